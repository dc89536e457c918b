"""A written model beside the float model: kernels, engines, speed, and the samples of the largest error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build
from onnx import ModelProto

from evaluation.wrong_engine import Wrong
from onnxq.data.dataset import Subset
from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples
from onnxq.errors import DataError, ModelError
from onnxq.evaluation import verification
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.metrics import Metric, Top1
from onnxq.evaluation.verification import Kernels, Timer, Verifier, count_kernels, verify
from onnxq.runtime.engine import OnnxRuntime
from onnxq.runtime.interleaved_timing import Turn
from onnxq.system.resources import Deadline


def test_a_float_model_has_no_integer_kernels(residual: ModelProto, tmp_path: Path) -> None:
    onnx.save(residual, tmp_path / "float.onnx")
    assert count_kernels(tmp_path / "float.onnx") == Kernels(integer=0, quantize=0, heavy_float=4)


def test_a_quantized_model_shows_its_kernels(residual: ModelProto, quantize_to, tmp_path: Path) -> None:
    quantize_to(residual, tmp_path / "q.onnx")
    # Four convolutions and the sum; one QuantizeLinear in front and one DequantizeLinear behind.
    assert count_kernels(tmp_path / "q.onnx") == Kernels(integer=5, quantize=2, heavy_float=0, heavy_integer=4)


def test_a_weight_in_blocks_is_multiplied_with_float_activations() -> None:
    found = Kernels.of({"MatMulNBits": 3, "MatMul": 1, "QLinearMatMul": 2, "QLinearAdd": 1, "GatherBlockQuantized": 1})
    assert (found.heavy_integer, found.heavy_float, found.integer) == (2, 4, 7)


@pytest.mark.parametrize("scheme", ["int8", "int8-dynamic", "int8-per-tensor"])
def test_recurrent_cells_run_as_integer_kernels_where_the_runtimes_own_may_be_written(
    scheme: str, build, quantize_to, tmp_path: Path
) -> None:
    model = build(
        """(float[8,2,32] x) => (float[8,2,2,24] y, float[2,2,24] h) {
        [cell] y, h = LSTM <hidden_size = 24, direction = "bidirectional"> (x, w, r, b)
        }""",
        w=(2, 96, 32),
        r=(2, 96, 24),
        b=(2, 192),
    )
    for emit, integer in (("qdq", 0), ("ort", 1)):
        done = quantize_to(model, tmp_path / f"{emit}.onnx", scheme=scheme, emit=emit)
        assert done.report.agreement.worst_sqnr >= 30
        assert done.report.performance.kernels == count_kernels(tmp_path / f"{emit}.onnx")
        assert done.report.performance.kernels == Kernels(integer=integer, quantize=0, heavy_float=0)
        assert done.report.files.bytes < 0.4 * done.report.files.float_bytes


def test_stored_weights_leave_a_float_model(residual: ModelProto, quantize_to, tmp_path: Path) -> None:
    quantize_to(residual, tmp_path / "q.onnx", scheme="int8-storage")
    kernels = count_kernels(tmp_path / "q.onnx")
    assert (kernels.integer, kernels.quantize, kernels.heavy_float) == (0, 0, 4)


def test_kernels_in_control_flow_are_counted(build, tmp_path: Path) -> None:
    model = build(
        """(float[4,32] x, bool c) => (float[4,32] y) {
        y = If (c) <
            then_branch = t () => (float[4,32] u) { u = MatMul(x, w) },
            else_branch = e () => (float[4,32] v) { v = Tanh(x) }>
        }""",
        w=(32, 32),
    )
    onnx.save(model, tmp_path / "if.onnx")
    assert count_kernels(tmp_path / "if.onnx").heavy_float == 1


def test_looking_at_a_model_leaves_nothing_beside_it(perceptron: ModelProto, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    count_kernels(tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_model_that_does_not_load_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"model\.onnx"):
        count_kernels(tmp_path / "model.onnx")


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_what_the_model_is_for_runs_it_too_and_tells_the_latency(
    build: Callable[..., ModelProto], tmp_path: Path, seconds: float
) -> None:
    for name, op in (("float", "Sin"), ("candidate", "Identity")):
        onnx.save(build(f"(float[64] x) => (float[64] y) {{ h = Tanh(x) y = {op}(h) }}"), tmp_path / f"{name}.onnx")
    samples = [{"x": np.linspace(-1, 1, 64, dtype=np.float32)}]
    found = verify(tmp_path / "float.onnx", tmp_path / "float.onnx", samples, timer=Timer(seconds), engines=[Wrong()])
    assert found.agreement.worst_sqnr == math.inf
    [there] = found.on_engines
    assert there.engine == "wrong 1"
    assert there.floats == there.agreement.worst_sqnr < 10
    assert found.floats_miss(20.0)
    assert (found.latency.engine if found.latency else "") == ("wrong 1" if seconds else "")
    assert found.agreements == (found.agreement, there.agreement)


# Speeds of rounds that other work disturbs.
DISTURBED = [0.8, 1.5, 0.9, 1.6, 0.9, 0.8]


@pytest.mark.parametrize(
    ("scheme", "speeds", "slower"),
    [
        ("int8", [1.1] * 3, False),
        ("int8", [0.9] * 3 + [1.1] * 3, False),
        ("int8", [0.99] * 3 + [0.98] * 3, True),
        ("int8", [0.9] * 3 + DISTURBED + [1.5] * 3 + [1.0] * 3, False),
        ("int8", [0.9] * 3 + DISTURBED + [0.9] * 3 + [1.0] * 3, True),
        ("int8", [0.9] * 3 + DISTURBED + DISTURBED + [0.8, 1.2, 1.3, 0.7, 1.0, 1.1] + [3.0] * 3 + [1.0] * 3, False),
        ("int8-storage", [0.99] * 3, True),
    ],
    ids=[
        "faster",
        "faster on a second look",
        "slower on both",
        "disturbed, faster",
        "disturbed, slower",
        "busy",
        "float",
    ],
)
def test_a_model_that_looks_slower_is_looked_at_again_unless_it_is_float_throughout(
    perceptron: ModelProto,
    samples_for: Callable[..., list],
    quantize_to,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    speeds: list[float],
    slower: bool,
) -> None:
    onnx.save(perceptron, tmp_path / "float.onnx")
    quantize_to(perceptron, tmp_path / "q.onnx", scheme=scheme)
    rounds = iter(speeds)

    def times(engine: OnnxRuntime, models: object, samples: Sequence[object], *given: object) -> list[list[Turn]]:
        # Rounds that agree are enough when there are three.
        speed = next(rounds)
        return [[(1.0, 1 / speed)] for _ in samples]

    monkeypatch.setattr(OnnxRuntime, "time", times)
    found = verify(tmp_path / "float.onnx", tmp_path / "q.onnx", samples_for(perceptron, 2), timer=Timer(0.1))
    assert found.latency is not None
    assert next(rounds, None) is None
    assert found.latency.slower is slower


# What judges the models that are built.

SAMPLES = [{"x": np.random.default_rng(place).standard_normal((1, 4)).astype(np.float32)} for place in range(8)]


@pytest.fixture
def files(build: Build, tmp_path: Path) -> tuple[Path, Path]:
    """A model that returns its input, and one that clips it at 1.5."""
    for name, nodes in (("float", "y = Identity(x)"), ("clipped", "y = Min(x, most)")):
        model = build(f"(float[1,4] x) => (float[1,4] y) {{ {nodes} }}", most=np.array([1.5], np.float32))
        onnx.save(model, tmp_path / f"{name}.onnx")
    return tmp_path / "float.onnx", tmp_path / "clipped.onnx"


def test_a_model_is_verified_and_scored_and_each_look_costs_trust(files: tuple[Path, Path]) -> None:
    labels = np.array([int(sample["x"].argmax()) for sample in SAMPLES])
    verifier = Verifier.of(files[0], SAMPLES, 0.0, Metric("top1", Top1(labels)))
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


@pytest.mark.parametrize(("limit", "labels", "fits"), [(4, 20, True), (8, 8, True), (8, 20, False), (9, 20, False)])
def test_labels_of_more_samples_are_for_a_limit_that_leaves_some_out(
    limit: int, labels: int, fits: bool, files: tuple[Path, Path]
) -> None:
    samples = open_samples(SAMPLES, [Input("x", np.dtype(np.float32), (1, 4))], limit=limit, in_order=True)
    metric = Metric("top1", Top1(np.zeros(labels, np.int64)))
    refused = pytest.raises(DataError, match=f"8 answers for 8 samples and there are {labels} labels, expected one")
    with nullcontext() if fits else refused:
        Verifier.of(files[0], samples, 0.0, metric)


def test_labels_stand_in_the_order_of_all_samples_of_which_some_judge(files: tuple[Path, Path]) -> None:
    samples = open_samples(SAMPLES, [Input("x", np.dtype(np.float32), (1, 4))], limit=6, in_order=True)
    labels = np.array([int(sample["x"].argmax()) for sample in SAMPLES])
    labels[3] += 1
    for places, score in (([0, 3], 0.5), ([0, 5], 1.0)):
        verifier = Verifier.of(files[0], Subset(samples, places), 0.0, Metric("top1", Top1(labels)))
        scores = verifier.scores(files[1], 1)
        assert scores is not None
        assert scores.chosen_by is not None
        assert (scores.reference, scores.chosen_by.reference) == (score, 1.0 if score < 1 else 0.75)
        assert verifier.scored == 6


def test_without_a_metric_nothing_is_scored(files: tuple[Path, Path]) -> None:
    assert Verifier.of(files[0], SAMPLES, 0.0, None).scores(files[1], 1) is None


def test_a_metric_that_cannot_be_told_is_refused_before_any_model_is_built(files: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match="gives 8 answers for 8 samples and there are 9 labels"):
        Verifier.of(files[0], SAMPLES, 0.0, Metric("top1", Top1(np.zeros(9, np.int64))))


@pytest.mark.parametrize(("left", "most"), [(60.0, 30.0), (0.0, 15.0)])
def test_looks_at_speed_take_half_of_the_time_that_is_left_and_are_taken_when_none_is(
    left: float, most: float, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[dict[str, float]] = []

    def measured(*_: object, **options: float) -> list[Latency]:
        # Slower, and never told: each look there may be is taken.
        requested.append(options)
        return [Latency(1.0, 2.0, 1, 8, 3)]

    monkeypatch.setattr(verification, "measure_latencies", measured)
    monkeypatch.setattr(verification, "_op_types", lambda _: Counter({"QGemm": 1}))
    verifier = replace(Verifier.of(files[0], SAMPLES, 10.0, None), deadline=Deadline.within(left))
    assert not verifier.verified(files[1], 1).keeps_up
    assert len(requested) == 3
    for name in ("seconds", "patience"):
        assert 0 < sum(one[name] for one in requested) <= most


def test_a_metric_counts_as_the_runs_that_it_takes(files: tuple[Path, Path]) -> None:
    metric = Metric("mean", lambda outputs, samples: 1.0)
    assert Verifier.of(files[0], SAMPLES, 0.0, metric).scored == len(SAMPLES)
    assert Verifier.of(files[0], SAMPLES, 0.0, None).scored == 0
