"""Two models timed beside each other: in turns, in rounds, with an interval."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.calibration.data import Data
from onnxq.errors import DataError, EngineError
from onnxq.evaluation import latency
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.latency import (
    Latency,
    LatencyComparison,
    bench,
    measure_latencies,
    measure_latency,
    median_interval,
)
from onnxq.runtime.engine import Engine, LoadedModel
from onnxq.runtime.engines import open_engine


class Timed(LoadedModel):
    """A model that is its own name."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name, self.outputs = clock, name, ()

    def run(self, sample: Any) -> list[Any]:
        self.clock.runs.append(self.name)
        self.clock.now += self.clock.seconds(self.name, sample)
        return []


class Clock(Engine):
    """An engine and a clock that its runs move on, so that what is measured is known."""

    name, version = "clock", "clock 1"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str, int], float]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.opened: list[str] = []
        self.runs: list[str] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        self.opened.append(model.name)
        return Timed(self, model.name)

    def measure(self, samples: list[int], models: str = "ab", **options: Any) -> list[Latency]:
        return measure_latencies([Path(name) for name in models], samples, threads=1, engine=self, **options)


def test_the_speed_is_that_of_the_medians_averaged_over_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda session, sample: sample * (3 if session == "a" else 2))
    [found] = clock.measure([1, 5], seconds=600.0)
    assert (found.reference, found.candidate, found.speed) == pytest.approx((9, 6, 1.5))
    assert found.interval == pytest.approx((1.5, 1.5))
    assert (found.significant, found.runs, found.threads) == (True, 6 * 7, 1)


def test_models_are_loaded_anew_in_every_round_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda session, sample: 1.0)
    clock.measure([1], seconds=0.0)
    assert clock.opened == ["b", "a", "a", "b"] * 3
    # No round begins once patience is lost.
    clock = Clock(monkeypatch, lambda session, sample: 1.0)
    [found] = clock.measure([0], seconds=0.0, patience=10.0)
    assert (found.rounds, len(clock.opened), found.engine) == (3, 6, "clock 1")


def test_several_candidates_are_timed_by_turns_and_the_reference_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda session, sample: {"a": 6.0, "b": 3.0, "c": 2.0}[session])
    assert [found.speed for found in clock.measure([0], "abc", seconds=200.0)] == [2, 3]
    assert clock.runs[3:9] == ["b", "a", "c", "c", "b", "a"]


@pytest.mark.parametrize(("run", "runs"), [(1.0, 3), (0.01, 9), (5e-4, 60)])
def test_a_round_ends_with_enough_runs_that_took_some_time(
    run: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Clock(monkeypatch, lambda *_: run).measure([0], seconds=60.0, enough=3)[0].runs == runs


@pytest.mark.parametrize(("faster", "rounds"), [(1.5, 3), (1.05, 6)])
def test_rounds_end_where_the_candidate_is_plainly_faster(
    faster: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each loaded copy has its own speed.
    clock = Clock(monkeypatch, lambda session, _: faster if session == "a" else 1.0 + 0.04 * (len(clock.opened) % 3))
    assert clock.measure([0], seconds=60.0)[0].rounds == 6
    assert clock.measure([0], seconds=60.0, enough=3)[0].rounds == rounds


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_neither_model_always_runs_first_whatever_the_sample(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first: dict[int, set[str]] = {}

    def seconds(session: str, sample: int) -> float:
        if len(clock.runs) > 2 and len(clock.runs) % 2:
            first.setdefault(sample, set()).add(session)
        return 1.0

    clock = Clock(monkeypatch, seconds)
    clock.measure(list(range(samples)), seconds=2.0 * 2 * samples, rounds=1)
    assert first == {sample: {"a", "b"} for sample in range(samples)}


def test_one_model_under_different_stars_is_not_called_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each loaded copy has its own speed, as where memory comes to lie gives it.
    clock = Clock(monkeypatch, lambda session, sample: 1.0 + 0.02 * ((len(clock.opened) // 2 + (session == "a")) % 2))
    [found] = clock.measure([1], seconds=120.0)
    assert not found.significant
    assert found.interval == pytest.approx((1 / 1.02, 1.02))


@pytest.mark.parametrize(("count", "left_out"), [(6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (25, 7), (100, 39)])
def test_the_interval_of_a_median_is_that_of_the_tables_of_the_sign_test(count: int, left_out: int) -> None:
    assert median_interval(list(range(count))[::-1]) == (left_out, count - 1 - left_out)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5])
def test_of_few_rounds_the_interval_is_that_of_a_normal_distribution(count: int) -> None:
    logs = np.random.default_rng(count).normal(0.5, 0.1, (2000, count))
    intervals = [median_interval(ratios) for ratios in np.exp(logs)]
    if count < 3:
        assert intervals[0] == (0.0, math.inf)
        return
    assert np.mean([low <= math.exp(0.5) <= high for low, high in intervals]) == pytest.approx(0.95, abs=0.01)


class Failing(Engine):
    """An engine of a user: it cannot load, or it loads what cannot run."""

    name, version = "mine", "mine 1.0"

    def __init__(self, *, loads: bool) -> None:
        self.loads = loads

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        return Broken() if self.loads else {}[model]


class Broken(LoadedModel):
    outputs = ("y",)

    def run(self, sample: Any) -> list[Any]:
        raise ZeroDivisionError("no cores")


@pytest.mark.parametrize(("loads", "message"), [(True, "ZeroDivisionError: no cores"), (False, "KeyError: ")])
def test_an_engine_that_fails_is_named(loads: bool, message: str, model: Path, tmp_path: Path) -> None:
    engine = Failing(loads=loads)
    with pytest.raises(EngineError, match=f"engine 'mine' failed: {message}"):
        measure_latencies([model, model], [{"x": np.zeros(1)}], seconds=0.1, engine=engine)
    with pytest.raises(EngineError, match=f"engine 'mine' failed: {message}"):
        ComparisonSpec.whole(model).open_on(engine, model, tmp_path).run({})


# Two files timed beside each other, and the sentence that sums it up.


@pytest.fixture
def model(perceptron: ModelProto, tmp_path: Path) -> Path:
    onnx.save(perceptron, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def data(perceptron: ModelProto, samples_for, tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=np.stack([sample["x"] for sample in samples_for(perceptron, 20)]))
    return tmp_path / "data.npz"


def test_a_bench_says_what_was_run_and_where(
    model: Path, data: Path, samples_for, perceptron: ModelProto, build, tmp_path: Path
) -> None:
    found = bench(model, model, data, threads=1, latency_seconds=0.0)
    assert (found.reference, found.candidate, found.samples) == (str(model), str(model), 8)
    assert (found.latency.rounds, found.latency.runs, found.latency.threads) == (12, 12, 1)
    assert found.latency.interval[0] <= found.latency.speed <= found.latency.interval[1]
    assert found.runtime == f"onnxruntime {version('onnxruntime')}"
    assert found.machine
    assert measure_latency(model, model, samples_for(perceptron, 2), seconds=0.0, threads=1).rounds == 6
    with open_engine(f"python:{sys.executable}") as engine:
        elsewhere = bench(model, model, Data(data, limit=3), threads=1, latency_seconds=0.0, engine=engine)
    assert elsewhere.runtime == elsewhere.latency.engine == engine.version
    assert (elsewhere.samples, elsewhere.latency.runs) == (3, 12)
    onnx.save(build("(float[4,32] other) => (float[4,32] y) { y = Relu(other) }"), tmp_path / "other.onnx")
    with pytest.raises(DataError, match="other"):
        bench(model, tmp_path / "other.onnx", data, latency_seconds=0.0)


@pytest.mark.parametrize(
    ("speed", "low", "high", "sentence"),
    [
        (1.32, 1.29, 1.35, "b.onnx is 1.32x (1.29-1.35) as fast as a.onnx with 95 % confidence"),
        (0.8, 0.78, 0.99, "b.onnx is 0.80x (0.78-0.99) as fast as a.onnx with 95 % confidence"),
        (1.004, 1.002, 1.006, "b.onnx is 1.004x (1.002-1.006) as fast as a.onnx with 95 % confidence"),
        (
            1.1,
            0.9,
            1.2,
            "no difference can be shown: b.onnx is 1.10x (0.90-1.20) as fast as a.onnx with 95 % confidence",
        ),
        (2.0, 0.0, math.inf, "no difference can be shown: b.onnx is 2.00x (0.00-inf) as fast as a.onnx with"),
    ],
)
def test_the_verdict_is_one_sentence_and_the_json_has_no_infinity(
    speed: float, low: float, high: float, sentence: str
) -> None:
    measured = Latency(speed, 1.0, 1, 60, 12, (low, high))
    found = LatencyComparison("a.onnx", "b.onnx", measured, 8, "a machine", "1.2.3")
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["verdict"].startswith(sentence)
    assert plain["latency"]["interval"] == [low, high if math.isfinite(high) else None]
    assert (plain["speed"], plain["machine"], plain["runtime"]) == (speed, "a machine", "1.2.3")
    assert bool(found.lack(1.3)) == (high < 1.3)


@pytest.mark.parametrize(
    ("text", "name"),
    [("processor : 0\nmodel name : A processor: fast\nmodel name : B", "A processor: fast"), ("Hardware : x", "known")],
)
def test_the_processor_is_named_where_the_system_tells(
    text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(latency, "_PROCESSORS", tmp_path / "cpuinfo")
    monkeypatch.setattr(latency.platform, "processor", lambda: "known")
    assert latency.processor_name.__wrapped__() == name
