"""DecodeWeights keeps codes in front of products, where onnxruntime multiplies them, and looks up rows as codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import (
    Array,
    apply_once,
    difference,
    model,
    named_graph,
    node_named,
    nodes,
    ops,
    outputs,
    sample,
    values,
)
from onnx import ModelProto, TensorProto, defs

from onnxq.algorithms.encode import encode
from onnxq.algorithms.encoders import encode_array
from onnxq.config.scheme import Granularity, Mode, Rule, Scheme, Spec, Storage
from onnxq.errors import ModelError
from onnxq.ir import Graph, as_graph, constants, to_model
from onnxq.lowering import AllowedOps, minimum_opset
from onnxq.onnx_api import infer_shapes
from onnxq.passes import DecodeWeights, RemoveUnused, ShareInitializers
from onnxq.planning.plan import Plan
from onnxq.planning.planner import make_plan
from onnxq.rewrite import Changes
from onnxq.runtime.sessions import open_session
from onnxq.runtime.targets import target_named

BLOCKS = Spec("int4", (16,))
# The oldest supported onnxruntime has fewer types, and multiplies codes of 4 bits in a MatMul only.
NEW_RUNTIME = defs.onnx_opset_version() > 24
MATMUL = "g (float[3, 40] x) => (float[3, 24] y) { [dot] y = MatMul(x, w) }"
LOOKUP = "g (int64[3, 2] i) => (float[3, 2, 32] y) { [look] y = Gather(w, i) }"


def plan_for(graph: Graph, spec: Spec) -> Plan:
    scheme = Scheme((Rule(Mode.WEIGHT_ONLY, weight=spec),))
    return make_plan(graph, scheme, target_named("onnxruntime-cpu"))


def decode(made: ModelProto | Graph, spec: Spec = BLOCKS, emit: AllowedOps = AllowedOps.QDQ) -> tuple[Graph, Changes]:
    """Decode the weights of all nodes that use codes."""
    graph = named_graph(made)
    plan = plan_for(graph, spec)
    changes = apply_once(DecodeWeights(plan, encode(plan, graph), emit), graph)
    ShareInitializers().apply(graph)
    RemoveUnused().apply(graph)
    return graph, changes


def running_ops(graph: Graph, folder: Path) -> list[str]:
    open_session(to_model(graph), optimized_copy=folder / "runs.onnx")
    return [node.op_type for node in onnx.load(folder / "runs.onnx").graph.node]


def decoded(weight: Array, spec: Spec, channel_axis: int = 1, reduction_axis: int = 0) -> Array:
    return encode_array(weight, spec, channel_axis=channel_axis, reduction_axis=reduction_axis).dequantize()


# --- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        Spec("int4", (16,)),
        Spec("int4", (32,), scale="bfloat16"),
        Spec("int4", (16,), scale="ue4m3", two_level=True),
        Spec("int4", (16,), storage=Storage.WORDS),
        Spec("int4", Granularity.CHANNEL),
        Spec("uint4", (32,), symmetric=False),
        Spec("uint4", (16,), symmetric=False, storage=Storage.WORDS),
        Spec("int8-narrow", (32,)),
        Spec("int8-narrow"),
        Spec("uint8", (128,), symmetric=False),
        Spec("int2", (16,)),
        Spec("uint2", (16,), symmetric=False),
    ],
    ids=lambda spec: f"{spec.format}-{spec.per}-{spec.scale}-{spec.storage}",
)
@pytest.mark.parametrize(
    ("text", "transposed"),
    [
        (MATMUL, False),
        (MATMUL.replace("MatMul(x, w)", "Gemm(x, w, b)"), False),
        (MATMUL.replace("MatMul(x, w)", "Gemm <transB = 1> (x, w, b)"), True),
        (MATMUL.replace("MatMul(x, w)", "Gemm <transB = 1> (x, w)"), True),
    ],
    ids=["MatMul", "Gemm", "Gemm transB", "Gemm transB without bias"],
)
def test_onnxruntime_multiplies_the_codes(text: str, transposed: bool, spec: Spec, tmp_path: Path) -> None:
    weight, bias = values(40, 24), values(24)
    opset = minimum_opset(spec, "MatMul", AllowedOps.QDQ, folded=False)
    if opset > 23 and not NEW_RUNTIME:
        pytest.skip("no 2-bit integers in this onnxruntime")
    made = model(text, opset=opset, w=weight.T.copy() if transposed else weight, b=bias)
    graph, changes = decode(made, spec)
    assert changes.changed == ("dot",)
    inputs = sample(made)
    expected = inputs["x"] @ decoded(weight, spec) + (bias if "b)" in text else 0)
    assert difference(outputs(graph, inputs), {"y": expected}) <= 1e-6
    if NEW_RUNTIME:
        assert running_ops(graph, tmp_path) == ["MatMulNBits"]


def test_data_of_float16_gets_scales_of_float16(tmp_path: Path) -> None:
    made = model(MATMUL.replace("float[", "float16["), opset=21, ir_version=10, w=values(40, 24, dtype=np.float16))
    graph, _ = decode(made)
    (decoder,) = nodes(graph, "DequantizeLinear")
    assert decoder.inputs[1].dtype == np.float16
    assert not NEW_RUNTIME or "MatMulNBits" in running_ops(graph, tmp_path)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.1


def test_a_weight_of_several_products_is_left_to_storage() -> None:
    made = model(
        "g (float[3, 32] x) => (float[3, 32] y) { [a] h = MatMul(x, w) [b] y = Gemm(h, w) }",
        opset=21, ir_version=10, w=values(32, 32),
    )  # fmt: skip
    graph, changes = decode(made)
    assert not changes
    reason = "computes in float from int4 weights: onnxruntime multiplies no codes that several nodes share"
    assert {decision.reason for decision in plan_for(graph, BLOCKS).decisions} == {reason}


def test_codes_take_half_a_byte_and_the_float_weight_is_gone() -> None:
    graph, _ = decode(model(MATMUL, opset=21, ir_version=10, w=values(40, 24)))
    assert {tensor.name: tensor.nbytes for tensor in constants(graph)} == {
        "w.codes": 40 * 24 // 2,
        "w.scale": 3 * 24 * 4,
    }


def test_products_in_bodies_are_left_to_storage() -> None:
    made = model(
        """g (float[3, 32] x, bool c) => (float[3, 32] y) {
            y = If (c) <
                then_branch = yes () => (float[3, 32] t) { [a] t = MatMul(x, w) },
                else_branch = no () => (float[3, 32] e) { e = Neg(x) }>
        }""",
        opset=21, ir_version=10, w=values(32, 32),
    )  # fmt: skip
    graph = as_graph(made)
    infer_shapes(graph)
    decision = plan_for(graph, BLOCKS).by_node["a"]
    assert decision.mode is Mode.STORAGE
    assert "control-flow body" in decision.reason


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [BLOCKS, Spec("int8", Granularity.CHANNEL), Spec("float4e2m1", (16,), scale="ue4m3")])
def test_only_the_rows_asked_for_are_decoded(spec: Spec) -> None:
    table = values(50, 32)
    graph, changes = decode(
        model(LOOKUP, opset=minimum_opset(spec, "Gather", AllowedOps.QDQ, folded=False), w=table), spec
    )
    assert changes.changed == ("look",)
    assert "DequantizeLinear" not in ops(graph)
    assert max(tensor.nbytes for tensor in constants(graph)) <= table.nbytes // 4
    indices = np.array([[0, 49], [-1, 7], [7, -50]])
    found = outputs(graph, {"i": indices})["y"]
    np.testing.assert_array_equal(found, decoded(table, spec, 0, 1)[indices], strict=True)


def test_rows_are_looked_up_in_bodies_too() -> None:
    made = model(
        """g (int64[3] i, bool c) => (float[3, 32] y) {
            y = If (c) <
                then_branch = yes () => (float[3, 32] t) { [a] t = Gather(w, i) },
                else_branch = no () => (float[3, 32] e) { [b] g = Gather(w, i) e = Neg(g) }>
        }""",
        opset=21, ir_version=10, w=values(50, 32),
    )  # fmt: skip
    graph, changes = decode(made)
    assert changes.changed == ("a", "b")
    inputs: dict[str, Any] = {"i": np.array([0, 49, -1])}
    for flag, sign in ((True, 1), (False, -1)):
        found = outputs(graph, {**inputs, "c": np.array(flag)})["y"]
        np.testing.assert_array_equal(found, sign * decoded(values(50, 32), BLOCKS, 0, 1)[inputs["i"]])


# --- strict ---------------------------------------------------------------------------------------------------------


def test_strict_decodes_a_whole_table_by_dequantizelinear() -> None:
    table = values(50, 32)
    graph, _ = decode(model(LOOKUP, opset=21, ir_version=10, w=table), emit=AllowedOps.STRICT)
    assert ops(graph) == ["DequantizeLinear", "Gather"]
    indices = np.array([[0, 49], [1, 7], [7, 0]])
    np.testing.assert_array_equal(outputs(graph, {"i": indices})["y"], decoded(table, BLOCKS, 0, 1)[indices])


def test_strict_types_are_valid_onnx_that_onnxruntime_cannot_load() -> None:
    spec = Spec("float4e2m1", (16,), scale="e8m0")
    graph, _ = decode(model(LOOKUP, opset=24, ir_version=12, w=values(50, 32)), spec, AllowedOps.STRICT)
    proto = to_model(graph)
    onnx.checker.check_model(proto, full_check=True)
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    assert types == {"w.codes": TensorProto.FLOAT4E2M1, "w.scale": TensorProto.FLOAT8E8M0}
    with pytest.raises(ModelError, match="cannot be loaded by onnxruntime"):
        open_session(proto)


def test_a_node_whose_weight_is_computed_is_left() -> None:
    graph, _ = decode(model(MATMUL, opset=21, ir_version=10, w=values(40, 24)))
    plan = plan_for(as_graph(model(MATMUL, opset=21, ir_version=10, w=values(40, 24))), BLOCKS)
    assert DecodeWeights(plan, encode(plan, graph)).apply(graph).left == (("dot", "its weight is codes already"),)
    assert node_named(graph, "dot").inputs[1].name == "w.decoded"
