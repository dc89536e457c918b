"""Where and in what time something was done: the machine, its versions, and stages with their time and memory."""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from onnxq.report.figures import size
from onnxq.system.resources import available_cores
from onnxq.version import VERSION

_LOG = logging.getLogger(__name__)
_PACKAGES = ("onnxruntime", "onnx", "numpy")


@dataclass(frozen=True)
class Stage:
    """A stage of the work.

    Attributes:
        name: in a word or two.
        seconds: that it took.
        peak_bytes: the most memory that the process had held by its end; 0 where the system does not tell.
    """

    name: str
    seconds: float
    peak_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """A machine and what it ran.

    Attributes:
        processor: its architecture.
        cores: how many the process might use.
        system: the operating system.
        versions: of Python and of the packages that decide what comes out, by name.
    """

    processor: str
    cores: int
    system: str
    versions: Mapping[str, str]

    @classmethod
    def this(cls) -> Machine:
        """Return the machine that this runs on.

        >>> sorted(Machine.this().versions)
        ['numpy', 'onnx', 'onnxq', 'onnxruntime', 'python']
        """
        versions = {
            "python": platform.python_version(),
            "onnxq": VERSION,
            **{name: import_module(name).__version__ for name in _PACKAGES},
        }
        return cls(platform.machine(), available_cores(), f"{platform.system()} {platform.release()}", versions)


class Stopwatch:
    """Tells stages apart: each ends where the next begins."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._stages: dict[str, Stage] = {}

    def lap(self, name: str) -> None:
        """End a stage of that name, or one more part of it where work went back to it."""
        now, before = time.perf_counter(), self._stages.get(name)
        seconds, peak = now - self._last, peak_memory()
        self._stages[name] = Stage(name, seconds + (before.seconds if before is not None else 0.0), peak)
        self._last = now
        _LOG.info("%s: %.1f s, most memory so far %s", name, seconds, size(peak))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages so far."""
        return tuple(self._stages.values())

    @property
    def seconds(self) -> float:
        """The time of all of them, and what came after."""
        return time.perf_counter() - self._start


def peak_memory() -> int:
    """Return the most bytes that this process has held; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes if sys.platform == "darwin" else kibibytes << 10
