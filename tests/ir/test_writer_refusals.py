"""Graphs that cannot be written are refused in a sentence."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

from ir.written_models import model
from onnxq.errors import ModelError
from onnxq.ir import Node, Variable, constant, read_model, to_model


def test_two_tensors_of_one_name_are_refused() -> None:
    graph = read_model(model())
    graph.nodes[0].inputs[1] = constant("v", np.ones((40, 40), np.float32))

    with pytest.raises(ModelError, match=r"graph 'g' has two tensors named 'v'; take new names from Names\.unique"):
        to_model(graph)


def test_a_node_may_not_make_a_tensor_of_a_taken_name() -> None:
    graph = read_model(model())
    graph.nodes.append(Node("Relu", "again", inputs=[graph.inputs[0]], outputs=[Variable("a")]))

    with pytest.raises(ModelError, match="Relu node 'again' makes 'a', but graph 'g' has a tensor of that name"):
        to_model(graph)


def test_a_tensor_that_nothing_produces_is_refused() -> None:
    graph = read_model(model())
    graph.nodes[0].name = "first"
    graph.nodes[0].inputs[0] = Variable("lost")

    with pytest.raises(ModelError, match="MatMul node 'first' reads the tensor 'lost', which nothing produces"):
        to_model(graph)


def test_a_tensor_of_another_branch_is_out_of_sight() -> None:
    graph = read_model(model())
    then, otherwise = graph.nodes[2].subgraphs()
    otherwise.nodes[0].inputs[1] = then.nodes[0].outputs[0]

    with pytest.raises(ModelError, match="reads the tensor 'p', which nothing produces where it could see it"):
        to_model(graph)


def test_a_hidden_tensor_is_refused() -> None:
    graph = read_model(model())
    then, _ = graph.nodes[2].subgraphs()
    then.nodes.insert(0, Node("Neg", "hides", inputs=[graph.inputs[0]], outputs=[Variable("b")]))

    with pytest.raises(ModelError, match="reads a tensor 'b', but another tensor of that name hides it"):
        to_model(graph)


def test_an_output_that_nothing_produces_is_refused() -> None:
    graph = read_model(model())
    graph.outputs.append(Variable("lost"))

    with pytest.raises(ModelError, match="the output list of graph 'g' reads the tensor 'lost'"):
        to_model(graph)


def test_an_attribute_that_onnx_cannot_store_is_refused() -> None:
    graph = read_model(model())
    graph.nodes[0].name = "first"
    graph.nodes[0].attrs["odd"] = object()

    with pytest.raises(ModelError, match="MatMul node 'first' has the attribute 'odd' with the value <object"):
        to_model(graph)


def test_documentation_that_is_no_text_is_refused_in_one_line() -> None:
    source = model()
    source.graph.node[0].doc_string = "MARK" * 2000
    graph = read_model(ModelProto.FromString(source.SerializeToString().replace(b"MARK", b"MA\xff\n")))
    graph.nodes[0].name = "another"

    with pytest.raises(ModelError, match="not UTF-8, such as") as caught:
        to_model(graph)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
