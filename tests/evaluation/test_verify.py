"""What a written model really runs, and how fast it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from evaluation.wrong_engine import Wrong
from onnxq.errors import ModelError
from onnxq.evaluation.verification import Kernels, Timer, count_kernels, verify
from onnxq.runtime.engine import OnnxRuntime
from onnxq.runtime.interleaved_timing import Turn


def test_a_float_model_has_no_integer_kernels(residual: ModelProto, tmp_path: Path) -> None:
    onnx.save(residual, tmp_path / "float.onnx")
    assert count_kernels(tmp_path / "float.onnx") == Kernels(integer=0, quantize=0, heavy_float=4)


def test_a_quantized_model_shows_its_kernels(residual: ModelProto, quantize_to, tmp_path: Path) -> None:
    quantize_to(residual, tmp_path / "q.onnx")
    # Four convolutions and the sum; one QuantizeLinear in front and one DequantizeLinear behind.
    assert count_kernels(tmp_path / "q.onnx") == Kernels(integer=5, quantize=2, heavy_float=0)


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
    found = verify(tmp_path / "float.onnx", tmp_path / "float.onnx", samples, timer=Timer(seconds), engine=Wrong())
    assert found.agreement.worst_sqnr == math.inf
    assert found.on_engine is not None
    assert found.on_engine.engine == "wrong 1"
    assert found.on_engine.floats == found.on_engine.agreement.worst_sqnr < 10
    assert found.floats_miss(20.0)
    assert (found.latency.engine if found.latency else "") == ("wrong 1" if seconds else "")
    assert found.agreements == (found.agreement, found.on_engine.agreement)


@pytest.mark.parametrize(
    ("scheme", "speeds", "slower"),
    [
        ("int8", [1.1] * 3, False),
        ("int8", [0.9] * 3 + [1.1] * 3, False),
        ("int8", [0.99] * 3 + [0.98] * 3, True),
        ("int8", [0.9] * 3 + [0.8, 1.5, 0.9, 1.6, 0.9, 0.8] + [1.5] * 3, False),
        ("int8", [0.9] * 3 + [0.8, 1.5, 0.9, 1.6, 0.9, 0.8] + [0.9] * 3, True),
        ("int8-storage", [0.99] * 3, True),
    ],
    ids=["faster", "faster on a second look", "slower on both", "disturbed, faster", "disturbed, slower", "float"],
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
