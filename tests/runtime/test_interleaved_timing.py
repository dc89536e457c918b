"""Two models take turns."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from onnxq.runtime import interleaved_timing as turns
from onnxq.runtime.interleaved_timing import balanced_orders, time_interleaved


def test_models_take_turns_and_go_on_where_they_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now, runs = [0.0], []

    def run(model: str, sample: int) -> None:
        runs.append(f"{model}{sample}")
        now[0] += sample * (3 if model == "a" else 2)

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    pair = (lambda sample: run("a", sample)), (lambda sample: run("b", sample))
    assert time_interleaved(pair, [1, 5], 10.0) == [[(3, 2)], [(15, 10)]]
    assert runs == ["a1", "b1", "b1", "a1", "a5", "b5"]
    assert time_interleaved(pair, [1, 5], 0.0, turn=1) == [[], [(15, 10)]]
    [first, second] = time_interleaved(pair, [0.002, 0.01], 1e9, enough=3)
    assert len(first) + len(second) == 3
    # Of what takes long one turn is enough: the next round goes on with the other sample.
    assert time_interleaved(pair, [1, 5], 1e9, enough=3) == [[(3, 2)], []]
    assert time_interleaved(pair, [1, 5], 1e9, turn=1, enough=3) == [[], [(15, 10)]]


def test_models_of_little_time_run_more_often_than_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def run(sample: float) -> None:
        now[0] += sample

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    [found] = time_interleaved([run, run, run], [0.002], 10.0, enough=2)
    assert len(found) == 4
    assert {len(turn) for turn in found} == {3}


@pytest.mark.parametrize("count", range(1, 8))
def test_each_stands_in_each_place_and_behind_each_other_equally_often(count: int) -> None:
    orders = balanced_orders(count)
    places = Counter(place for order in orders for place in enumerate(order))
    behind = Counter(pair for order in orders for pair in pairwise(order))
    assert len(places) == count**2
    assert len(set(places.values())) == 1
    assert len(behind) == count * (count - 1)
    assert len(set(behind.values())) <= 1


def test_none_of_three_always_runs_between_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now, last = [0.0], [""]

    def run(model: str) -> None:
        # What ran just now finds its weights in the caches.
        now[0] += 2.0 if model == last[0] else 3.0
        last[0] = model

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    runs = [lambda _, model=model: run(model) for model in "abc"]
    [found] = time_interleaved(runs, [0], 1e9, enough=60)
    assert len({sum(times) for times in zip(*found, strict=True)}) == 1
