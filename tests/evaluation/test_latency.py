"""Two models timed beside one another: by turns, in rounds, with an interval that tells what the ratio is worth."""

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


def test_latency_alternates_between_both_models(perceptron: ModelProto, samples_for, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    model = tmp_path / "model.onnx"
    latency = measure_latency(model, model, samples_for(perceptron, 2), seconds=0.0, threads=1)
    assert (latency.runs, latency.rounds, latency.threads) == (6, 6, 1)
    assert latency.reference > 0
    assert latency.candidate > 0
    assert latency.interval[0] <= latency.speed <= latency.interval[1]


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

    def measure(self, samples: list[int], **options) -> Latency:
        return measure_latency(Path("a"), Path("b"), samples, threads=1, engine=self, **options)


def test_the_speed_is_that_of_the_medians_averaged_over_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda session, sample: sample * (3 if session == "a" else 2))
    latency = clock.measure([1, 5], seconds=600.0)
    assert (latency.reference, latency.candidate, latency.speed) == pytest.approx((9, 6, 1.5))
    assert latency.interval == pytest.approx((1.5, 1.5))
    assert latency.significant
    assert latency.runs == 6 * 7


def test_both_models_are_loaded_anew_in_every_round_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda session, sample: 1.0)
    clock.measure([1], seconds=0.0)
    assert clock.opened == ["b", "a", "a", "b"] * 3


def test_no_round_begins_once_patience_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda session, sample: 1.0)
    latency = clock.measure([0], seconds=0.0, patience=10.0)
    assert (latency.rounds, len(clock.opened), latency.engine) == (3, 6, "clock 1")


def test_several_candidates_are_timed_by_turns_and_the_reference_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda session, sample: {"a": 6.0, "b": 3.0, "c": 2.0}[session])
    found = measure_latencies([Path("a"), Path("b"), Path("c")], [0], seconds=200.0, engine=clock)
    assert [latency.speed for latency in found] == [2, 3]
    assert clock.runs[3:9] == ["b", "a", "c", "c", "b", "a"]


def test_a_round_ends_with_enough_runs_that_took_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(time: float) -> int:
        clock = Clock(monkeypatch, lambda *_: time)
        return measure_latencies([Path("a"), Path("b")], [0], seconds=60.0, enough=3, engine=clock)[0].runs

    assert runs(1.0) == 3
    assert runs(0.01) == 3 * 3
    assert runs(5e-4) > 3 * 10


@pytest.mark.parametrize(("faster", "rounds"), [(1.5, 3), (1.05, 6)])
def test_rounds_end_where_the_candidate_is_plainly_faster(
    faster: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each loaded copy has its own speed.
    clock = Clock(monkeypatch, lambda session, _: faster if session == "a" else 1.0 + 0.04 * (len(clock.opened) % 3))
    assert clock.measure([0], seconds=60.0).rounds == 6
    found = measure_latencies([Path("a"), Path("b")], [0], seconds=60.0, enough=3, engine=clock)[0]
    assert found.rounds == rounds


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
    latency = clock.measure([1], seconds=120.0)
    assert not latency.significant
    assert latency.interval == pytest.approx((1 / 1.02, 1.02))


@pytest.mark.parametrize(("count", "left_out"), [(6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (25, 7), (100, 39)])
def test_the_interval_of_a_median_is_that_of_the_tables_of_the_sign_test(count: int, left_out: int) -> None:
    assert median_interval(list(range(count))[::-1]) == (left_out, count - 1 - left_out)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_of_few_rounds_the_interval_is_that_of_a_normal_distribution(count: int) -> None:
    logs = np.random.default_rng(count).normal(0.5, 0.1, (4000, count))
    held = [low <= math.exp(0.5) <= high for low, high in map(median_interval, np.exp(logs))]
    assert np.mean(held) == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_rounds_prove_nothing(count: int) -> None:
    assert median_interval([1.5] * count) == (0.0, math.inf)


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
def test_an_engine_that_fails_is_named(loads: bool, message: str, perceptron: ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(perceptron, path)
    engine = Failing(loads=loads)
    with pytest.raises(EngineError, match=f"engine 'mine' failed: {message}"):
        measure_latencies([path, path], [{"x": np.zeros(1)}], seconds=0.1, engine=engine)
    with pytest.raises(EngineError, match=f"engine 'mine' failed: {message}"):
        ComparisonSpec.whole(path).open_on(engine, path, tmp_path).run({})


# Two files timed beside one another, and the sentence that sums it up.


@pytest.fixture
def model(perceptron: ModelProto, tmp_path: Path) -> Path:
    onnx.save(perceptron, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def data(perceptron: ModelProto, samples_for, tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=np.stack([sample["x"] for sample in samples_for(perceptron, 20)]))
    return tmp_path / "data.npz"


def test_a_bench_says_what_was_run_and_where(model: Path, data: Path) -> None:
    found = bench(model, model, data, threads=1, latency_seconds=0.0)
    assert (found.reference, found.candidate, found.samples) == (str(model), str(model), 8)
    assert (found.latency.rounds, found.latency.runs, found.latency.threads) == (12, 12, 1)
    assert found.runtime == f"onnxruntime {version('onnxruntime')}"
    assert found.machine


def test_both_run_on_the_engine_that_is_given(model: Path, data: Path) -> None:
    with open_engine(f"python:{sys.executable}") as engine:
        found = bench(model, model, Data(data, limit=2), threads=1, latency_seconds=0.0, engine=engine)
    assert found.runtime == found.latency.engine == engine.version
    assert found.latency.runs == 12


def test_samples_are_limited(model: Path, data: Path) -> None:
    assert bench(model, model, Data(data, limit=3), threads=1, latency_seconds=0.0).samples == 3


def test_samples_must_fit_both_models(model: Path, data: Path, build, tmp_path: Path) -> None:
    onnx.save(build("(float[4,32] other) => (float[4,32] y) { y = Relu(other) }"), tmp_path / "other.onnx")
    with pytest.raises(DataError, match="other"):
        bench(model, tmp_path / "other.onnx", data, latency_seconds=0.0)


def made(speed: float, low: float, high: float) -> LatencyComparison:
    return LatencyComparison("a.onnx", "b.onnx", Latency(speed, 1.0, 1, 60, 12, (low, high)), 8, "a machine", "1.2.3")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (made(1.32, 1.29, 1.35), "b.onnx is 1.32x (1.29-1.35) as fast as a.onnx with 95 % confidence"),
        (made(0.8, 0.78, 0.99), "b.onnx is 0.80x (0.78-0.99) as fast as a.onnx with 95 % confidence"),
        (made(1.004, 1.002, 1.006), "b.onnx is 1.004x (1.002-1.006) as fast as a.onnx with 95 % confidence"),
        (
            made(1.1, 0.9, 1.2),
            "no difference can be shown: b.onnx is 1.10x (0.90-1.20) as fast as a.onnx with 95 % confidence",
        ),
    ],
)
def test_the_verdict_is_one_sentence(found: LatencyComparison, sentence: str) -> None:
    assert found.verdict == sentence


def test_plain_values_are_json_even_without_an_interval() -> None:
    plain = json.loads(json.dumps(made(2.0, 0.0, math.inf).to_dict(), allow_nan=False))
    assert plain["latency"]["interval"] == [0.0, None]
    assert (plain["speed"], plain["machine"], plain["runtime"]) == (2.0, "a machine", "1.2.3")


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
    assert latency._processor() == name
