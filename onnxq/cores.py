"""How many cores there are to work with, and work that takes one of them at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")


def available_cores() -> int:
    """Return how many cores this process may use, which not every system says of each process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each_at_once(work: Callable[[Given], Found], given: Iterable[Given]) -> Iterator[Found]:
    """Yield what a function makes of things, in order; it works on as many at once as there are cores.

    >>> list(each_at_once(abs, [3, -1, 2]))
    [3, 1, 2]
    """
    running: deque[Future[Found]] = deque()
    with ThreadPoolExecutor(cores := available_cores()) as pool:
        for one in given:
            running.append(pool.submit(work, one))
            # No more results wait than are being made.
            if len(running) > cores:
                yield running.popleft().result()
        yield from (one.result() for one in running)
