"""Models of plans that were built and run: each is built once, and run once on a sample."""

from __future__ import annotations

import itertools
import shutil
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from onnxq.evaluation.reference import held_bytes
from onnxq.system.publish import stored_bytes

Answers: TypeAlias = Mapping[int, Sequence[Any]]
"""The outputs of a model by the number of the sample."""
Runner: TypeAlias = Callable[[Sequence[int]], Answers]
"""Runs a model on the samples of some numbers."""

# Bytes of files that are kept, and models that are whatever they take: one that runs, and the next.
_ROOM, _NEEDED = 1 << 29, 2
# Bytes of outputs that are kept.
_HELD = 1 << 26
# No two models of a process are built in the same place.
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Candidate:
    """The model of a plan.

    Attributes:
        path: its file.
        coded: the tensor of the prepared model that nodes around codes stand for, see `coded_tensors`.
        is_whole: whether the file holds all of it, or weights lie in files that others share.
    """

    path: Path
    coded: Mapping[str, str]
    is_whole: bool = True


class Candidates:
    """Models that were built and run, so that one that is tried, judged otherwise, profiled and timed is built once.

    What was longest not asked for is removed when there is no room for more.

    Args:
        room: bytes of files that are kept.
        held: bytes of outputs that are kept.
    """

    def __init__(self, room: int = _ROOM, held: int = _HELD) -> None:
        self._room, self._held = room, held
        self._models: OrderedDict[Hashable, Candidate] = OrderedDict()
        self._answers: OrderedDict[Hashable, Answers] = OrderedDict()
        self._running: dict[Hashable, Future[Answers]] = {}
        self._background = ThreadPoolExecutor(1)

    def model(self, key: Hashable, folder: Path, build: Callable[[Path], Candidate]) -> Candidate:
        """Return a model, built now or before; its file stays until two others are asked for.

        Args:
            key: what tells it from other models.
            folder: where it is built.
            build: writes it to a path.
        """
        if key not in self._models:
            self._models[key] = build(folder / f"candidate.{next(_NUMBERS)}.onnx")
        self._models.move_to_end(key)
        while len(self._models) > _NEEDED and sum(stored_bytes(one.path) for one in self._models.values()) > self._room:
            self._models.popitem(last=False)[1].path.unlink(missing_ok=True)
        return self._models[key]

    def copied(self, key: Hashable, place: Path) -> bool:
        """Copy the file of a model that was built before and is all in one; return whether there is one."""
        known = self._models.get(key)
        if known is None or not known.is_whole:
            return False
        shutil.copyfile(known.path, place)
        return True

    def begin(self, key: Hashable, numbers: Sequence[int], build: Callable[[], Runner]) -> None:
        """Run a model on samples in the background, one model at a time, unless that is done or begun.

        Args:
            key: what tells it from other models.
            numbers: of the samples.
            build: builds it now, in case it is not there.
        """
        if key not in self._running and (lacking := self._lacking(key, numbers)):
            self._running[key] = self._background.submit(build(), lacking)

    def answers(self, key: Hashable, numbers: Sequence[int], build: Callable[[], Runner]) -> list[Sequence[Any]]:
        """Return what a model gives for samples, run now, in the background or before; see `begin`."""
        begun = self._running.pop(key, None)
        known = {**self._answers.get(key, {}), **(begun.result() if begun is not None else {})}
        if lacking := [number for number in numbers if number not in known]:
            known |= build()(lacking)
        self._answers[key] = known
        self._answers.move_to_end(key)
        while sum(held_bytes(outputs) for one in self._answers.values() for outputs in one.values()) > self._held:
            self._answers.popitem(last=False)
        return [known[number] for number in numbers]

    def _lacking(self, key: Hashable, numbers: Sequence[int]) -> list[int]:
        known = self._answers.get(key, {})
        return [number for number in numbers if number not in known]
