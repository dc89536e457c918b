"""Cores, memory, time limits and progress, and caches of results that last as long as their source."""

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
"""Called as ``progress("calibrate", done, total)``; a total of 0 means that it is unknown."""

# Enough for the models that one search builds and opens.
_CACHED_FILES = 256


def silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""


# Cores and memory


def available_cores() -> int:
    """Return how many cores this process may use; all cores of the machine if the system does not report them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def parallel_map(work: Callable[[Given], Found], items: Iterable[Given], most: int | None = None) -> Iterator[Found]:
    """Yield the results of a function in the order of its arguments, computed by threads: by default one per core.

    Arguments are consumed only as fast as results are computed.

    >>> list(parallel_map(abs, [3, -1, 2]))
    [3, 1, 2]
    """
    running: deque[Future[Found]] = deque()
    with ThreadPoolExecutor(cores := most or available_cores()) as pool:
        for item in items:
            running.append(pool.submit(work, item))
            # Limits the results that wait for the caller.
            if len(running) > cores:
                yield running.popleft().result()
        yield from (future.result() for future in running)


# Time limits


@dataclass(frozen=True)
class Deadline:
    """When work has to end: ``at`` is a value of the monotonic clock in seconds, infinite without a limit.

    >>> Deadline().left, Deadline.within(0).left
    (inf, 0.0)
    """

    at: float = math.inf

    @classmethod
    def within(cls, seconds: float) -> Deadline:
        """Return the deadline this many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(self.at - time.monotonic(), 0.0)

    def part(self, share: float) -> Deadline:
        """Return the deadline after a share (0 to 1) of the seconds that are left."""
        return Deadline.within(share * self.left)


NEVER = Deadline()
"""No limit."""


# Caches


def cached_by_mtime(find: Callable[[Path], Found]) -> Callable[[Path], Found]:
    """Return a function of a file that calls ``find`` again only if the file's size or time of change differs.

    All callers share the result. If there is no file, ``find`` is called each time.

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

    The array must never be changed. All callers share the result, which must not be a view.

    >>> import numpy as np
    >>> total = cached_by_array(lambda array: [array.sum()])
    >>> ones = np.ones(3)
    >>> total(ones) is total(ones), total(ones) is total(ones.copy())
    (True, False)
    """
    results: dict[int, tuple[ref[NDArray[Any]], Found]] = {}

    @wraps(find)
    def ask(array: NDArray[Any]) -> Found:
        place = id(array)
        held = results.get(place)
        if held is None or held[0]() is not array:
            held = results[place] = ref(array, lambda _: results.pop(place, None)), find(array)
        return held[1]

    return ask
