"""How many cores there are to work with, and work that takes one of them at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")


def available_cores() -> int:
    """Return how many cores this process may use, which not every system says of each process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resident_bytes() -> int:
    """Return the bytes that this process has in memory; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def each_at_once(work: Callable[[Given], Found], given: Iterable[Given], most: int | None = None) -> Iterator[Found]:
    """Yield what a function makes of things, in order; it works on several at once.

    Args:
        work: the function.
        given: the things.
        most: how many it works on at once; None takes as many as there are cores.

    >>> list(each_at_once(abs, [3, -1, 2]))
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
