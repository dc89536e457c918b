"""A written model beside the float model: kernels, engines, speed, and the samples of the largest error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build
from counted_kernels import count_kernels
from onnx import ModelProto

from evaluation.wrong_engine import Wrong
from onnxq.data.dataset import Subset
from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples
from onnxq.errors import DataError, ModelError
from onnxq.evaluation import verification
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.metrics import Metric, Scorer, Top1
from onnxq.evaluation.verification import Kernels, Verifier
from onnxq.runtime.engine import OnnxRuntime
from onnxq.runtime.interleaved_timing import Turn
from onnxq.system.resources import Deadline


@pytest.mark.parametrize(
    ("scheme", "kernels"),
    [
        ("", Kernels(integer=0, quantize=0, heavy_float=4)),
        # Four convolutions and the sum; one QuantizeLinear in front and one DequantizeLinear behind.
        ("int8", Kernels(integer=5, quantize=2, heavy_float=0, heavy_integer=4)),
        ("int8-storage", Kernels(integer=0, quantize=0, heavy_float=4)),
    ],
)
def test_the_kernels_of_a_file_are_counted(
    scheme: str, kernels: Kernels, residual: ModelProto, quantize_to, tmp_path: Path
) -> None:
    if scheme:
        quantize_to(residual, tmp_path / "model.onnx", scheme=scheme)
    else:
        onnx.save(residual, tmp_path / "model.onnx")
    assert count_kernels(tmp_path / "model.onnx") == kernels
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"model\.onnx"):
        count_kernels(tmp_path / "model.onnx")


def test_weights_in_blocks_and_kernels_of_bodies_are_counted(build: Build, tmp_path: Path) -> None:
    found = Kernels.of([*["MatMulNBits"] * 3, "MatMul", *["QLinearMatMul"] * 2, "QLinearAdd", "GatherBlockQuantized"])
    assert (found.heavy_integer, found.heavy_float, found.integer) == (2, 4, 7)
    text = """(float[4,32] x, bool c) => (float[4,32] y) {
        y = If (c) <
            then_branch = t () => (float[4,32] u) { u = MatMul(x, w) },
            else_branch = e () => (float[4,32] v) { v = Tanh(x) }>
    }"""
    onnx.save(build(text, w=(32, 32)), tmp_path / "if.onnx")
    assert count_kernels(tmp_path / "if.onnx").heavy_float == 1


@pytest.mark.parametrize("scheme", ["int8", "int8-dynamic", "int8-per-tensor"])
def test_recurrent_cells_run_as_integer_kernels_where_the_runtimes_own_may_be_written(
    scheme: str, build: Build, quantize_to, tmp_path: Path
) -> None:
    text = """(float[8,2,32] x) => (float[8,2,2,24] y, float[2,2,24] h) {
        [cell] y, h = LSTM <hidden_size = 24, direction = "bidirectional"> (x, w, r, b)
    }"""
    model = build(text, w=(2, 96, 32), r=(2, 96, 24), b=(2, 192))
    for emit, integer in (("qdq", 0), ("ort", 1)):
        report = quantize_to(model, tmp_path / f"{emit}.onnx", scheme=scheme, emit=emit).report
        assert report.agreement.worst_sqnr >= 30
        assert report.performance.kernels == Kernels(integer=integer, quantize=0, heavy_float=0)
        assert report.performance.kernels == count_kernels(tmp_path / f"{emit}.onnx")
        assert report.files.bytes < 0.4 * report.files.float_bytes


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_the_engine_that_the_model_is_for_runs_it_too_and_is_timed(
    build: Build, tmp_path: Path, seconds: float
) -> None:
    path = tmp_path / "float.onnx"
    onnx.save(build("(float[64] x) => (float[64] y) { h = Tanh(x) y = Sin(h) }"), path)
    samples = [{"x": np.linspace(-1, 1, 64, dtype=np.float32)}]
    found = Verifier(path, samples, seconds, engine=Wrong()).verified(path, 1)
    assert found.agreement.worst_sqnr == math.inf
    there = found.elsewhere
    assert there is not None
    assert there.engine == "wrong 1"
    assert there.floats == there.agreement.worst_sqnr < 10
    assert found.floats_miss(20.0)
    assert (found.latency.engine if found.latency else "") == ("wrong 1" if seconds else "")
    assert found.agreements == (found.agreement, there.agreement)


# Speeds of rounds that other work disturbs.
DISTURBED = [0.8, 1.5, 0.9, 1.6, 0.9, 0.8]
LOOKS = {
    "faster": ("int8", [1.1] * 3, False),
    "faster on a second look": ("int8", [0.9] * 3 + [1.1] * 3, False),
    "slower on both": ("int8", [0.99] * 3 + [0.98] * 3 + [1.0] * 3, True),
    "slower, on a busy machine": ("int8", [0.9] * 6 + [0.8, 1.2, 1.3, 0.7, 1.0, 1.1] + [1.5] * 3 + [1.0] * 3, False),
    "slower than a busy machine explains": ("int8", [0.6] * 6 + [0.8, 1.2, 1.3, 0.7, 1.0, 1.1], True),
    "disturbed, faster": ("int8", [0.9] * 3 + DISTURBED + [1.5] * 3 + [1.0] * 3, False),
    "disturbed, slower": ("int8", [0.9] * 3 + DISTURBED + [0.9] * 3 + [1.0] * 3, True),
    "busy": (
        "int8",
        [0.9] * 3 + DISTURBED + DISTURBED + [0.8, 1.2, 1.3, 0.7, 1.0, 1.1] + [3.0] * 3 + [1.0] * 3,
        False,
    ),
    "float": ("int8-storage", [0.99] * 3, True),
}


@pytest.mark.parametrize(("scheme", "speeds", "slower"), LOOKS.values(), ids=LOOKS)
def test_a_model_that_looks_slower_is_timed_again_unless_it_is_float_throughout(
    scheme: str,
    speeds: list[float],
    slower: bool,
    perceptron: ModelProto,
    samples_for: Callable[..., list],
    quantize_to,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    onnx.save(perceptron, tmp_path / "float.onnx")
    quantize_to(perceptron, tmp_path / "q.onnx", scheme=scheme)
    rounds = iter(speeds)

    def times(engine: OnnxRuntime, models: object, samples: Sequence[object], *given: object) -> list[list[Turn]]:
        # Rounds that agree are enough when there are three.
        speed = next(rounds)
        return [[(1.0, 1 / speed)] for _ in samples]

    monkeypatch.setattr(OnnxRuntime, "time", times)
    found = Verifier(tmp_path / "float.onnx", samples_for(perceptron, 2), 0.1).verified(tmp_path / "q.onnx", 1)
    assert found.latency is not None
    assert next(rounds, None) is None
    assert found.latency.slower is slower


# Verifying the candidates of a search.

SAMPLES = [{"x": np.random.default_rng(place).standard_normal((1, 4)).astype(np.float32)} for place in range(8)]
LABELS = np.array([int(sample["x"].argmax()) for sample in SAMPLES])


def top1(labels: np.ndarray) -> Metric:
    return Metric("top1", Top1(labels))


@pytest.fixture
def files(build: Build, tmp_path: Path) -> tuple[Path, Path]:
    """A model that returns its input, and one that clips it at 1.5."""
    for name, nodes in (("float", "y = Identity(x)"), ("clipped", "y = Min(x, most)")):
        model = build(f"(float[1,4] x) => (float[1,4] y) {{ {nodes} }}", most=np.array([1.5], np.float32))
        onnx.save(model, tmp_path / f"{name}.onnx")
    return tmp_path / "float.onnx", tmp_path / "clipped.onnx"


def test_a_model_is_verified_and_scored_and_each_look_costs_trust(files: tuple[Path, Path]) -> None:
    verifier = Verifier(files[0], SAMPLES, 0.0, Scorer.of_holdout(top1(LABELS), files[0], SAMPLES))
    bounds, lost = [], []
    for look in (1, 2, 5):
        (output,) = verifier.verified(files[1], look).agreement.outputs
        scores = verifier.scores(files[1], look)
        assert scores is not None
        assert output.bound is not None
        assert output.bound < output.decibels < math.inf
        bounds.append(output.bound)
        lost.append(scores.most_lost)
    assert bounds == sorted(bounds, reverse=True)
    assert lost == sorted(lost)


@pytest.mark.parametrize(
    ("limit", "labels", "fits"), [(4, 20, True), (8, 8, True), (8, 20, False), (9, 20, False), (8, 9, False)]
)
def test_labels_of_more_samples_are_for_a_limit_that_leaves_some_out(
    limit: int, labels: int, fits: bool, files: tuple[Path, Path]
) -> None:
    samples = open_samples(SAMPLES, [Input("x", np.dtype(np.float32), (1, 4))], limit=limit, in_order=True)
    refused = pytest.raises(DataError, match=f"8 answers for 8 samples and there are {labels} labels, expected one")
    with nullcontext() if fits else refused:
        Scorer.of_holdout(top1(np.zeros(labels, np.int64)), files[0], samples)


def test_labels_stand_in_the_order_of_all_samples_of_which_some_judge(files: tuple[Path, Path]) -> None:
    samples = open_samples(SAMPLES, [Input("x", np.dtype(np.float32), (1, 4))], limit=6, in_order=True)
    labels = LABELS + (np.arange(8) == 3)
    for places, score, others in (([0, 3], 0.5, 1.0), ([0, 5], 1.0, 0.75)):
        holdout = Subset(samples, places)
        verifier = Verifier(files[0], holdout, 0.0, Scorer.of_holdout(top1(labels), files[0], holdout))
        scores = verifier.scores(files[1], 1)
        assert scores is not None
        assert scores.chosen_by is not None
        assert (scores.reference, scores.chosen_by.reference, verifier.scored) == (score, others, 6)


@pytest.mark.parametrize(("left", "most"), [(60.0, 30.0), (0.0, 15.0)])
def test_timing_takes_half_of_the_time_left_and_a_little_if_none_is(
    left: float, most: float, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[dict[str, float]] = []

    def measured(*_: object, **options: float) -> Latency:
        # Slower, and never told: each look there may be is taken.
        requested.append(options)
        return Latency(1.0, 2.0, 1, 8, 3)

    monkeypatch.setattr(verification, "measure_latency", measured)
    monkeypatch.setattr(verification, "_operators", lambda _: Counter({"QGemm": 1}))
    verifier = Verifier(files[0], SAMPLES, 10.0, deadline=Deadline.within(left))
    assert not verifier.verified(files[1], 1).keeps_up
    assert len(requested) == 3
    for name in ("seconds", "patience"):
        assert 0 < sum(one[name] for one in requested) <= most


def test_a_metric_counts_as_the_runs_that_it_takes(files: tuple[Path, Path]) -> None:
    scorer = Scorer.of_holdout(Metric("mean", lambda outputs, samples: 1.0), files[0], SAMPLES)
    assert Verifier(files[0], SAMPLES, 0.0, scorer).scored == 8
    without = Verifier(files[0], SAMPLES, 0.0)
    assert (without.scored, without.scores(files[1], 1)) == (0, None)
