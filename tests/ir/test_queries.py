"""Questions to a graph: subgraphs, names, producers and consumers, origins."""

from __future__ import annotations

from onnx import ModelProto, helper, parser
from small_models import BRANCHING, model

from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Variable,
    all_graphs,
    all_nodes,
    as_graph,
    constant,
    is_constant,
    join_origins,
    operator_key,
    optional_input,
    origins_by_name,
    owner_graphs,
    producer,
    read_model,
    restore_origins,
    sole_consumer,
)

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


# The words in which graphs are read.

MODEL = """(float[4] x, bool c) => (float[4] y, float[4] z) <float[4] w = {1, 2, 3, 4}> {
  [first] a = Mul (x, w)
  [second] b = Mul (a, a)
  [third] z = Relu (b)
  [last] y = If (c) <
    then_branch = t () => (float[4] u) { [inner] u = Clip (z, , w) },
    else_branch = e () => (float[4] v) { [other] v = Identity (w) }>
}
"""


def test_a_tensor_knows_its_producer_and_its_only_reader(build) -> None:
    graph = read_model(build(MODEL))
    named = {node.name: node for _, node in all_nodes(graph)}
    fed, product, square, returned = (named[name].inputs[0] for name in ("first", "second", "third", "inner"))
    assert [producer(tensor) for tensor in (fed, product)] == [None, named["first"]]
    assert sole_consumer(fed) is named["first"]
    assert sole_consumer(product) is None, "it is read twice"
    assert sole_consumer(square) is named["third"]
    assert sole_consumer(returned) is None, "a graph returns it besides"
    assert producer(named["first"].inputs[1]) is None


def test_inputs_that_are_left_out_are_none(build) -> None:
    clip = next(node for _, node in all_nodes(read_model(build(MODEL))) if node.name == "inner")
    assert [optional_input(clip, index) is None for index in range(4)] == [False, True, False, True]
    assert isinstance(optional_input(clip, 2), Constant)


def test_nodes_come_with_the_graph_that_lists_them(build) -> None:
    graph = read_model(build(MODEL))
    found = [(scope.name, node.name) for scope, node in all_nodes(graph)]
    assert found[:4] == [("main", "first"), ("main", "second"), ("main", "third"), ("main", "last")]
    assert found[4:] == [("t", "inner"), ("e", "other")]


def test_an_operator_has_a_domain_however_that_is_written(build) -> None:
    graph = read_model(build(MODEL))
    first, second, third, _ = graph.nodes
    first.domain, second.domain, third.domain = "ai.onnx", "com.microsoft", None
    assert [operator_key(node) for node in (first, second, third)] == [
        ("", "Mul"),
        ("com.microsoft", "Mul"),
        ("", "Relu"),
    ]


def test_an_initializer_that_a_caller_may_feed_is_not_fixed(build: object) -> None:
    model: ModelProto = build("(float[2] x) => (float[2] y) { a = Add(x, w) y = Mul(a, v) }", w=(2,), v=(2,))  # type: ignore[operator]
    model.graph.input.append(helper.make_tensor_value_info("w", 1, [2]))
    add, multiply = as_graph(model).nodes
    assert not is_constant(add.inputs[1])
    assert is_constant(multiply.inputs[1])
    assert not is_constant(add.inputs[0])


# Origins: joined in order, each once, and put back on nodes that were read again.


def fused(*origins: tuple[str, str]) -> Node:
    node = Node("Gemm", "g")
    node.origins = origins
    return node


def test_a_node_that_stands_for_others_is_none_of_the_model_itself() -> None:
    both = fused(("m", "MatMul"), ("a", "Add"))
    assert join_origins((Node("Relu", "r"), both, both)) == (("r", "Relu"), ("m", "MatMul"), ("a", "Add"))


def test_of_very_many_the_first_are_kept() -> None:
    long = join_origins([Node("Neg", f"n{index}") for index in range(1000)])
    assert long[0] == ("n0", "Neg")
    assert len(long) < 100
    assert join_origins((fused(*long), Node("Neg", "last"))) == long


def test_origins_come_back_by_name_in_bodies_too() -> None:
    named = BRANCHING.replace("u = Add", "[inner] u = Add")
    graph, again = read_model(model(named)), read_model(model(named))
    for _, node in all_nodes(graph):
        node.origins = ((f"before {node.name}", node.op),)
    restore_origins(again, origins_by_name(graph))
    assert {node.name: node.origins for _, node in all_nodes(again)} == {
        "scale": (("before scale", "Mul"),),
        "branch": (("before branch", "If"),),
        "inner": (("before inner", "Add"),),
    }
