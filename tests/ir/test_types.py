"""Types of new nodes."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.ir import (
    Node,
    Variable,
    constant,
    forget_types,
    inner_variables,
    read_model,
    types_to_declare,
)
from onnxq.ir.type_inference import infer_types
from onnxq.onnx_api import infer_shapes


def made_by(op_type: str, *inputs: object, domain: str = "", **attributes: object) -> Variable:
    output = Variable("y")
    infer_types(Node(op_type, "n", attributes, list(inputs), [output], domain), {"": 17})
    return output


def test_dtype_and_shape_follow_from_the_inputs() -> None:
    made = made_by("MatMul", Variable("a", np.float32, ["N", 4]), constant("b", np.zeros((4, 3), np.float32)))
    assert (made.dtype, made.shape) == (np.float32, ["N", 3])


def test_small_constants_are_read() -> None:
    made = made_by("Reshape", Variable("a", np.float16, [2, 6]), constant("s", np.array([3, 4])))
    assert (made.dtype, made.shape) == (np.float16, [3, 4])


@pytest.mark.parametrize(("op_type", "domain"), [("Gelu", "com.microsoft"), ("Nothing", "")])
def test_operators_that_onnx_does_not_know_stay_open(op_type: str, domain: str) -> None:
    assert made_by(op_type, Variable("a", np.float32, [2]), domain=domain).dtype is None


def test_inputs_of_unknown_type_leave_it_open() -> None:
    assert made_by("Neg", Variable("a")).dtype is None
    assert made_by("Neg", Variable("a", np.float32)).shape is None


def test_an_ill_typed_node_is_told() -> None:
    with pytest.raises(ValueError, match="Incompatible dimensions"):
        made_by("MatMul", Variable("a", np.float32, [2, 5]), constant("b", np.zeros((4, 3), np.float32)))
    with pytest.raises(ValueError, match="it has 1 inputs, expected 2 to 2"):
        made_by("MatMul", Variable("a", np.float32, [2, 5]))


def test_types_that_a_runtime_finds_out_are_forgotten(build) -> None:
    model = build("""(float[N, S, 6] x) => (float[N, 3, S, 2] y) {
        a = Relu(x)
        target = Constant<value_ints=[0, -1, 3, 2]>()
        b = Reshape(a, target)
        c = Neg(b)
        y = Transpose<perm=[0, 2, 1, 3]>(c)
    }""")
    graph = read_model(model)
    infer_shapes(graph)
    for tensor in inner_variables(graph):
        if tensor.name in ("b", "c"):
            tensor.shape = ["N", "S", 3, 2]
    forget_types(graph, {"a"} | types_to_declare(graph))
    known = {tensor.name: tensor.shape for tensor in inner_variables(graph) if tensor.shape is not None}
    assert known == {"a": ["N", "S", 6], "b": ["N", "S", 3, 2]}
