"""Fleets: the runtimes and machines that one plan is for, and the engines that measure on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from onnxq.errors import SchemeError
from onnxq.runtime.engine import Engine, OnnxRuntime, is_in_process
from onnxq.runtime.engines import start_engine_for
from onnxq.runtime.targets import JOINED, target_named
from onnxq.system.resources import available_cores

_THREADS = ":threads="


@dataclass(frozen=True)
class Member:
    """A runtime on a machine.

    Attributes:
        target: name of the target.
        engine: the engine that runs it, see `open_engine`; an empty text leaves that to the target.
        threads: threads of an operator; None leaves the number to the engine.
    """

    target: str
    engine: str = ""
    threads: int | None = None


def split_threads(text: str, what: str) -> tuple[str, int | None]:
    """Split the number of threads off the name of a target or an engine.

    >>> split_threads("ssh:board:threads=4", "engine"), split_threads("openvino", "target")
    (('ssh:board', 4), ('openvino', None))

    Raises:
        SchemeError: it is no number of threads.
    """
    name, found, count = text.partition(_THREADS)
    if not found:
        return text, None
    if not count.isdecimal() or not int(count):
        raise SchemeError(f"the number of threads of {what} {name!r} is {count!r}, expected a whole number from 1 on")
    return name, int(count)


def join_names(targets: Sequence[str]) -> str:
    """Return the name of what some targets have in common, without numbers of threads; see `target_named`.

    Raises:
        SchemeError: there is none, or one is unknown.

    >>> join_names(["onnxruntime-cpu:threads=1", "onnxruntime-cpu", "openvino"])
    'onnxruntime-cpu+openvino'
    """
    if not targets:
        raise SchemeError("no target is given, expected the name of a runtime such as onnxruntime-cpu")
    return target_named(JOINED.join(split_threads(one, "target")[0] for one in targets)).name


def members_of(targets: Sequence[str], engines: Sequence[str] = (), threads: int | None = None) -> tuple[Member, ...]:
    """Return the members of a fleet: each target on its engine, or one target on several engines.

    Args:
        targets: names, each perhaps with a number of threads, as in ``openvino:threads=16``.
        engines: for each target in order, or for the only one; empty takes the targets' own.
        threads: for members without a number of their own.

    Raises:
        SchemeError: a target or number is wrong, a member is given twice, or the numbers of targets and engines do not
            fit.
    """
    names = [split_threads(one, "target") for text in targets for one in text.split(JOINED)]
    places = [split_threads(one, "engine") for one in engines] or [("", None)]
    if engines and len(names) > 1 and len(names) != len(places):
        raise SchemeError(
            f"there are {len(names)} targets and {len(places)} of --engine, expected an engine for each target, in "
            "their order, or several engines for one target"
        )
    width = max(len(names), len(places))
    found = []
    for (target, own), (engine, other) in zip(_repeat(names, width), _repeat(places, width), strict=True):
        if own and other and own != other:
            raise SchemeError(f"target {target!r} has {own} threads and engine {engine!r} {other}; leave one out")
        found.append(Member(target_named(target).name, engine, own or other or threads))
    counts = Counter((one.target, one.engine, one.threads or available_cores()) for one in found)
    for (target, engine, count), times in counts.items():
        if times > 1:
            where = f" on engine {engine!r}" if engine else ""
            raise SchemeError(f"target {target!r}{where} with {count} threads is given {times} times; leave one out")
    return tuple(found)


def _repeat(given: list[tuple[str, int | None]], width: int) -> list[tuple[str, int | None]]:
    return given * width if len(given) == 1 else given


@dataclass(frozen=True, eq=False)
class Fleet:
    """The engines that a plan is measured on; close it after use, as a context manager.

    Attributes:
        engines: one for each member that can be measured; that of onnxruntime in this process is an `OnnxRuntime`.
        unmeasured: why the other members cannot be measured here; empty if all can.
    """

    engines: tuple[Engine, ...] = ()
    unmeasured: str = ""
    _started: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def elsewhere(self) -> tuple[Engine, ...]:
        """The engines that are not onnxruntime in this process."""
        return tuple(one for one in self.engines if not is_in_process(one))

    def caching(self, folder: Path) -> tuple[Engine, ...]:
        """Return the engines; onnxruntime in this process keeps optimized models in a folder."""
        return tuple(OnnxRuntime(folder, one.threads) if is_in_process(one) else one for one in self.engines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()


def start_fleet(members: Sequence[Member]) -> Fleet:
    """Start the engines that measure for members; engines that were asked for may still be starting on return.

    Raises:
        EngineError: an engine that was asked for is not installed.
    """
    engines: list[Engine] = []
    unmeasured: list[str] = []
    started = ExitStack()
    try:
        for one in members:
            engine, reason = start_engine_for(target_named(one.target), one.engine, one.threads)
            if reason:
                unmeasured.append(f"{one.target}: {reason}" if len(members) > 1 else reason)
            else:
                engines.append(started.enter_context(engine or OnnxRuntime(threads=one.threads)))
    except BaseException:
        started.close()
        raise
    return Fleet(tuple(engines), "; ".join(unmeasured), started)
