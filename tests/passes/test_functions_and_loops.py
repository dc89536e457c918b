"""Functions, branches, loops and recurrent cells."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from model_texts import Array, apply_once, difference, model, named_graph, nodes, ops, outputs, sample, values
from model_zoo import local_functions
from onnx import ModelProto

from onnxq.errors import ModelError
from onnxq.ir import Graph, as_graph, to_model
from onnxq.passes import (
    DropInitialStates,
    InlineFunctions,
    InlineIfs,
    LiftInvariants,
    NameNodes,
    RemoveUnused,
)
from onnxq.rewrite import Changes

# InlineFunctions ------------------------------------------------------------------------------------------------------

NESTED = """
<domain: "local", opset_import: ["" : 17, "local" : 1]>
outer <slope> (p) => (r) { a = local.inner <alpha: float = @slope> (p) r = Neg(a) }
<domain: "local", opset_import: ["" : 17]>
inner <alpha> (p) => (r) { r = LeakyRelu <alpha: float = @alpha> (p) }
"""


def test_calls_become_nodes_and_functions_go() -> None:
    made = local_functions()
    graph = as_graph(made)
    assert InlineFunctions().apply(graph) == Changes(("layer",))
    assert ops(graph) == ["MatMul", "Relu", "MatMul", "Relu"]
    assert not to_model(graph).functions
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= 1e-6


def test_the_weights_of_both_calls_stay_one_tensor() -> None:
    graph = as_graph(local_functions())
    InlineFunctions().apply(graph)
    first, second = nodes(graph, "MatMul")
    assert first.inputs[1] is second.inputs[1]


def test_functions_that_call_functions_hand_their_attributes_down() -> None:
    made = model("g (float[4] x) => (float[4] y) { y = local.outer <slope = 0.25> (x) }", functions=NESTED)
    graph = as_graph(made)
    assert set(InlineFunctions().apply(graph).changed) == {"outer", "inner"}
    assert ops(graph) == ["LeakyRelu", "Neg"]
    assert nodes(graph, "LeakyRelu")[0].attrs["alpha"] == 0.25
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_calls_inside_bodies_are_inlined() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            y = If (c) <
                then_branch = yes () => (float[4] t) { t = local.twice(x) },
                else_branch = no () => (float[4] e) { e = Neg(x) }>
        }""",
        functions='<domain: "local", opset_import: ["" : 17]> twice (p) => (r) { r = Add(p, p) }',
    )
    graph = as_graph(made)
    assert InlineFunctions().apply(graph)
    assert ops(graph) == ["If", "Add", "Neg"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_the_names_of_inlined_nodes_can_be_made_unique() -> None:
    graph = as_graph(local_functions())
    InlineFunctions().apply(graph)
    NameNodes().apply(graph)
    names = [node.name for node in nodes(graph)]
    assert len(set(names)) == len(names) == 4


def test_a_model_without_functions_is_not_touched() -> None:
    graph = as_graph(model("g (float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }", w=values(4, 4)))
    before = graph.nodes
    assert not InlineFunctions().apply(graph)
    assert graph.nodes is before


def test_a_function_of_an_opset_that_does_not_convert_is_an_error() -> None:
    made = model(
        "g (float[4] x) => (float[4] y) { y = local.f(x) }",
        functions='<domain: "local", opset_import: ["" : 6]> f (p) => (r) { r = Upsample <scales = [1.0]> (p) }',
    )
    with pytest.raises(ModelError, match="inlined"):
        InlineFunctions().apply(as_graph(made))


# InlineIfs ------------------------------------------------------------------------------------------------------------


def inlined(made: ModelProto) -> Graph:
    graph = named_graph(made)
    apply_once(InlineIfs(), graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0
    assert [tensor.name for tensor in graph.outputs] == [info.name for info in made.graph.output]
    return graph


def choice(then: str, other: str, *, around: str = "y = Exp(t)", condition: Array | None = None) -> ModelProto:
    return model(
        f"""g (float[4] x) => (float[4] y) {{
            a = Neg(x)
            t = If (c) <then_branch = yes () => (float[4] p) {then}, else_branch = no () => (float[4] p) {other}>
            {around}
        }}""",
        c=np.array(True) if condition is None else condition,
    )


@pytest.mark.parametrize(
    ("condition", "left"),
    [(np.array(True), ["Neg", "Sqrt", "Exp"]), (np.array([False]), ["Neg", "Abs", "Sin", "Exp"])],
)
def test_the_branch_that_is_taken_takes_its_place(condition: Array, left: list[str]) -> None:
    graph = inlined(choice("{ p = Sqrt(x) }", "{ q = Abs(a) p = Sin(q) }", condition=condition))
    assert ops(graph) == left


def test_constants_of_the_branch_come_along_and_names_stay_unique() -> None:
    made = choice(
        "<float[4] w = {1, 2, 3, 4}> { q = Mul(x, w) p = Add(q, q) }",
        "<float[4] w = {5, 6, 7, 8}> { q = Mul(x, w) p = Sub(q, q) }",
        around="""s = If (d) <
                      then_branch = yes () => (float[4] p) <float[4] w = {2, 2, 2, 2}> { q = Mul(x, w) p = Add(q, w) },
                      else_branch = no () => (float[4] e) { e = Neg(x) }>
                  y = Add(t, s)""",
    )
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "d"))
    assert ops(inlined(made)) == ["Neg", "Mul", "Add", "Mul", "Add", "Add"]


def test_nested_choices_are_inlined_too() -> None:
    inner = (
        "If (c) <then_branch = i () => (float[4] k) { k = Sin(m) }, else_branch = j () => (float[4] l) { l = Cos(m) }>"
    )
    graph = inlined(choice(f"{{ m = Abs(x) p = {inner} }}", "{ p = Neg(x) }"))
    assert ops(graph) == ["Neg", "Abs", "Sin", "Exp"]


def test_a_choice_in_the_body_of_another_that_stays() -> None:
    made = model(
        """g (float[4] x, bool u) => (float[4] y) {
            y = If (u) <
                then_branch = yes () => (float[4] p) {
                    p = If (c) <then_branch = i () => (float[4] k) { k = Sin(x) },
                                else_branch = j () => (float[4] l) { l = Cos(x) }> },
                else_branch = no () => (float[4] e) { e = Neg(x) }>
        }""",
        c=np.array(False),
    )
    assert ops(inlined(made)) == ["If", "Cos", "Neg"]


@pytest.mark.parametrize(
    "then",
    [
        "{ p = Sqrt(x) }",
        "{ p = Identity(x) }",
        "<float[4] p = {1, 2, 3, 4}> { unread = Neg(x) }",
    ],
)
def test_outputs_of_the_graph_keep_their_names(then: str) -> None:
    made = choice(then, "{ p = Neg(x) }")
    made.graph.node[1].output[0] = "y"
    del made.graph.node[2:]
    assert "If" not in ops(inlined(made))


def test_a_result_that_is_returned_twice() -> None:
    made = model(
        """g (float[4] x) => (float[4] y, float[4] z) {
            y, z = If (c) <then_branch = yes () => (float[4] p, float[4] p) { p = Sqrt(x) },
                           else_branch = no () => (float[4] q, float[4] r) { q = Neg(x) r = Abs(x) }>
        }""",
        c=np.array(True),
    )
    graph = named_graph(made)
    InlineIfs().apply(graph)
    assert ops(graph) == ["Sqrt", "Identity"]
    assert [tensor.name for tensor in graph.outputs] == ["y", "z"]


def test_a_condition_that_a_caller_may_feed_stays() -> None:
    made = choice("{ p = Sqrt(x) }", "{ p = Neg(x) }")
    made.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    assert not InlineIfs().apply(named_graph(made))


# LiftInvariants -------------------------------------------------------------------------------------------------------

LOOP = """g (float[4, 3] x) => (float[4, 3] y, float[4, 3] z) {{
    last, kept, all = Loop (three, , x, w) <body = step (int64 i, bool c, float[4, 3] h, float[3, 3] r) => {returned} {{
        go = Identity(c) s = MatMul(h, r) n = Tanh(s) {handed_on} }}>
    {after}
}}"""


def lifted(made: ModelProto) -> Graph:
    graph = named_graph(made)
    apply_once(LiftInvariants(), graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0
    return graph


def loop(
    handed_on: str = "k = Identity(r)",
    after: str = "y = MatMul(last, kept) z = ReduceSum<keepdims=0>(all, zero)",
    returned: str = "(bool go, float[4, 3] n, float[3, 3] k, float[4, 3] n2)",
) -> ModelProto:
    text = LOOP.format(returned=returned, handed_on=f"{handed_on} n2 = Identity(n)", after=after)
    return model(text, w=values(3, 3), three=np.array(3), zero=np.array([0]))


@pytest.mark.parametrize("handed_on", ["k = Identity(r)", "m = Identity(r) k = Identity(m)"])
def test_what_each_iteration_hands_on_is_read_from_around(handed_on: str) -> None:
    graph = lifted(loop(handed_on))
    (node,) = nodes(graph, "Loop")
    (body,) = node.subgraphs()
    assert (len(node.inputs), len(node.outputs), len(body.inputs), len(body.outputs)) == (3, 2, 3, 3)
    (product,) = (inner for inner in body.nodes if inner.op == "MatMul")
    assert product.inputs[1].name == "w"


def test_what_the_body_returns_itself_is_handed_on() -> None:
    returned = "(bool go, float[4, 3] n, float[3, 3] r, float[4, 3] n2)"
    (node,) = nodes(lifted(loop("", returned=returned)), "Loop")
    assert len(node.inputs) == 3


def test_what_changes_stays() -> None:
    (node,) = nodes(lifted(loop("k = Neg(r)")), "Loop")
    assert len(node.inputs) == 4


def test_what_the_graph_returns_stays() -> None:
    made = model(
        """g (float[4, 3] x) => (float[4, 3] last, float[3, 3] kept) {
            last, kept = Loop (three, , x, w) <
                body = step (int64 i, bool c, float[4, 3] h, float[3, 3] r) => (bool go, float[4, 3] n, float[3, 3] k) {
                    go = Identity(c) n = MatMul(h, r) k = Identity(r) }>
        }""",
        w=values(3, 3), three=np.array(3),
    )  # fmt: skip
    (node,) = nodes(lifted(made), "Loop")
    assert len(node.inputs) == 4


def test_states_that_trade_places_change() -> None:
    made = model(
        """g (float[3, 3] x) => (float[3, 3] y) {
            a, b = Loop (three, , x, w) <
                body = step (int64 i, bool c, float[3, 3] h, float[3, 3] r) => (bool go, float[3, 3] p, float[3, 3] q) {
                    go = Identity(c) p = Identity(r) q = Identity(h) }>
            y = MatMul(a, b)
        }""",
        w=values(3, 3), three=np.array(3),
    )  # fmt: skip
    (node,) = nodes(lifted(made), "Loop")
    assert len(node.inputs) == 4


def test_states_of_a_scan() -> None:
    made = model(
        """g (float[5, 4, 3] x) => (float[5, 4, 3] y, float[3, 3] z) {
            k, y = Scan <num_scan_inputs = 1,
                body = step (float[3, 3] r, float[4, 3] h) => (float[3, 3] same, float[4, 3] n) {
                    same = Identity(r) n = MatMul(h, r) }> (w, x)
            z = Neg(k)
        }""",
        w=values(3, 3),
    )  # fmt: skip
    (node,) = nodes(lifted(made), "Scan")
    assert (len(node.inputs), len(node.outputs)) == (1, 1)


def test_a_loop_in_the_body_of_another() -> None:
    made = model(
        """g (float[4, 3] x) => (float[4, 3] y) {
            y, kept = Loop (three, , x, w) <
                body = step (int64 i, bool c, float[4, 3] h, float[3, 3] r) => (bool go, float[4, 3] n, float[3, 3] k) {
                    go = Identity(c) k = Identity(r)
                    n, l = Loop (three, , h, r) <
                        body = inner (int64 j, bool d, float[4, 3] a, float[3, 3] b) =>
                            (bool on, float[4, 3] e, float[3, 3] f) {
                            on = Identity(d) e = MatMul(a, b) f = Identity(b) }>
                }>
        }""",
        w=values(3, 3), three=np.array(3),
    )  # fmt: skip
    graph = lifted(made)
    assert [len(node.inputs) for node in nodes(graph, "Loop")] == [3, 3]


def test_a_state_that_is_a_scan_output_as_well_stays() -> None:
    # What a body returns must be made in it, or be one of its states.
    returned = "(bool go, float[4, 3] n, float[3, 3] k, float[3, 3] r)"
    after = "y = MatMul(last, kept) z = ReduceSum<keepdims=0>(all, zero)"
    text = LOOP.replace("float[4, 3] z", "float[3, 3] z")
    handed_on = "k = Identity(r)"
    made = model(
        text.format(returned=returned, handed_on=handed_on, after=after),
        w=values(3, 3), three=np.array(3), zero=np.array([0]),
    )  # fmt: skip
    (node,) = nodes(lifted(made), "Loop")
    assert len(node.inputs) == 4


@pytest.mark.parametrize(("opset", "ir_version", "states"), [(17, 8, 0), (10, 5, 1)])
def test_a_loop_keeps_the_states_that_its_opset_asks_for(opset: int, ir_version: int, states: int) -> None:
    made = model(
        """g (float[2] x) => (float[2] y, float[3, 2] z) {
            last, z = Loop (three, yes, x) <
                body = step (int64 i, bool c, float[2] s) => (bool go, float[2] k, float[2] e) {
                    go = Identity(c) k = Identity(s) e = Neg(s) }>
            y = Neg(last)
        }""",
        opset=opset, ir_version=ir_version, three=np.array(3), yes=np.array(True),
    )  # fmt: skip
    graph = lifted(made)
    (node,) = nodes(graph, "Loop")
    assert len(node.inputs) == 2 + states
    assert graph.nodes[-1].inputs[0].name == "x"


def test_a_loop_keeps_an_output() -> None:
    made = model(
        """g (float[2] x) => (float[2] y) {
            last = Loop (three, , x) <
                body = step (int64 i, bool c, float[2] s) => (bool go, float[2] k) {
                    go = Identity(c) k = Identity(s) }>
            y = Neg(last)
        }""",
        three=np.array(3),
    )  # fmt: skip
    graph = lifted(made)
    (node,) = nodes(graph, "Loop")
    assert [tensor.name for tensor in node.outputs] == ["last"]
    assert graph.nodes[-1].inputs[0].name == "x"


# DropInitialStates ----------------------------------------------------------------------------------------------------

WEIGHTS = {"LSTM": 4, "GRU": 3, "RNN": 1}
ZEROS = np.zeros((1, 2, 5), np.float32)


def layer(op: str, states: str, before: str = "", **constants: Array) -> ModelProto:
    gates = WEIGHTS[op]
    return model(
        f"g (float[7, 2, 3] x) => (float[7, 1, 2, 5] y) {{ {before} y = {op}<hidden_size=5>(x, w, r, , {states}) }}",
        w=values(1, gates * 5, 3), r=values(1, gates * 5, 5), **constants,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "inputs"),
    [
        (layer("LSTM", ", h, c", h=ZEROS, c=ZEROS), 3),
        (layer("LSTM", ", h, c", h=ZEROS, c=values(1, 2, 5)), 7),
        (layer("LSTM", ", h, c", h=values(1, 2, 5), c=ZEROS), 6),
        (layer("GRU", ", h", h=ZEROS), 3),
        (layer("RNN", ", h", h=ZEROS), 3),
        (layer("RNN", ", h", h=values(1, 2, 5)), 6),
        (layer("GRU", "lengths, h", lengths=np.array([7, 4], np.int32), h=ZEROS), 5),
        (layer("GRU", ", h", "h = Expand(z, shape)", z=np.zeros(1, np.float32), shape=np.array([1, 2, 5])), 3),
        (layer("GRU", ", h", "h = ConstantOfShape(shape)", shape=np.array([1, 2, 5])), 3),
        (layer("GRU", ", h", "h = ConstantOfShape<value = float[1] {2}>(shape)", shape=np.array([1, 2, 5])), 6),
    ],
)
def test_states(made: ModelProto, inputs: int) -> None:
    graph = named_graph(made)
    apply_once(DropInitialStates(), graph)
    RemoveUnused().apply(graph)
    (node,) = (node for node in nodes(graph) if node.op in WEIGHTS)
    assert len(node.inputs) == inputs
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


def test_a_weight_that_is_the_same_tensor_of_zeros_stays() -> None:
    made = model(
        "g (float[5, 2, 3] x) => (float[5, 1, 2, 2] y) { y = RNN <hidden_size = 2> (x, w, z, , , z) }",
        w=values(1, 2, 3), z=np.zeros((1, 2, 2), np.float32),
    )  # fmt: skip
    graph = named_graph(made)
    assert apply_once(DropInitialStates(), graph)
    (node,) = nodes(graph, "RNN")
    assert [tensor.name for tensor in node.inputs] == ["x", "w", "z"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


def test_what_made_the_zeros_is_no_longer_needed() -> None:
    before = "s = Shape(x) b = Slice(s, one, two) k = Concat<axis=0>(one, b, five) h = Expand(z, k)"
    made = layer(
        "LSTM", ", h, h", before, z=np.zeros((1, 1, 1), np.float32),
        one=np.array([1]), two=np.array([2]), five=np.array([5]),
    )  # fmt: skip
    graph = named_graph(made)
    DropInitialStates().apply(graph)
    RemoveUnused().apply(graph)
    assert ops(graph) == ["LSTM"]
