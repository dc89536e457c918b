"""Copies of graphs: equal as files, and independent."""

from __future__ import annotations

import copy

import pytest
from onnx import ModelProto
from small_models import BRANCHING, branching, model

from onnxq.ir import Constant, Graph, Variable, all_graphs, constants, read_model, to_model


def test_a_copy_is_written_as_the_same_model() -> None:
    graph = branching()
    assert to_model(graph.copy()).SerializeToString() == to_model(graph).SerializeToString() != b""


def test_nothing_but_values_is_shared(residual: ModelProto) -> None:
    graph = read_model(residual)
    twin = graph.copy()
    tensors = {tensor for node in graph.nodes for tensor in (*node.inputs, *node.outputs)}
    assert not tensors & {tensor for node in twin.nodes for tensor in (*node.inputs, *node.outputs)}
    assert not set(graph.nodes) & set(twin.nodes)
    pairs = zip(constants(graph), constants(twin), strict=True)
    assert all(before.tensor_data is after.tensor_data for before, after in pairs)


def test_nodes_of_a_copy_stand_for_the_same(residual: ModelProto) -> None:
    graph = read_model(residual)
    graph.nodes[0].origins = (("m", "MatMul"), ("a", "Add"))
    assert [node.origins for node in graph.copy().nodes] == [node.origins for node in graph.nodes]


def test_editing_a_copy_changes_neither_the_graph_nor_its_metadata() -> None:
    graph = branching()
    before = to_model(graph).SerializeToString()
    twin = graph.copy()
    twin.set_metadata("key", "value")
    twin.opset = 21
    for scope in all_graphs(twin):
        for node in scope.nodes:
            node.op = "Gone"
            node.inputs.clear()
    assert to_model(graph).SerializeToString() == before
    assert graph.metadata == {}


def test_deepcopy_is_a_copy() -> None:
    graph = read_model(model(BRANCHING))
    twin = copy.deepcopy(graph)
    assert isinstance(twin, Graph)
    assert to_model(twin).SerializeToString() == to_model(graph).SerializeToString()


def test_a_body_that_is_copied_alone_reads_what_it_read(build) -> None:
    whole = build("""(float[2] x, bool c) => (float[2] y) {
        h = Neg(x)
        y = If (c) <then_branch = t () => (u) { i = Exp(h) u = Abs(i) }, else_branch = e () => (v) { v = Neg(h) }>
    }""")
    graph = read_model(whole)
    body = graph.nodes[1].subgraphs()[0]
    twin = body.copy()
    assert twin.nodes[0].inputs[0] is graph.nodes[0].outputs[0]
    assert twin.nodes[0].outputs[0] is not body.nodes[0].outputs[0]
    assert twin.nodes[1].inputs[0] is twin.nodes[0].outputs[0]


def test_an_overridable_initializer_stays_one(build) -> None:
    proto = build("(float[2] x, float[2] w) => (float[2] y) { y = Add(x, w) }", w=(2,))
    graph = read_model(proto)
    twin = graph.copy()
    (stored,) = twin.initializers
    assert isinstance(stored, Constant)
    assert stored.overridable_input is not None
    assert [type(tensor) for tensor in twin.inputs] == [Variable]
    assert to_model(twin).SerializeToString() == to_model(graph).SerializeToString()


@pytest.mark.parametrize("name", ["doc_string", "name", "producer_name"])
def test_fields_of_the_model_are_kept(name: str) -> None:
    graph = branching()
    setattr(graph, name, "told")
    assert getattr(graph.copy(), name) == "told"
