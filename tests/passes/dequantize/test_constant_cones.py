"""Which parts of a graph are decoders, and what they give."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper, parser

from onnxq.ir import Graph, as_graph
from onnxq.onnx_api import infer_shapes
from onnxq.passes.dequantize.constant_cones import ConstantCones, Decoded, Rows

CODES = np.arange(12, dtype=np.int8).reshape(4, 3)
STORED = {
    "c": CODES, "s": np.array(0.5, np.float32), "w": np.ones((4, 3), np.float32), "u": np.arange(4, dtype=np.uint32),
    "four": np.array(4, np.uint32), "shape": np.array([3, 4]),
}  # fmt: skip


def graph_of(text: str, opset: int = 18) -> Graph:
    header = f'<ir_version: 8, opset_import: ["" : {opset}, "my.own" : 1, "com.microsoft" : 1]>'
    made: ModelProto = parser.parse_model(f"{header} g {text}")
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in STORED.items())
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = as_graph(made)
    infer_shapes(graph)
    return graph


def found(body: str) -> dict[str, Decoded]:
    graph = graph_of(f"(float[4, 3] x, int64[2] i, int64[5] j) => (float y) {{ {body} }}")
    return {one.tensor.name: one for one in ConstantCones.of(graph).results(graph.opset)}


def loaded(one: Decoded) -> NDArray[np.generic]:
    assert one.tensor_data is not None
    return one.tensor_data.load()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = DequantizeLinear(c, s)  y = Add(a, x)", {"a": "c"}),
        ("a = Cast <to = 1> (c)  b = Mul(a, s)  y = Add(b, x)", {"b": "c"}),
        ("a = Cast <to = 1> (c)  b = Mul(a, s)  d = Add(b, x)  y = Add(a, d)", {"a": "c", "b": "c"}),
        ('a = BitShift <direction = "RIGHT"> (u, four)  b = Cast <to = 1> (a)  y = Mul(b, s)', {"y": "u"}),
        ("a = Mul(w, s)  y = Add(a, x)", {}),
        ("a = Cast <to = 1> (shape)  y = Mul(a, s)", {}),
        ("a = Add(x, x)  y = Mul(a, s)", {}),
        ("a = Cast <to = 7> (c)  b = Cast <to = 7> (x)  d = Add(a, b)  y = Cast <to = 1> (d)", {}),
        ("a = Cast <to = 1> (c)  b = my.own.Odd(a)  y = Add(b, x)", {"a": "c"}),
        ("a = com.microsoft.DequantizeLinear(c, s)  y = Add(a, x)", {"a": "c"}),
        ("a = RandomNormalLike(w)  b = Cast <to = 1> (c)  d = Add(a, b)  y = Add(d, x)", {"b": "c"}),
    ],
)
def test_results_are_floats_from_codes_that_the_rest_reads(body: str, expected: dict[str, str]) -> None:
    assert {name: one.codes for name, one in found(body).items()} == expected


def test_results_have_values_a_scope_and_no_obstacle() -> None:
    one = found("a = Cast <to = 1> (c)  b = Mul(a, s)  d = Reshape(b, shape)  e = Flatten(x)  y = MatMul(x, d)")["d"]
    np.testing.assert_array_equal(loaded(one), (CODES * np.float32(0.5)).reshape(3, 4))
    assert (one.scope.name, one.rows) == ("g", None)


def test_rows_that_an_index_chooses_have_the_whole_table_as_values() -> None:
    one = found("a = Gather(c, i)  b = Cast <to = 1> (a)  y = Mul(b, s)")["y"]
    np.testing.assert_array_equal(loaded(one), CODES * np.float32(0.5))
    assert one.rows is not None
    assert (one.rows.indices.name, one.rows.count) == ("i", 4)
    assert one.rows == Rows(one.rows.indices, 4)


def test_equal_recipes_are_equal_whatever_the_names() -> None:
    results = found(
        """a = Cast <to = 1> (c)  b = Mul(a, s)  d = Cast <to = 1> (c)  e = Mul(d, s)  f = Mul(d, w)
           g = Add(b, x)  h = Add(e, g)  y = Add(f, h)"""
    )
    assert results["b"].recipe == results["e"].recipe
    assert results["b"].recipe != results["f"].recipe


def test_rows_of_one_table_have_equal_recipes_whatever_chooses_them() -> None:
    results = found(
        """a = Gather(c, i)  b = Cast <to = 1> (a)  d = Gather(c, j)  e = Cast <to = 1> (d)  h = Cast <to = 1> (c)
           f = MatMul(b, x)  g = MatMul(e, x)  k = MatMul(h, x)  y = Concat <axis = 0> (f, g, k)"""
    )
    assert results["b"].recipe == results["e"].recipe
    assert results["b"].recipe != results["h"].recipe


def test_the_scales_of_kernels_on_blocks_count_though_they_are_no_codes() -> None:
    graph = graph_of("(float[4, 3] x) => (float y) { a = Mul(w, s)  y = com.microsoft.MatMulNBits(x, c, a) }")
    assert [one.tensor.name for one in ConstantCones.of(graph).results(18)] == ["a"]


def test_nodes_that_nothing_reads_are_told_from_those_that_something_does() -> None:
    graph = graph_of(
        """(float[4, 3] x) => (float y) {
            [dead] a = Cast <to = 1> (c)  [deader] b = Mul(a, s)  [live] d = Cast <to = 1> (c)  y = Add(d, x)
        }"""
    )
    assert {node.name for node in ConstantCones.of(graph).unread()} == {"dead", "deader"}


def test_a_chain_of_thousands_is_found_in_no_time_and_without_recursion() -> None:
    steps = "".join(f"a{i + 1} = Add(a{i}, a0) " for i in range(3000))
    results = found(f"a0 = Cast <to = 1> (c) {steps} y = Add(a3000, x)")
    np.testing.assert_array_equal(loaded(results["a3000"]), CODES * np.float32(3001))


def test_onnx_has_every_operator_that_decoders_are_made_of() -> None:
    from onnxq.passes.dequantize.constant_cones import _DECODING

    assert all(onnx.defs.has(op) for op in _DECODING)
