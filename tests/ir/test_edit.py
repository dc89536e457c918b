from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from ir.edited_graphs import branches, calls, hub, named, names, wire
from onnxq.errors import ModelError
from onnxq.ir import (
    Node,
    Variable,
    all_graphs,
    become_constant,
    constant,
    insert_nodes,
    read_model,
    remove_nodes,
    remove_unused,
    replace_nodes,
    replace_uses,
    to_model,
)
from onnxq.ir.tensor_data import ArrayData


def test_nodes_go_before_after_and_first_in_one_pass() -> None:
    graph = branches()
    x, branch = graph.inputs[0], named(graph, "branch")

    insert_nodes(
        graph,
        before={branch: [wire("a", x), wire("b", x)]},
        after={branch: [wire("c", x)], named(graph, "first"): [wire("d", x)]},
        first={graph: [wire("z", x)]},
    )

    assert names(graph) == ["z", "first", "d", "captured", "a", "b", "branch", "c", "dead", "deader"]
    insert_nodes(graph, first={graph: [wire("y", x)]})
    assert names(graph)[:2] == ["y", "z"]


def test_nodes_go_into_bodies_and_beside_no_stranger() -> None:
    graph = branches()
    then, otherwise = named(graph, "branch").subgraphs()

    insert_nodes(
        graph,
        before={then.nodes[0]: [wire("a", graph.inputs[0])]},
        first={otherwise: [wire("b", graph.inputs[0])]},
    )

    assert (names(then), names(otherwise)) == (["a", "then"], ["b"])
    with pytest.raises(ModelError, match="beside Identity node 'c': graph 'g' and its bodies do not list it"):
        insert_nodes(graph, before={wire("c", graph.inputs[0]): []})


def test_removed_nodes_let_go_of_all_tensors_also_of_those_in_their_bodies() -> None:
    graph = branches()
    hidden, weight = named(graph, "first").outputs[0], named(graph, "then").inputs[1]

    remove_nodes(graph, [named(graph, "branch"), named(graph, "deader"), named(graph, "dead")])

    assert names(graph) == ["first", "captured"]
    assert hidden.outputs == [named(graph, "captured")]
    assert weight.outputs == []
    assert graph.outputs[0].inputs == []


def test_nodes_of_bodies_are_removed_where_they_are() -> None:
    graph = branches()
    then = named(graph, "then")

    remove_nodes(graph, {then})

    assert [scope.name for scope in all_graphs(graph) if not scope.nodes] == ["t", "e"]
    assert (then.inputs, then.outputs) == ([], [])
    remove_nodes(graph, [])


def test_nodes_take_the_place_of_others_wherever_they_are() -> None:
    graph = branches()
    first, then = named(graph, "first"), named(graph, "then")
    hidden, chosen = first.outputs[0], then.outputs[0]
    new = [wire("a", graph.inputs[0]), wire("b", graph.inputs[0])]
    inner = wire("c", hidden)
    for old, maker in ((first, new[1]), (then, inner)):
        output = old.outputs[0]
        old.outputs.clear()
        maker.outputs[0] = output

    replace_nodes(graph, {first: new, then: [inner]})

    assert names(graph)[:3] == ["a", "b", "captured"]
    assert next(scope for scope in all_graphs(graph) if scope.name == "t").nodes == [inner]
    assert (hidden.inputs, chosen.inputs) == ([new[1]], [inner])
    assert (first.inputs, then.inputs) == ([], [])
    assert first not in graph.inputs[0].outputs
    replace_nodes(graph, {})


def test_uses_are_replaced_once_for_each_time_a_node_reads_the_tensor() -> None:
    x, new = Variable("x"), Variable("new")
    twice = Node("Add", "twice", inputs=[x, x], outputs=[Variable("y")])
    once = Node("Add", "once", inputs=[constant("k", 1), x], outputs=[Variable("z")])

    replace_uses(x, new)

    assert twice.inputs == [new, new]
    assert once.inputs[1] is new
    assert (x.outputs, new.outputs) == ([], [twice, twice, once])


def test_only_chosen_consumers_are_changed() -> None:
    x, new = Variable("x"), Variable("new")
    nodes = [Node("Add", name, inputs=[x, x], outputs=[Variable(f"{name}.y")]) for name in "abc"]

    replace_uses(x, new, {nodes[1]})

    assert [node.inputs[0].name for node in nodes] == ["x", "new", "x"]
    assert x.outputs == [nodes[0], nodes[0], nodes[2], nodes[2]]
    assert new.outputs == [nodes[1], nodes[1]]


def test_the_node_that_makes_the_new_tensor_from_the_old_one_keeps_reading_it() -> None:
    graph = branches()
    hidden = named(graph, "first").outputs[0]
    pair = wire("pair", hidden)
    insert_nodes(graph, after={named(graph, "first"): [pair]})

    replace_uses(hidden, pair.outputs[0])

    assert hidden.outputs == [pair]
    assert named(graph, "then").inputs[0] is pair.outputs[0]
    to_model(graph)


def test_a_body_returns_the_new_tensor_on_request() -> None:
    graph = branches()
    otherwise = named(graph, "branch").subgraphs()[1]
    captured = named(graph, "captured").outputs[0]
    pair = wire("pair", captured)
    graph.nodes.insert(2, pair)

    replace_uses(captured, pair.outputs[0])
    assert otherwise.outputs == [captured]
    replace_uses(captured, pair.outputs[0], graph_outputs=True)
    assert otherwise.outputs == [pair.outputs[0]]
    assert (captured.name, pair.outputs[0].name) == ("k", "pair.out")
    to_model(graph)


def test_a_replaced_output_of_the_main_graph_keeps_its_name() -> None:
    graph = branches()
    output = graph.outputs[0]
    pair = wire("pair", output)
    graph.nodes.append(pair)

    replace_uses(output, pair.outputs[0], graph_outputs=True)

    assert graph.outputs == [pair.outputs[0]]
    assert (output.name, graph.outputs[0].name) == ("pair.out", "y")
    written = to_model(graph).graph
    assert written.output[0].name == "y"
    assert written.output[0].type.tensor_type.elem_type == 1


def test_unused_nodes_go_and_captured_ones_stay() -> None:
    graph = branches()

    remove_unused(graph)

    assert names(graph) == ["first", "captured", "branch"]
    assert named(graph, "first").outputs[0].outputs == [named(graph, "captured"), named(graph, "then")]


def test_constants_that_lost_their_last_use_go_and_those_never_used_stay() -> None:
    graph = branches()
    named(graph, "captured").inputs[1] = constant("other", np.ones(4, np.float32))

    remove_unused(graph)

    assert [tensor.name for tensor in graph.initializers] == ["w", "never"]
    assert [tensor.name for tensor in to_model(graph).graph.initializer] == ["w", "never", "other"]


def test_unused_nodes_inside_a_used_body_go() -> None:
    graph = branches()
    then = named(graph, "branch").subgraphs()[0]
    then.nodes.append(Node("Neg", "idle", inputs=[graph.inputs[0]], outputs=[Variable("idle")]))

    remove_unused(graph)

    assert names(then) == ["then"]
    assert graph.inputs[0].outputs == [named(graph, "first")]


def test_a_node_with_one_used_output_stays_whole() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[2] b)
    { a, b = Split(x) }"""
    graph = read_model(parser.parse_model(text))

    remove_unused(graph)

    assert [tensor.name for tensor in graph.nodes[0].outputs] == ["a", "b"]


def test_a_variable_becomes_a_constant_for_all_its_consumers() -> None:
    graph = branches()
    first, then = named(graph, "first"), named(graph, "then")
    hidden = first.outputs[0]

    made = become_constant(hidden, ArrayData(np.zeros(4, np.float32)))
    remove_unused(graph)

    assert made is hidden is then.inputs[0]
    assert names(graph) == ["captured", "branch"]
    assert [tensor.name for tensor in to_model(graph).graph.initializer] == ["w", "spare", "never", "h"]


def test_a_folded_output_is_declared_by_its_graph() -> None:
    graph = branches()

    become_constant(graph.outputs[0], ArrayData(np.zeros(4, np.float32)))
    remove_unused(graph)
    written = to_model(graph)

    assert [tensor.name for tensor in written.graph.initializer] == ["never", "y"]
    assert list(written.graph.node) == []
    assert written.graph.output[0].name == "y"


@pytest.mark.parametrize("edit", ["replace", "remove", "insert", "unused", "write"])
def test_the_work_of_an_edit_grows_in_proportion_to_its_size(edit: str) -> None:
    def work(size: int) -> int:
        graph, shared = hub(size)
        if edit == "replace":
            return calls(lambda: replace_uses(shared, graph.inputs[0], list(graph.nodes[:0:-1])))
        if edit == "remove":
            return calls(lambda: remove_nodes(graph, graph.nodes[:0:-1]))
        if edit == "insert":
            pairs = {node: [wire(f"{node.name}.w", shared)] for node in graph.nodes[1:]}
            return calls(lambda: insert_nodes(graph, before=pairs))
        if edit == "write":
            return calls(lambda: to_model(graph))
        graph.outputs = graph.outputs[:1]
        return calls(lambda: remove_unused(graph))

    assert work(4000) - work(2000) <= 2.1 * (work(2000) - work(1000)) + 10


def test_equal_looking_nodes_of_two_branches_are_told_apart() -> None:
    """GraphSurgeon compares nodes by content and would take the wrong one off the shared tensor."""
    body = "() => (float[4] u) { u = Neg(h) }"
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[4] x, bool c) => (float[4] y)
    {{ h = Relu(x) y = If (c) <then_branch = t {body}, else_branch = e {body}> }}"""
    graph = read_model(parser.parse_model(text))
    then, otherwise = (body.nodes[0] for body in graph.nodes[1].subgraphs())

    otherwise.inputs[0] = graph.inputs[0]

    assert graph.nodes[0].outputs[0].outputs == [then]
    assert then != otherwise
