from __future__ import annotations

import pytest
from onnx import helper

from onnxq.errors import ModelError
from onnxq.modelfile.schemas import check_arity


def test_nodes_with_all_that_they_need_pass() -> None:
    for node in (
        helper.make_node("MatMul", ["a", "b"], ["c"]),
        helper.make_node("Clip", ["a"], ["c"]),
        helper.make_node("Constant", [], ["c"]),
        helper.make_node("Concat", ["a"], ["c"]),
        helper.make_node("NoSuchOperator", [], []),
    ):
        check_arity(node, 17)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (helper.make_node("MatMul", ["a"], ["c"], "product"), "MatMul node 'product' has 1 inputs, expected 2 or more"),
        (helper.make_node("Relu", [], ["c"]), "a node Relu has 0 inputs, expected 1 or more"),
        (helper.make_node("Relu", ["a"], []), "a node Relu has 0 outputs, expected 1 or more"),
    ],
)
def test_nodes_with_less_are_refused(node, message: str) -> None:
    with pytest.raises(ModelError, match=f"^{message}; the model is damaged$"):
        check_arity(node, 17)


def test_what_an_operator_needs_depends_on_the_opset() -> None:
    squeeze = helper.make_node("Unsqueeze", ["a"], ["c"], axes=[0])
    check_arity(squeeze, 11)
    with pytest.raises(ModelError, match="Unsqueeze has 1 inputs, expected 2"):
        check_arity(squeeze, 13)
