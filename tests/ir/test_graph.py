"""Copies of graphs: equal as files, and independent."""

from __future__ import annotations

import copy

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from onnx import ModelProto, helper, numpy_helper, parser
from onnx_graphsurgeon.ir.tensor import LazyValues
from plain_graphs import MODEL, plain, run
from small_models import BRANCHING, branching, model

from onnxq.errors import ModelError
from onnxq.ir import (
    Constant,
    Graph,
    Node,
    Variable,
    constants,
    read_model,
    remove_unused,
    restore_classes,
    to_model,
)


def test_a_copied_graph_is_independent_and_shares_values() -> None:
    original = branching()
    original.nodes[0].attrs["list"] = [1, 2]

    twin = original.copy()
    twin.set_metadata("key", "value")
    twin.nodes[0].attrs["list"].append(3)
    twin.nodes[0].name = "changed"
    twin.nodes[1].subgraphs()[0].nodes.clear()
    twin.opset = 21

    assert (original.nodes[0].name, original.nodes[0].attrs["list"], original.opset) == ("scale", [1, 2], 17)
    assert original.metadata == {}
    assert len(original.nodes[1].subgraphs()[0].nodes) == 1
    assert twin.initializers[0] is not original.initializers[0]
    assert twin.initializers[0].tensor_data is original.initializers[0].tensor_data


def test_tensors_know_the_graphs_that_return_them() -> None:
    main = branching()
    body = main.nodes[1].subgraphs()[1]
    hidden, output = main.nodes[0].outputs[0], main.outputs[0]

    assert (hidden.graph_output_of, output.graph_output_of) == ([body], [main])
    main.outputs.append(hidden)
    assert hidden.graph_output_of == [body, main]
    main.outputs[0] = hidden
    assert (hidden.graph_output_of, output.graph_output_of) == ([body, main, main], [])
    del main.outputs[0]
    main.outputs[:] = [output]
    assert (hidden.graph_output_of, output.graph_output_of) == ([body], [main])
    main.outputs = [hidden, output]
    main.outputs += [main.inputs[0]]
    assert [tensor.name for tensor in main.outputs] == ["h", "y", "x"]
    main.outputs.pop()
    main.outputs.remove(hidden)
    assert (hidden.graph_output_of, output.graph_output_of) == ([body], [main])


def test_changing_the_opset_of_the_model_changes_that_of_its_bodies() -> None:
    main = branching()
    main.opset = 21

    assert main.nodes[1].subgraphs()[0].opset == 21
    assert [(entry.domain, entry.version) for entry in main.import_domains] == [("", 21)]


def test_a_graph_is_a_few_lines() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float x) => (float y) { a = Neg(x) b = Neg(a) y = Abs(b) }"""
    main = read_model(parser.parse_model(text))

    assert repr(main).splitlines() == [
        "Graph g (Opset 17)",
        "Inputs: Variable (x): (shape=[], dtype=float32)",
        "Nodes: 3, 2 Neg, 1 Abs",
        "Outputs: Variable (y): (shape=[], dtype=float32)",
    ]
    main.inputs *= 60
    assert repr(main).splitlines()[1].endswith(", and 52 more")
    assert len(repr(branching())) < 500


def test_cleanup_never_shifts_the_outputs_of_a_node() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[2] b) { a, b = Split(x) z = Neg(x) }"""
    main = read_model(parser.parse_model(text))

    main.cleanup(remove_unused_node_outputs=True)

    assert [node.op for node in main.nodes] == ["Split"]
    assert [tensor.name for tensor in main.nodes[0].outputs] == ["a", "b"]


def test_functions_are_carried_as_protos_through_cleanup() -> None:
    source = model(BRANCHING)
    node = helper.make_node("Relu", ["p"], ["q"])
    source.functions.append(helper.make_function("local", "f", ["p"], ["q"], [node], [helper.make_opsetid("", 17)]))
    main = read_model(source)

    assert [function.name for function in main.cleanup().functions] == ["f"]
    assert to_model(main) == source
    main.functions = []
    assert not to_model(main).functions


def test_assigned_values_are_written() -> None:
    main = branching()
    main.initializers[0].values = np.zeros((2, 2), np.float16)

    assert to_model(main).graph.initializer[0] == numpy_helper.from_array(np.zeros((2, 2), np.float16), "w")


def test_setting_metadata_leaves_the_other_entries_as_they_are() -> None:
    source = model(BRANCHING)
    source.metadata_props.add(key="author", value="somebody")
    damaged = ModelProto.FromString(source.SerializeToString().replace(b"somebody", b"some\xffody"))
    graph = read_model(damaged)
    graph.set_metadata("tool", "one")
    graph.set_metadata("tool", "two")
    written = to_model(graph)
    assert [entry.key for entry in written.metadata_props] == ["author", "tool"]
    assert written.metadata_props[1].value == "two"
    assert b"some\xffody" in written.SerializeToString()


# Copies of graphs: equal as files, and independent.


def test_nothing_but_values_is_shared_and_nodes_stand_for_the_same(residual: ModelProto) -> None:
    graph = read_model(residual)
    graph.nodes[0].origins = (("m", "MatMul"), ("a", "Add"))
    twin = graph.copy()
    tensors = {tensor for node in graph.nodes for tensor in (*node.inputs, *node.outputs)}
    assert not tensors & {tensor for node in twin.nodes for tensor in (*node.inputs, *node.outputs)}
    assert not set(graph.nodes) & set(twin.nodes)
    pairs = zip(constants(graph), constants(twin), strict=True)
    assert all(before.tensor_data is after.tensor_data for before, after in pairs)
    assert [node.origins for node in twin.nodes] == [node.origins for node in graph.nodes]


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


@pytest.mark.parametrize("name", ["doc_string", "name", "producer_name"])
def test_fields_of_the_model_are_kept(name: str) -> None:
    graph = branching()
    setattr(graph, name, "told")
    assert getattr(graph.copy(), name) == "told"


def test_a_pass_written_for_plain_graphsurgeon_works_on_our_graphs() -> None:
    graph = read_model(parser.parse_model(MODEL))

    doubled = gs.Variable("doubled", np.float32)
    two = gs.Constant("two", np.float32([2]))
    graph.nodes.insert(0, gs.Node("Mul", "double", inputs=[graph.inputs[0], two], outputs=[doubled]))
    graph.nodes[1].inputs[0] = doubled
    graph.cleanup().toposort()

    np.testing.assert_array_equal(run(to_model(graph), True), [[3, 6, 9, 12]])


def test_stock_objects_take_our_classes_in_place() -> None:
    graph = read_model(parser.parse_model(MODEL))
    node = gs.Node("Mul", "m", {"t": gs.Constant("", np.zeros(1))}, [graph.inputs[0]], [gs.Variable("z")])
    detached = gs.Node("Neg", "detached", inputs=[graph.inputs[0]], outputs=[gs.Variable("lost")])
    graph.nodes.append(node)
    graph.outputs.append(gs.Constant("k", np.zeros(1)))
    graph.nodes[0].inputs[1] = gs.Constant("lazy", LazyValues(numpy_helper.from_array(np.zeros(4, np.float32), "l")))

    assert restore_classes(graph) is graph

    assert [type(item) for item in (node, detached, node.outputs[0])] == [Node, Node, Variable]
    constants = (node.attrs["t"], graph.outputs[1], graph.nodes[0].inputs[1])
    assert [type(item) for item in constants] == [Constant] * 3
    assert [item.tensor_data.shape for item in constants] == [(1,), (1,), (4,)]
    remove_unused(graph)
    assert [node.name for node in graph.nodes] == ["scale", "branch"]


def test_a_body_made_by_hand_belongs_to_the_graph_around_it() -> None:
    graph = read_model(parser.parse_model(MODEL))
    z = Variable("z", np.float32)
    body = Graph([Node("Neg", inputs=[graph.inputs[0]], outputs=[z])], outputs=[z], name="made")
    graph.nodes[1].attrs["else_branch"] = body

    np.testing.assert_array_equal(run(to_model(graph), False), [[-1, -1, -1, -1]])
    assert (body.parent, body.opset) == (graph, 17)


def test_plain_graphs_inside_ours_are_refused() -> None:
    graph = read_model(parser.parse_model(MODEL))
    graph.nodes[1].attrs["else_branch"] = gs.Graph(name="plain")

    with pytest.raises(ModelError, match=r"'else_branch' of node 'branch' is a plain GraphSurgeon graph; make it from"):
        to_model(graph)
    with pytest.raises(ModelError, match=r"convert it with onnxq.ir.as_graph"):
        restore_classes(plain())
