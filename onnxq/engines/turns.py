"""Two models run by turns, so that both see the same moods of the machine.

A process with neither onnxq nor onnx is sent this module too, so it imports nothing of theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

Pair = tuple[float, float]
"""Seconds of a run of the first model and of one of the second, one right behind the other."""
_WARM_UPS = 2


def timed_by_turns(
    runs: tuple[Callable[[Any], Any], Callable[[Any], Any]],
    samples: Sequence[Any],
    seconds: float,
    turn: int = 0,
) -> list[list[Pair]]:
    """Run two models by turns, one run each, for some seconds and at least once.

    Args:
        runs: run each model on a sample.
        samples: run round robin.
        seconds: time to spend, two runs of each to warm up aside.
        turn: how many turns there were before, which go on where they stopped.

    Returns:
        For each sample the times of both.
    """
    for run in runs:
        for _ in range(_WARM_UPS):
            run(samples[0])
    times: list[list[Pair]] = [[] for _ in samples]
    deadline = time.perf_counter() + seconds
    while True:
        index = turn % len(samples)
        # The order alternates, so that neither always runs behind the other's warm caches.
        if (turn // len(samples) + index) % 2:
            first = _timed(runs[0], samples[index])
            times[index].append((first, _timed(runs[1], samples[index])))
        else:
            second = _timed(runs[1], samples[index])
            times[index].append((_timed(runs[0], samples[index]), second))
        turn += 1
        if time.perf_counter() >= deadline:
            return times


def _timed(run: Callable[[Any], Any], sample: Any) -> float:
    start = time.perf_counter()
    run(sample)
    return time.perf_counter() - start
