"""Decoded weights equal what onnxruntime computes, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxq.dequantizing.decoding import Step, computed, dequantize_linear, dequantized, evaluate, is_small, value_name
from onnxq.errors import ModelError
from onnxq.graph import ArrayPayload, Constant, Graph, Names, Node, PackedPayload, Variable, constant, to_model
from onnxq.runtime import open_session, run

Array = NDArray[Any]

CODES = (
    *("int8", "uint8", "int16", "uint16", "int32", "int4", "uint4", "int2", "uint2"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
LAYOUTS = {
    "tensor": ((), {}),
    "columns": ((70,), {"axis": 1}),
    "rows": ((6,), {"axis": -2}),
    "blocks, the last one partial": ((6, 5), {"axis": 1, "block_size": 16}),
}


def dtype_named(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def random_codes(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    if dtype.name.startswith("float"):
        return generator.normal(size=shape).astype(dtype)
    limits = ml_dtypes.iinfo(dtype)
    return generator.integers(limits.min, int(limits.max) + 1, shape).astype(dtype)


def by_onnxruntime(op: str, inputs: list[Array], attributes: dict[str, Any], wanted: object = None) -> Array:
    """What onnxruntime computes; small types go in as initializers, and floats come out."""
    tensors = [constant(f"i{index}", array) for index, array in enumerate(inputs)]
    output = Variable("y", wanted if wanted is not None else inputs[-1].dtype)
    graph = Graph([Node(op, "n", attributes, tensors, [output])], [], [output], "g", opset=25)
    found: Array = run(open_session(to_model(graph), optimize=False), {})[0]
    return found


def assert_same_bits(found: Array, expected: Array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found.view(f"u{found.itemsize}"), expected.view(f"u{expected.itemsize}"))


@pytest.mark.parametrize("wanted", [None, np.float32, np.float16])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("shape", "attributes"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("scale_type", [np.float32, np.float16])
@pytest.mark.parametrize("name", CODES)
def test_dequantize_linear_is_onnxruntimes(
    name: str, scale_type: type, shape: tuple[int, ...], attributes: dict[str, int], shifted: bool, wanted: Any
) -> None:
    dtype = dtype_named(name)
    codes = random_codes(dtype, (6, 70))
    scale = np.random.default_rng(1).uniform(1e-3, 1, shape).astype(scale_type)
    inputs = [codes, scale]
    if shifted:
        zeros = name == "int32" or name.startswith("float")
        inputs.append(np.zeros(shape, dtype) if zeros else random_codes(dtype, shape, seed=2))
    output = {} if wanted is None else {"output_dtype": helper.np_dtype_to_tensor_dtype(np.dtype(wanted))}
    expected = by_onnxruntime("DequantizeLinear", inputs, attributes | output, wanted or scale_type)
    assert_same_bits(dequantize_linear(*inputs, **attributes, dtype=wanted), expected)


def test_types_without_a_kernel_are_decoded_by_their_definition() -> None:
    """The values of float4e2m1, and powers of two in float8e8m0."""
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    scale = np.array([126, 128], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    found = dequantize_linear(codes, scale, None, 0, 8, np.float32)
    np.testing.assert_array_equal(found, [*(x / 2 for x in positive), *(-2.0 * x for x in positive)])
    rounded = dequantize_linear(codes, np.array(1, ml_dtypes.bfloat16))
    assert rounded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(rounded.astype(np.float32), [*positive, *(-x for x in positive)])


def test_a_scale_that_broadcasts_is_taken_as_it_is() -> None:
    codes = random_codes(np.dtype(np.int8), (2, 3, 5))
    scale = np.random.default_rng(0).uniform(size=(2, 1, 5)).astype(np.float32)
    np.testing.assert_array_equal(dequantize_linear(codes, scale), codes.astype(np.float32) * scale)


def step(op: str, arrays: list[Array | None], outputs: int = 1, **attributes: Any) -> tuple[Step, list[Variable]]:
    made = [Variable(f"y{index}") for index in range(outputs)]
    inputs = tuple(None if array is None else ArrayPayload(array) for array in arrays)
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
    assert found.inputs == (codes.payload, scale.payload, None)
    assert found.outputs == (output,)


def test_large_values_are_computed_when_they_are_asked_for_and_small_ones_at_once() -> None:
    calls: list[int] = []

    def compute(size: int) -> Array:
        calls.append(size)
        return np.arange(size, dtype=np.float32)

    small = computed(lambda: compute(10), TensorProto.FLOAT, (10,))
    assert calls == [10]
    large = computed(lambda: compute(100_000), TensorProto.FLOAT, (100_000,))
    unknown = computed(lambda: compute(100_001), TensorProto.FLOAT, (None,))
    assert calls == [10, 100_001]
    assert (large.shape, large.nbytes, large.dtype) == ((100_000,), 400_000, np.float32)
    assert unknown.shape == (100_001,)
    assert b"".join(large.chunks()) == large.to_proto("w").raw_data == compute(100_000).tobytes()
    np.testing.assert_array_equal(large.load(), large.load())
    np.testing.assert_array_equal(small.load(), compute(10))


def test_values_of_another_shape_than_declared_are_refused() -> None:
    payload = computed(lambda: np.zeros(50_000, np.float32), TensorProto.FLOAT, (60_000,))
    with pytest.raises(ModelError, match=r"decoding a weight gave .*50000.* but the model says .*60000"):
        payload.load()


def test_parts_that_do_not_fit_together_are_a_fault_of_the_model() -> None:
    codes, scale = ArrayPayload(np.zeros((4, 3), np.int8)), ArrayPayload(np.ones(7, np.float32))
    with pytest.raises(ModelError, match="codes, scale and zero point of a weight do not fit together"):
        dequantized(codes, scale, None)
    large = dequantized(ArrayPayload(np.zeros((400, 300), np.int8)), scale, None)
    with pytest.raises(ModelError, match="codes, scale and zero point of a weight do not fit together"):
        large.load()


def test_dequantized_payloads_are_lazy_and_keep_the_type_of_the_scale() -> None:
    codes = np.random.default_rng(0).integers(-8, 8, (300, 400)).astype(ml_dtypes.int4)
    packed = constant("c", codes).payload.to_proto("").raw_data
    stored = PackedPayload(TensorProto.INT4, codes.shape, packed)
    scale = np.random.default_rng(1).uniform(size=400).astype(np.float16)
    found = dequantized(stored, ArrayPayload(scale), None)
    assert type(found).__name__ == "ComputedPayload"
    assert found.dtype == np.float16
    assert_same_bits(found.load(), by_onnxruntime("DequantizeLinear", [codes, scale], {"axis": 1}))


def test_only_added_types_are_small() -> None:
    assert all(is_small(dtype_named(name)) for name in ("int4", "float8_e5m2", "float8_e8m0fnu", "bfloat16"))
    assert not any(is_small(np.dtype(name)) for name in ("int8", "uint32", "float16", "<f4", "bool", "object"))


def test_values_are_called_as_they_were_before_they_became_codes() -> None:
    names = Names(Graph(outputs=[Constant("taken", np.float32([1]))]))
    assert value_name("w.codes", names) == "w"
    assert value_name("w.codes", names) == "w.codes.values"
    assert value_name("v_quantized", names) == "v"
    assert value_name("taken.codes", names, otherwise="kept") == "kept"
    assert value_name("c", names) == "c.values"
