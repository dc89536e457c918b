from __future__ import annotations

from onnx import parser

from onnxq.ir import Graph, Names, Node, Variable, all_graphs, constant, owner_graphs, read_model

NESTED = """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x, bool c) => (float[4] y)
<float[4] w = {1, 2, 3, 4}> {
  [first] h = Relu(x)
  [outer] y = If (c) <
    then_branch = t () => (u) {
      [inner] u = If (c) <
        then_branch = tt () => (d) { [deep] d = Neg(h) },
        else_branch = te () => (m) <float[4] k = {1, 1, 1, 1}> { m = Add(k, w) }>
    },
    else_branch = e () => (v) { v = Abs(h) }>
  [second] unused = Constant <value = float[1] held {1}> ()
}"""


def nested() -> Graph:
    return read_model(parser.parse_model(NESTED))


def test_a_graph_comes_before_its_bodies_in_node_order() -> None:
    assert [scope.name for scope in all_graphs(nested())] == ["g", "t", "tt", "te", "e"]


def test_bodies_nested_deeper_than_the_stack_are_walked() -> None:
    graph = root = Graph(name="0")
    for depth in range(1, 3000):
        body = Graph(name=str(depth))
        graph.nodes.append(Node("If", f"if{depth}", {"then_branch": body}))
        graph = body

    assert [scope.name for scope in all_graphs(root)] == [str(depth) for depth in range(3000)]


def test_graphs_in_lists_are_bodies_too() -> None:
    graph = Graph(name="g", nodes=[Node("Custom", attrs={"bodies": [Graph(name="a"), Graph(name="b")]})])

    assert [scope.name for scope in all_graphs(graph)] == ["g", "a", "b"]


def test_every_node_belongs_to_the_graph_that_lists_it() -> None:
    owners = {node.name: scope.name for node, scope in owner_graphs(nested()).items() if node.name}

    assert owners == {"first": "g", "outer": "g", "second": "g", "inner": "t", "deep": "tt"}


def test_fresh_names_are_new_to_tensors_and_nodes_of_all_scopes() -> None:
    names = Names(nested())

    for taken in ("x", "c", "y", "w", "h", "first", "u", "inner", "deep", "d", "k", "held"):
        assert taken in names
        assert names.unique(taken) == f"{taken}.1"
    assert names.unique("w") == "w.2"
    assert names.unique("w.codes") == "w.codes"


def test_a_fresh_name_skips_numbers_that_are_taken() -> None:
    graph = Graph(inputs=[Variable("a"), Variable("a.1")], outputs=[constant("a.3", 1)])
    names = Names(graph)

    assert [names.unique("a"), names.unique("a")] == ["a.2", "a.4"]


def test_a_fresh_name_is_never_empty() -> None:
    assert Names(Graph()).unique("") == ".1"


def test_names_of_a_body_include_those_around_it() -> None:
    body = nested().nodes[1].subgraphs()[0].nodes[0].subgraphs()[0]

    assert Names(body).unique("w") == "w.1"
    assert Names(body).unique("v") == "v.1"
