"""Rules replace what their patterns find, until nothing changes."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, named_graph, nodes, ops, outputs, sample, values

from onnxq.ir import Constant, Graph, Names, Node, Variable, as_graph, to_model
from onnxq.rewrite import (
    Changes,
    Match,
    RewriteContext,
    RewriteRule,
    RewriteRules,
)
from rewrite.example_rules import (
    ENDLESS,
    GROWING,
    MISTAKES,
    NEGATED_DIFFERENCE,
    NEGATIONS,
    NO_PATTERN,
    POWER,
    SPLIT_EXPONENTIAL,
    TO_SUM,
    TWICE,
    WRONG_SHAPE,
    SmallPowers,
    applied,
    rule,
)

# Rules ----------------------------------------------------------------------------------------------------------------


def test_a_match_is_replaced_and_the_new_node_has_a_type() -> None:
    graph, changes = applied(TWICE, model("g (float[4] x) => (float[4] y) { [a] s = Add(x, x) y = Neg(s) }"))
    assert changes.changed == ("a",)
    assert ops(graph) == ["Mul", "Neg"]
    assert (graph.nodes[0].outputs[0].dtype, graph.nodes[0].outputs[0].shape) == (np.float32, [4])
    assert graph.nodes[0].inputs[1].dtype == np.float32


def test_the_last_new_node_and_outputs_keep_their_names() -> None:
    graph, _ = applied(TWICE, model("g (float[4] x) => (float[4] y) { [a] y = Add(x, x) }"))
    assert graph.nodes[0].name == "a"
    assert [tensor.name for tensor in graph.outputs] == ["y"]


def test_inner_values_of_the_replacement_have_types_too() -> None:
    graph, _ = applied(SmallPowers(), model(POWER, e=np.array(3, np.float32)))
    assert ops(graph) == ["Mul", "Mul"]
    assert graph.nodes[0].outputs[0].shape == [4]


def test_a_refusal_has_its_reason() -> None:
    _, changes = applied(SmallPowers(), model(POWER, e=np.array(5, np.float32)))
    assert changes.skipped == (("a", "its exponent is 5.0"),)
    graph, _ = applied(SmallPowers(5), model(POWER, e=np.array(5, np.float32)))
    assert ops(graph) == ["Mul"] * 4


@pytest.mark.parametrize(
    "text",
    [
        "g (float[4] x) => (float[4] y, float[4] z) { n = Neg(x) y = Neg(n) z = Exp(n) }",
        "g (float[4] x) => (float[4] y, float[4] n) { n = Neg(x) y = Neg(n) }",
    ],
)
def test_inner_values_that_others_read_do_not_match(text: str) -> None:
    graph, changes = applied(NEGATIONS, model(text))
    assert changes == Changes() or not changes.changed
    assert ops(graph)[:2] == ["Neg", "Neg"]


def test_a_match_that_spans_two_graphs_is_none() -> None:
    made = model("""g (float[4] x, bool c) => (float[4] y) {
        n = Neg(x)
        y = If (c) <then_branch = t () => (float[4] t) { t = Neg(n) },
                    else_branch = e () => (float[4] e) { m = Neg(n) k = Neg(m) e = Exp(k) }>
    }""")
    graph, changes = applied(NEGATIONS, made)
    assert len(changes.changed) == 1
    assert ops(graph) == ["Neg", "If", "Neg", "Exp"]


def test_an_input_or_constant_does_not_become_an_output() -> None:
    graph, changes = applied(NEGATIONS, model("g (float[4] x) => (float[4] y) { n = Neg(x) [last] y = Neg(n) }"))
    assert changes.skipped == (("last", "its output is an output of the graph"),)
    assert ops(graph) == ["Neg", "Neg"]


def test_what_a_node_makes_may_become_an_output_under_its_name() -> None:
    graph, _ = applied(NEGATIONS, model("g (float[4] x) => (float[4] y) { e = Exp(x) n = Neg(e) y = Neg(n) }"))
    assert ops(graph) == ["Exp"]
    assert graph.outputs[0].name == "y"


def test_long_chains_end_in_few_rounds() -> None:
    body = " ".join(f"t{index + 1} = Neg(t{index})" for index in range(1001))
    made = model(f"g (float[4] t0) => (float[4] y) {{ {body} y = Exp(t1001) }}")
    graph, changes = applied(NEGATIONS, made)
    assert ops(graph) == ["Neg", "Exp"]
    assert len(changes.changed) == 500


def test_rules_meet_what_others_made() -> None:
    made = model(
        """g (float[4] x, float[4] z) => (float[4] y) {
        d = Sub(x, z) n = Neg(d) m = Neg(n) k = Neg(m) y = Add(k, k) }"""
    )
    graph, changes = applied(RewriteRules((NEGATIONS, NEGATED_DIFFERENCE, TWICE)), made)
    assert ops(graph) == ["Sub", "Mul"]
    assert dict(changes.counts) == {"NegatedDifference": 3, "Twice": 1}


def test_several_outputs_are_replaced_one_by_one() -> None:
    slices = rule(
        "SplitToSlices",
        lambda op: op.Split(op.any("x"), axis=0),
        lambda new, match: [new.Slice(match.x, np.array([2 * i]), np.array([2 * i + 2])) for i in range(2)],
    )
    made = model("g (float[4] x) => (float[2] p, float[2] y) { p, q = Split<axis=0>(x) y = Neg(q) }")
    graph, _ = applied(slices, made)
    assert ops(graph) == ["Slice", "Slice", "Neg"]


def test_a_shared_node_stays_for_those_who_read_it() -> None:
    shared = rule(
        "ShareExp",
        lambda op: op.Log(op.Exp(op.any("x"), allow_other_consumers=True)),
        lambda new, match: new.Identity(match.x),
    )
    made = model("g (float[4] x) => (float[4] y, float[4] z) { e = Exp(x) y = Log(e) z = Neg(e) }")
    graph, _ = applied(shared, made)
    assert ops(graph) == ["Exp", "Identity", "Neg"]


def test_like_keeps_name_and_attributes() -> None:
    moved = rule(
        "MoveNeg",
        lambda op: op.Neg(op.Transpose(op.any("x"), name="turn")),
        lambda new, match: new.like(match.turn, new.Neg(match.x)),
    )
    made = model("g (float[2, 3] x) => (float[3, 2] y) { [turn] t = Transpose<perm=[1, 0]>(x) [neg] y = Neg(t) }")
    graph, _ = applied(moved, made)
    assert [(node.op, node.name, node.attrs) for node in nodes(graph)] == [
        ("Neg", "neg.Neg", {}),
        ("Transpose", "turn", {"perm": [1, 0]}),
    ]


def origins(graph: Graph) -> dict[str, tuple[tuple[str, str], ...]]:
    return {node.name: node.origins for node in nodes(graph)}


def test_a_new_node_knows_those_that_went_however_often_it_was_replaced() -> None:
    made = model(
        """g (float[4] x, float[4] z) => (float[4] y) {
        [d] d = Sub(x, z) [n] n = Neg(d) [m] m = Neg(n) [k] y = Exp(m) }"""
    )
    graph, _ = applied(NEGATED_DIFFERENCE, made)
    assert origins(graph) == {"m": (("m", "Neg"), ("n", "Neg"), ("d", "Sub")), "k": ()}


def test_each_name_is_given_once_and_that_of_a_node_that_stays_not_at_all() -> None:
    text = "g (float[4] x, float[4] z) => (float[4] y) {{ [s] s = Add(x, z) [e] e = Exp(s) y = {} }}"
    graph, _ = applied(SPLIT_EXPONENTIAL, model(text.format("Neg(e)")))
    assert origins(graph) == {
        "e": (("e", "Exp"), ("s", "Add")),
        "e.1": (("e", "Exp"), ("s", "Add")),
        "s": (("s", "Add"), ("e", "Exp")),
        "": (),
    }
    graph, _ = applied(SPLIT_EXPONENTIAL, model(text.format("Sub(e, s)")))
    assert origins(graph) == {
        "s": (),
        "e": (("e", "Exp"),),
        "e.1": (("e", "Exp"),),
        "e.Mul": (("e", "Exp"),),
        "": (),
    }


@pytest.mark.parametrize(("mistaken", "message"), MISTAKES.items(), ids=[type(one).__name__ for one in MISTAKES])
def test_a_rule_with_a_mistake_is_skipped_and_reported_and_the_others_go_on(
    mistaken: RewriteRule, message: str
) -> None:
    made = model("g (float[4] x, float[4] z) => (float[4] y) { e = Exp(x) m = Neg(e) n = Neg(m) [sum] y = Add(n, z) }")
    graph = named_graph(made)
    changes = RewriteRules((mistaken, NEGATIONS)).apply(graph)
    ((name, what),) = changes.failed
    assert name == type(mistaken).__name__
    assert what.startswith(f"rule {name} failed at Add node 'sum': {message}")
    assert changes.skipped == (("sum", what),)
    assert ops(graph) == ["Exp", "Add"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_a_replacement_of_another_shape_is_left() -> None:
    graph = named_graph(model("g (float[4] x, float[4] z) => (float[4] y) { [sum] y = Add(x, z) }"))
    assert WRONG_SHAPE.apply(graph) == Changes(skipped=(("sum", "it would make the shape [1, 4] of [4]"),))
    assert ops(graph) == ["Add"]


def test_a_rule_without_a_pattern_is_reported() -> None:
    graph = as_graph(model("g (float[4] x, float[4] z) => (float[4] y) { [sum] y = Add(x, z) }"))
    ((name, what),) = NO_PATTERN.apply(graph).failed
    assert name == "NoPattern"
    assert "expected an operator such as op.Add(x, y)" in what


@pytest.mark.parametrize("rules", [(ENDLESS,), (GROWING,), (TO_SUM, TWICE)])
def test_rules_that_keep_firing_are_stopped_and_reported(
    rules: tuple[RewriteRule, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxq.rewrite.rules._ALWAYS_FINE", 100)
    made = model("g (float[4] x, float[4] z) => (float[4] y) { s = Add(x, x) m = Neg(s) n = Neg(m) y = Add(n, z) }")
    graph = as_graph(made)
    changes = RewriteRules((*rules, NEGATIONS)).apply(graph)
    ((name, what),) = changes.failed
    assert name in {type(rule).__name__ for rule in rules}
    assert what.startswith(f"rule {name} was stopped after")
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_a_node_stays_if_the_replacement_reads_what_it_makes() -> None:
    divided = rule(
        "DivideByRoot",
        lambda op: op.Mul(op.any("x"), op.Reciprocal(op.Sqrt(op.any("s")))),
        lambda new, match: new.Div(match.x, new.Sqrt(match.s)),
    )
    made = model("g (float[2] x) => (float[2] y) { p = Exp(x) s = Sqrt(p) r = Reciprocal(s) y = Mul(r, s) }")
    graph, _ = applied(divided, made)
    assert ops(graph) == ["Exp", "Sqrt", "Sqrt", "Div"]


def test_rules_that_round_leave_what_decides() -> None:
    thirds = rule(
        "Thirds",
        lambda op: op.Div(op.any("x"), 3.0),
        lambda new, match: new.Mul(match.x, 1 / 3),
        rounds=lambda match: True,
    )
    text = "g (float[4] x) => (float[4] y) {{ [d] d = Div(x, k) r = Relu(d) y = {}(r) }}"
    graph = as_graph(model(text.format("Floor"), k=np.array(3, np.float32)))
    assert thirds.apply(graph).skipped == (("d", "its last bit may decide what reads it"),)
    graph = as_graph(model(text.format("Exp"), k=np.array(3, np.float32)))
    assert thirds.apply(graph).changed == ("d",)


@pytest.mark.parametrize(
    ("op_type", "dtype", "reason"),
    [
        ("HardSigmoid", "double", "onnxruntime has no HardSigmoid of float64"),
        ("Gelu", "float", "opset 17 of the model has no Gelu"),
    ],
)
def test_a_rule_that_makes_what_the_runtime_or_the_opset_lacks_leaves_it(op_type: str, dtype: str, reason: str) -> None:
    replaced = rule(
        "Replace",
        lambda op: op.Min(op.Max(op.any("x"), 0.0), 1.0),
        lambda new, match: getattr(new, op_type)(match.x),
    )
    limits = {name: np.full((), value, "f4" if dtype == "float" else "f8") for name, value in (("z", 0), ("o", 1))}
    text = f"g ({dtype}[2] x) => ({dtype}[2] y) {{ m = Max(x, z) [min] y = Min(m, o) }}"
    graph, changes = applied(replaced, model(text, **limits))
    assert changes.skipped == (("min", reason),)
    assert ops(graph) == ["Max", "Min"]


def test_outputs_of_the_graph_keep_their_declared_shape() -> None:
    graph, _ = applied(NEGATIONS, model("g (float[N] x) => (float[M] y) { e = Exp(x) n = Neg(e) y = Neg(n) }"))
    assert [(tensor.name, tensor.shape) for tensor in graph.outputs] == [("y", ["M"])]


def test_a_tensor_that_many_read() -> None:
    names = [f"t{index}" for index in range(3000)]
    powers = " ".join(f"{name} = Pow(x, e)" for name in names)
    text = f"g (float[1] x) => (float[3000] y) {{ {powers} y = Concat<axis=0>({', '.join(names)}) }}"
    graph = as_graph(model(text, e=np.array(2, np.float32)))
    assert len(SmallPowers().apply(graph).changed) == 3000
    assert len(to_model(graph).graph.node) == 3001


def test_plain_graphsurgeon_nodes_are_seen() -> None:
    import onnx_graphsurgeon as gs

    graph = as_graph(model("g (float[4] x) => (float[4] y) { y = Neg(x) }", w=values(4)))
    inner = gs.Variable("inner", dtype=np.float32)
    graph.nodes.insert(0, gs.Node("Add", "a", inputs=[graph.inputs[0], graph.inputs[0]], outputs=[inner]))
    graph.nodes[1].inputs[0] = inner
    assert TWICE.apply(graph).changed == ("a",)
    assert isinstance(graph.nodes[0], Node)
    assert isinstance(graph.nodes[0].outputs[0], Variable)


# Replacements ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def graph() -> Graph:
    return as_graph(model("g (float[2, 4] x) => (float[2, 4] y) { [a] y = Neg(x) }"))


@pytest.fixture
def new(graph: Graph) -> RewriteContext:
    return RewriteContext(graph, Names(graph), Match(graph.nodes[0], (graph.nodes[0],), 17, {}))


def test_a_new_node_is_named_after_the_old_and_its_output_has_a_type(graph: Graph, new: RewriteContext) -> None:
    made = new.Transpose(graph.inputs[0], perm=[1, 0])
    assert (made.dtype, made.shape) == (np.float32, [4, 2])
    assert [(node.op, node.name, node.attrs) for node in new.nodes] == [("Transpose", "a.Transpose", {"perm": [1, 0]})]
    new.Transpose(graph.inputs[0])
    assert new.nodes[1].name == "a.Transpose.1"


@pytest.mark.parametrize(("value", "dtype"), [(2, np.float32), (0.5, np.float32), (np.ones(4), np.float32)])
def test_numbers_become_constants_of_the_type_beside_them(
    graph: Graph, new: RewriteContext, value: object, dtype: type
) -> None:
    new.Mul(graph.inputs[0], value)
    operand = new.nodes[0].inputs[1]
    assert isinstance(operand, Constant)
    assert operand.dtype == dtype


def test_whole_numbers_in_arrays_stay_such(graph: Graph, new: RewriteContext) -> None:
    new.Reshape(graph.inputs[0], np.array([8]))
    assert new.nodes[0].inputs[1].dtype == np.int64
    assert new.nodes[0].outputs[0].shape == [8]


def test_an_empty_list_holds_whole_numbers(graph: Graph, new: RewriteContext) -> None:
    assert new.constant([]).dtype == np.int64


def test_none_leaves_an_input_or_attribute_out(graph: Graph, new: RewriteContext) -> None:
    new.Clip(graph.inputs[0], None, 6.0)
    new.Softmax(graph.inputs[0], axis=None)
    assert [tensor.name for tensor in new.nodes[0].inputs[:2]] == ["x", ""]
    assert new.nodes[1].attrs == {}


def test_several_outputs_are_a_tuple(graph: Graph, new: RewriteContext) -> None:
    first, second = new.Split(graph.inputs[0], outputs=2, axis=1)
    assert first.shape == second.shape == [2, 2]


def test_like_keeps_operator_name_and_attributes(graph: Graph, new: RewriteContext) -> None:
    old = Node("Softmax", "soft", {"axis": 0}, outputs=[Variable("z")], domain="")
    new.like(old, graph.inputs[0])
    new.like(old, graph.inputs[0], axis=None)
    assert [(node.op, node.name, node.attrs) for node in new.nodes] == [
        ("Softmax", "soft", {"axis": 0}),
        ("Softmax", "soft", {}),
    ]


def test_a_node_that_is_named_after_another_is_remembered(graph: Graph, new: RewriteContext) -> None:
    old = Node("MatMul", "product")
    made = new.named(old, new.Neg(graph.inputs[0]))
    assert new.named_after == {made.inputs[0]: old}


def test_operators_of_other_domains(graph: Graph, new: RewriteContext) -> None:
    new.call("com.microsoft", "Gelu", graph.inputs[0])
    assert (new.nodes[0].domain, new.nodes[0].op) == ("com.microsoft", "Gelu")


def test_an_ill_typed_node_is_told(graph: Graph, new: RewriteContext) -> None:
    with pytest.raises(ValueError, match="Incompatible dimensions"):
        new.MatMul(graph.inputs[0], np.zeros((3, 3), np.float32))


def test_numbers_beside_data_of_unknown_type_are_like_the_constants_that_were_matched(graph: Graph) -> None:
    scale = Node("Mul", "m", inputs=[graph.inputs[0], Constant("half", np.array(0.5, np.float16))])
    new = RewriteContext(graph, Names(graph), Match(graph.nodes[0], (graph.nodes[0], scale), 17, {}))
    new.Div(Variable("unknown"), 1.5)
    assert new.nodes[0].inputs[1].dtype == np.float16


def test_floats_beside_data_of_unknown_type_are_float32(graph: Graph, new: RewriteContext) -> None:
    new.Clip(Variable("unknown"), 0.0, 6.0)
    assert {bound.dtype for bound in new.nodes[0].inputs[1:]} == {np.dtype(np.float32)}
