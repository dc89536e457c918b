"""ReplaceIntegerOperators puts the float operator that each one on codes stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from integer_operators import CONV, DOT, EXAMPLES, FILTERS, GEMM, codes_of, example
from model_texts import Array, apply_once, difference, model, named_graph, node_named, ops, outputs, sample, values
from onnx import ModelProto, numpy_helper

from onnxq.errors import ModelError
from onnxq.ir import Constant, Graph, as_graph, constants, to_model
from onnxq.ops import INTEGER_OPERATORS
from onnxq.passes import NameNodes, RemoveQuantizeDequantize, ReplaceIntegerOperators

NOISE = 0.03


def replaced(made: ModelProto) -> Graph:
    graph = named_graph(made)
    assert apply_once(ReplaceIntegerOperators(), graph).changed == ("op",)
    return graph


@pytest.mark.parametrize(("made", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_the_float_operator_computes_the_same_but_for_rounding(made: ModelProto, expected: list[str]) -> None:
    graph = replaced(made)
    before = to_model(graph)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == expected
    if expected == ["ReduceMean"]:
        # No kernel on a CPU runs the other one.
        return
    inputs = {name: array.clip(-3, 3) for name, array in sample(made).items()}
    for found in (before, graph):
        assert difference(outputs(found, inputs), outputs(made, inputs)) <= NOISE


def test_every_row_of_the_table_has_an_example() -> None:
    of_its_own = {"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention", "QLinearConvTranspose"}
    assert {name.split()[0] for name in EXAMPLES} | of_its_own == set(INTEGER_OPERATORS)


def by_dequantize_linear(codes: Array, scale: Array, zero_point: Array, axis: int) -> Array:
    made = model(
        f"g () => (float y) {{ y = DequantizeLinear <axis = {axis}> (c, s, z) }}", c=codes, s=scale, z=zero_point
    )
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return outputs(made, {})["y"]


def test_weights_and_biases_are_what_dequantize_linear_gives_bit_for_bit() -> None:
    graph = replaced(EXAMPLES["QLinearConv"][0])
    conv = node_named(graph, "op.float")
    weight, bias = (tensor.values for tensor in conv.inputs[1:])
    np.testing.assert_array_equal(weight, by_dequantize_linear(CONV["w"], CONV["ws"], CONV["wz"], 0), strict=True)
    product = np.float32(0.03) * FILTERS
    np.testing.assert_array_equal(bias, by_dequantize_linear(CONV["b"], product, np.zeros(4, np.int32), 0), strict=True)
    gemm = node_named(replaced(EXAMPLES["QGemm"][0]), "op.float")
    expected = by_dequantize_linear(GEMM["w"], GEMM["ws"], GEMM["wz"], 0)
    np.testing.assert_array_equal(gemm.inputs[1].values, expected, strict=True)
    dot = node_named(replaced(EXAMPLES["QLinearMatMul"][0]), "op.float")
    expected = by_dequantize_linear(DOT["w"], DOT["ws"], DOT["wz"], 1)
    np.testing.assert_array_equal(dot.inputs[1].values, expected, strict=True)


def test_a_float_result_of_gemm_is_scaled_by_alpha() -> None:
    made = model(
        """g (float[7, 6] x) => (float y) {
            qx = QuantizeLinear(x, s, z)
            [op] y = com.microsoft.QGemm <transB = 1, alpha = 0.5> (qx, s, z, w, ws, wz, b)
        }""",
        s=np.array(0.03, np.float32), z=np.array(120, np.uint8), **GEMM,
    )  # fmt: skip
    made.opset_import.add(domain="com.microsoft", version=1)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = replaced(made)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["Gemm"]
    inputs = {"x": sample(made)["x"].clip(-3, 3)}
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= NOISE


@pytest.mark.parametrize("bias", [True, False])
def test_what_the_runtime_fuses_dynamic_products_to_is_undone(bias: bool) -> None:
    end = ", b" if bias else ""
    made = model(
        f"""g (float[7, 6] x) => (float[7, 5] y, float[7, 5] u) {{
            [op] y = com.microsoft.DynamicQuantizeMatMul(x, w, ws, wz{end})
            q, s, z = DynamicQuantizeLinear(x)
            [second] u = com.microsoft.MatMulIntegerToFloat(q, w, s, ws, z, wz{end})
        }}""",
        **DOT, b=np.linspace(-1, 1, 5, dtype=np.float32),
    )  # fmt: skip
    made.opset_import.add(domain="com.microsoft", version=1)
    graph = as_graph(made)
    NameNodes().apply(graph)
    assert ReplaceIntegerOperators().apply(graph).changed == ("op", "second")
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["MatMul", "Add"] * 2 if bias else ["MatMul"] * 2
    assert len([tensor for tensor in constants(graph) if tensor.shape == (6, 5) and tensor.outputs]) == 1
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= NOISE


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_recurrent_layer_gets_its_weights_back_the_right_way_round(directions: int, per_channel: bool) -> None:
    size, hidden = 5, 4
    scale_shape = (directions, 4 * hidden) if per_channel else (directions,)
    generator = np.random.default_rng(0)
    stored: dict[str, Any] = {}
    for name, extent in (("w", size), ("r", hidden)):
        stored[name] = generator.integers(-64, 65, (directions, extent, 4 * hidden)).astype(np.int8)
        stored[f"{name}s"] = generator.uniform(0.003, 0.006, scale_shape).astype(np.float32)
        stored[f"{name}z"] = np.zeros(scale_shape, np.int8)
    direction = "bidirectional" if directions == 2 else "forward"
    made = model(
        f"""g (float[3, 2, {size}] x) => (float y, float h) {{
            [op] y, h = com.microsoft.DynamicQuantizeLSTM <hidden_size = {hidden}, direction = "{direction}">
                (x, w, r, b, , , , , ws, wz, rs, rz)
        }}""",
        b=values(directions, 8 * hidden), **stored,
    )  # fmt: skip
    made.opset_import.add(domain="com.microsoft", version=1)
    for output in made.graph.output:
        output.type.tensor_type.ClearField("shape")
    graph = replaced(made)
    assert ops(graph) == ["LSTM"]
    spread = stored["ws"].reshape(directions, 1, -1)
    expected = (stored["w"].astype(np.float32) * spread).transpose(0, 2, 1)
    np.testing.assert_array_equal(node_named(graph, "op.float").inputs[1].values, expected, strict=True)
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= NOISE


def test_attention_becomes_the_float_operator() -> None:
    hidden = 8
    made = model(
        f"""g (float[2, 3, {hidden}] x) => (float[2, 3, {hidden}] y) {{
            q, s, z = DynamicQuantizeLinear(x)
            [op] y = com.microsoft.QAttention <num_heads = 2> (q, w, b, s, ws, , z, wz)
        }}""",
        w=codes_of(values(hidden, 3 * hidden), 0.02), ws=np.array(0.02, np.float32), wz=np.array(0, np.int8),
        b=values(3 * hidden),
    )  # fmt: skip
    made.opset_import.add(domain="com.microsoft", version=1)
    graph = replaced(made)
    RemoveQuantizeDequantize().apply(graph)
    assert [(node.op, node.domain) for node in graph.nodes] == [("Attention", "com.microsoft")]
    inputs = sample(made)
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 2 * NOISE


def test_weights_around_a_body_are_decoded_for_the_body() -> None:
    made = model(
        """g (float[2, 3, 6, 6] x, bool c) => (float y) {
            q = QuantizeLinear(x, s, z)
            y = If (c) <
                then_branch = yes () => (float t) {
                    [op] a = QLinearMatMul(q, s, z, w, ws, wz, s, z)  t = DequantizeLinear(a, s, z) },
                else_branch = no () => (float e) { e = DequantizeLinear(q, s, z) }>
        }""",
        s=np.array(0.03, np.float32), z=np.array(120, np.uint8), **DOT,
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = replaced(made)
    RemoveQuantizeDequantize().apply(graph)
    assert ops(graph) == ["If", "MatMul", "Identity"]
    onnx.checker.check_model(to_model(graph))
    inputs = {name: array.clip(-3, 3) if name == "x" else array for name, array in sample(made).items()}
    assert difference(outputs(graph, inputs), outputs(made, inputs)) <= 2 * NOISE


def test_weights_take_their_old_names() -> None:
    made = EXAMPLES["QLinearConv"][0]
    renamed = ModelProto()
    renamed.CopyFrom(made)
    for tensor in renamed.graph.initializer:
        tensor.name = {"w": "kernel_quantized", "b": "bias.codes"}.get(tensor.name, tensor.name)
    node = next(node for node in renamed.graph.node if node.name == "op")
    node.input[3], node.input[8] = "kernel_quantized", "bias.codes"
    found = node_named(replaced(renamed), "op.float").inputs
    assert [tensor.name for tensor in found[1:]] == ["kernel", "bias"]
    assert all(isinstance(tensor, Constant) for tensor in found[1:])


REFUSED = {
    "qy = QLinearAveragePool <kernel_shape = [2, 2], channels_last = 1> (qx, s, z, t, v)": (
        r"node op \(QLinearAveragePool\) has its channels last"
    ),
    "qy = QLinearSoftmax <axis = 1, opset = 11> (qx, s, z, t, v)": (
        r"node op \(QLinearSoftmax\) follows opset 11, expected that of the model, 17"
    ),
    "qy = QLinearMatMul(qx, s, z, w, ds, wz, t, v)": r"node op \(QLinearMatMul\) reads ds, which is computed",
}


@pytest.mark.parametrize(("body", "message"), REFUSED.items())
def test_what_is_not_known_is_refused_by_name(body: str, message: str) -> None:
    made = example(body, **DOT)
    made.graph.node.insert(0, onnx.helper.make_node("Identity", ["ws"], ["ds"]))
    made.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "unused"))
    graph = as_graph(made)
    with pytest.raises(ModelError, match=message):
        ReplaceIntegerOperators().apply(graph)


def test_a_weight_that_is_read_along_either_axis_has_floats_for_each() -> None:
    codes = np.random.default_rng(0).integers(-127, 127, (4, 4)).astype(np.int8)
    made = model(
        """g (float[7, 4] x) => (float[7, 4] a, float[7, 4] b) {
            qx = QuantizeLinear(x, s, z)
            [one] a = com.microsoft.QGemm (qx, s, z, w, ws, wz)
            [other] b = com.microsoft.QGemm <transB = 1> (qx, s, z, w, ws, wz)
        }""",
        s=np.array(0.02, np.float32), z=np.array(128, np.uint8), w=codes,
        ws=np.array([0.001, 0.01, 0.1, 1], np.float32), wz=np.zeros(4, np.int8),
    )  # fmt: skip
    made.opset_import.add(domain="com.microsoft", version=1)
    graph = named_graph(made)
    ReplaceIntegerOperators().apply(graph)
    weights = [node_named(graph, f"{name}.float").inputs[1].values for name in ("one", "other")]
    scales = np.array([0.001, 0.01, 0.1, 1], np.float32)
    np.testing.assert_array_equal(weights[0], codes * scales, strict=True)
    np.testing.assert_array_equal(weights[1], codes * scales[:, None], strict=True)
