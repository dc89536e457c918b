"""Models of 16-bit floats end to end: integer kernels where a float32 model has them, and no larger a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from onnxq.config.scheme import Mode
from onnxq.pipeline.quantization import plan
from onnxq.pipeline.request import Budget
from onnxq.planning.plan_file import load_plan, save_plan

CNN = """(float16[1,3,16,16] x) => (float16[1,10] y) {
    a = Conv <pads = [1,1,1,1]> (x, w0, b0) b = BatchNormalization(a, scale, shift, mean, variance) c = Relu(b)
    d = Conv <pads = [1,1,1,1], strides = [2,2]> (c, w1, b1) e = Relu(d)
    f = Conv <pads = [1,1,1,1]> (e, w2) g = Add(f, e) h = Relu(g)
    p = GlobalAveragePool(h) q = Flatten(p) y = Gemm <transB = 1> (q, w3, b3)
}"""

# Attention with its softmax in float32, and a mask of the lowest float16, as exporters of mixed precision write them.
TRANSFORMER = """(int64[1,8] tokens, bool[1,8] mask) => (float16[1,8,64] y, float16[1,8,8] attention) {
    x = Gather(table, tokens)
    n = LayerNormalization(x, gain, offset)
    q = MatMul(n, wq) k = MatMul(n, wk) v = MatMul(n, wv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul(q, kt) scaled = Mul(s, eighth) masked = Where(mask, scaled, lowest)
    wide = Cast <to = 1> (masked) p = Softmax(wide) attention = Cast <to = 10> (p)
    o = MatMul(attention, v) r = Add(x, o)
    u = MatMul(r, w1) act = Relu(u) z = MatMul(act, w2) y = Add(r, z)
}"""


def half(*shape: int) -> NDArray[np.float16]:
    generator = np.random.default_rng([len(shape), *shape])
    return (generator.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))).astype(np.float16)


@pytest.fixture
def cnn(build) -> ModelProto:
    ones = np.ones(32, np.float16)
    norm = {"scale": ones, "shift": half(32), "mean": half(32), "variance": ones}
    kernels = {"w0": half(32, 3, 3, 3), "w1": half(64, 32, 3, 3), "w2": half(64, 64, 3, 3), "w3": half(10, 64)}
    return build(CNN, **norm, **kernels, b0=half(32), b1=half(64), b3=half(10))


@pytest.fixture
def transformer(build) -> ModelProto:
    # Equal weights would be one, and so would what is multiplied with them.
    square = {name: np.roll(half(64, 64), index, 0) for index, name in enumerate(("wq", "wk", "wv"))}
    table = np.random.default_rng(3).standard_normal((100, 64)).astype(np.float16)
    numbers = {"eighth": np.float16(0.125), "lowest": np.float16(-65504)}
    norm = {"gain": np.ones(64, np.float16), "offset": half(64)}
    return build(TRANSFORMER, **square, **numbers, **norm, table=table, w1=half(64, 256), w2=half(256, 64))


def sentences(count: int = 6) -> list[dict[str, NDArray[np.generic]]]:
    generator = np.random.default_rng(0)
    return [{"tokens": generator.integers(0, 100, (1, 8)), "mask": np.arange(8)[None] < 6} for _ in range(count)]


def types(path: Path) -> dict[str, int]:
    """The types of what a model is fed and gives."""
    graph = onnx.load(path).graph
    return {info.name: info.type.tensor_type.elem_type for info in (*graph.input, *graph.output)}


def test_a_convolutional_model_runs_on_integers(cnn: ModelProto, quantize_to, tmp_path: Path) -> None:
    report = quantize_to(cnn, tmp_path / "m").report
    onnx.checker.check_model(tmp_path / "m", full_check=True)
    assert (report.performance.kernels.integer, report.performance.kernels.heavy_float) == (6, 0)
    assert report.agreement.worst_sqnr >= 20
    assert report.size_ratio < 0.6
    assert types(tmp_path / "m") == {"x": TensorProto.FLOAT16, "y": TensorProto.FLOAT16}


def test_a_transformer_runs_on_integers(transformer: ModelProto, quantize_to, tmp_path: Path) -> None:
    report = quantize_to(transformer, tmp_path / "m", samples=sentences()).report
    onnx.checker.check_model(tmp_path / "m", full_check=True)
    assert report.performance.kernels.integer >= 5
    assert report.agreement.worst_sqnr >= 20
    assert report.size_ratio < 0.7
    casts = [node for node in onnx.load(tmp_path / "m").graph.node if node.op_type == "Cast"]
    assert sum(node.output[0] in ("y", "attention") for node in casts) == 2


def test_the_search_is_judged_by_the_model_of_the_user(cnn: ModelProto, quantize_to, tmp_path: Path) -> None:
    report = quantize_to(cnn, tmp_path / "m", goal=20, budget=Budget(latency_seconds=0)).report
    assert report.performance.kernels.integer > 0
    assert report.agreement.worst_sqnr >= 20


def test_what_stays_float_takes_16_bits(transformer: ModelProto, quantize_to, tmp_path: Path) -> None:
    from onnxq.config.presets import PRESETS

    scheme = PRESETS["int8"].excluding("re:MatMul_[uz]", "re:Gather.*")
    report = quantize_to(transformer, tmp_path / "m", scheme=scheme, samples=sentences()).report
    assert report.performance.kernels.integer > 0
    assert report.size_ratio < 0.95
    stored = {tensor.name: tensor.data_type for tensor in onnx.load(tmp_path / "m").graph.initializer}
    assert {name: stored[f"{name}.narrow"] for name in ("table", "w1", "w2")} == dict.fromkeys(
        ("table", "w1", "w2"), TensorProto.FLOAT16
    )


def test_dynamic_scales_work_as_well(transformer: ModelProto, quantize_to, tmp_path: Path) -> None:
    report = quantize_to(transformer, tmp_path / "m", scheme="int8-dynamic", samples=sentences()).report
    assert report.plan.count(Mode.DYNAMIC) == 5
    assert report.agreement.worst_sqnr >= 20


@pytest.mark.parametrize(("scheme", "target"), [("int8-storage", "onnxruntime-cpu"), ("int8", "tensorrt")])
def test_where_no_integers_pay_floats_stay_as_wide_as_they_were(scheme: str, target: str, cnn: ModelProto) -> None:
    found = plan(cnn, scheme=scheme, target=target)
    assert "Cast" not in {decision.op_type for decision in found.decisions}


def test_a_plan_is_replayed_to_the_same_bytes(cnn: ModelProto, quantize_to, tmp_path: Path) -> None:
    report = quantize_to(cnn, tmp_path / "first").report
    save_plan(report.plan, tmp_path / "plan.toml")
    quantize_to(cnn, tmp_path / "second", scheme=load_plan(tmp_path / "plan.toml"))
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
