"""Weights that are quantized values are found in whatever form a model stores them, of onnxq and of others."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser
from onnx.helper import make_tensor

from onnxq.ir import Graph, read_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes.dequantize.stored_weights import holds_quantized, stored_weights

Found = list[tuple[str, str, int, tuple[int, ...] | None, int, bool]]
BYTES, FLOAT = 2, 1


def graph_of(text: str, **stored: tuple[int, tuple[int, ...]]) -> Graph:
    """A graph in text form; keywords are initializers by ONNX type and shape, of values that do not matter."""
    header = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
    model = parser.parse_model(f"{header} main {text}")
    for name, (type_, shape) in stored.items():
        model.graph.initializer.append(make_tensor(name, type_, shape, np.ones(int(np.prod(shape)), np.int64)))
    graph = read_model(model)
    infer_shapes(graph)
    return graph


def found(graph: Graph) -> Found:
    return [(one.node.op, one.format, one.bits, one.shape, one.scales, one.integer) for one in stored_weights(graph)]


# What onnxq itself writes is found where it is written.
KERNELS = {
    "MatMulBnb4": (
        "(float[2,64] x) => (float[2,8] y) { y = com.microsoft.MatMulBnb4 <K = 64, N = 8, quant_type = 0,"
        " block_size = 64> (x, c, s) }",
        {"c": (BYTES, (256,)), "s": (FLOAT, (8,))},
        ("MatMulBnb4", "fp4", 4, (64, 8), 8, False),
    ),
    "GatherBlockQuantized in its own type": (
        "(int64[2] i) => (float[2,64] y) { y = com.microsoft.GatherBlockQuantized <block_size = 32> (c, i, s, z) }",
        {"c": (21, (10, 64)), "s": (FLOAT, (10, 2)), "z": (21, (10, 2))},
        ("GatherBlockQuantized", "uint4", 4, (10, 64), 20, False),
    ),
    "QLinearConv": (
        "(uint8[1,3,8,8] x) => (uint8[1,4,6,6] y) { y = QLinearConv(x, s, z, c, t, n, s, z) }",
        {"c": (3, (4, 3, 3, 3)), "s": (FLOAT, ()), "z": (BYTES, ()), "t": (FLOAT, (4,)), "n": (3, (4,))},
        ("QLinearConv", "int8", 8, (4, 3, 3, 3), 4, True),
    ),
    "MatMulInteger": (
        "(uint8[2,8] x, float[] q) => (float[2,4] y) {"
        " a = MatMulInteger(x, c) f = Cast <to = 1> (a) m = Mul(q, s) y = Mul(f, m) }",
        {"c": (3, (8, 4)), "s": (FLOAT, (4,))},
        ("MatMulInteger", "int8", 8, (8, 4), 4, True),
    ),
    "ConvInteger": (
        "(uint8[1,3,8,8] x) => (float[1,4,6,6] y) { a = ConvInteger(x, c) f = Cast <to = 1> (a) y = Mul(f, s) }",
        {"c": (3, (4, 3, 3, 3)), "s": (FLOAT, ())},
        ("ConvInteger", "int8", 8, (4, 3, 3, 3), 1, True),
    ),
    "DequantizeLinear": (
        "(uint8[2,8] x) => (float[2,4] y) { a = DequantizeLinear(x, q) w = DequantizeLinear <axis = 1> (c, s)"
        " y = MatMul(a, w) }",
        {"c": (3, (8, 4)), "s": (FLOAT, (4,)), "q": (FLOAT, ())},
        ("MatMul", "int8", 8, (8, 4), 4, True),
    ),
    "Cast and Mul": (
        "(float[2,8] x) => (float[2,4] y) { n = Cast <to = 1> (c) w = Mul(n, s) y = MatMul(x, w) }",
        {"c": (3, (8, 4)), "s": (FLOAT, (4,))},
        ("MatMul", "int8", 8, (8, 4), 4, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "stored", "expected"), KERNELS.values(), ids=KERNELS)
def test_each_form_of_codes_is_found(text: str, stored, expected: tuple[object, ...]) -> None:
    graph = graph_of(text, **stored)
    assert holds_quantized(graph)
    assert found(graph) == [expected]


def test_rows_of_one_table_are_one_weight() -> None:
    graph = graph_of(
        "(int64[2] i) => (float[2,8] y, float[2,8] z) {"
        " r = Gather(c, i) n = Cast <to = 1> (r) d = Mul(n, s) y = Tanh(d) h = Mul(d, s) z = Sin(h) }",
        c=(3, (10, 8)), s=(FLOAT, ()),
    )  # fmt: skip
    assert found(graph) == [("Gather", "int8", 8, (10, 8), 1, False)]


@pytest.mark.parametrize(
    "text",
    [
        "(float[2,8] x, int8[8,4] c) => (float[2,4] y) { n = Cast <to = 1> (c) v = Mul(n, s) y = MatMul(x, v) }",
        "(int64[2] i) => (float[2,8] y) { r = Gather(w, i) y = Mul(r, s) }",
    ],
    ids=["codes that are fed", "a table of floats"],
)
def test_what_is_no_constant_of_codes_is_none(text: str) -> None:
    graph = graph_of(text, s=(FLOAT, ()), w=(FLOAT, (10, 8)))
    assert not holds_quantized(graph)
    assert found(graph) == []
