"""Time models alternately, so that changes in the speed of the machine affect all of them equally.

A process without onnxq and onnx receives this module too, so it imports neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

Turn = tuple[float, ...]
"""Seconds of one run of each model, in direct succession."""
# Seconds: a round of small models continues after `enough` turns until it took this long.
_SHORTEST_ROUND = 0.02
# Seconds for each model after which a round may end with fewer turns.
_LONGEST_ROUND = 0.05
# Seconds: a model whose first run takes longer needs no second warm-up run.
_LONG = 0.02


def time_interleaved(
    runs: Sequence[Callable[[Any], Any]],
    samples: Sequence[Any],
    seconds: float,
    turn: int = 0,
    enough: int | None = None,
) -> list[list[Turn]]:
    """Run models alternately, one run each, for some seconds and at least once.

    Args:
        runs: run each model on a sample.
        samples: run round robin.
        seconds: time to spend, without one or two warm-up runs of each model.
        turn: number of earlier turns, which are continued.
        enough: number of turns after which no other begins, unless they took less than 20 ms. Turns of slow models stop
            earlier, after 50 ms a model; later calls continue with the remaining samples. None spends all seconds.

    Returns:
        For each sample the times of its turns.
    """
    for run in runs:
        # The first run allocates memory; further warm-up is a small part of a long run.
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
        # Another turn of a slow model may exceed the time left.
        no_time = spent * (1 + 0.5 / (turn - first)) >= seconds
        if no_time or (enough is not None and (many or long)):
            return times


def balanced_orders(count: int) -> list[list[int]]:
    """Return orders of `count` models in which none gains or loses by the caches that others leave.

    Over all orders, each model takes each place equally often, and follows each other model equally often (Williams,
    "Experimental designs balanced for the estimation of residual effects of treatments", 1949).

    >>> balanced_orders(2), balanced_orders(3)[:2]
    ([[1, 0], [0, 1]], [[1, 0, 2], [2, 1, 0]])
    """
    zigzag = [count - (place + 1) // 2 if place % 2 else place // 2 for place in range(count)]
    orders = [[(place + turn) % count for place in zigzag] for turn in range(1, count + 1)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def _timed(run: Callable[[Any], Any], sample: Any) -> float:
    start = time.perf_counter()
    run(sample)
    return time.perf_counter() - start
