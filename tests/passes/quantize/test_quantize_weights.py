"""The weights of a plan: behind DequantizeLinear, in packed operators, and compressed on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import ml_dtypes
import numpy as np
import onnx
import pytest
from model_texts import (
    Array,
    apply_once,
    difference,
    initializer_names,
    model,
    named_graph,
    node_named,
    nodes,
    ops,
    outputs,
    sample,
    values,
)
from model_zoo import float16_weights, if_bodies_that_share_a_captured_weight, recurrent_layers, unrolled_recurrence
from numpy.lib.stride_tricks import sliding_window_view
from onnx import ModelProto, TensorProto, defs
from stored_weights import PER_CHANNEL, PER_TENSOR, decisions, decoded_by, largest_float, store

from onnxq.algorithms.encode import encode, encode_with
from onnxq.algorithms.encoders import encode_array
from onnxq.algorithms.encodings import Encodings
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme, Storage
from onnxq.ir import Constant, Graph, all_graphs, as_graph, constant, constants, to_model
from onnxq.lowering import AllowedOps, minimum_opset
from onnxq.numerics.affine import QuantParams
from onnxq.onnx_api import infer_shapes, upgrade_opset
from onnxq.passes import (
    CompressWeights,
    DecodeWeights,
    DivideChannels,
    InsertQuantizeDequantize,
    QuantizeWeights,
    RemoveUnused,
    ReplaceWithContrib,
    ShareInitializers,
)
from onnxq.planning.plan import Activation, Decision, Plan, Weight
from onnxq.planning.planner import make_plan
from onnxq.rewrite import Changes
from onnxq.runtime.sessions import open_session
from onnxq.runtime.targets import target_named

SCALE = np.float32(0.03)
ZERO = np.uint8(117)
PARAMETERS = {"x": QuantParams(np.asarray(SCALE), np.asarray(ZERO))}
# The oldest supported onnxruntime has fewer types, and multiplies quantized values of 4 bits in a MatMul only.
NEW_RUNTIME = defs.onnx_opset_version() > 24

# QuantizeWeights ------------------------------------------------------------------------------------------------------


def plan(*decisions: Decision) -> Plan:
    return Plan(decisions, (Activation("x", QuantSpec("uint8", symmetric=False), "x"),), "scheme", "target")


def static(node: str, op: str, axis: int, *, per_channel: bool = True, bias: int | None = None) -> Decision:
    granularity = Granularity.CHANNEL if per_channel else Granularity.TENSOR
    weight = Weight(1, "w", QuantSpec("int8-narrow", granularity=granularity), axis)
    return Decision(node, op, Mode.STATIC, "integer kernel", (weight,), bias=bias, data="x")


def quantize(made: ModelProto, *decisions: Decision) -> tuple[Graph, Changes]:
    graph = as_graph(made)
    infer_shapes(graph)
    wanted = plan(*decisions)
    step = QuantizeWeights(wanted, encode_with(wanted, graph, PARAMETERS, {}))
    changes = step.apply(graph)
    again = step.apply(graph)
    assert not again
    assert [reason for _, reason in again.skipped] == ["its weight is quantized already"] * len(changes.changed)
    onnx.checker.check_model(to_model(graph), full_check=True)
    return graph, changes


def decoder(graph: Graph, name: str, index: int = 1) -> dict[str, Any]:
    """Quantized values, scale and attributes of the DequantizeLinear in front of a node's input."""
    node = node_named(graph, name).inputs[index].inputs[0]
    assert node.op == "DequantizeLinear"
    parts = dict(zip(("codes", "scale", "zero"), (tensor.values for tensor in node.inputs), strict=False))
    return parts | {"axis": node.attrs.get("axis"), "names": [tensor.name for tensor in node.inputs]}


def reference_codes(weight: Array, axis: int | None) -> tuple[Array, Array]:
    """Symmetric narrow int8 in plain numpy: quantized values, and scales that broadcast."""
    others = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis % weight.ndim)
    largest = np.abs(weight.astype(np.float64)).max(axis=others, keepdims=axis is not None)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8), scale


# Each call, the shapes of data and weight, the axis of its channels, and that axis as DequantizeLinear names it.
PRODUCTS = {
    "MatMul": ("MatMul(x, w)", "3, 16", (16, 5), -1, 1),
    "Gemm": ("Gemm(x, w)", "3, 16", (16, 5), 1, 1),
    "Gemm transposed": ("Gemm <transB = 1> (x, w)", "3, 16", (5, 16), 0, 0),
    "Conv": ("Conv <group = 2> (x, w)", "1, 4, 6, 6", (6, 2, 3, 3), 0, 0),
    "ConvTranspose": ("ConvTranspose <group = 2> (x, w)", "1, 4, 6, 6", (4, 3, 3, 3), 1, 1),
}
DOT = "(float[3, 16] x) => (float[3, 5] y) { [dot] y = MatMul(x, w) }"
GEMM = "(float[3, 16] x) => (float[3, 5] y) { [dot] y = Gemm(x, w, b) }"
TWO = "(float[3, 16] x) => (float[3, 16] y, float[3, 16] z) { [a] y = %s [b] z = %s }"


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("product", PRODUCTS)
def test_codes_and_scales_equal_the_reference_bit_for_bit(product: str, per_channel: bool) -> None:
    call, data, shape, axis, stored_axis = PRODUCTS[product]
    weight = values(*shape)
    made = model(f"(float[{data}] x) => (float[{', '.join('ABCD'[: len(shape)])}] y) {{ [dot] y = {call} }}", w=weight)
    graph, changes = quantize(made, static("dot", product.split()[0], axis, per_channel=per_channel))
    assert changes == Changes(("dot",))
    found = decoder(graph, "dot")
    quantized, scale = reference_codes(weight, axis if per_channel else None)
    np.testing.assert_array_equal(found["codes"], quantized, strict=True)
    np.testing.assert_array_equal(found["scale"], scale.reshape(-1) if per_channel else scale.reshape(()), strict=True)
    np.testing.assert_array_equal(found["zero"], np.zeros(found["scale"].shape, np.int8), strict=True)
    assert found["axis"] == (stored_axis if per_channel else None)
    assert found["names"] == ["w.codes", "w.scale", "w.zero_point"]


def test_codes_of_four_bits_are_stored_in_their_own_type() -> None:
    weight = values(16, 5)
    few = Weight(1, "w", QuantSpec("int4-narrow", Granularity.CHANNEL), -1)
    graph, _ = quantize(model(DOT, opset=21, w=weight), Decision("dot", "MatMul", Mode.STATIC, "", (few,), data="x"))
    found = decoder(graph, "dot")
    assert found["names"] == ["w.codes", "w.scale"]
    np.testing.assert_array_equal(found["codes"].astype(np.int8), np.rint(weight / (np.abs(weight).max(0) / 7)))
    assert {one.name: one.data_type for one in to_model(graph).graph.initializer}["w.codes"] == onnx.TensorProto.INT4


def test_a_channel_of_zeros_gets_a_scale_that_divides() -> None:
    weight = values(16, 5)
    weight[:, 2] = 0
    found = decoder(quantize(model(DOT, w=weight), static("dot", "MatMul", -1))[0], "dot")
    assert found["scale"][2] == 1
    assert not found["codes"][:, 2].any()


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
@pytest.mark.parametrize("per_channel", [True, False])
def test_the_bias_becomes_int32_with_the_product_of_both_scales(per_channel: bool, shape: tuple[int, ...]) -> None:
    weight, bias = values(16, 5), values(*shape, scale=3)
    made = model(GEMM, w=weight, b=bias)
    graph, _ = quantize(made, static("dot", "Gemm", 1, per_channel=per_channel, bias=2))
    found = decoder(graph, "dot", 2)
    scale = reference_codes(weight, 1 if per_channel else None)[1].reshape(-1 if per_channel else ())
    np.testing.assert_array_equal(found["scale"], SCALE * scale, strict=True)
    expected = np.rint(bias.astype(np.float64) / (SCALE * scale).astype(np.float64)).astype(np.int32)
    np.testing.assert_array_equal(found["codes"], expected, strict=True)
    assert found["names"] == ["b.codes", "b.scale"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.02


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_huge_bias_raises_the_scale_of_the_weight_so_that_it_fits(per_channel: bool) -> None:
    bias = np.array([0, 1, 1e7, -1e9, 2], np.float32)
    made = model(GEMM, w=values(16, 5), b=bias)
    graph, _ = quantize(made, static("dot", "Gemm", 1, per_channel=per_channel, bias=2))
    weight, found = decoder(graph, "dot"), decoder(graph, "dot", 2)
    assert np.abs(found["codes"].astype(np.int64)).max() <= 2**30
    np.testing.assert_array_equal(found["scale"], SCALE * weight["scale"], strict=True)
    np.testing.assert_allclose(found["codes"] * found["scale"].astype(np.float64), bias, rtol=1e-6, atol=1)
    raised = weight["scale"] > reference_codes(values(16, 5), 1)[1].reshape(-1)
    assert raised.tolist() == ([False, False, True, True, False] if per_channel else [True] * 5)


def test_the_float_weight_leaves_the_file_unless_another_node_reads_it() -> None:
    made = model(
        """(float[3, 16] x) => (float[3, 5] y, float[3, 5] z) {
            [dot] y = Gemm(x, w, b)  [other] h = MatMul(x, w)  z = Neg(h) }""",
        w=values(16, 5), b=values(5),
    )  # fmt: skip
    graph, _ = quantize(made, static("dot", "Gemm", 1, bias=2))
    assert RemoveUnused().apply(graph).changed == ("b",)
    assert "w" in initializer_names(to_model(graph))
    assert node_named(graph, "other").inputs[1].name == "w"

    graph, _ = quantize(made, static("dot", "Gemm", 1, bias=2), static("other", "MatMul", -1))
    assert set(RemoveUnused().apply(graph).changed) == {"w", "b"}
    assert not initializer_names(to_model(graph)) & {"w", "b"}


def test_nodes_that_share_a_weight_get_names_and_scales_of_their_own() -> None:
    made = model(TWO % ("MatMul(x, w)", "MatMul(x, w)"), w=values(16, 16))
    graph, changes = quantize(made, static("a", "MatMul", -1), static("b", "MatMul", -1, per_channel=False))
    assert changes.changed == ("a", "b")
    assert decoder(graph, "a")["names"] == ["w.codes", "w.scale", "w.zero_point"]
    assert decoder(graph, "b")["names"] == ["w.codes.1", "w.scale.1", "w.zero_point.1"]
    assert (decoder(graph, "a")["scale"].shape, decoder(graph, "b")["scale"].shape) == ((16,), ())


def test_names_of_the_model_are_not_taken() -> None:
    text = "(float[3, 16] x) => (float[3, 5] y) { [dot] m = MatMul(x, w) y = Add(m, k) }"
    made = model(text, w=values(16, 5), k=values(5))
    made.graph.initializer[1].name = made.graph.node[1].input[1] = "w.codes"
    graph, _ = quantize(made, static("dot", "MatMul", -1))
    assert decoder(graph, "dot")["names"][0] == "w.codes.1"


WEIGHT = Weight(1, "w", QuantSpec("int8-narrow"), -1)


@pytest.mark.parametrize(
    "decision",
    [
        Decision("dot", "MatMul", Mode.FLOAT, "asked for"),
        Decision("dot", "MatMul", Mode.STORAGE, "asked for", (WEIGHT,)),
        Decision("dot", "MatMul", Mode.STATIC, "passes quantized values through"),
        static("elsewhere", "MatMul", -1),
    ],
    ids=lambda decision: f"{decision.node}-{decision.mode}",
)
def test_only_static_nodes_of_the_plan_are_touched(decision: Decision) -> None:
    graph, changes = quantize(model(DOT, w=values(16, 5)), decision)
    assert changes == Changes()
    assert ops(graph) == ["MatMul"]


def test_storage_does_not_touch_what_is_static() -> None:
    graph = as_graph(model(DOT, w=values(16, 5)))
    assert not CompressWeights(plan(static("dot", "MatMul", -1)), Encodings()).apply(graph)


# --- against integer arithmetic in numpy ------------------------------------------------------------------------------


def encodings_of(data: Array) -> Array:
    return np.clip(np.rint(data / SCALE).astype(np.int64) + int(ZERO), 0, 255) - int(ZERO)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("product", ["MatMul", "Gemm", "Gemm transposed", "Conv"])
def test_products_equal_integer_arithmetic(product: str, bias: bool, per_channel: bool) -> None:
    call, data, shape, axis, _ = PRODUCTS[product]
    call = call.replace(" <group = 2>", "")
    shape = (6, 4, 3, 3) if product == "Conv" else shape
    channels = shape[axis]
    bias = bias and product != "MatMul"
    call = call.replace("w)", "w, b)") if bias else call
    weights = {"w": values(*shape)} | ({"b": values(channels)} if bias else {})
    made = model(f"(float[{data}] x) => (y) {{ [dot] y = {call} }}", **weights)
    decision = static("dot", product.split()[0], axis, per_channel=per_channel, bias=2 if bias else None)
    graph, _ = quantize(named_model(made), decision)
    InsertQuantizeDequantize(plan(decision), Encodings(PARAMETERS)).apply(graph)
    feed = sample(made)["x"]
    stored, axes = decoder(graph, "dot")["codes"].astype(np.int64), (1, 1) if product == "Conv" else ()
    if product == "Conv":
        windows = sliding_window_view(encodings_of(feed), (3, 3), axis=(2, 3))
        sums = np.einsum("nchwij,ocij->nohw", windows, stored)
    else:
        sums = encodings_of(feed) @ (stored.T if "transposed" in product else stored)
    if bias:
        sums = sums + decoder(graph, "dot", 2)["codes"].astype(np.int64).reshape(-1, *axes)
    scale = SCALE.astype(np.float64) * decoder(graph, "dot")["scale"].astype(np.float64)
    expected = (sums * scale.reshape(-1, *axes if scale.ndim else ())).astype(np.float32)
    assert difference(outputs(graph, {"x": feed}), {"y": expected}) <= 1e-6


def named_model(made: ModelProto) -> ModelProto:
    """The model with the shape of its output."""
    return to_model(named_graph(made))


def test_a_weight_that_was_replaced_by_hand_is_quantized_as_it_is_now() -> None:
    graph = as_graph(model("(float[3, 2] x) => (float[3, 2] y) { [dot] y = MatMul(x, w) }", w=values(2, 2)))
    nodes(graph)[0].inputs[1] = constant("eye", np.eye(2, dtype=np.float32))
    wanted = plan(static("dot", "MatMul", -1))
    QuantizeWeights(wanted, encode_with(wanted, graph, PARAMETERS, {})).apply(graph)
    assert decoder(graph, "dot")["codes"].tolist() == [[127, 0], [0, 127]]


def test_nodes_of_bodies_read_decoders_beside_them() -> None:
    made = model(
        """(float[4,32] x, bool c) => (float[4,16] y) { y = If (c) <
            then_branch = yes () => (float[4,16] u) { [inner] u = MatMul(x, w) },
            else_branch = no () => (float[4,16] v) { [other] k = MatMul(x, w) v = Neg(k) }> }""",
        w=values(32, 16),
    )
    graph, changes = quantize(made, static("inner", "MatMul", -1), static("other", "MatMul", -1))
    assert changes.changed == ("inner", "other")
    assert [[node.op for node in scope.nodes] for scope in all_graphs(graph)] == [
        ["If"], ["DequantizeLinear", "MatMul"], ["DequantizeLinear", "MatMul", "Neg"]
    ]  # fmt: skip
    ShareInitializers().apply(graph)
    assert sorted(tuple(tensor.dims) for tensor in to_model(graph).graph.initializer) == [(16,), (16,), (32, 16)]


# DecodeWeights keeps quantized values in front of products, where onnxruntime multiplies them, and looks up rows as
# quantized values. ----------------------------------------------------------------------------------------------------

BLOCKS = QuantSpec("int4", (16,))
MATMUL = "(float[3, 40] x) => (float[3, 24] y) { [dot] y = MatMul(x, w) }"
TRANSPOSED = MATMUL.replace("MatMul(x, w)", "Gemm <transB = 1> (x, w, b)")
LOOKUP = "(int64[3, 2] i) => (float[3, 2, 64] y) { [look] y = Gather(w, i) }"
CALLS = ("MatMul(x, w)", "Gemm(x, w, b)", "Gemm <transB = 1> (x, w, b)", "Gemm <transB = 1> (x, w)")
INDICES = np.array([[0, 49], [-1, 7], [7, -50]])


def plan_for(graph: Graph, spec: QuantSpec, mode: Mode = Mode.WEIGHT_ONLY, target: str = "onnxruntime-cpu",
             **options: Any) -> Plan:  # fmt: skip
    return make_plan(graph, Scheme((Rule(mode, weight=spec),)), target_named(target), **options)


def decode(made: ModelProto | Graph, spec: QuantSpec = BLOCKS) -> tuple[Graph, Changes]:
    """Decode the weights of all nodes that use quantized values."""
    graph = named_graph(made)
    plan = plan_for(graph, spec)
    changes = apply_once(DecodeWeights(plan, encode(plan, graph)), graph)
    ShareInitializers().apply(graph)
    RemoveUnused().apply(graph)
    return graph, changes


def running(graph: Graph, folder: Path) -> Graph:
    """What runs after onnxruntime's optimisations."""
    open_session(to_model(graph), optimized_copy=folder / "runs.onnx")
    return as_graph(onnx.load(folder / "runs.onnx"))


def decoded(weight: Array, spec: QuantSpec, channel_axis: int = 1, reduction_axis: int = 0) -> Array:
    return encode_array(weight, spec, channel_axis=channel_axis, reduction_axis=reduction_axis).dequantize()


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec("int4", (16,)),
        QuantSpec("int4", (32,), scale="bfloat16"),
        QuantSpec("int4", (16,), scale="ue4m3", two_level=True),
        QuantSpec("int4", (16,), storage=Storage.WORDS),
        QuantSpec("int4", Granularity.CHANNEL),
        QuantSpec("uint4", (32,), symmetric=False),
        QuantSpec("uint4", (16,), symmetric=False, storage=Storage.WORDS),
        QuantSpec("int8-narrow", (32,)),
        QuantSpec("int8-narrow"),
        QuantSpec("uint8", (128,), symmetric=False),
        QuantSpec("int2", (16,)),
        QuantSpec("uint2", (16,), symmetric=False),
    ],
    ids=lambda spec: f"{spec.format}-{spec.granularity}-{spec.scale}-{spec.storage}",
)
@pytest.mark.parametrize(
    "call", ["MatMul(x, w)", "Gemm(x, w, b)", "Gemm <transB = 1> (x, w, b)", "Gemm <transB = 1> (x, w)"]
)
def test_onnxruntime_multiplies_the_codes(call: str, spec: QuantSpec, tmp_path: Path) -> None:
    weight, bias = values(40, 24), values(24)
    opset = minimum_opset(spec, "MatMul", AllowedOps.QDQ, folded=False)
    if opset > 23 and not NEW_RUNTIME:
        pytest.skip("no 2-bit integers in this onnxruntime")
    weights = {"w": weight.T.copy() if "transB" in call else weight} | ({"b": bias} if "b)" in call else {})
    made = model(MATMUL.replace("MatMul(x, w)", call), opset=opset, **weights)
    graph, changes = decode(made, spec)
    assert changes.changed == ("dot",)
    feed = sample(made)
    expected = feed["x"] @ decoded(weight, spec) + (bias if "b)" in call else 0)
    assert difference(outputs(graph, feed), {"y": expected}) <= 1e-6
    if NEW_RUNTIME:
        assert ops(running(graph, tmp_path)) == ["MatMulNBits"]


def test_data_of_float16_gets_scales_of_float16(tmp_path: Path) -> None:
    made = model(MATMUL.replace("float[", "float16["), opset=21, w=values(40, 24, dtype=np.float16))
    graph, _ = decode(made)
    (decoder,) = nodes(graph, "DequantizeLinear")
    assert decoder.inputs[1].dtype == np.float16
    assert not NEW_RUNTIME or "MatMulNBits" in ops(running(graph, tmp_path))
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.1


SHARED = "(float[3, 32] x) => (float[3, 32] y) { [a] h = MatMul(x, w) [b] y = Gemm(h, w) }"
IN_A_BODY = """(float[3, 32] x, bool c) => (float[3, 32] y) { y = If (c) <
    then_branch = yes () => (float[3, 32] t) { [a] t = MatMul(x, w) },
    else_branch = no () => (float[3, 32] e) { e = Neg(x) }> }"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [(SHARED, "cannot multiply by quantized weights that several nodes share"), (IN_A_BODY, "in a subgraph")],
)
def test_weights_that_several_products_share_or_bodies_read_are_left_to_storage(text: str, reason: str) -> None:
    graph = as_graph(model(text, opset=21, w=values(32, 32)))
    infer_shapes(graph)
    assert not decode(graph)[1]
    left = [decision for decision in plan_for(graph, BLOCKS).decisions if decision.node in ("a", "b")]
    assert {decision.mode for decision in left} == {Mode.STORAGE}
    assert all(reason in decision.reason for decision in left)


def test_codes_take_half_a_byte_and_the_float_weight_is_gone() -> None:
    graph, _ = decode(model(MATMUL, opset=21, w=values(40, 24)))
    sizes = {tensor.name: tensor.nbytes for tensor in constants(graph)}
    assert sizes == {"w.codes": 40 * 24 // 2, "w.scale": 3 * 24 * 4}


@pytest.mark.parametrize(
    "spec", [BLOCKS, QuantSpec("int8", Granularity.CHANNEL), QuantSpec("float4e2m1", (16,), scale="ue4m3")]
)
def test_only_the_rows_asked_for_are_decoded(spec: QuantSpec) -> None:
    rows = values(50, 64)
    opset = minimum_opset(spec, "Gather", AllowedOps.QDQ, folded=False)
    graph, changes = decode(model(LOOKUP, opset=opset, w=rows), spec)
    assert changes.changed == ("look",)
    assert "DequantizeLinear" not in ops(graph)
    assert max(tensor.nbytes for tensor in constants(graph)) <= rows.nbytes // 4
    found = outputs(graph, {"i": INDICES})["y"]
    np.testing.assert_array_equal(found, decoded(rows, spec, 0, 1)[INDICES], strict=True)


def test_rows_are_looked_up_in_bodies_too() -> None:
    made = model(
        """(int64[3] i, bool c) => (float[3, 32] y) { y = If (c) <
            then_branch = yes () => (float[3, 32] t) { [a] t = Gather(w, i) },
            else_branch = no () => (float[3, 32] e) { [b] g = Gather(w, i) e = Neg(g) }> }""",
        opset=21, w=values(50, 32),
    )  # fmt: skip
    graph, changes = decode(made)
    assert changes.changed == ("a", "b")
    indices = np.array([0, 49, -1])
    for flag, sign in ((True, 1), (False, -1)):
        found = outputs(graph, {"i": indices, "c": np.array(flag)})["y"]
        np.testing.assert_array_equal(found, sign * decoded(values(50, 32), BLOCKS, 0, 1)[indices])


def test_a_node_whose_weight_is_computed_is_left() -> None:
    made = model(MATMUL, opset=21, w=values(40, 24))
    graph, _ = decode(made)
    plan = plan_for(as_graph(made), BLOCKS)
    changes = DecodeWeights(plan, encode(plan, graph)).apply(graph)
    assert changes.skipped == (("dot", "its weight is quantized already"),)
    assert node_named(graph, "dot").inputs[1].name == "w.decoded"


# ReplaceWithContrib writes onnxruntime's own operators where they fit, and leaves the rest to standard ONNX. ----------

TWO_BITS = pytest.param(
    QuantSpec("int2", (16,)), marks=pytest.mark.skipif(not NEW_RUNTIME, reason="an old onnxruntime"), id="int2"
)


def replace(made: ModelProto, spec: QuantSpec, emit: AllowedOps = AllowedOps.ORT) -> tuple[Graph, Changes]:
    """Replace what fits; a second time there is nothing left to do."""
    graph = as_graph(made)
    infer_shapes(graph)
    plan = plan_for(graph, spec, emit=emit)
    encodings = encode(plan, graph)
    changes = apply_once(ReplaceWithContrib(plan, encodings, emit), graph)
    DecodeWeights(plan, encodings).apply(graph)
    RemoveUnused().apply(graph)
    return graph, changes


@pytest.mark.parametrize(
    "spec",
    [QuantSpec("int4", (16,)), QuantSpec("uint4", (32,), symmetric=False), QuantSpec("int8", (32,)), TWO_BITS],
    ids=lambda spec: spec.format,
)
@pytest.mark.parametrize("text", [MATMUL, TRANSPOSED], ids=["MatMul", "Gemm"])
def test_a_product_becomes_matmulnbits(text: str, spec: QuantSpec) -> None:
    weight, bias = values(40, 24), values(24)
    weights = {"w": weight.T.copy(), "b": bias} if text is TRANSPOSED else {"w": weight}
    graph, changes = replace(model(text, **weights), spec)
    assert (ops(graph), changes.changed) == (["MatMulNBits"], ("dot",))
    assert not [tensor for tensor in constants(graph) if tensor.name == "w"]
    feed = {"x": np.eye(3, 40, dtype=np.float32)}
    expected = feed["x"] @ decoded(weight, spec) + (bias if text is TRANSPOSED else 0)
    assert difference(outputs(graph, feed), {"y": expected}) <= 1e-6


@pytest.mark.parametrize("spec", [QuantSpec("int4", (16,)), QuantSpec("uint4", (32,), symmetric=False), TWO_BITS])
def test_a_lookup_becomes_gatherblockquantized(spec: QuantSpec) -> None:
    graph, changes = replace(model(LOOKUP, w=values(50, 64)), spec)
    assert (ops(graph), changes.changed) == (["GatherBlockQuantized"], ("look",))
    expected = decoded(values(50, 64), spec, 0, 1)[INDICES]
    np.testing.assert_array_equal(outputs(graph, {"i": INDICES})["y"], expected, strict=True)


def test_float16_stays_float16() -> None:
    made = model(MATMUL.replace("float[", "float16["), w=values(40, 24, dtype=np.float16))
    graph, _ = replace(made, QuantSpec("int8", (16,)))
    assert node_named(graph, "w.product.matmulnbits").inputs[2].dtype == np.float16
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.02


@pytest.mark.parametrize(
    "spec", [QuantSpec("int4", Granularity.CHANNEL), QuantSpec("int4", (16,), storage=Storage.WORDS)]
)
def test_what_does_not_fit_is_left_to_standard_onnx(spec: QuantSpec) -> None:
    graph, changes = replace(model(MATMUL, opset=21, w=values(40, 24)), spec)
    assert changes.skipped == (("dot", "no operator of onnxruntime reads int4 values so"),)
    assert "DequantizeLinear" in ops(graph)


@pytest.mark.parametrize(
    ("text", "spec", "left"),
    [
        (LOOKUP, QuantSpec("int4", (16,)), False),
        (LOOKUP, QuantSpec("int8", (16,)), True),
        (MATMUL, QuantSpec("int4", (16,)), True),
    ],
    ids=["4-bit rows", "8-bit rows", "a product"],
)
def test_the_fastest_form_is_standard_onnx_where_that_is_as_fast(text: str, spec: QuantSpec, left: bool) -> None:
    weight = values(40, 24) if text is MATMUL else values(50, 64)
    _, changes = replace(model(text, opset=21, w=weight), spec, AllowedOps.FASTEST)
    assert (changes.skipped == ((ANY, "standard ONNX is as fast"),)) is left
    assert bool(changes.changed) is not left


def test_the_fastest_form_of_a_product_in_a_body_is_an_operator_of_the_runtimes_own() -> None:
    weight, spec = values(40, 40), QuantSpec("int8", (32,))
    text = """(int64 n, float[3, 40] x) => (float[3, 40] y) { go = Constant <value = bool {1}> ()
        y = Loop (n, go, x) <body = b (int64 i, bool g, float[3, 40] s) => (bool h, float[3, 40] t) {
            h = Identity (g) [dot] t = MatMul (s, w) }> }"""
    graph, changes = replace(model(text, opset=21, w=weight), spec, AllowedOps.FASTEST)
    assert changes.changed == ("dot",)
    feed = {"n": np.array(2), "x": np.eye(3, 40, dtype=np.float32)}
    expected = feed["x"] @ decoded(weight, spec) @ decoded(weight, spec)
    assert difference(outputs(graph, feed), {"y": expected}) <= 0.02


# CompressWeights keeps quantized values in the file, and onnxruntime decodes them once, when it loads the model. ------

SQUARE = "(float[3, 16] x) => (float[3, 16] y) { [dot] y = MatMul(x, w) }"


def compress(made: ModelProto, *weights: tuple[str, Weight]) -> tuple[Graph, Changes]:
    graph = as_graph(made)
    plan = decisions(*weights)
    return graph, CompressWeights(plan, encode(plan, graph)).apply(graph)


@pytest.mark.parametrize("spec", [PER_CHANNEL, PER_TENSOR])
def test_stored_codes_and_scales_equal_the_reference_bit_for_bit(spec: QuantSpec) -> None:
    weight = values(16, 16)
    made = model(SQUARE, w=weight)
    graph, _ = compress(made, ("dot", Weight(1, "w", spec, -1)))
    cast, decode = decoded_by(graph, "dot")
    largest = np.abs(weight).max(axis=0 if spec is PER_CHANNEL else None, keepdims=True)
    scale = (largest.astype(np.float64) / 127).astype(np.float32)
    quantized = np.rint(weight / scale).astype(np.int8)
    assert [cast.op, decode.op] == ["Cast", "Mul"]
    np.testing.assert_array_equal(cast.inputs[0].values, quantized, strict=True)
    np.testing.assert_array_equal(decode.inputs[1].values, scale, strict=True)
    assert [cast.inputs[0].name, decode.inputs[1].name, decode.outputs[0].name] == ["w.codes", "w.scale", "w.decoded"]
    expected = sample(made)["x"] @ (quantized.astype(np.float32) * scale)
    assert difference(outputs(graph, sample(made)), {"y": expected}) <= 1e-6


@pytest.mark.parametrize(
    ("second", "axis", "changed", "shapes"),
    [
        # Other scales of one weight are quantized values of their own, and axes that mean the same share them.
        ("Gemm <transB = 1> (x, w)", 0, ("w", "w"), {"a": (1, 16), "b": (16, 1)}),
        ("Gemm(x, w)", 1, ("w",), {"a": (1, 16), "b": (1, 16)}),
        # A node that is not in the plan keeps the float weight.
        ("MatMul(x, w)", None, ("w",), {"a": (1, 16)}),
    ],
    ids=["other scales", "the same scales", "not in the plan"],
)
def test_nodes_that_share_a_weight_share_its_codes_where_these_are_the_same(
    second: str, axis: int | None, changed: tuple[str, ...], shapes: dict[str, tuple[int, ...]]
) -> None:
    made = model(TWO % ("MatMul(x, w)", second), w=values(16, 16))
    weights = [("a", Weight(1, "w", PER_CHANNEL, -1))]
    weights += [] if axis is None else [("b", Weight(1, "w", PER_CHANNEL, axis))]
    graph, changes = compress(made, *weights)
    assert changes.changed == changed
    assert {name: decoded_by(graph, name)[1].inputs[1].shape for name in shapes} == shapes
    one, other = (node_named(graph, name).inputs[1] for name in "ab")
    assert (one is other) == (axis is not None and len(changed) == 1)
    assert axis is not None or other.name == "w"


def test_a_weight_that_several_nodes_read_is_stored_once() -> None:
    made = unrolled_recurrence()
    graph, changes = store(made)
    assert changes.changed == ("w2", "w")
    assert ops(graph).count("Cast") == ops(graph).count("Mul") == 2
    assert len({node_named(graph, f"in{step}").inputs[1] for step in range(3)}) == 1
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.03


def test_float16_weights_stay_float16_and_near_their_values() -> None:
    made = float16_weights()
    graph, changes = store(made)
    assert changes.changed == ("w",)
    assert [node.op for node in decoded_by(graph, "conv")] == ["Cast", "Mul", "Cast"]
    assert node_named(graph, "conv").inputs[1].dtype == np.float16
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.03


@pytest.mark.parametrize("size", [1e-6, 1.0, 6e4])
def test_float16_weights_decode_near_their_values_even_when_their_scale_is_no_float16(size: float) -> None:
    weight = (np.linspace(-1, 1, 256).reshape(16, 16) * size).astype(np.float16)
    graph, _ = store(model("(float16[16, 16] x) => (float16[16, 16] y) { [dot] y = MatMul(x, w) }", w=weight))
    assert node_named(graph, "dot").inputs[1].name == "w.rounded"
    graph.outputs = [node_named(graph, "dot").inputs[1]]
    RemoveUnused().apply(graph)
    (numbers,) = outputs(graph, {"x": np.eye(16, dtype=np.float16)}).values()
    assert numbers.dtype == np.float16
    assert numbers.any()
    step = np.abs(weight.astype(np.float64)).max(axis=0) / 127
    # Half a step of the quantized values, and half a step of float16, whose smallest number is 2**-24.
    allowed = 0.51 * step + np.abs(weight.astype(np.float64)) * 2.0**-11 + 2.0**-25
    assert (np.abs(numbers.astype(np.float64) - weight) <= allowed).all()


def test_bfloat16_weights_stay_bfloat16() -> None:
    made = model(
        "(bfloat16[3, 16] x) => (bfloat16[3, 16] y) { [dot] y = MatMul(x, w) }",
        w=values(16, 16).astype(ml_dtypes.bfloat16),
    )
    graph, changes = store(made)
    assert changes.changed == ("w",)
    assert decoded_by(graph, "dot")[-1].attrs["to"] == TensorProto.BFLOAT16
    assert node_named(graph, "dot").inputs[1].dtype == ml_dtypes.bfloat16


def test_recurrent_weights_have_one_scale_for_each_row_of_the_gates() -> None:
    made = recurrent_layers()
    graph, changes = store(made)
    assert changes.changed == ("wl", "rl", "wg", "rg")
    for node, index, rows in (("lstm", 1, 64), ("lstm", 2, 64), ("gru", 1, 48), ("gru", 2, 48)):
        assert decoded_by(graph, node, index)[1].inputs[1].shape == (1, rows, 1)
    assert largest_float(graph) == 128 * 4, "the bias stays"
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.03


@pytest.mark.parametrize(
    ("spec", "wider"), [(PER_CHANNEL, TensorProto.INT32), (QuantSpec("float8e4m3fn"), TensorProto.FLOAT16)]
)
def test_codes_that_a_runtime_does_not_fold_by_itself_pass_through_a_wider_type(spec: QuantSpec, wider: int) -> None:
    made = recurrent_layers()
    graph = upgrade_opset(named_graph(made), 19)
    infer_shapes(graph)
    plan = plan_for(graph, spec, Mode.STORAGE, "openvino")
    apply_once(CompressWeights(plan, encode(plan, graph), constants=frozenset({"LSTM"})), graph)
    assert [node.attrs["to"] for node in decoded_by(graph, "lstm")[:2]] == [wider, TensorProto.FLOAT]
    assert [node.op for node in decoded_by(graph, "gru")] == ["Cast", "Mul"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.15


def test_tables_of_embeddings_are_stored() -> None:
    made = model("(int64[N] i) => (float[N, 8] y) { [look] y = Gather(w, i) }", w=values(64, 8))
    graph, changes = store(made)
    assert changes.changed == ("w",)
    indices = {"i": np.array([0, 5, 63])}
    assert difference(outputs(graph, indices), outputs(made, indices)) < 0.02


def test_the_file_is_about_a_quarter_of_the_size_and_zeros_stay_zeros() -> None:
    weight = values(64, 64)
    weight[:, 3] = 0
    made = model("(float[3, 64] x) => (float[3, 64] y) { [dot] y = MatMul(x, w) }", w=weight)
    graph, _ = store(made)
    assert sum(tensor.values.nbytes for tensor in constants(graph)) == 64 * 64 + 64 * 4
    assert not outputs(graph, sample(made))["y"][:, 3].any()


@pytest.mark.parametrize(
    "build",
    [unrolled_recurrence, recurrent_layers, if_bodies_that_share_a_captured_weight, float16_weights],
)
def test_onnxruntime_decodes_when_it_loads_and_never_again(build: Any, tmp_path: Path) -> None:
    graph, _ = store(build())
    assert "Cast" in ops(graph)
    runs = running(graph, tmp_path)
    decoders = [node for node in nodes(runs) if node.op in ("Cast", "Mul")]
    assert not [node.name for node in decoders if all(isinstance(tensor, Constant) for tensor in node.inputs)]
    assert not [tensor.name for tensor in constants(runs) if tensor.dtype == np.int8]


NVFP4 = QuantSpec("float4e2m1", (16,), scale="ue4m3", two_level=True)
WORDS = QuantSpec("uint4", (8,), symmetric=False, storage=Storage.WORDS)


@pytest.mark.parametrize("spec", [BLOCKS, NVFP4, WORDS], ids=["blocks", "two levels", "words"])
@pytest.mark.parametrize("build", [recurrent_layers, if_bodies_that_share_a_captured_weight])
def test_any_format_is_decoded_where_the_weight_is_declared(
    build: Callable[[], ModelProto], spec: QuantSpec, tmp_path: Path
) -> None:
    graph, plain = (upgrade_opset(as_graph(build()), 21) for _ in range(2))
    infer_shapes(graph)
    plan = plan_for(graph, spec, Mode.STORAGE)
    floats = {tensor.name: tensor.values for tensor in constants(plain)}
    for node in nodes(plain):
        for weight in plan.by_node[node.name].weights:
            numbers = decoded(floats[weight.tensor], weight.spec, weight.axis, weight.reduction_axis)
            node.inputs[weight.index].values = numbers
    assert CompressWeights(plan, encode(plan, graph)).apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    feed = sample(build())
    assert difference(outputs(graph, feed), outputs(plain, feed)) <= 1e-6
    assert not {"Cast", "Reshape", "BitShift", "DequantizeLinear"} & set(ops(running(graph, tmp_path)))


# --- bodies of control flow -------------------------------------------------------------------------------------------


def test_a_captured_weight_is_decoded_where_it_is_declared() -> None:
    made = if_bodies_that_share_a_captured_weight()
    graph, changes = store(made)
    assert changes.changed == ("w",)
    assert [node.op for node in graph.nodes[:2]] == ["Cast", "Mul"]
    users = [node_named(graph, name) for name in ("before", "yes", "no")]
    assert {node.inputs[1].name for node in users} == {"w.decoded"}
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 0.03


def in_both_bodies(outer: bool) -> Graph:
    """An If whose bodies multiply with one weight that no list of initializers holds."""
    made = model(
        f"""(float[3, 16] x, bool c) => (float[3, 16] y) {{
            {"[o] h = MatMul(x, w)" if outer else "h = Neg(x)"}
            y = If (c) <then_branch = yes () => (float[3, 16] t) {{ [a] t = MatMul(h, w) }},
                        else_branch = no () => (float[3, 16] e) {{ [b] e = MatMul(h, w) }}> }}""",
        w=values(16, 16),
    )
    graph = as_graph(made)
    fresh = constant("fresh", values(16, 16))
    for node in nodes(graph, "MatMul"):
        node.inputs[1] = fresh
    return graph


@pytest.mark.parametrize("outer", [True, False])
def test_a_new_weight_is_decoded_around_all_bodies_that_read_it(outer: bool) -> None:
    graph, changes = store(in_both_bodies(outer))
    assert changes.changed == ("fresh",)
    assert [node.op for node in graph.nodes[:2]] == ["Cast", "Mul"]
    for chosen in (True, False):
        feed = {"x": values(3, 16), "c": np.array(chosen)}
        assert difference(outputs(graph, feed), outputs(in_both_bodies(outer), feed)) < 0.03


def test_a_weight_that_a_body_declares_is_decoded_there() -> None:
    numbers = ", ".join(str(number) for number in range(256))
    made = model(
        f"""(float[3, 16] x, bool c) => (float[3, 16] y) {{ y = If (c) <
            then_branch = yes () => (float[3, 16] t) <float[16, 16] w = {{{numbers}}}> {{ [a] t = MatMul(x, w) }},
            else_branch = no () => (float[3, 16] e) {{ e = Neg(x) }}> }}"""
    )
    graph, changes = store(made)
    assert changes.changed == ("w",)
    assert [node.op for node in graph.nodes] == ["If"]
    assert [node.op for node in graph.nodes[0].subgraphs()[0].nodes] == ["Cast", "Mul", "MatMul"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.03


# DivideChannels gives nodes the constants that divide what they make. -------------------------------------------------


def test_constants_are_replaced_where_they_differ() -> None:
    text = "(float[2,4] x) => (float[2,4] y, float[2,4] z) {[one] y = Mul(x, s) [other] z = Mul(x, s)}"
    graph = as_graph(model(text, s=np.arange(4, dtype=np.float32)))
    assert not apply_once(DivideChannels(Encodings()), graph)
    quantized = Encodings(floats={("one", 1): np.ones(4, np.float32), ("other", 1): np.arange(4, dtype=np.float32)})
    assert apply_once(DivideChannels(quantized), graph).changed == ("one",)
    one, other = (node.inputs[1] for node in graph.nodes)
    assert (one.name, other.name) == ("s.divided", "s")
    np.testing.assert_array_equal(one.values, np.ones(4))
    np.testing.assert_array_equal(other.values, np.arange(4))
