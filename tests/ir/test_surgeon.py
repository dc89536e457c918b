from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from onnx import numpy_helper, parser
from onnx_graphsurgeon.ir.tensor import LazyValues
from plain_graphs import MODEL, plain, run

from onnxq.errors import ModelError
from onnxq.ir import (
    Constant,
    Graph,
    Node,
    Variable,
    read_model,
    remove_unused,
    restore_classes,
    to_model,
)


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
    with pytest.raises(ModelError, match="convert it with from_graphsurgeon"):
        restore_classes(plain())
