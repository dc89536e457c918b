"""Cores, memory, time limits and progress of work, and results that are cached as long as their source stays."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar
from weakref import ref

from numpy.typing import NDArray

Given = TypeVar("Given")
Found = TypeVar("Found")

Progress = Callable[[str, int, int], None]
"""Called as ``progress("calibrate", done, total)``; a total of 0 means that it is not known."""

# Models that are built and opened in one search.
_CACHED_FILES = 256


def silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""


# Cores and memory


def available_cores() -> int:
    """Return how many cores this process may use, or how many there are where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resident_bytes() -> int:
    """Return the bytes that this process has in memory; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def parallel_map(work: Callable[[Given], Found], given: Iterable[Given], most: int | None = None) -> Iterator[Found]:
    """Yield the results of a function in order; threads work on several at once.

    Args:
        work: the function.
        given: its arguments, taken only as fast as they are worked on.
        most: number of threads; None takes as many as there are cores.

    >>> list(parallel_map(abs, [3, -1, 2]))
    [3, 1, 2]
    """
    running: deque[Future[Found]] = deque()
    with ThreadPoolExecutor(cores := most or available_cores()) as pool:
        for one in given:
            running.append(pool.submit(work, one))
            # No more results wait than are being made.
            if len(running) > cores:
                yield running.popleft().result()
        yield from (one.result() for one in running)


# Time limits


@dataclass(frozen=True)
class Deadline:
    """When work has to end.

    Attributes:
        at: value of the monotonic clock; infinite without a limit.

    >>> Deadline().left, Deadline.within(0).left
    (inf, 0.0)
    """

    at: float = math.inf

    @classmethod
    def within(cls, seconds: float) -> Deadline:
        """Return the deadline that many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(self.at - time.monotonic(), 0.0)

    def at_most(self, seconds: float) -> Deadline:
        """Return the earlier one of this deadline and that many seconds from now."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    def part(self, share: float, reserved: float = 0.0) -> Deadline:
        """Return the deadline after a share of the seconds left, without those reserved for what follows."""
        return Deadline.within(share * max(self.left - reserved, 0.0))


NEVER = Deadline()
"""No limit."""


# Caches


def cached_by_mtime(find: Callable[[Path], Found]) -> Callable[[Path], Found]:
    """Return a function of a file that reads it again only after its size or time of change differ.

    Args:
        find: reads the file. Its result is shared by all callers. Where there is no file, it is called each time.

    >>> lines = cached_by_mtime(lambda path: path.read_text().splitlines())
    >>> lines(Path(__file__))[0].startswith('\"\"\"Cores'), lines(Path(__file__)) is lines(Path(__file__))
    (True, True)
    """

    @lru_cache(_CACHED_FILES)
    def found(path: Path, _size: int, _changed: int) -> Found:
        return find(path)

    @wraps(find)
    def ask(path: Path) -> Found:
        try:
            state = path.stat()
        except OSError:
            return find(path)
        return found(path, state.st_size, state.st_mtime_ns)

    return ask


def cached_by_array(find: Callable[[NDArray[Any]], Found]) -> Callable[[NDArray[Any]], Found]:
    """Return a function of an array that computes its result once for as long as the array lives.

    Args:
        find: of an array, which nobody may change. Its result is shared by all callers and must not be a view.

    >>> import numpy as np
    >>> total = cached_by_array(lambda array: [array.sum()])
    >>> ones = np.ones(3)
    >>> total(ones) is total(ones), total(ones) is total(ones.copy())
    (True, False)
    """
    known: dict[int, tuple[ref[NDArray[Any]], Found]] = {}

    @wraps(find)
    def ask(array: NDArray[Any]) -> Found:
        place = id(array)
        held = known.get(place)
        if held is None or held[0]() is not array:
            held = known[place] = ref(array, lambda _: known.pop(place, None)), find(array)
        return held[1]

    return ask
