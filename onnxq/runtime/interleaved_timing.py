"""Models run by turns, so that all see the same moods of the machine.

A process with neither onnxq nor onnx is sent this module too, so it imports nothing of theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

Turn = tuple[float, ...]
"""Seconds of a run of each model, one right behind the other."""
# Seconds of a round that many runs of a small model are not enough for.
_SHORTEST_ROUND = 0.02
# Seconds of a round for each model that fewer runs of a large one are enough for.
_LONGEST_ROUND = 0.05
# Seconds of a run that needs no second one to warm up.
_LONG = 0.02


def time_interleaved(
    runs: Sequence[Callable[[Any], Any]],
    samples: Sequence[Any],
    seconds: float,
    turn: int = 0,
    enough: int | None = None,
) -> list[list[Turn]]:
    """Run models by turns, one run each, for some seconds and at least once.

    Args:
        runs: run each model on a sample.
        samples: run round robin.
        seconds: time to spend, one or two runs of each to warm up aside.
        turn: how many turns there were before, which go on where they stopped.
        enough: turns after which no other begins, unless they took hardly any time; where they take long, one may be
            enough, and further rounds go on with the samples that lack. None leaves that to the seconds.

    Returns:
        For each sample the times of all.
    """
    for run in runs:
        # The first run lays out memory; what a long one still has to warm up after that is little of its time.
        if _timed(run, samples[0]) < _LONG:
            run(samples[0])
    orders = balanced_orders(len(runs))
    times: list[list[Turn]] = [[] for _ in samples]
    start, first = time.perf_counter(), turn
    while True:
        index = turn % len(samples)
        order = orders[(turn // len(samples) + index) % len(orders)]
        taken = {place: _timed(runs[place], samples[index]) for place in order}
        times[index].append(tuple(taken[place] for place in range(len(runs))))
        turn += 1
        spent = time.perf_counter() - start
        many = turn - first >= (enough or 0) and spent >= _SHORTEST_ROUND
        long = spent >= _LONGEST_ROUND * len(runs)
        # Another turn of a slow model may take longer than there is time.
        no_time = spent * (1 + 0.5 / (turn - first)) >= seconds
        if no_time or (enough is not None and (many or long)):
            return times


def balanced_orders(count: int) -> list[list[int]]:
    """Return orders in which so many things take turns, so that none gains by warm caches or loses by the others'.

    In all of them together each stands in each place, and right behind each other one, equally often (Williams,
    "Experimental designs balanced for the estimation of residual effects of treatments", 1949).

    >>> orders_of(2), orders_of(3)[:2]
    ([[1, 0], [0, 1]], [[1, 0, 2], [2, 1, 0]])
    """
    zigzag = [count - (place + 1) // 2 if place % 2 else place // 2 for place in range(count)]
    orders = [[(place + turn) % count for place in zigzag] for turn in range(1, count + 1)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def _timed(run: Callable[[Any], Any], sample: Any) -> float:
    start = time.perf_counter()
    run(sample)
    return time.perf_counter() - start
