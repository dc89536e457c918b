"""Every step of a decoder gives what onnxruntime computes, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bits import Array, assert_same_bits, by_onnxruntime, dtype_named, random_codes
from onnx import TensorProto, helper

from onnxq.errors import ModelError
from onnxq.ir import ArrayData, Node, Variable, constant
from onnxq.rewrite.constant_folding import Step, evaluate, is_small


def step(op: str, arrays: list[Array | None], outputs: int = 1, **attributes: Any) -> tuple[Step, list[Variable]]:
    made = [Variable(f"y{index}") for index in range(outputs)]
    inputs = tuple(None if array is None else ArrayData(array) for array in arrays)
    return Step("decoder", op, attributes, inputs, tuple(made)), made


WORDS = random_codes(np.dtype(np.uint32), (4, 3))
FLOATS = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
STEPS: dict[str, tuple[str, list[Array], dict[str, Any]]] = {
    "add": ("Add", [FLOATS, FLOATS[0]], {}),
    "add float16": ("Add", [FLOATS.astype(np.float16), FLOATS[0].astype(np.float16)], {}),
    "bits": ("BitwiseAnd", [WORDS, np.array(15, np.uint32)], {}),
    "cast float16": ("Cast", [FLOATS], {"to": TensorProto.FLOAT16}),
    "cast int32": ("Cast", [WORDS], {"to": TensorProto.INT32}),
    "cast int8": ("Cast", [random_codes(np.dtype(np.int32), (9,))], {"to": TensorProto.INT8}),
    "cast words": ("Cast", [WORDS], {"to": TensorProto.FLOAT}),
    "divide": ("Div", [random_codes(np.dtype(np.int32), (9,)), np.array(-7, np.int32)], {}),
    "look up": ("Gather", [FLOATS, np.array([[3, 0], [-1, 2]])], {"axis": 0}),
    "multiply": ("Mul", [FLOATS, FLOATS[:, :1]], {}),
    "multiply float16": ("Mul", [FLOATS.astype(np.float16), FLOATS[:, :1].astype(np.float16)], {}),
    "pad": ("Pad", [FLOATS, np.array([0, 0, 0, 2])], {}),
    "power": ("Pow", [np.float32([2.0, 1.5]), np.float32([-126.0, 3.3])], {}),
    "reshape": ("Reshape", [FLOATS, np.array([0, 2, -1])], {}),
    "shift": ("BitShift", [WORDS, np.array([0, 8, 28], np.uint32)], {"direction": "RIGHT"}),
    "slice": ("Slice", [FLOATS, np.array([1]), np.array([5]), np.array([1])], {}),
    "subtract": ("Sub", [FLOATS, FLOATS[0]], {}),
    "subtract words": ("Sub", [WORDS, np.array(8, np.uint32)], {}),
}


@pytest.mark.parametrize(("op", "arrays", "attributes"), STEPS.values(), ids=STEPS)
def test_every_step_gives_what_onnxruntime_gives(op: str, arrays: list[Array], attributes: dict[str, Any]) -> None:
    one, (made,) = step(op, list(arrays), **attributes)
    wanted = helper.tensor_dtype_to_np_dtype(attributes["to"]) if "to" in attributes else arrays[0].dtype
    assert_same_bits(evaluate([one], made, 25), by_onnxruntime(op, arrays, attributes, wanted))


@pytest.mark.parametrize("name", ["int4", "uint2", "float8_e5m2", "float8_e4m3fn", "float4_e2m1fn", "bfloat16"])
def test_small_types_are_moved_without_being_looked_at(name: str) -> None:
    array = random_codes(dtype_named(name), (4, 6)) if name != "bfloat16" else FLOATS.astype(ml_dtypes.bfloat16)
    moved, (made,) = step("Transpose", [array], perm=[1, 0])
    assert_same_bits(evaluate([moved], made, 25), np.ascontiguousarray(array.T))
    parts, (first, second) = step("Split", [array, np.array([1, 3])], outputs=2, axis=0)
    assert_same_bits(evaluate([parts], first, 25), array[:1])
    assert_same_bits(evaluate([parts], second, 25), array[1:])


def test_small_types_are_cast_by_value() -> None:
    codes = random_codes(np.dtype(ml_dtypes.int4), (9,))
    cast, (made,) = step("Cast", [codes], to=TensorProto.FLOAT)
    np.testing.assert_array_equal(evaluate([cast], made, 25), codes.astype(np.float32))


def test_steps_read_earlier_steps_and_what_is_given() -> None:
    one, (sum_,) = step("Add", [FLOATS, FLOATS])
    fed, twice = Variable("x"), Variable("y")
    two = Step("second", "Mul", {}, (sum_, fed), (twice,))
    np.testing.assert_array_equal(
        evaluate([one, two], twice, 25, {fed: np.float32([3])}), (FLOATS + FLOATS) * np.float32(3)
    )


def test_a_step_that_cannot_be_computed_is_named() -> None:
    one, (made,) = step("Gather", [FLOATS, np.array([99])], axis=0)
    with pytest.raises(ModelError, match=r"node decoder \(Gather\) decodes a weight, but the sample cannot be run"):
        evaluate([one], made, 25)


def test_a_step_is_what_its_node_was() -> None:
    codes, scale, output = constant("c", np.int8([1])), constant("s", np.float32(2)), Variable("y")
    node = Node("DequantizeLinear", "n", {"axis": 0}, [codes, scale, Variable("")], [output])
    found = Step.of(node)
    node.inputs.clear()
    assert (found.node, found.op, found.attributes) == ("n", "DequantizeLinear", {"axis": 0})
    assert found.inputs == (codes.tensor_data, scale.tensor_data, None)
    assert found.outputs == (output,)


def test_only_added_types_are_small() -> None:
    assert all(is_small(dtype_named(name)) for name in ("int4", "float8_e5m2", "float8_e8m0fnu", "bfloat16"))
    assert not any(is_small(np.dtype(name)) for name in ("int8", "uint32", "float16", "<f4", "bool", "object"))
