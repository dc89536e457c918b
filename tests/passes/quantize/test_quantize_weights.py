"""QuantizeWeights writes the codes and scales that integer kernels need, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import Array, difference, initializer_names, model, node_named, nodes, ops, outputs, sample, values
from numpy.lib.stride_tricks import sliding_window_view
from onnx import ModelProto

from onnxq.algorithms.encode import encode_with
from onnxq.algorithms.encodings import Codes
from onnxq.config.scheme import Granularity, Mode, Spec
from onnxq.ir import Graph, all_graphs, as_graph, constant, to_model
from onnxq.numerics.affine import Parameters
from onnxq.onnx_api import infer_shapes
from onnxq.passes import (
    InsertQuantizeDequantize,
    QuantizeWeights,
    RemoveUnused,
    ShareInitializers,
    StoreWeights,
)
from onnxq.planning.plan import Activation, Decision, Plan, Weight
from onnxq.rewrite import Changes

SCALE = np.float32(0.03)
ZERO = np.uint8(117)
PARAMETERS = {"x": Parameters(np.asarray(SCALE), np.asarray(ZERO))}
AFFINE = Spec("uint8", symmetric=False)


def plan(*decisions: Decision, activations: tuple[str, ...] = ("x",)) -> Plan:
    quantized = tuple(Activation(name, AFFINE, name) for name in activations)
    return Plan(decisions, quantized, "scheme", "target")


def static(node: str, op: str, axis: int, *, per_channel: bool = True, bias: int | None = None) -> Decision:
    per = Granularity.CHANNEL if per_channel else Granularity.TENSOR
    weight = Weight(1, "w", Spec("int8-narrow", per=per), axis)
    return Decision(node, op, Mode.STATIC, "integer kernel", (weight,), bias=bias, data="x")


def quantize(made: ModelProto, *decisions: Decision) -> tuple[Graph, Changes]:
    graph = as_graph(made)
    infer_shapes(graph)
    wanted = plan(*decisions)
    step = QuantizeWeights(wanted, encode_with(wanted, graph, PARAMETERS, {}))
    changes = step.apply(graph)
    again = step.apply(graph)
    assert not again
    assert [reason for _, reason in again.left] == ["its weight is codes already"] * len(changes.changed)
    onnx.checker.check_model(to_model(graph), full_check=True)
    return graph, changes


def decoder(graph: Graph, name: str, index: int = 1) -> dict[str, Any]:
    """Codes, scale and attributes of the DequantizeLinear in front of a node's input."""
    made = node_named(graph, name).inputs[index].inputs[0]
    assert made.op == "DequantizeLinear"
    parts = dict(zip(("codes", "scale", "zero"), (tensor.values for tensor in made.inputs), strict=False))
    return parts | {"axis": made.attrs.get("axis"), "names": [tensor.name for tensor in made.inputs]}


def reference_codes(weight: Array, axis: int | None) -> tuple[Array, Array]:
    """Symmetric narrow int8 in plain numpy: codes, and scales that broadcast."""
    others = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis % weight.ndim)
    largest = np.abs(weight.astype(np.float64)).max(axis=others, keepdims=axis is not None)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8), scale


PRODUCTS = {
    "MatMul": ("MatMul(x, w)", (16, 5), -1, 1),
    "Gemm": ("Gemm(x, w)", (16, 5), 1, 1),
    "Gemm transposed": ("Gemm <transB = 1> (x, w)", (5, 16), 0, 0),
}


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("product", PRODUCTS)
def test_codes_and_scales_equal_the_reference_bit_for_bit(product: str, per_channel: bool) -> None:
    call, shape, axis, stored_axis = PRODUCTS[product]
    weight = values(*shape)
    made = model(f"g (float[3, 16] x) => (float[3, 5] y) {{ [dot] y = {call} }}", w=weight)
    graph, changes = quantize(made, static("dot", product.split()[0], axis, per_channel=per_channel))
    assert changes == Changes(("dot",))
    found = decoder(graph, "dot")
    codes, scale = reference_codes(weight, axis if per_channel else None)
    np.testing.assert_array_equal(found["codes"], codes, strict=True)
    np.testing.assert_array_equal(found["scale"], scale.reshape(-1) if per_channel else scale.reshape(()), strict=True)
    np.testing.assert_array_equal(found["zero"], np.zeros(found["scale"].shape, np.int8), strict=True)
    assert found["axis"] == (stored_axis if per_channel else None)
    assert found["names"] == ["w.codes", "w.scale", "w.zero_point"]


def test_codes_of_four_bits_are_stored_in_their_own_type() -> None:
    weight = values(16, 5)
    made = model("g (float[3, 16] x) => (float[3, 5] y) { [dot] y = MatMul(x, w) }", opset=21, w=weight)
    few = Weight(1, "w", Spec("int4-narrow", Granularity.CHANNEL), -1)
    graph, _ = quantize(made, Decision("dot", "MatMul", Mode.STATIC, "", (few,), data="x"))
    scale = np.abs(weight).max(axis=0) / np.float32(7)
    found = decoder(graph, "dot")
    assert found["names"] == ["w.codes", "w.scale"]
    np.testing.assert_array_equal(found["codes"].astype(np.int8), np.rint(weight / scale))
    assert {one.name: one.data_type for one in to_model(graph).graph.initializer}["w.codes"] == onnx.TensorProto.INT4


@pytest.mark.parametrize(("op", "shape", "axis"), [("Conv", (6, 2, 3, 3), 0), ("ConvTranspose", (4, 3, 3, 3), 1)])
def test_convolutions_have_their_scales_along_their_own_axis(op: str, shape: tuple[int, ...], axis: int) -> None:
    weight = values(*shape)
    made = model(f"g (float[1, 4, 6, 6] x) => (float[A, B, C, D] y) {{ [c] y = {op} <group = 2> (x, w) }}", w=weight)
    graph, _ = quantize(made, static("c", op, axis))
    found = decoder(graph, "c")
    codes, scale = reference_codes(weight, axis)
    np.testing.assert_array_equal(found["codes"], codes, strict=True)
    np.testing.assert_array_equal(found["scale"], scale.reshape(-1), strict=True)
    assert found["axis"] == axis


def test_a_channel_of_zeros_gets_a_scale_that_divides() -> None:
    weight = values(16, 5)
    weight[:, 2] = 0
    graph, _ = quantize(
        model("g (float[3, 16] x) => (float[3, 5] y) { [dot] y = MatMul(x, w) }", w=weight), static("dot", "MatMul", -1)
    )
    found = decoder(graph, "dot")
    assert found["scale"][2] == 1
    assert not found["codes"][:, 2].any()


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
@pytest.mark.parametrize("per_channel", [True, False])
def test_the_bias_becomes_int32_with_the_product_of_both_scales(per_channel: bool, shape: tuple[int, ...]) -> None:
    weight, bias = values(16, 5), values(*shape, scale=3)
    made = model("g (float[3, 16] x) => (float[3, 5] y) { [dot] y = Gemm(x, w, b) }", w=weight, b=bias)
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
    made = model("g (float[3, 16] x) => (float[3, 5] y) { [dot] y = Gemm(x, w, b) }", w=values(16, 5), b=bias)
    graph, _ = quantize(made, static("dot", "Gemm", 1, per_channel=per_channel, bias=2))
    weight, found = decoder(graph, "dot"), decoder(graph, "dot", 2)
    assert np.abs(found["codes"].astype(np.int64)).max() <= 2**30
    np.testing.assert_array_equal(found["scale"], SCALE * weight["scale"], strict=True)
    np.testing.assert_allclose(found["codes"] * found["scale"].astype(np.float64), bias, rtol=1e-6, atol=1)
    usual = reference_codes(values(16, 5), 1)[1].reshape(-1)
    raised = weight["scale"] > usual
    assert raised.tolist() == ([False, False, True, True, False] if per_channel else [True] * 5)


def test_the_float_weight_leaves_the_file_unless_another_node_reads_it() -> None:
    made = model(
        """g (float[3, 16] x) => (float[3, 5] y, float[3, 5] z) {
            [dot] y = Gemm(x, w, b)  [other] h = MatMul(x, w)  z = Neg(h)
        }""",
        w=values(16, 5), b=values(5),
    )  # fmt: skip
    graph, _ = quantize(made, static("dot", "Gemm", 1, bias=2))
    assert RemoveUnused().apply(graph).changed == ("b",)
    assert "w" in initializer_names(to_model(graph))
    assert node_named(graph, "other").inputs[1].name == "w"

    graph, _ = quantize(made, static("dot", "Gemm", 1, bias=2), static("other", "MatMul", -1))
    assert set(RemoveUnused().apply(graph).changed) == {"w", "b"}
    assert all(
        tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2
        for tensor in to_model(graph).graph.initializer
    )


def test_nodes_that_share_a_weight_get_names_and_scales_of_their_own() -> None:
    made = model(
        "g (float[3, 16] x) => (float[3, 5] y, float[3, 5] z) { [a] y = MatMul(x, w) [b] z = MatMul(x, w) }",
        w=values(16, 5),
    )
    graph, changes = quantize(made, static("a", "MatMul", -1), static("b", "MatMul", -1, per_channel=False))
    assert changes.changed == ("a", "b")
    assert decoder(graph, "a")["names"] == ["w.codes", "w.scale", "w.zero_point"]
    assert decoder(graph, "b")["names"] == ["w.codes.1", "w.scale.1", "w.zero_point.1"]
    assert decoder(graph, "a")["scale"].shape == (5,)
    assert decoder(graph, "b")["scale"].shape == ()


def test_names_of_the_model_are_not_taken() -> None:
    made = model(
        "g (float[3, 16] x) => (float[3, 5] y) { [dot] m = MatMul(x, w) y = Add(m, w.codes) }".replace("w.codes", "k"),
        w=values(16, 5), k=values(5),
    )  # fmt: skip
    made.graph.initializer[1].name = made.graph.node[1].input[1] = "w.codes"
    graph, _ = quantize(made, static("dot", "MatMul", -1))
    assert decoder(graph, "dot")["names"][0] == "w.codes.1"


def test_only_static_nodes_of_the_plan_are_touched() -> None:
    made = model("g (float[3, 16] x) => (float[3, 5] y) { [dot] y = MatMul(x, w) }", w=values(16, 5))
    weight = Weight(1, "w", Spec("int8-narrow"), -1)
    for decision in (
        Decision("dot", "MatMul", Mode.FLOAT, "asked for"),
        Decision("dot", "MatMul", Mode.STORAGE, "asked for", (weight,)),
        Decision("dot", "MatMul", Mode.STATIC, "passes codes on"),
        static("elsewhere", "MatMul", -1),
    ):
        graph, changes = quantize(made, decision)
        assert changes == Changes()
        assert ops(graph) == ["MatMul"]


def test_storage_does_not_touch_what_is_static() -> None:
    made = model("g (float[3, 16] x) => (float[3, 5] y) { [dot] y = MatMul(x, w) }", w=values(16, 5))
    assert not StoreWeights(plan(static("dot", "MatMul", -1)), Codes()).apply(as_graph(made))


# --- against integer arithmetic in numpy --------------------------------------------------------------------------


def codes_of(data: Array) -> Array:
    return np.clip(np.rint(data / SCALE).astype(np.int64) + int(ZERO), 0, 255) - int(ZERO)


def simulated(graph: Graph, name: str, product: Array, bias: bool, axes: tuple[int, ...]) -> Array:
    """Scale the integer products of a node, after adding the codes of its bias."""
    scale = SCALE.astype(np.float64) * decoder(graph, name)["scale"].astype(np.float64)
    if bias:
        product = product + decoder(graph, name, 2)["codes"].astype(np.int64).reshape(-1, *axes)
    return product * scale.reshape(-1, *axes if scale.ndim else ())


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_equal_integer_arithmetic(product: str, bias: bool, per_channel: bool) -> None:
    call, shape, axis, _ = PRODUCTS[product]
    bias = bias and product != "MatMul"
    weights = {"w": values(*shape)} | ({"b": values(5)} if bias else {})
    call = call.replace("w)", "w, b)") if bias else call
    made = model(f"g (float[3, 16] x) => (float[3, 5] y) {{ [dot] y = {call} }}", **weights)
    decision = static("dot", product.split()[0], axis, per_channel=per_channel, bias=2 if bias else None)
    graph, _ = quantize(made, decision)
    InsertQuantizeDequantize(plan(decision), Codes(PARAMETERS)).apply(graph)
    data = sample(made)["x"]
    stored = decoder(graph, "dot")["codes"].astype(np.int64)
    sums = codes_of(data) @ (stored.T if "transposed" in product else stored)
    assert (
        difference(outputs(graph, {"x": data}), {"y": simulated(graph, "dot", sums, bias, ()).astype(np.float32)})
        <= 1e-6
    )


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_convolution_equals_integer_arithmetic(per_channel: bool) -> None:
    made = model(
        "g (float[2, 4, 6, 6] x) => (float[2, 6, 4, 4] y) { [c] y = Conv(x, w, b) }", w=values(6, 4, 3, 3), b=values(6)
    )
    decision = static("c", "Conv", 0, per_channel=per_channel, bias=2)
    graph, _ = quantize(made, decision)
    InsertQuantizeDequantize(plan(decision), Codes(PARAMETERS)).apply(graph)
    data = sample(made)["x"]
    windows = sliding_window_view(codes_of(data), (3, 3), axis=(2, 3))
    sums = np.einsum("nchwij,ocij->nohw", windows, decoder(graph, "c")["codes"].astype(np.int64))
    expected = simulated(graph, "c", sums, True, (1, 1)).astype(np.float32)
    assert difference(outputs(graph, {"x": data}), {"y": expected}) <= 1e-6


def test_a_weight_that_was_replaced_by_hand_is_quantized_as_it_is_now() -> None:
    graph = as_graph(model("g (float[3, 2] x) => (float[3, 2] y) { [dot] y = MatMul(x, w) }", w=values(2, 2)))
    nodes(graph)[0].inputs[1] = constant("eye", np.eye(2, dtype=np.float32))
    wanted = plan(static("dot", "MatMul", -1))
    QuantizeWeights(wanted, encode_with(wanted, graph, PARAMETERS, {})).apply(graph)
    assert decoder(graph, "dot")["codes"].tolist() == [[127, 0], [0, 127]]


def test_nodes_of_bodies_read_decoders_beside_them() -> None:
    made = model(
        """g (float[4,32] x, bool c) => (float[4,16] y) {
            y = If (c) <
                then_branch = yes () => (float[4,16] u) { [inner] u = MatMul(x, w) },
                else_branch = no () => (float[4,16] v) { [other] k = MatMul(x, w) v = Neg(k) }>
        }""",
        w=values(32, 16),
    )
    graph, changes = quantize(made, static("inner", "MatMul", -1), static("other", "MatMul", -1))
    assert changes.changed == ("inner", "other")
    assert [[node.op for node in scope.nodes] for scope in all_graphs(graph)] == [
        ["If"], ["DequantizeLinear", "MatMul"], ["DequantizeLinear", "MatMul", "Neg"]
    ]  # fmt: skip
    ShareInitializers().apply(graph)
    stored = to_model(graph).graph.initializer
    assert sorted(tuple(tensor.dims) for tensor in stored) == [(16,), (16,), (32, 16)]
