"""Which floats quantized values stand for, and how they enter and leave a float model."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bits import Array, assert_same_bits, by_onnxruntime, dtype_named, random_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, helper

from onnxq.errors import ModelError
from onnxq.ir import (
    ArrayData,
    Constant,
    Graph,
    Names,
    Node,
    PackedTensor,
    Tensor,
    Variable,
    constant,
    to_model,
)
from onnxq.ir.computed_data import computed
from onnxq.numerics.affine import dequantize_linear
from onnxq.passes.dequantize.quantized_values import (
    QuantizedValue,
    decode_values,
    dequantized,
    encode_values,
    integer_range,
    value_name,
)
from onnxq.runtime.sessions import open_session, run

VALUE = Variable("x", np.float32)


def decoder(*parameters: object, **attributes: int) -> Node:
    """A DequantizeLinear with these numbers as scale and zero point; tensors are taken as they are."""
    tensors = [one if isinstance(one, Variable) else constant(f"p{i}", one) for i, one in enumerate(parameters)]
    return Node("DequantizeLinear", "d", attributes, [Variable("codes"), *tensors], [Variable("values")])


def quantized(*parameters: object, **attributes: int) -> QuantizedValue:
    return QuantizedValue.by(decoder(*parameters, **attributes), VALUE)


SCALE, ZERO = np.float32(0.5), np.uint8(3)


def test_a_node_says_what_codes_mean() -> None:
    found = quantized(SCALE, ZERO)
    assert (found.value, found.layout) == (VALUE, ())
    assert quantized(SCALE).zero_point is quantized(SCALE, Variable("")).zero_point is None


@pytest.mark.parametrize(
    ("scale", "attributes", "layout"),
    [
        (np.float32([0.5]), {}, ()),
        (np.float32([[0.5]]), {"axis": 0, "block_size": 8}, ()),
        (np.float32([0.5, 1]), {}, (1, 0)),
        (np.float32([0.5, 1]), {"axis": 0}, (0, 0)),
        (np.float32([[0.5, 1]]), {"axis": 1, "block_size": 8}, (1, 8)),
        (Variable("computed"), {}, (1, 0)),
    ],
)
def test_one_scale_has_no_layout(scale: object, attributes: dict[str, int], layout: tuple[int, ...]) -> None:
    assert quantized(scale, **attributes).layout == layout


def test_the_scale_of_a_dynamic_quantizer_is_one_number() -> None:
    scale = Variable("s")
    Node("DynamicQuantizeLinear", "q", {}, [VALUE], [Variable("codes"), scale, Variable("z")])
    assert quantized(scale).layout == ()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (quantized(SCALE, ZERO), quantized(SCALE.reshape(1), ZERO.reshape(1)), True),
        (quantized(SCALE, np.uint8(0)), quantized(SCALE), True),
        (quantized(SCALE, ZERO), quantized(SCALE), False),
        (quantized(SCALE, ZERO), quantized(np.float32(0.25), ZERO), False),
        (quantized(SCALE, ZERO), quantized(SCALE, np.uint8(4)), False),
        (quantized(np.float32([1, 2]), axis=0), quantized(np.float32([1, 2]), axis=1), False),
        (quantized(Variable("s")), quantized(Variable("s")), False),
    ],
)
def test_codes_agree_only_where_they_mean_the_same(one: QuantizedValue, other: QuantizedValue, same: bool) -> None:
    assert one.agrees(other) == other.agrees(one) == same
    assert one.agrees(one)


@pytest.mark.parametrize(
    ("one", "other", "factor"),
    [
        (quantized(SCALE, ZERO), quantized(np.float32(0.25), ZERO), 0.5),
        (quantized(SCALE, ZERO), quantized(np.float32([1.5]), ZERO), 3.0),
        (quantized(SCALE, ZERO), quantized(np.float32(0.25), np.uint8(4)), None),
        (quantized(SCALE, ZERO), quantized(Variable("s"), ZERO), None),
        (quantized(SCALE, ZERO), quantized(np.float32([1, 2]), ZERO), None),
    ],
)
def test_a_factor_may_lie_in_the_scale(one: QuantizedValue, other: QuantizedValue, factor: float | None) -> None:
    assert one.factor(other) == factor


@pytest.mark.parametrize("axis", [1, -2])
def test_each_channel_may_have_a_factor_of_its_own(axis: int) -> None:
    value = Variable("x", np.dtype(np.float32), [None, 2, 5])
    one = QuantizedValue(value, constant("s", SCALE), constant("z", ZERO))
    scales, zeros = constant("t", np.float32([0.25, 1.5])), constant("y", np.array([3, 3], np.uint8))
    found = one.factor(QuantizedValue(value, scales, zeros, (axis, 0)))
    assert found is not None
    assert found.tolist() == [[[0.5], [3.0]]]
    assert one.factor(QuantizedValue(value, scales, constant("y", np.array([3, 4], np.uint8)), (axis, 0))) is None
    assert one.factor(QuantizedValue(value, scales, zeros, (axis, 2))) is None


def test_a_scale_that_is_computed_agrees_with_itself() -> None:
    scale: Tensor = Variable("s")
    assert quantized(scale).agrees(quantized(scale))


# Codes that enter or leave a float model are what QuantizeLinear and DequantizeLinear would make of them.

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.uint8, (0, 255)),
        (np.int16, (-32768, 32767)),
        (ml_dtypes.int4, (-8, 7)),
        (ml_dtypes.uint2, (0, 3)),
        (np.float32, None),
        (ml_dtypes.float8_e4m3fn, None),
        (np.bool_, None),
    ],
)
def test_ranges_of_codes(dtype: Any, expected: tuple[int, int] | None) -> None:
    assert integer_range(np.dtype(dtype)) == expected


@pytest.mark.parametrize(
    ("code", "scale_type"), [*((code, np.float32) for code in INTEGERS), (np.int8, np.float16), (np.uint8, np.float16)]
)
@settings(max_examples=20)
@given(
    values=arrays(np.float32, 64, elements=st.floats(-1e9, 1e9, width=32)),
    scale=st.floats(2**-10, 2**10, width=32),
    share=st.floats(0, 1),
)
def test_encoding_is_quantize_linear_bit_for_bit(
    code: Any, scale_type: Any, values: Any, scale: float, share: float
) -> None:
    limits, largest = np.iinfo(code), np.finfo(scale_type).max
    # Quotients of float16 are exact for powers of two alone.
    step = constant("s", scale_type(scale if scale_type is np.float32 else 2.0 ** round(math.log2(scale))))
    values = values.clip(-largest, largest).astype(scale_type)
    # Values half way between two quantized values are rounded to the even one.
    values[:16] = (np.arange(16) - 8 + 0.5) * step.values
    x, y, expected = Variable("x", scale_type, [64]), Variable("y", code, [64]), Variable("expected", code, [64])
    zero = constant("z", np.array(limits.min + int(share * (int(limits.max) - limits.min)), code))
    graph = Graph([Node("QuantizeLinear", "q", {}, [x, step, zero], [expected])], [x], [y, expected], "g", opset=21)
    graph.nodes.extend(encode_values(x, step, zero, y, Names(graph), graph.opset))
    found, wanted = run(open_session(to_model(graph), optimize=False), {"x": values})
    np.testing.assert_array_equal(found, wanted, strict=True)


@pytest.mark.parametrize("scale_type", [np.float32, np.float16])
@pytest.mark.parametrize("zero", [None, 100])
@pytest.mark.parametrize("code", INTEGERS)
def test_decoding_is_dequantize_linear_bit_for_bit(code: Any, zero: int | None, scale_type: Any) -> None:
    limits = np.iinfo(code)
    x = Variable("x", code, [256])
    y, expected = Variable("y", scale_type, [256]), Variable("expected", scale_type, [256])
    step = constant("s", scale_type(0.0371))
    point = None if zero is None else constant("z", np.array(zero, code))
    inputs = [x, step] if point is None else [x, step, point]
    graph = Graph([Node("DequantizeLinear", "d", {}, inputs, [expected])], [x], [y, expected], "g", opset=21)
    graph.nodes.extend(decode_values(x, step, point, y, Names(graph)))
    reached = min(limits.max, 2000)
    quantized = np.linspace(max(limits.min, -2000), reached, 256).astype(code)
    found, wanted = run(open_session(to_model(graph), optimize=False), {"x": quantized})
    np.testing.assert_array_equal(found, wanted, strict=True)


def test_codes_that_cannot_be_encoded_are_refused_by_name() -> None:
    x, y = Variable("x"), Variable("y")
    step = constant("s", np.float32(1))
    float8 = constant("z", np.zeros((), ml_dtypes.float8_e4m3fn))
    with pytest.raises(ModelError, match="output y is quantized to float8_e4m3fn at opset 21"):
        encode_values(x, step, float8, y, Names(Graph()), 21)
    with pytest.raises(ModelError, match="to uint8 at opset 10, expected integers at opset 11 or above"):
        encode_values(x, step, constant("z", np.uint8(0)), y, Names(Graph()), 10)


# Decoded weights equal what onnxruntime computes, bit for bit.

CODES = (
    *("int8", "uint8", "int16", "uint16", "int32", "int4", "uint4", "int2", "uint2"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
LAYOUTS: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((), {}),
    ((70,), {"axis": 1}),
    ((6,), {"axis": -2}),
    # The last block is a partial one.
    ((6, 5), {"axis": 1, "block_size": 16}),
    ((6, 5), {"axis": -1, "block_size": 16}),
]


@pytest.mark.parametrize("scale_type", [np.float32, np.float16])
@pytest.mark.parametrize("name", CODES)
def test_dequantize_linear_is_onnxruntimes(name: str, scale_type: type) -> None:
    dtype = dtype_named(name)
    quantized = random_codes(dtype, (6, 70))
    zeros = name == "int32" or name.startswith("float")
    for shape, attributes in LAYOUTS:
        scale = np.random.default_rng(1).uniform(1e-3, 1, shape).astype(scale_type)
        shift = np.zeros(shape, dtype) if zeros else random_codes(dtype, shape, seed=2)
        for inputs, wanted in product(([quantized, scale], [quantized, scale, shift]), (None, np.float32, np.float16)):
            output = {} if wanted is None else {"output_dtype": helper.np_dtype_to_tensor_dtype(np.dtype(wanted))}
            expected = by_onnxruntime("DequantizeLinear", inputs, attributes | output, wanted or scale_type)
            assert_same_bits(dequantize_linear(*inputs, **attributes, dtype=wanted), expected)


def test_types_without_a_kernel_are_decoded_by_their_definition() -> None:
    """The values of float4e2m1, and powers of two in float8e8m0."""
    quantized = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    scale = np.array([126, 128], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    found = dequantize_linear(quantized, scale, None, 0, 8, np.float32)
    np.testing.assert_array_equal(found, [*(x / 2 for x in positive), *(-2.0 * x for x in positive)])
    rounded = dequantize_linear(quantized, np.array(1, ml_dtypes.bfloat16))
    assert rounded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(rounded.astype(np.float32), [*positive, *(-x for x in positive)])


def test_a_scale_that_broadcasts_is_taken_as_it_is() -> None:
    quantized = random_codes(np.dtype(np.int8), (2, 3, 5))
    scale = np.random.default_rng(0).uniform(size=(2, 1, 5)).astype(np.float32)
    np.testing.assert_array_equal(dequantize_linear(quantized, scale), quantized.astype(np.float32) * scale)


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
    tensor_data = computed(lambda: np.zeros(50_000, np.float32), TensorProto.FLOAT, (60_000,))
    with pytest.raises(ModelError, match=r"a dequantized weight is .*50000.*, expected .*60000"):
        tensor_data.load()


def test_parts_that_do_not_fit_together_are_a_fault_of_the_model() -> None:
    quantized, scale = ArrayData(np.zeros((4, 3), np.int8)), ArrayData(np.ones(7, np.float32))
    with pytest.raises(ModelError, match="quantized values, scale and zero point of a weight do not fit together"):
        dequantized(quantized, scale, None)
    large = dequantized(ArrayData(np.zeros((400, 300), np.int8)), scale, None)
    with pytest.raises(ModelError, match="quantized values, scale and zero point of a weight do not fit together"):
        large.load()


def test_dequantized_payloads_are_lazy_and_keep_the_type_of_the_scale() -> None:
    quantized = np.random.default_rng(0).integers(-8, 8, (300, 400)).astype(ml_dtypes.int4)
    packed = constant("c", quantized).tensor_data.to_proto("").raw_data
    stored = PackedTensor(TensorProto.INT4, quantized.shape, packed)
    scale = np.random.default_rng(1).uniform(size=400).astype(np.float16)
    found = dequantized(stored, ArrayData(scale), None)
    assert type(found).__name__ == "LazyTensor"
    assert found.dtype == np.float16
    assert_same_bits(found.load(), by_onnxruntime("DequantizeLinear", [quantized, scale], {"axis": 1}))


def test_values_are_called_as_they_were_before_they_became_codes() -> None:
    names = Names(Graph(outputs=[Constant("taken", np.float32([1]))]))
    assert value_name("w.codes", names) == "w"
    assert value_name("w.codes", names) == "w.codes.values"
    assert value_name("v_quantized", names) == "v"
    assert value_name("taken.codes", names, otherwise="kept") == "kept"
    assert value_name("c", names) == "c.values"
