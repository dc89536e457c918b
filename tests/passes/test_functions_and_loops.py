"""Functions, branches, loops and recurrent cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, ops, outputs, sample, values
from model_zoo import local_functions
from onnx import ModelProto
from rule_cases import Case, Rule, table

from onnxq.errors import ModelError
from onnxq.ir import Graph, as_graph, to_model
from onnxq.passes import DropInitialStates, InlineFunctions, InlineIfs, LiftInvariants, NameNodes, RemoveUnused
from onnxq.rewrite import Changes

# InlineIfs ------------------------------------------------------------------------------------------------------------

inline = Rule(InlineIfs(), "float[4] x", c=True, d=True, no=np.array([False]))


def choice(then: str, other: str, *, around: str = "y = Exp(t)", condition: str = "c", result: str = "t") -> str:
    return f"""(float[4] x) => (float[4] y) {{ a = Neg(x) {result} = If ({condition}) <
        then_branch = yes () => (float[4] p) {then}, else_branch = no () => (float[4] p) {other}> {around} }}"""


INNER = "If (c) <then_branch = i () => (float[4] k) { k = Sin(m) }, else_branch = j () => (float[4] l) { l = Cos(m) }>"
WEIGHT = "<float[4] w = {%s}>"


def fed_condition(made: ModelProto) -> None:
    made.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))


INLINED = [
    inline(choice("{ p = Sqrt(x) }", "{ q = Abs(a) p = Sin(q) }", condition="no"), "Neg Abs Sin Exp"),
    inline(choice("{ q = Abs(x) p = Sqrt(q) }", "{ p = Sin(a) }"), "Neg Abs Sqrt Exp"),
    # Constants of the branch come along, and names stay unique.
    inline(choice(
        WEIGHT % "1, 2, 3, 4" + "{ q = Mul(x, w) p = Add(q, q) }",
        WEIGHT % "5, 6, 7, 8" + "{ q = Mul(x, w) p = Sub(q, q) }",
        around=f"""s = If (d) <then_branch = yes () => (float[4] p) {WEIGHT % "2, 2, 2, 2"}
            {{ q = Mul(x, w) p = Add(q, w) }}, else_branch = no () => (float[4] e) {{ e = Neg(x) }}> y = Add(t, s)"""),
        "Neg Mul Add Mul Add Add"),
    inline(choice(f"{{ m = Abs(x) p = {INNER} }}", "{ p = Neg(x) }"), "Neg Abs Sin Exp"),
    # A choice in the body of another that stays.
    inline(f"""(float[4] m, bool u) => (float[4] y) {{ y = If (u) <
           then_branch = yes () => (float[4] p) {{ p = {INNER} }},
           else_branch = n () => (float[4] e) {{ e = Neg(m) }}> }}""", "If Sin Neg"),
    # Outputs of the graph keep their names.
    inline(choice("{ p = Abs(x) }", "{ p = Neg(x) }", around="", result="y"), "Neg Abs"),
    inline(choice("{ p = Identity(x) }", "{ p = Neg(x) }", around="", result="y"), "Neg Identity"),
    inline(choice("<float[4] p = {1, 2, 3, 4}> { unread = Neg(x) }", "{ p = Neg(x) }", around="", result="y")),
    inline("""(float[4] x) => (float[4] y, float[4] z) { y, z = If (c) <
           then_branch = yes () => (float[4] p, float[4] p) { p = Abs(x) },
           else_branch = n () => (float[4] q, float[4] r) { q = Neg(x) r = Abs(x) }> }""", "Abs Identity", runs=False,
           holds=lambda graph: [tensor.name for tensor in graph.outputs] == ["y", "z"]),
    inline(choice("{ p = Abs(x) }", "{ p = Neg(x) }"), damage=fed_condition, stays=""),
]  # fmt: skip

# LiftInvariants -------------------------------------------------------------------------------------------------------

lift = Rule(LiftInvariants(), "float[4, 3] x", w=values(3, 3), three=np.array(3), zero=[0], yes=True)
RETURNED = "(bool go, float[4, 3] n, float[3, 3] k, float[4, 3] n2)"


def loop(handed_on: str, returned: str = RETURNED, result: str = "float[4, 3] z") -> str:
    """A Loop over a state of data and one of a weight, which also gives a tensor for each iteration."""
    return f"""(float[4, 3] x) => (float[4, 3] y, {result}) {{ last, kept, all = Loop (three, , x, w) <
        body = step (int64 i, bool c, float[4, 3] h, float[3, 3] r) => {returned} {{
            go = Identity(c) s = MatMul(h, r) n = Tanh(s) {handed_on} n2 = Identity(n) }}>
        y = MatMul(last, kept) z = ReduceSum<keepdims=0>(all, zero) }}"""


def sizes(*counts: int) -> object:
    """The inputs and outputs of each Loop and Scan, in this order."""
    return lambda graph: (
        [
            count
            for node in nodes(graph)
            if node.op in ("Loop", "Scan")
            for count in (len(node.inputs), len(node.outputs))
        ]
        == list(counts)
    )


def reads_around(graph: Graph) -> bool:
    (node,) = nodes(graph, "Loop")
    (body,) = node.subgraphs()
    (product,) = (inner for inner in body.nodes if inner.op == "MatMul")
    return (
        (len(node.inputs), len(node.outputs), len(body.inputs), len(body.outputs)) == (3, 2, 3, 3)
    ) and product.inputs[1].name == "w"


HEADER = "body = step (int64 i, bool c, float[4, 3] h, float[3, 3] r) => (bool go, float[4, 3] n, float[3, 3] k)"
SMALL_LOOP = """(float[2] x) => (float[2] y%s) { last%s = Loop (three, yes, x) <
    body = step (int64 i, bool c, float[2] s) => (bool go, float[2] k%s) { go = Identity(c) k = Identity(s)%s }>
    y = Neg(last) }"""
SCANNED = SMALL_LOOP % (", float[3, 2] z", ", z", ", float[2] e", " e = Neg(s)")
HOISTED = [
    lift(loop("k = Identity(r)"), holds=reads_around),
    lift(loop("m = Identity(r) k = Identity(m)"), holds=reads_around),
    # What the body returns itself is handed on.
    lift(loop("", "(bool go, float[4, 3] n, float[3, 3] r, float[4, 3] n2)"), holds=sizes(3, 2)),
    lift(loop("k = Neg(r)"), stays="", holds=sizes(4, 3)),
    # What a body returns must be made in it, or be one of its states.
    lift(loop("k = Identity(r)", "(bool go, float[4, 3] n, float[3, 3] k, float[3, 3] r)", "float[3, 3] z"), stays="",
         holds=sizes(4, 3)),
    lift(f"""(float[4, 3] x) => (float[4, 3] last, float[3, 3] kept) {{ last, kept = Loop (three, , x, w) <{HEADER}
         {{ go = Identity(c) n = MatMul(h, r) k = Identity(r) }}> }}""", stays="", holds=sizes(4, 2)),
    # States that trade places change.
    lift("""(float[3, 3] x) => (float[3, 3] y) { a, b = Loop (three, , x, w) <
         body = step (int64 i, bool c, float[3, 3] h, float[3, 3] r) => (bool go, float[3, 3] p, float[3, 3] q) {
             go = Identity(c) p = Identity(r) q = Identity(h) }> y = MatMul(a, b) }""", stays="", holds=sizes(4, 2)),
    lift("""(float[5, 4, 3] x) => (float[5, 4, 3] y, float[3, 3] z) { k, y = Scan <num_scan_inputs = 1,
         body = step (float[3, 3] r, float[4, 3] h) => (float[3, 3] same, float[4, 3] n) {
             same = Identity(r) n = MatMul(h, r) }> (w, x) z = Neg(k) }""", holds=sizes(1, 1)),
    # A loop in the body of another.
    lift(f"""(float[4, 3] x) => (float[4, 3] y) {{ y, kept = Loop (three, , x, w) <{HEADER} {{
         go = Identity(c) k = Identity(r) n, l = Loop (three, , h, r) <body = inner
             (int64 j, bool d, float[4, 3] a, float[3, 3] b) => (bool on, float[4, 3] e, float[3, 3] f) {{
             on = Identity(d) e = MatMul(a, b) f = Identity(b) }}> }}> }}""", holds=sizes(3, 1, 3, 1)),
    # A loop keeps the states that its opset asks for, and an output.
    lift(SCANNED, holds=lambda graph: sizes(2, 1)(graph) and graph.nodes[-1].inputs[0].name == "x"),
    lift(SCANNED, opset=10, holds=lambda graph: sizes(3, 2)(graph) and graph.nodes[-1].inputs[0].name == "x"),
    lift(SMALL_LOOP % ("", "", "", ""),
         holds=lambda graph: [tensor.name for tensor in nodes(graph, "Loop")[0].outputs] == ["last"]
         and graph.nodes[-1].inputs[0].name == "x"),
]  # fmt: skip

# DropInitialStates ----------------------------------------------------------------------------------------------------

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
drop = Rule(DropInitialStates(), "float[7, 2, 3] x", then=RemoveUnused(), zeros=np.zeros((1, 2, 5), np.float32),
            some=values(1, 2, 5), lengths=np.array([7, 4], np.int32), nil=np.zeros((1, 1, 1), np.float32),
            shape=[1, 2, 5], one=[1], two=[2], five=[5])  # fmt: skip


def layer(op: str, states: str, inputs: int, before: str = "", **options: Any) -> Case:
    """A recurrent layer with states that nodes before it may make, and the inputs that it has afterwards."""
    gates = GATES[op]
    return drop(f"{before} y = {op}<hidden_size=5>(x, w, r, , {states})", w=values(1, gates * 5, 3),
                r=values(1, gates * 5, 5), **options,
                holds=lambda graph: [len(node.inputs) for node in nodes(graph, op)] == [inputs])  # fmt: skip


COMPUTED = "s = Shape(x) b = Slice(s, one, two) k = Concat<axis=0>(one, b, five) h = Expand(nil, k)"
STATES = [
    layer("LSTM", ", zeros, zeros", 3),
    layer("LSTM", ", zeros, some", 7),
    layer("LSTM", ", some, zeros", 6),
    layer("GRU", ", zeros", 3),
    layer("RNN", ", zeros", 3),
    layer("RNN", ", some", 6, stays=""),
    layer("GRU", "lengths, zeros", 5),
    layer("GRU", ", h", 3, "h = Expand(nil, shape)"),
    layer("GRU", ", h", 3, "h = ConstantOfShape(shape)"),
    layer("GRU", ", h", 6, "h = ConstantOfShape<value = float[1] {2}>(shape)", stays=""),
    # What made the zeros is no longer needed.
    layer("LSTM", ", h, h", 3, COMPUTED),
    # A weight that is the same tensor of zeros stays.
    drop("y = RNN <hidden_size = 2> (x, w, z, , , z)", "RNN", inputs="float[5, 2, 3] x", w=values(1, 2, 3),
         z=np.zeros((1, 2, 2), np.float32),
         holds=lambda graph: [tensor.name for tensor in graph.nodes[0].inputs] == ["x", "w", "z"]),
]  # fmt: skip


@table(INLINED, HOISTED, STATES)
def test_rules(case: Case) -> None:
    graph = case.check()
    assert [tensor.name for tensor in graph.outputs] == [info.name for info in case.made.graph.output]


# InlineFunctions ------------------------------------------------------------------------------------------------------


def test_calls_become_nodes_and_functions_go() -> None:
    made = local_functions()
    graph = as_graph(made)
    assert InlineFunctions().apply(graph) == Changes(("layer",))
    assert ops(graph) == ["MatMul", "Relu", "MatMul", "Relu"]
    first, second = nodes(graph, "MatMul")
    assert first.inputs[1] is second.inputs[1], "the weights of both calls stay one tensor"
    assert not to_model(graph).functions
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= 1e-6
    NameNodes().apply(graph)
    assert len({node.name for node in nodes(graph)}) == 4


def test_a_model_without_functions_is_not_touched() -> None:
    graph = as_graph(model("(float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }", w=values(4, 4)))
    before = graph.nodes
    assert not apply_once(InlineFunctions(), graph)
    assert graph.nodes is before


def test_a_function_of_an_opset_that_does_not_convert_is_an_error() -> None:
    made = model(
        "(float[4] x) => (float[4] y) { y = local.f(x) }",
        functions='<domain: "local", opset_import: ["" : 6]> f (p) => (r) { r = Upsample <scales = [1.0]> (p) }',
    )
    with pytest.raises(ModelError, match="inlined"):
        InlineFunctions().apply(named_graph(made))
