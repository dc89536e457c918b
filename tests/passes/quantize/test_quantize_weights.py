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
    running,
    sample,
    values,
)
from model_zoo import float16_weights, if_bodies_that_share_a_captured_weight, recurrent_layers, unrolled_recurrence
from onnx import ModelProto, TensorProto, defs

from onnxq.algorithms.encode import encode, encode_with
from onnxq.algorithms.encoders import encode_array
from onnxq.algorithms.encodings import Encodings
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme, Storage
from onnxq.ir import Graph, all_graphs, as_graph, constant, constants, is_constant, to_model
from onnxq.lowering import AllowedOps, minimum_opset
from onnxq.numerics.affine import QuantParams
from onnxq.numerics.formats import FORMATS
from onnxq.onnx_api import infer_shapes, upgrade_opset
from onnxq.passes import (
    CompressWeights,
    DecodeWeights,
    DequantizeWeights,
    DivideChannels,
    QuantizeWeights,
    RemoveUnused,
    ReplaceWithContrib,
    ShareInitializers,
    UnpackBlockWeights,
)
from onnxq.passes.dequantize.stored_weights import stored_weights
from onnxq.planning.plan import Activation, Decision, Plan, Weight
from onnxq.planning.planner import make_plan
from onnxq.rewrite import Changes
from onnxq.runtime.sessions import open_session, run
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


def decoded(weight: Array, spec: QuantSpec, channel_axis: int = 1, reduction_axis: int = 0) -> Array:
    return encode_array(weight, spec, channel_axis=channel_axis, reduction_axis=reduction_axis).dequantize()


# Whatever operators hold a weight, they use its codes, and it is read back.

SPECS = [
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
    QuantSpec("int2", (16,), scale="ue4m3", two_level=True),
    QuantSpec("uint2", (16,), symmetric=False),
    QuantSpec("uint2", (32,), symmetric=False, scale="e8m0"),
]
OWN = {"Gather": "GatherBlockQuantized", "MatMul": "MatMulNBits", "Gemm": "MatMulNBits"}


def replace(made: ModelProto, spec: QuantSpec, emit: AllowedOps = AllowedOps.ORT) -> tuple[Graph, Changes]:
    """Replace what fits by onnxruntime's own operators, and decode the rest; a second time there is nothing left."""
    graph = named_graph(made)
    plan = plan_for(graph, spec, emit=emit)
    encodings = encode(plan, graph)
    changes = apply_once(ReplaceWithContrib(plan, encodings, emit), graph)
    left = apply_once(DecodeWeights(plan, encodings), graph)
    assert len(changes.changed + left.changed) == 1
    ShareInitializers().apply(graph)
    RemoveUnused().apply(graph)
    return graph, changes


@pytest.mark.parametrize("emit", [AllowedOps.QDQ, AllowedOps.ORT])
@pytest.mark.parametrize("spec", SPECS, ids=lambda one: f"{one.format}-{one.granularity}-{one.scale}-{one.storage}")
@pytest.mark.parametrize("call", [*CALLS, "Gather(w, x)"])
def test_a_weight_is_used_as_its_codes_found_and_dequantized_to_the_bit(
    call: str, spec: QuantSpec, emit: AllowedOps, tmp_path: Path
) -> None:
    op, rows, axes = call.split("(")[0].split()[0], "Gather" in call, (0, 1) if "Gather" in call else (1, 0)
    weight, bias = values(50, 64) if rows else values(40, 24), values(24)
    opset = minimum_opset(spec, op, AllowedOps.QDQ, folded=False)
    if (opset > 23 or spec.format in ("int2", "uint2")) and not NEW_RUNTIME:
        pytest.skip("no 2-bit integers in this onnxruntime")
    text = LOOKUP.replace(" i)", " x)") if rows else MATMUL.replace("[3,", "[40,")
    text = text.replace("Gather(w, i)" if rows else "MatMul(x, w)", call)
    weights = {"w": weight.T.copy() if "transB" in call else weight} | ({"b": bias} if "b)" in call else {})
    made = model(text, opset=opset, **weights)
    graph, changes = replace(made, spec, emit)
    data, exact = INDICES if rows else np.eye(40, dtype=np.float32), decoded(weight, spec, *axes)
    expected = exact[data] if rows else exact + (bias if "b)" in call else 0)
    # Only an optimised session computes scales first, without which MatMulNBits multiplies by nothing.
    (found,) = run(open_session(to_model(graph), threads=1), {"x": data})
    assert difference({"y": found}, {"y": expected}) <= (0 if rows else 1e-6)
    if changes.changed:
        assert ops(graph)[-1] == OWN[op]
    else:
        unread = f"no operator of onnxruntime reads {spec.format} values so"
        assert changes.skipped[0][1] in (unread, *["standard ONNX is as fast"] * (emit is AllowedOps.QDQ))
    if rows:
        assert "DequantizeLinear" not in ops(graph)
    elif not changes.changed:
        # What decodes the weight stands in front.
        assert ops(graph)[-1] == op
    if not rows and NEW_RUNTIME:
        assert ops(running(graph, tmp_path)) == ["MatMulNBits"]

    # It is found as it was written, but for names of formats that fit the same bits.
    (stored,) = stored_weights(named_graph(graph))
    assert (stored.node.op, stored.integer) == (OWN[op] if changes.changed else op, False)
    assert (stored.format, stored.bits) == (spec.format.removesuffix("-narrow"), FORMATS[spec.format].bits)
    assert stored.shape in (weight.shape, weight.shape[::-1] if "transB" in call else None)
    encoding = encode_array(weight, spec, channel_axis=axes[0], reduction_axis=axes[1])
    assert stored.scales == encoding.parameters.scale.size
    back = named_graph(graph)
    DequantizeWeights().apply(back)
    UnpackBlockWeights().apply(back)
    RemoveUnused().apply(back)
    (held,) = (tensor.values for tensor in constants(back) if len(tensor.shape) > 1)
    np.testing.assert_array_equal(held if held.shape == weight.shape else held.T, exact, strict=True)


@pytest.mark.parametrize(("emit", "spec"), [(AllowedOps.QDQ, BLOCKS), (AllowedOps.ORT, QuantSpec("int8", (16,)))])
def test_float16_stays_float16(emit: AllowedOps, spec: QuantSpec, tmp_path: Path) -> None:
    made = model(MATMUL.replace("float[", "float16["), opset=21, w=values(40, 24, dtype=np.float16))
    graph, _ = replace(made, spec, emit)
    assert {tensor.dtype for tensor in constants(graph) if tensor.name == "w.scale"} == {np.dtype(np.float16)}
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

PER_CHANNEL = QuantSpec("int8-narrow", granularity=Granularity.CHANNEL)


def store(made: ModelProto | Graph) -> tuple[Graph, Changes]:
    """Store all weights that the preset for storage picks."""
    graph = named_graph(made)
    plan = make_plan(graph, preset_named("int8-storage"), target_named("onnxruntime-cpu"))
    changes = apply_once(CompressWeights(plan, encode(plan, graph)), graph)
    RemoveUnused().apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    return graph, changes


def decoded_by(graph: Graph, node: str, index: int = 1) -> list[Any]:
    """The decoder in front of a node's input, first node first."""
    found: list[Any] = []
    tensor = node_named(graph, node).inputs[index]
    while tensor.inputs:
        found.insert(0, tensor.inputs[0])
        tensor = tensor.inputs[0].inputs[0]
    return found


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
    graph = as_graph(made)
    stored = plan(*(Decision(node, "", Mode.STORAGE, "asked for", (weight,)) for node, weight in weights))
    assert CompressWeights(stored, encode_with(stored, graph, PARAMETERS, {})).apply(graph).changed == changed
    assert {name: decoded_by(graph, name)[1].inputs[1].shape for name in shapes} == shapes
    one, other = (node_named(graph, name).inputs[1] for name in "ab")
    assert (one is other) == (axis is not None and len(changed) == 1)
    assert axis is not None or other.name == "w"


def test_recurrent_weights_have_one_scale_for_each_row_of_the_gates() -> None:
    graph, _ = store(recurrent_layers())
    for node, index, rows in (("lstm", 1, 64), ("lstm", 2, 64), ("gru", 1, 48), ("gru", 2, 48)):
        assert decoded_by(graph, node, index)[1].inputs[1].shape == (1, rows, 1)
    assert max(tensor.nbytes for tensor in constants(graph) if tensor.dtype == np.float32) == 128 * 4, "the bias stays"


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


# --- bodies of control flow -------------------------------------------------------------------------------------------


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


def with_a_weight_of_a_body() -> ModelProto:
    numbers = ", ".join(str(number) for number in range(256))
    return model(
        f"""(float[3, 16] x, bool c) => (float[3, 16] y) {{ y = If (c) <
            then_branch = yes () => (float[3, 16] t) <float[16, 16] w = {{{numbers}}}> {{ [a] t = MatMul(x, w) }},
            else_branch = no () => (float[3, 16] e) {{ e = Neg(x) }}> }}"""
    )


def of_bfloat16() -> ModelProto:
    weight = values(16, 16).astype(ml_dtypes.bfloat16)
    return model("(bfloat16[3, 16] x) => (bfloat16[3, 16] y) { [dot] y = MatMul(x, w) }", w=weight)


def embedding() -> ModelProto:
    return model("(int64[N, 3] i) => (float[N, 3, 8] y) { [look] y = Gather(w, i) }", w=values(64, 8))


@pytest.mark.parametrize(
    ("build", "changed", "decoders"),
    [
        # Each weight is stored once where it is declared, and decoded to the type that it had.
        (unrolled_recurrence, "w2 w", "Cast Mul Cast Mul"),
        (recurrent_layers, "wl rl wg rg", "Cast Mul Cast Mul Cast Mul Cast Mul"),
        (float16_weights, "w", "Cast Mul Cast"),
        (of_bfloat16, "w", "Cast Mul Cast"),
        (embedding, "w", "Cast Mul"),
        (if_bodies_that_share_a_captured_weight, "w", "Cast Mul"),
        (lambda: in_both_bodies(outer=True), "fresh", "Cast Mul"),
        (lambda: in_both_bodies(outer=False), "fresh", "Cast Mul"),
        (with_a_weight_of_a_body, "w", ""),
    ],
)
def test_weights_are_stored_where_they_are_declared_and_decoded_when_the_model_is_loaded(
    build: Callable[[], ModelProto | Graph], changed: str, decoders: str, tmp_path: Path
) -> None:
    graph, changes = store(build())
    assert changes.changed == tuple(changed.split())
    placed = [node.op for node in graph.nodes[: len(decoders.split())]]
    assert placed == decoders.split()
    if not decoders:
        assert [node.op for node in graph.nodes[0].subgraphs()[0].nodes] == ["Cast", "Mul", "MatMul"]
    made = build() if isinstance(build(), ModelProto) else to_model(build())
    assert {tensor.dtype for tensor in graph.outputs} == {tensor.dtype for tensor in as_graph(made).outputs}
    if build is of_bfloat16:
        # No kernel multiplies it.
        return
    for seed in (0, 1):
        inputs = sample(made, seed)
        assert difference(outputs(graph, inputs), outputs(made, inputs)) < 0.03
    runs = running(graph, tmp_path)
    assert not [node for node in nodes(runs) if node.op in ("Cast", "Mul") and all(map(is_constant, node.inputs))]
    assert not [tensor.name for tensor in constants(runs) if tensor.dtype == np.int8]


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
