"""NameTensors gives every tensor of all graphs a name of its own and changes no name that is one."""

from __future__ import annotations

import numpy as np
from model_texts import apply_once, difference, model, nodes, outputs, sample, values
from onnx import ModelProto, helper, numpy_helper

from onnxq.ir import Graph, all_graphs, as_graph, to_model
from onnxq.passes import NameTensors
from onnxq.rewrite import Changes

ALIKE = """g (float[4,8] x, bool c) => (float[4,8] y) {
    h = MatMul(x, w)
    y = If (c) <
        then_branch = t () => (float[4,8] y) { a = Neg(h) b = MatMul(a, w) y = Tanh(b) },
        else_branch = e () => (float[4,8] y) { a = Abs(h) b = MatMul(a, w) y = Sin(b) }>
}"""


def tensor_names(graph: Graph) -> list[str]:
    """The names of what all graphs are given, store and make, each tensor once."""
    found = {
        tensor: tensor.name
        for scope in all_graphs(graph)
        for tensor in (*scope.inputs, *scope.initializers, *(one for node in scope.nodes for one in node.outputs))
    }
    return [name for name in found.values() if name]


def test_the_first_graph_keeps_a_name_and_readers_follow() -> None:
    made = model(ALIKE, w=values(8, 8))
    graph = as_graph(made)
    assert apply_once(NameTensors(), graph) == Changes(("y.1", "a.1", "b.1", "y.2"))
    assert tensor_names(graph) == ["x", "c", "w", "h", "y", "a", "b", "y.1", "a.1", "b.1", "y.2"]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0


def test_declared_types_go_with_their_tensors() -> None:
    made = model(ALIKE, w=values(8, 8))
    for attribute in made.graph.node[1].attribute:
        attribute.g.value_info.append(helper.make_tensor_value_info("a", 1, [4, 8]))
    graph = as_graph(made)
    NameTensors().apply(graph)
    bodies = {attribute.name: attribute.g for attribute in to_model(graph).graph.node[1].attribute}
    assert [info.name for info in bodies["then_branch"].value_info] == ["a"]
    assert [info.name for info in bodies["else_branch"].value_info] == ["a.1"]
    assert bodies["else_branch"].output[0].name == "y.2"


def shadowing() -> ModelProto:
    """A Loop whose state is called like an input outside, and whose constant like one of the other body."""
    made = model(
        """g (float[4] s, int64 m, bool c) => (float[4] y) {
            t = Loop (m, , s) <body = b (int64 i, bool g, float[4] s) => (bool h, float[4] u) {
                h = Identity(g) u = Mul(s, k) }>
            y = If (c) <
                then_branch = p () => (float[4] u) { u = Sub(t, k) },
                else_branch = e () => (float[4] u) { u = Add(t, s) }>
        }"""
    )
    loop, branch = made.graph.node
    for body, number in ((loop.attribute[0].g, 0.5), (branch.attribute[0].g, 3.0)):
        body.initializer.append(numpy_helper.from_array(np.full(4, number, np.float32), "k"))
    return made


def test_inputs_and_constants_of_bodies_hide_nothing_outside_any_longer() -> None:
    made = shadowing()
    graph = as_graph(made)
    changes = apply_once(NameTensors(), graph)
    assert set(changes.changed) == {"s.1", "k.1", "u.1", "u.2"}
    assert len(set(tensor_names(graph))) == len(tensor_names(graph))
    assert [tensor.name for tensor in graph.inputs] == ["s", "m", "c"]
    assert [node.inputs[1].name for node in nodes(graph) if node.op == "Add"] == ["s"]
    inputs = {"s": np.float32([1, 2, 3, 4]), "m": np.array(2), "c": np.array(True)}
    for inputs["c"] in (np.array(True), np.array(False)):
        assert difference(outputs(graph, inputs), outputs(made, inputs)) == 0


def test_unique_names_and_those_of_the_main_graph_stay() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { y = Add(x, k) }", k=values(4)))
    assert not NameTensors().apply(graph)
