"""New nodes: names, types, constants and inputs that are left out."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import model

from onnxq.ir import Constant, Graph, Names, Node, Variable, as_graph
from onnxq.rewrite import Match, RewriteContext


@pytest.fixture
def graph() -> Graph:
    return as_graph(model("g (float[2, 4] x) => (float[2, 4] y) { [a] y = Neg(x) }"))


@pytest.fixture
def new(graph: Graph) -> RewriteContext:
    return RewriteContext(graph, Names(graph), Match(graph.nodes[0], (graph.nodes[0],), 17, {}))


def test_a_new_node_is_named_after_the_old_and_its_output_has_a_type(graph: Graph, new: RewriteContext) -> None:
    made = new.Transpose(graph.inputs[0], perm=[1, 0])
    assert (made.dtype, made.shape) == (np.float32, [4, 2])
    assert [(node.op, node.name, node.attrs) for node in new.nodes] == [("Transpose", "a.Transpose", {"perm": [1, 0]})]
    new.Transpose(graph.inputs[0])
    assert new.nodes[1].name == "a.Transpose.1"


@pytest.mark.parametrize(("value", "dtype"), [(2, np.float32), (0.5, np.float32), (np.ones(4), np.float32)])
def test_numbers_become_constants_of_the_type_beside_them(
    graph: Graph, new: RewriteContext, value: object, dtype: type
) -> None:
    new.Mul(graph.inputs[0], value)
    operand = new.nodes[0].inputs[1]
    assert isinstance(operand, Constant)
    assert operand.dtype == dtype


def test_whole_numbers_in_arrays_stay_such(graph: Graph, new: RewriteContext) -> None:
    new.Reshape(graph.inputs[0], np.array([8]))
    assert new.nodes[0].inputs[1].dtype == np.int64
    assert new.nodes[0].outputs[0].shape == [8]


def test_an_empty_list_holds_whole_numbers(graph: Graph, new: RewriteContext) -> None:
    assert new.constant([]).dtype == np.int64


def test_none_leaves_an_input_or_attribute_out(graph: Graph, new: RewriteContext) -> None:
    new.Clip(graph.inputs[0], None, 6.0)
    new.Softmax(graph.inputs[0], axis=None)
    assert [tensor.name for tensor in new.nodes[0].inputs[:2]] == ["x", ""]
    assert new.nodes[1].attrs == {}


def test_several_outputs_are_a_tuple(graph: Graph, new: RewriteContext) -> None:
    first, second = new.Split(graph.inputs[0], outputs=2, axis=1)
    assert first.shape == second.shape == [2, 2]


def test_like_keeps_operator_name_and_attributes(graph: Graph, new: RewriteContext) -> None:
    old = Node("Softmax", "soft", {"axis": 0}, outputs=[Variable("z")], domain="")
    new.like(old, graph.inputs[0])
    new.like(old, graph.inputs[0], axis=None)
    assert [(node.op, node.name, node.attrs) for node in new.nodes] == [
        ("Softmax", "soft", {"axis": 0}),
        ("Softmax", "soft", {}),
    ]


def test_a_node_that_is_named_after_another_is_remembered(graph: Graph, new: RewriteContext) -> None:
    old = Node("MatMul", "product")
    made = new.named(old, new.Neg(graph.inputs[0]))
    assert new.named_after == {made.inputs[0]: old}


def test_operators_of_other_domains(graph: Graph, new: RewriteContext) -> None:
    new.call("com.microsoft", "Gelu", graph.inputs[0])
    assert (new.nodes[0].domain, new.nodes[0].op) == ("com.microsoft", "Gelu")


def test_an_ill_typed_node_is_told(graph: Graph, new: RewriteContext) -> None:
    with pytest.raises(ValueError, match="Incompatible dimensions"):
        new.MatMul(graph.inputs[0], np.zeros((3, 3), np.float32))


def test_numbers_beside_data_of_unknown_type_are_like_the_constants_that_were_matched(graph: Graph) -> None:
    scale = Node("Mul", "m", inputs=[graph.inputs[0], Constant("half", np.array(0.5, np.float16))])
    new = RewriteContext(graph, Names(graph), Match(graph.nodes[0], (graph.nodes[0], scale), 17, {}))
    new.Div(Variable("unknown"), 1.5)
    assert new.nodes[0].inputs[1].dtype == np.float16
