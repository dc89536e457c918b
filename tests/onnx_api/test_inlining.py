"""Inlining of model-local functions: an inlined model computes what onnxruntime computes with the functions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxq.ir import all_graphs, read_model, to_model
from onnxq.onnx_api import inline_functions
from onnxq.runtime.sessions import open_session, run

X = np.array([[-1, 2, -3, 4], [0.5, -0.25, 3, 1]], np.float32)
LOCAL = '<domain: "local", opset_import: ["" : 17, "local" : 1, "ai.onnx.ml" : 3]>'
LEAKY = LOCAL + " F <slope: float = 0.5> (a) => (r) { r = LeakyRelu <alpha: float = @slope> (a) }"
# Passes its attribute on to F, which has a default of its own.
FORWARDS = LOCAL + " G <s> (a) => (r) { r = local.F <slope: float = @s> (a) }" + LEAKY
IN_BODIES = (
    LOCAL
    + """ H <slope: float = 0.25> (a) => (r) {
        nought = Constant <value_float = 0.0> ()
        total = ReduceSum <keepdims = 0> (a)
        c = Greater (total, nought)
        r = If (c) <
            then_branch = t () => (u) { u = LeakyRelu <alpha: float = @slope> (a) },
            else_branch = e () => (v) { v = local.F (a) }>
    }"""
    + LEAKY
)


def constant(kind: str, default: str, attribute: str) -> str:
    return (
        f"{LOCAL} C <c: {kind} = {default}> (a) => (r) {{ "
        f"k = Constant <{attribute}: {kind} = @c> () i = Cast <to = 1> (k) r = Add (a, i) }}"
    )


def model_of(call: str, functions: str, output: str = "float") -> onnx.ModelProto:
    return parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17, "local" : 1, "other" : 1, "ai.onnx.ml" : 3, "com.microsoft" : 1]> '
        f"g (float[2,4] x) => ({output}[N,M] y) {{ {call} }} {functions}"
    )


@pytest.mark.parametrize(
    ("call", "functions"),
    [
        ("y = local.F (x)", LEAKY),
        ("y = local.F <slope = 0.125> (x)", LEAKY),
        ("y = local.F (x)", LEAKY.replace(": float = 0.5", "")),
        ("y = local.G (x)", FORWARDS),
        ("y = local.G <s = 0.125> (x)", FORWARDS),
        ("y = local.H (x)", IN_BODIES),
        ("n = Neg (x) y = local.H (n)", IN_BODIES),
        ("n = Neg (x) y = local.H <slope = 0.75> (n)", IN_BODIES),
        (
            """t = Constant <value_int = 3> () y = Loop (t, , x) <body = b (int64 i, bool c, float[2,4] s) =>
                (bool d, float[2,4] r) { d = Identity (c) r = local.F (s) }>""",
            LEAKY,
        ),
        (
            "y = Scan <num_scan_inputs = 1, body = b (float[4] s) => (float[4] r) { r = local.F (s) }> (x)",
            LEAKY,
        ),
        (
            "y = local.F (x)",
            LOCAL + " F <axis: int = 0> (a) => (r) { r = Softmax <axis: int = @axis> (a) }",
        ),
        (
            "y = local.F (x)",
            LOCAL + " F <perm: ints = [1, 0]> (a) => (r) { r = Transpose <perm: ints = @perm> (a) }",
        ),
        ("y = local.C (x)", constant("float", "2.5", "value_float")),
        ("y = local.C (x)", constant("floats", "[1.0, 2.0, 3.0, 4.0]", "value_floats")),
        ("y = local.C <c = [4.0, 3.0, 2.0, 1.0]> (x)", constant("floats", "[1.0, 2.0, 3.0, 4.0]", "value_floats")),
        ("y = local.C (x)", constant("int", "7", "value_int")),
        ("y = local.C (x)", constant("ints", "[1, 2, 3, 4]", "value_ints")),
        ("y = local.C (x)", constant("tensor", "float[4] {1.0, 2.0, 3.0, 4.0}", "value")),
        (
            "y = local.P (x)",
            LOCAL
            + """ P <m: string = "edge"> (a) => (r) {
                p = Constant <value_ints = [0, 1, 0, 1]> () r = Pad <mode: string = @m> (a, p) }""",
        ),
        (
            "y = local.F (x)",
            LEAKY + '<domain: "other", opset_import: ["" : 17]> F <slope: float = 9.0> (a) => (r) { r = Exp (a) }',
        ),
        # onnxruntime runs its own operators in place of functions with their names.
        ("y = Relu (x)", '<domain: "", opset_import: ["" : 17]> Relu (a) => (r) { r = Neg (a) }'),
        (
            "y = local.F (x)",
            LEAKY.replace("LeakyRelu", "Elu") + '<domain: "", opset_import: ["" : 17]> Elu (a) => (r) { r = Neg (a) }',
        ),
        (
            "y = com.microsoft.Gelu (x)",
            '<domain: "com.microsoft", opset_import: ["" : 17]> Gelu (a) => (r) { r = Neg (a) }',
        ),
    ],
)
def test_an_inlined_model_computes_the_same(call: str, functions: str) -> None:
    model = model_of(call, functions)
    graph = inline_functions(read_model(model))
    assert not graph.functions
    assert not [node for scope in all_graphs(graph) for node in scope.nodes if node.domain == "local"]
    (expected,) = run(open_session(model, optimize=False), {"x": X})
    (found,) = run(open_session(to_model(graph), optimize=False), {"x": X})
    np.testing.assert_array_equal(found, expected, strict=True)


def test_overloads_are_told_apart() -> None:
    model = model_of("h = local.F (x) y = local.F (h)", LEAKY + LEAKY.replace("0.5", "0.25"))
    for node, function, overload in zip(model.graph.node, model.functions, ("one", "two"), strict=True):
        node.overload = function.overload = overload
    inlined = to_model(inline_functions(read_model(model)))
    assert [node.attribute[0].f for node in inlined.graph.node] == [0.5, 0.25]


def test_defaults_of_strings_are_kept() -> None:
    labels = "LabelEncoder <keys_floats = [2.0, 4.0], values_strings: strings = @names> (a)"
    functions = LOCAL + f' S <names: strings = ["two", "four"]> (a) => (r) {{ r = ai.onnx.ml.{labels} }}'
    model = model_of("y = local.S (x)", functions, "string")
    (found,) = run(open_session(to_model(inline_functions(read_model(model)))), {"x": X})
    assert found[0].tolist() == ["_Unused", "two", "_Unused", "four"]
