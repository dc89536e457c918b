from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import parser

from onnxq.errors import ModelError
from onnxq.ir import Graph, Node, Variable, read_model, toposort


def chain(length: int) -> Graph:
    tensors = [Variable(f"t{index}") for index in range(length + 1)]
    nodes = [
        Node("Relu", f"n{index}", inputs=[tensors[index]], outputs=[tensors[index + 1]]) for index in range(length)
    ]
    return Graph(nodes, tensors[:1], tensors[-1:])


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_a_reversed_chain_of_5000_nodes_is_put_in_order() -> None:
    graph = chain(5000)
    graph.nodes.reverse()

    assert graph.toposort() is graph
    assert names(graph) == [f"n{index}" for index in range(5000)]


@given(st.integers(1, 25), st.integers(0, 2**32))
def test_every_node_follows_its_producers_and_sorting_again_changes_nothing(size: int, seed: int) -> None:
    rng = random.Random(seed)
    tensors = [Variable("x")]
    nodes = []
    for index in range(size):
        output = Variable(f"t{index}")
        nodes.append(Node("Sum", f"n{index}", inputs=rng.choices(tensors, k=rng.randint(1, 3)), outputs=[output]))
        tensors.append(output)
    graph = Graph(nodes, tensors[:1], tensors[-1:])
    toposort(graph)
    assert graph.nodes == nodes, "an order of execution is left alone"
    rng.shuffle(graph.nodes)

    toposort(graph)

    made = {tensors[0]}
    for node in graph.nodes:
        assert made.issuperset(node.inputs)
        made.update(node.outputs)
    once = list(graph.nodes)
    toposort(graph)
    assert graph.nodes == once
    assert set(once) == set(nodes)


def test_a_node_follows_what_its_bodies_read() -> None:
    graph = read_model(
        parser.parse_model(
            """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x, bool c) => (float[4] y) {
            [branch] y = If (c) <
              then_branch = t () => (u) {
                [inner] u = If (c) <then_branch = tt () => (d) { d = Neg(late) }, else_branch = te () => (late2) { }>
              },
              else_branch = e () => (v) { [second] v = Abs(w) [first] w = Neg(x) }>
            [producer2] late2 = Abs(x)
            [producer] late = Relu(x)
            }"""
        )
    )

    assert names(graph) == ["producer2", "producer", "branch"]
    assert names(graph.nodes[2].subgraphs()[1]) == ["first", "second"]


def test_a_cycle_is_named_and_long_ones_are_shortened() -> None:
    graph = chain(30)
    graph.nodes[10].inputs[0] = graph.nodes[20].outputs[0]

    with pytest.raises(ModelError, match=r"cycle through the nodes n10 -> n11 -> n12 -> n13 and 7 more;"):
        toposort(graph)
