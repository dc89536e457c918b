"""Two files timed beside one another, and the sentence that sums it up."""

from __future__ import annotations

import json
import math
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.calibration.data import Data
from onnxq.errors import DataError
from onnxq.evaluation import latency
from onnxq.evaluation.latency import Latency, LatencyComparison, bench
from onnxq.runtime.engines import open_engine


@pytest.fixture
def model(perceptron: ModelProto, tmp_path: Path) -> Path:
    onnx.save(perceptron, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def data(perceptron: ModelProto, samples_for, tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=np.stack([sample["x"] for sample in samples_for(perceptron, 20)]))
    return tmp_path / "data.npz"


def test_a_bench_says_what_was_run_and_where(model: Path, data: Path) -> None:
    found = bench(model, model, data, threads=1, seconds=0.0)
    assert (found.reference, found.candidate, found.samples) == (str(model), str(model), 8)
    assert (found.latency.rounds, found.latency.runs, found.latency.threads) == (12, 12, 1)
    assert found.runtime == f"onnxruntime {version('onnxruntime')}"
    assert found.machine


def test_both_run_on_the_engine_that_is_given(model: Path, data: Path) -> None:
    with open_engine(f"python:{sys.executable}") as engine:
        found = bench(model, model, Data(data, limit=2), threads=1, seconds=0.0, engine=engine)
    assert found.runtime == found.latency.engine == engine.version
    assert found.latency.runs == 12


def test_samples_are_limited(model: Path, data: Path) -> None:
    assert bench(model, model, Data(data, limit=3), threads=1, seconds=0.0).samples == 3


def test_samples_must_fit_both_models(model: Path, data: Path, build, tmp_path: Path) -> None:
    onnx.save(build("(float[4,32] other) => (float[4,32] y) { y = Relu(other) }"), tmp_path / "other.onnx")
    with pytest.raises(DataError, match="other"):
        bench(model, tmp_path / "other.onnx", data, seconds=0.0)


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
