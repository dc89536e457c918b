"""IsolateFloats hides products of floats between codes, whose weights onnxruntime would make codes of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import apply_once, model, sample, values
from onnx import ModelProto

from onnxq.config.scheme import Mode, Rule, Scheme
from onnxq.ir import as_graph, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import IsolateFloats
from onnxq.planning.plan import Plan
from onnxq.runtime.sessions import open_session

NOTHING_STATIC = Plan((), (), "", "onnxruntime-cpu")
ONE, CHANNELS = "(c, s, z)", "<axis=1>(c, ss, zz)"
IMAGES = {
    "convolution": "[p] c = Conv(a, w)",
    "bias": "[p] c = Conv(a, w, b)",
    "Relu": "[p] d = Conv(a, w) c = Relu(d)",
    "Clip": "[p] d = Conv(a, w) c = Clip(d, low, high)",
    "moved": "t = Transpose<perm=[0,1,3,2]>(a) [p] d = Conv(t, w) c = Transpose<perm=[0,1,3,2]>(d)",
    "transposed": "[p] c = ConvTranspose(a, w)",
}
ROWS = {"product": "[p] c = Gemm(a, m)", "product and bias": "[p] c = Gemm(a, m, b)"}


def between_codes(body: str, shape: str, quantizer: str = ONE) -> ModelProto:
    return model(
        f"g (float[{shape}] x) => (float[{shape}] y) {{ q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z)"
        f" {body} r = QuantizeLinear{quantizer} y = DequantizeLinear{quantizer.replace('c,', 'r,')} }}",
        opset=21, ir_version=10, w=values(4, 4, 1, 1), m=values(4, 4), b=values(4),
        s=np.array(0.05, np.float32), z=np.array(7, np.uint8),
        ss=np.array([0.01, 0.02, 0.03, 0.04], np.float32), zz=np.full(4, 7, np.uint8),
        low=np.array(0, np.float32), high=np.array(6, np.float32),
    )  # fmt: skip


CASES = [
    *((body, "1, 4, 6, 6", quantizer) for body in IMAGES.values() for quantizer in (ONE, CHANNELS)),
    *((body, "3, 4", ONE) for body in ROWS.values()),
]


@pytest.mark.parametrize(("body", "shape", "quantizer"), CASES)
def test_a_product_of_floats_stays_one_between_codes(body: str, shape: str, quantizer: str, tmp_path: Path) -> None:
    made = between_codes(body, shape, quantizer)
    graph = as_graph(made)
    infer_shapes(graph)
    assert apply_once(IsolateFloats(NOTHING_STATIC), graph).changed == ("p",)
    inputs = sample(made)
    expected = open_session(made, optimize=False).run(None, inputs)[0]
    found = open_session(to_model(graph), optimized_copy=tmp_path / "runs.onnx").run(None, inputs)[0]
    assert np.array_equal(found, expected)
    stored = onnx.load(tmp_path / "runs.onnx").graph.initializer
    assert not any(len(tensor.dims) > 1 and tensor.data_type != onnx.TensorProto.FLOAT for tensor in stored)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        pytest.param("[p] c = MatMul(a, m)", "3, 4", id="onnxruntime leaves it as it is"),
        pytest.param("[p] d = Conv(a, w) c = Tanh(d)", "1, 4, 6, 6", id="what it makes is not made codes of"),
        pytest.param("e = Tanh(a) [p] c = Conv(e, w)", "1, 4, 6, 6", id="what it reads was not decoded"),
        pytest.param("[p] c0 = Conv(a, w) c1 = Tanh(c0) c = Add(c0, c1)", "1, 4, 6, 6", id="others read it"),
    ],
)
def test_all_else_is_left(body: str, shape: str) -> None:
    graph = as_graph(between_codes(body, shape))
    infer_shapes(graph)
    assert not apply_once(IsolateFloats(NOTHING_STATIC), graph).changed


# For OpenVINO what stands in front gives floats, so that onnxruntime makes no integer kernel of it.
@pytest.mark.parametrize(("target", "kernels"), [("onnxruntime-cpu", (2, 1)), ("openvino", (0, 3))])
@pytest.mark.parametrize("middle", [Mode.FLOAT, Mode.STORAGE])
def test_what_a_scheme_leaves_in_float_is_computed_in_float(
    middle: Mode, target: str, kernels: tuple[int, int], build, quantize_to, running_graph, tmp_path: Path
) -> None:
    made = build(
        "(float[1, 32, 6, 6] x) => (float[1, 32, 6, 6] y)"
        "{ [a] p = Conv(x, w0) [b] q = Conv(p, w1) [c] y = Conv(q, w2) }",
        w0=(32, 32, 1, 1), w1=(32, 32, 1, 1), w2=(32, 32, 1, 1),
    )  # fmt: skip
    scheme = Scheme((Rule(middle, nodes=("b",)), Rule(Mode.STATIC)))
    plan = quantize_to(made, tmp_path / "q.onnx", scheme=scheme, target=target).report.plan
    assert [plan.by_node[node].mode for node in "abc"] == [Mode.STATIC, middle, Mode.STATIC]
    runs = [node.op_type for node in running_graph(tmp_path / "q.onnx").node]
    assert (runs.count("QLinearConv"), runs.count("Conv") + runs.count("FusedConv")) == kernels
