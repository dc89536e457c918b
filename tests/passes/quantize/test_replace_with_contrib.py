"""ReplaceWithContrib writes onnxruntime's own operators where they fit, and leaves the rest to standard ONNX."""

from __future__ import annotations

from unittest.mock import ANY

import numpy as np
import pytest
from model_texts import difference, model, node_named, ops, outputs, sample, values
from onnx import ModelProto, defs

from onnxq.algorithms.encode import encode
from onnxq.algorithms.encoders import encode_array
from onnxq.config.scheme import Granularity, Mode, Rule, Scheme, Spec, Storage
from onnxq.ir import Graph, as_graph, constants
from onnxq.lowering import AllowedOps
from onnxq.onnx_api import infer_shapes
from onnxq.passes import DecodeWeights, RemoveUnused, ReplaceWithContrib
from onnxq.planning.planner import make_plan
from onnxq.rewrite import Changes
from onnxq.runtime.targets import target_named

MATMUL = "g (float[3, 40] x) => (float[3, 24] y) { [dot] y = MatMul(x, w) }"
GEMM = MATMUL.replace("MatMul(x, w)", "Gemm <transB = 1> (x, w, b)")
TWO_BITS = pytest.param(
    Spec("int2", (16,)),
    marks=pytest.mark.skipif(defs.onnx_opset_version() < 25, reason="an old onnxruntime"),
    id="int2",
)
LOOKUP = "g (int64[2, 3] i) => (float[2, 3, 64] y) { [look] y = Gather(w, i) }"


def replace(made: ModelProto, spec: Spec, emit: AllowedOps = AllowedOps.ORT) -> tuple[Graph, Changes]:
    """Replace what fits; a second time there is nothing left to do."""
    graph = as_graph(made)
    infer_shapes(graph)
    plan = make_plan(graph, Scheme((Rule(Mode.WEIGHT_ONLY, weight=spec),)), target_named("onnxruntime-cpu"), emit=emit)
    codes = encode(plan, graph)
    step = ReplaceWithContrib(plan, codes, emit)
    changes = step.apply(graph)
    assert not step.apply(graph)
    DecodeWeights(plan, codes).apply(graph)
    RemoveUnused().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    "spec",
    [Spec("int4", (16,)), Spec("uint4", (32,), symmetric=False), Spec("int8", (32,)), TWO_BITS],
    ids=lambda spec: spec.format,
)
@pytest.mark.parametrize("text", [MATMUL, GEMM], ids=["MatMul", "Gemm"])
def test_a_product_becomes_matmulnbits(text: str, spec: Spec) -> None:
    weight, bias = values(40, 24), values(24)
    made = model(text, w=weight.T.copy() if text is GEMM else weight, b=bias)
    graph, changes = replace(made, spec)
    assert (ops(graph), changes.changed) == (["MatMulNBits"], ("dot",))
    assert not [tensor for tensor in constants(graph) if tensor.name == "w"]
    decoded = encode_array(weight, spec, channel_axis=1, reduction_axis=0).dequantize()
    inputs = {"x": np.eye(3, 40, dtype=np.float32)}
    expected = inputs["x"] @ decoded + (bias if text is GEMM else 0)
    assert difference(outputs(graph, inputs), {"y": expected}) <= 1e-6


@pytest.mark.parametrize("spec", [Spec("int4", (16,)), Spec("uint4", (32,), symmetric=False), TWO_BITS])
def test_a_lookup_becomes_gatherblockquantized(spec: Spec) -> None:
    made = model(LOOKUP, w=values(30, 64))
    graph, changes = replace(made, spec)
    assert (ops(graph), changes.changed) == (["GatherBlockQuantized"], ("look",))
    indices = np.array([[0, 29, 3], [7, -1, 3]])
    expected = encode_array(values(30, 64), spec, channel_axis=0, reduction_axis=1).dequantize()[indices]
    np.testing.assert_array_equal(outputs(graph, {"i": indices})["y"], expected, strict=True)


def test_float16_stays_float16() -> None:
    made = model(MATMUL.replace("float[", "float16["), w=values(40, 24, dtype=np.float16))
    graph, _ = replace(made, Spec("int8", (16,)))
    assert node_named(graph, "w.product.matmulnbits").inputs[2].dtype == np.float16
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.02


@pytest.mark.parametrize(
    "spec",
    [
        Spec("int4", Granularity.CHANNEL),
        Spec("int4", (16,), storage=Storage.WORDS),
    ],
    ids=["per channel", "words"],
)
def test_what_does_not_fit_is_left_to_standard_onnx(spec: Spec) -> None:
    graph, changes = replace(model(MATMUL, opset=21, ir_version=10, w=values(40, 24)), spec)
    assert changes.left == (("dot", "no operator of onnxruntime reads int4 codes so"),)
    assert "DequantizeLinear" in ops(graph)


@pytest.mark.parametrize(
    ("text", "spec", "left"),
    [(LOOKUP, Spec("int4", (16,)), False), (LOOKUP, Spec("int8", (16,)), True), (MATMUL, Spec("int4", (16,)), True)],
    ids=["4-bit rows", "8-bit rows", "a product"],
)
def test_the_fastest_form_is_standard_onnx_where_that_is_as_fast(text: str, spec: Spec, left: bool) -> None:
    weight = values(40, 24) if text is MATMUL else values(40, 64)
    _, changes = replace(model(text, opset=21, ir_version=10, w=weight), spec, AllowedOps.FASTEST)
    assert (changes.left == ((ANY, "standard ONNX is as fast"),)) is left
    assert bool(changes.changed) is not left


LOOP = """g (int64 n, float[3, 40] x) => (float[3, 40] y) {
    go = Constant <value = bool {1}> ()
    y = Loop (n, go, x) <body = b (int64 i, bool g, float[3, 40] s) => (bool h, float[3, 40] t) {
        h = Identity (g) [dot] t = MatMul (s, w)
    }>
}"""


def test_the_fastest_form_of_a_product_in_a_body_is_an_operator_of_the_runtimes_own() -> None:
    weight, spec = values(40, 40), Spec("int8", (32,))
    graph, changes = replace(model(LOOP, opset=21, ir_version=10, w=weight), spec, AllowedOps.FASTEST)
    assert changes.changed == ("dot",)
    decoded = encode_array(weight, spec, channel_axis=1, reduction_axis=0).dequantize()
    inputs = {"n": np.array(2), "x": np.eye(3, 40, dtype=np.float32)}
    assert difference(outputs(graph, inputs), {"y": inputs["x"] @ decoded @ decoded}) <= 0.02
