"""What onnx's inference is shown in the place of operators that it does not know."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from onnxq.ir import Variable, all_nodes, read_model
from onnxq.ir.types import infer_types
from onnxq.onnx_api import infer_shapes
from onnxq.ops import OPERATORS

HEAD = '<ir_version: 8, opset_import: ["" : 16, "com.microsoft" : 1]>'
FED = "float[2,5,8] x, float[2,5,8] s, int32[2,5] i, float[8,24] w, float[99,8] t, float[8] g, float[2,3,5,4] q"


def found(body: str) -> dict[str, tuple[str, object]]:
    graph = read_model(parser.parse_model(f"{HEAD} g ({FED}) => (y) {{ {body} }}"))
    infer_shapes(graph)
    return {
        tensor.name: (np.dtype(tensor.dtype).name if tensor.dtype is not None else "", tensor.shape)
        for _, node in all_nodes(graph)
        for tensor in node.outputs
    }


@pytest.mark.parametrize(
    ("call", "dtype", "shape"),
    [
        ("FastGelu (x, g)", "float32", [2, 5, 8]),
        ("SkipLayerNormalization (x, s, g, g)", "float32", [2, 5, 8]),
        ("Attention <num_heads = 2> (x, w, g)", "float32", None),
        ("FusedMatMul <alpha = 0.5> (x, w)", "float32", [2, 5, 24]),
        ("FusedMatMul <transB = 1> (q, q)", "float32", None),
        ('FusedGemm <activation = "Relu", transA = 0> (t, w)', "float32", [99, 24]),
        ("EmbedLayerNormalization (i, i, t, t, t, g, g)", "float32", [2, 5, 8]),
        ('FusedConv <activation = "Relu", kernel_shape = [3, 3]> (q, q)', "float32", None),
        ("MultiHeadAttention <num_heads = 2> (x, x, x)", "float32", None),
        ("Mystery (x)", "", None),
    ],
)
def test_types_behind_foreign_operators_are_known(call: str, dtype: str, shape: object) -> None:
    known = found(f"a = com.microsoft.{call} y = Relu (a)")
    assert known["y"][0] == dtype
    assert call.startswith("FusedConv") or known["y"][1] == shape


def test_other_outputs_have_types_too() -> None:
    known = found("a, , , b = com.microsoft.SkipLayerNormalization (x, s, g, g) y = Add (a, b)")
    assert known["b"] == known["y"] == ("float32", [2, 5, 8])
    assert "" not in known or known[""] == ("", None)


def test_an_operator_of_a_later_opset_has_a_type_as_well() -> None:
    assert found("a = LayerNormalization (x, g) y = Relu (a)")["y"] == ("float32", [2, 5, 8])


def test_bodies_have_stand_ins_and_the_nodes_of_the_graph_stay() -> None:
    text = """c = Cast <to = 9> (g) y = If (c) <
      then_branch = t () => (float[2,5,8] u) { a = com.microsoft.QuickGelu (x) u = Relu (a) },
      else_branch = e () => (float[2,5,8] v) { b = com.microsoft.Attention <num_heads = 2> (x, w, g) v = Relu (b) }>"""
    known = found(text)
    assert (known["a"], known["b"]) == (("float32", [2, 5, 8]), ("float32", None))


def test_a_damaged_node_says_nothing() -> None:
    assert found("a = com.microsoft.RotaryEmbedding () y = Relu (a)")["y"] == ("", None)
    assert found("a = com.microsoft.FusedMatMul (x) y = Relu (a)")["y"][0] in ("", "float32")


def test_a_model_that_imports_no_opset_of_onnx_is_left_as_it_is() -> None:
    text = '<ir_version: 8, opset_import: ["com.microsoft" : 1]> g (float[2,8] x, float[8,4] w) => (float[2,4] y)'
    graph = read_model(parser.parse_model(text + " { y = com.microsoft.FusedMatMul (x, w) }"))
    infer_shapes(graph)
    assert graph.outputs[0].shape == [2, 4]


def test_every_row_of_another_domain_says_what_type_it_gives() -> None:
    assert all(row.types for (domain, _), row in OPERATORS.items() if domain)
    assert all(len(row.shapes) <= len(row.types) for row in OPERATORS.values())


def test_what_is_declared_counts_where_onnx_knows_an_operator_but_not_what_it_makes() -> None:
    text = """<ir_version: 8, opset_import: ["" : 16, "ai.onnx.ml" : 3]> g (float[2,4] x) => (y) <float[2,4] a> {
        a = ai.onnx.ml.Scaler <offset = [1.0], scale = [2.0]> (x)  y = Relu (a) }"""
    graph = read_model(parser.parse_model(text))
    infer_shapes(graph)
    assert (graph.outputs[0].dtype, graph.outputs[0].shape) == (np.float32, [2, 4])


@pytest.mark.parametrize(
    ("opset", "body", "shape"),
    [
        (10, "y = Slice (x, zero, one, zero)", [None, 5]),
        (10, "y = Slice (x, zero, one, one)", ["A", 1]),
        (11, "y = Slice (x, zero, one, zero)", [None, 5]),
        (10, "y = Squeeze <axes = [-1]> (u)", ["A", 5]),
        (10, "y = Unsqueeze <axes = [-1]> (x)", ["A", 5, 1]),
        (13, 'y = Einsum <equation = "ij,ij->ij"> (u2, x)', ["A", 5]),
        (13, 'y = Einsum <equation = "ij,ij->ij"> (x, z)', [None, 5]),
        (13, 'y = Einsum <equation = "ij,kj->ki"> (x, z)', ["B", "A"]),
        (13, 'y = Einsum <equation = "ij,kj"> (x, z)', ["A", "B"]),
        (13, 'y = Einsum <equation = "...j,...j->...j"> (u2, x)', None),
        (13, 'y = Einsum <equation = "ij->ji"> (x)', [5, "A"]),
        (
            10,
            "y = If (c) <then_branch = t () => (p) { p = Neg (x) }, else_branch = e () => (q) { q = Neg (z) }>",
            None,
        ),
        (
            11,
            "y = If (c) <then_branch = t () => (p) { p = Neg (x) }, else_branch = e () => (q) { q = Neg (z) }>",
            [None, 5],
        ),
        (
            10,
            """l = com.microsoft.FastGelu (x) y = If (c) <then_branch = t () => (p) {
                k = Slice (x, zero, one, zero) p = Neg (k) }, else_branch = e () => (q) { q = Neg (l) }>""",
            None,
        ),
    ],
)
def test_what_onnx_infers_wrongly_is_not_believed(opset: int, body: str, shape: object) -> None:
    graph = read_model(
        parser.parse_model(
            f"""<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
            g (float[A,5] x, float[B,5] z, float[A,5,1] u, float[1,5] u2, bool c) => (y)
            <int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ {body} }}"""
        )
    )
    infer_shapes(graph)
    found = {tensor.name: tensor.shape for _, node in all_nodes(graph) for tensor in node.outputs}
    assert found["y"] == shape
    assert found.get("k", [None])[0] is None
    for _, node in all_nodes(graph):
        if node.outputs[0].name == "y":
            alone = node.copy(node.inputs, [Variable(tensor.name) for tensor in node.outputs])
            infer_types(alone, graph.opset_imports)
            assert alone.outputs[0].shape in (shape, None)
