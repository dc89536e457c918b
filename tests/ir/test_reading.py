"""The words in which graphs are read."""

from __future__ import annotations

from onnx import ModelProto, helper

from onnxq.ir import (
    Constant,
    all_nodes,
    as_graph,
    is_constant,
    operator_key,
    optional_input,
    producer,
    read_model,
    sole_consumer,
)

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
