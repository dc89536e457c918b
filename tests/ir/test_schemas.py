from __future__ import annotations

import pytest
from onnx import helper

from onnxq.errors import ModelError
from onnxq.ir.deserialize import check_node


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
