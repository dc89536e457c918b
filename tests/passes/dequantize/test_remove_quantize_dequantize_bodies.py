"""RemoveQuantizeDequantize around and inside bodies, and where types and factors differ."""

from __future__ import annotations

import numpy as np
from model_texts import model, nodes, ops, outputs, sample
from onnx import TensorProto
from quantized_pairs import MIDDLE, SCALE, quantized, remove

from onnxq.ir import as_graph
from onnxq.passes import RemoveQuantizeDequantize
from onnxq.rewrite import Changes


def test_scales_along_an_axis_belong_together_too() -> None:
    made = model(
        """g (float[2, 3] x) => (float[2, 3] y) {
            a = Neg(x)  q = QuantizeLinear <axis = 1> (a, s, z)  b = DequantizeLinear <axis = 1> (q, s, z)  y = Neg(b)
        }""",
        s=np.array([1, 2, 3], np.float32), z=np.array([1, 2, 3], np.uint8),
    )  # fmt: skip
    assert ops(remove(made)[0]) == ["Neg", "Neg"]


def test_what_a_run_measures_vanishes_with_the_codes() -> None:
    made = model(
        """g (float[2, 3] x) => (float[2, 3] y) {
            q, s, z = DynamicQuantizeLinear(x)  t = Transpose(q)  u = Transpose(t)
            a = DequantizeLinear(u, s, z)  y = Tanh(a)
        }"""
    )
    graph, _ = remove(made)
    assert ops(graph) == ["Transpose", "Transpose", "Tanh"]


def test_bodies_read_the_floats_of_codes_around_them() -> None:
    made = quantized(
        """g (float[2, 3] x, bool c) => (float[2, 3] y) {
            a = Neg(x)
            q = QuantizeLinear(a, s, z)
            y = If (c) <
                then_branch = yes () => (float[2, 3] t) { b = DequantizeLinear(q, s, z)  t = Tanh(b) },
                else_branch = no () => (float[2, 3] e) { e = DequantizeLinear(q, s, z) }>
        }"""
    )
    graph, _ = remove(made)
    assert ops(graph) == ["Neg", "If", "Tanh", "Identity"]
    for seed, function in ((0, np.tanh), (1, np.array)):
        inputs = sample(made, seed)
        np.testing.assert_allclose(outputs(graph, inputs)["y"], function(-inputs["x"]), rtol=1e-6)


def test_codes_that_a_body_returns_stay_codes() -> None:
    made = quantized(
        """g (float[2, 3] x, bool c) => (float[2, 3] y) {
            q = If (c) <
                then_branch = yes () => (uint8[2, 3] t) { a = Tanh(x)  t = QuantizeLinear(a, s, z) },
                else_branch = no () => (uint8[2, 3] e) { e = QuantizeLinear(x, s, z) }>
            y = DequantizeLinear(q, s, z)
        }"""
    )
    graph, _ = remove(made)
    assert not {"QuantizeLinear", "DequantizeLinear"} & set(ops(graph))
    for seed in (0, 1):
        inputs = sample(made, seed)
        np.testing.assert_array_equal(outputs(graph, inputs)["y"], outputs(made, inputs)["y"])


def test_another_float_type_behind_the_pair_is_a_cast() -> None:
    made = model(
        """g (float[2, 3] x) => (float16[2, 3] y) {
            a = Tanh(x)  q = QuantizeLinear(a, s, z)  y = DequantizeLinear(q, t, z)
        }""",
        opset=21, ir_version=10, s=SCALE, t=np.array(0.0625, np.float16), z=MIDDLE,
    )  # fmt: skip
    made.graph.initializer[0].float_data[:] = []
    made.graph.initializer[0].raw_data = np.array(0.0625, np.float32).tobytes()
    graph, _ = remove(made)
    assert ops(graph) == ["Tanh", "Cast"]
    assert nodes(graph, "Cast")[0].attrs["to"] == TensorProto.FLOAT16


def test_a_factor_in_the_scale_of_codes_is_a_multiplication() -> None:
    made = quantized(
        """g (float[2, 3] x) => (float[2, 3] y) {
            a = Tanh(x)  q = QuantizeLinear(a, s, z)  y = DequantizeLinear(q, t, z)
        }""",
        t=3 * SCALE,
    )
    graph, _ = remove(made)
    assert ops(graph) == ["Tanh", "Mul"]
    inputs = sample(made)
    np.testing.assert_allclose(outputs(graph, inputs)["y"], outputs(made, inputs)["y"], atol=3 * float(SCALE))


def test_weights_are_left() -> None:
    made = quantized("g (float[2, 3] x) => (float[2, 3] y) { w = DequantizeLinear(codes, s, z)  y = Add(x, w) }",
                     codes=np.ones((2, 3), np.uint8))  # fmt: skip
    graph = as_graph(made)
    changes = RemoveQuantizeDequantize().apply(graph)
    assert changes == Changes((), (("", "it decodes a weight"),))
