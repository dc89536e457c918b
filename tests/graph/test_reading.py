"""What is read off a graph."""

from __future__ import annotations

from onnx import ModelProto, helper

from onnxq.graph import is_fixed
from onnxq.modelfile import as_graph


def test_an_initializer_that_a_caller_may_feed_is_not_fixed(build: object) -> None:
    model: ModelProto = build("(float[2] x) => (float[2] y) { a = Add(x, w) y = Mul(a, v) }", w=(2,), v=(2,))  # type: ignore[operator]
    model.graph.input.append(helper.make_tensor_value_info("w", 1, [2]))
    add, multiply = as_graph(model).nodes
    assert not is_fixed(add.inputs[1])
    assert is_fixed(multiply.inputs[1])
    assert not is_fixed(add.inputs[0])
