"""Bytes to graphs: what is read, and what is refused with the place of the fault."""

from __future__ import annotations

import pytest
from onnx import ModelProto, TensorProto, helper
from small_models import model, small

from onnxq.errors import ModelError
from onnxq.ir import Graph, ProtoTensor, read_model
from onnxq.ir.deserialize import check_node, deserialize_graph


def parsed(text: str) -> Graph:
    return deserialize_graph(model(text).graph, {"": 17}, lambda proto: ProtoTensor(proto, None))


def test_every_stored_tensor_gets_its_payload_from_the_caller() -> None:
    made: list[str] = []

    def tensor_data(proto: TensorProto) -> ProtoTensor:
        made.append(proto.name)
        return ProtoTensor(proto, None)

    text = """g (bool c) => (float[1] y) <float[1] w = {1}>
    { y = If (c) <then_branch = t () => (u) { k = Constant <value = float[1] v {3}> () u = Add(k, w) },
                  else_branch = e () => (w) { }> }"""
    graph = deserialize_graph(model(text).graph, {"": 17}, tensor_data)
    assert made == ["w", "v"]
    assert graph.nodes[0].subgraphs()[1].outputs == graph.initializers


def test_what_was_unused_when_it_was_read_is_kept() -> None:
    graph = parsed("g (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}, float[1] s = {1}> { y = Add(x, w) }")
    assert {tensor.name: tensor.declared_unused for tensor in graph.initializers} == {"w": False, "s": True}


def test_bodies_read_the_tensors_around_them() -> None:
    graph = parsed(
        """g (float[4] x, bool c) => (float[4] y) <float[4] w = {1, 2, 3, 4}> {
            h = Relu(x)
            y = If (c) <then_branch = t () => (u) { u = Add(h, w) }, else_branch = e () => (v) { v = Neg(h) }>
            }"""
    )
    then, otherwise = graph.nodes[1].subgraphs()

    assert (then.parent, otherwise.parent) == (graph, graph)
    assert then.nodes[0].inputs == [graph.nodes[0].outputs[0], graph.initializers[0]]
    assert graph.nodes[0].outputs[0].outputs == [then.nodes[0], otherwise.nodes[0]]
    assert then.opset == 17


def test_a_local_tensor_hides_an_outer_one_of_its_name() -> None:
    graph = parsed(
        """g (float[4] x, bool c) => (float[4] y) {
            h = Relu(x)
            y = If (c) <then_branch = t () => (u) { h = Neg(x) u = Abs(h) }, else_branch = e () => (v) { v = Neg(h) }>
            }"""
    )
    then, otherwise = graph.nodes[1].subgraphs()

    assert then.nodes[1].inputs[0] is then.nodes[0].outputs[0]
    assert otherwise.nodes[0].inputs[0] is graph.nodes[0].outputs[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "g (float[4] x) => (float[4] y) { [adder] y = Add(x, lost) }",
            "Add node 'adder' reads the tensor 'lost', which nothing produces",
        ),
        (
            "g (float[4] x) => (float[4] y) { y = Add(x, lost) }",
            r"the Add node that makes \['y'\] reads the tensor 'lost'",
        ),
        ("g (float[4] x) => (float[4] lost) { y = Relu(x) }", "nothing produces 'lost', an output of graph 'g'"),
        (
            "g (float[4] x) => (float[4] y) { y = Relu(x) [again] y = Neg(x) }",
            "declares the tensor 'y' twice, the second time as an output of Neg node 'again'",
        ),
        ("g (float[4] x) => (float[4] x) { x = Relu(x) }", "declares the tensor 'x' twice"),
        (
            "g (float[4] x) => (float[4] y) <float[1] w = {1}> { w = Relu(x) y = Add(x, w) }",
            "declares the tensor 'w' twice",
        ),
        ("g (float[4] x, float[4] x) => (float[4] y) { y = Relu(x) }", "'x' twice, the second time as an input"),
        (
            "g (float[4] x) => (float[4] c) { [one] a = Add(x, b) [two] b = Relu(a) [three] c = Neg(b) }",
            "graph 'g' has a cycle through the nodes one -> two; it cannot be executed",
        ),
        (
            """g (bool c) => (float[4] y)
            { [if] y = If (c) <then_branch = t () => (u) { u = Neg(y) }, else_branch = e () => (v) { v = Abs(y) }> }""",
            "cycle through the nodes if;",
        ),
        (
            """g (bool c) => (float[4] y)
            { y = If (c) <then_branch = t () => (u) { [in] u = Neg(z) }, else_branch = e () => (z) { z = Abs(c) }> }""",
            "Neg node 'in' reads the tensor 'z'",
        ),
    ],
)
def test_a_graph_that_cannot_be_executed_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model(model(text))


@pytest.mark.parametrize(("old", "new"), [(b"Add", b"\xff\xfe\xfd"), (b"\x01x", b"\x01\xff"), (b"\x01w", b"\x01\xff")])
def test_names_that_are_no_text_are_refused(old: bytes, new: bytes) -> None:
    broken = ModelProto.FromString(small().SerializeToString().replace(old, new))

    with pytest.raises(ModelError, match="not UTF-8"):
        read_model(broken)


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("MatMul", ["a", "b"], ["c"]),
        helper.make_node("Clip", ["a"], ["c"]),
        helper.make_node("Clip", ["a", "", "b"], ["c"]),
        helper.make_node("Constant", [], ["c"]),
        helper.make_node("Concat", ["a"] * 40, ["c"], axis=0),
        helper.make_node("GRU", ["a", "w", "r"], ["", "h"]),
        helper.make_node("Loop", ["", "", "s"], ["c"], body=helper.make_graph([], "b", [], [])),
        helper.make_node("NoSuchOperator", [], []),
    ],
    ids=lambda node: node.op_type,
)
def test_nodes_with_all_that_they_need_pass(node) -> None:
    check_node(node, 17)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (helper.make_node("MatMul", ["a"], ["c"], "product"), "MatMul node 'product' has 1 inputs, expected 2"),
        (helper.make_node("Relu", [], ["c"]), "a node Relu has 0 inputs, expected 1"),
        (helper.make_node("Relu", ["a"], []), "a node Relu has 0 outputs, expected 1"),
        (helper.make_node("Concat", [], ["c"]), "a node Concat has 0 inputs, expected 1 or more"),
        (helper.make_node("Add", ["a", "b", "a"], ["c"]), "a node Add has 3 inputs, expected 2"),
        (helper.make_node("Conv", ["a"] * 4, ["c"]), "a node Conv has 4 inputs, expected 2 to 3"),
        (helper.make_node("Relu", ["a"], ["b", "c"]), "a node Relu has 2 outputs, expected 1"),
        (helper.make_node("MatMul", ["a", ""], ["c"]), "a node MatMul lacks input 1, which is required"),
        (helper.make_node("Relu", ["a"], [""]), "a node Relu lacks output 0, which is required"),
        (helper.make_node("Cast", ["a"], ["b"]), "a node Cast lacks the attribute 'to', which is required"),
        (
            helper.make_node("Gemm", ["a", "b"], ["c"], "g", transB="yes"),
            "Gemm node 'g' has the attribute 'transB' of type string, expected int",
        ),
        (
            helper.make_node("Conv", ["a", "b"], ["c"], pads=1),
            "a node Conv has the attribute 'pads' of type int, expected ints",
        ),
    ],
)
def test_nodes_with_what_their_operator_cannot_have_are_refused(node, message: str) -> None:
    with pytest.raises(ModelError, match=f"^{message}; the model is damaged$"):
        check_node(node, 17)


def test_what_an_operator_needs_depends_on_the_opset() -> None:
    squeeze = helper.make_node("Unsqueeze", ["a"], ["c"], axes=[0])
    check_node(squeeze, 11)
    with pytest.raises(ModelError, match="Unsqueeze has 1 inputs, expected 2"):
        check_node(squeeze, 13)
