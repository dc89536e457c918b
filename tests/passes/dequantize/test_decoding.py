"""Decoded weights equal what onnxruntime computes, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bits import Array, assert_same_bits, by_onnxruntime, dtype_named, random_codes
from onnx import TensorProto, helper

from onnxq.errors import ModelError
from onnxq.ir import ArrayData, Constant, Graph, Names, PackedTensor, constant
from onnxq.passes.dequantize.decoding import dequantized, value_name
from onnxq.rewrite.constant_folding import computed, dequantize_linear

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
    with pytest.raises(ModelError, match=r"decoding a weight gave .*50000.* but the model says .*60000"):
        tensor_data.load()


def test_parts_that_do_not_fit_together_are_a_fault_of_the_model() -> None:
    codes, scale = ArrayData(np.zeros((4, 3), np.int8)), ArrayData(np.ones(7, np.float32))
    with pytest.raises(ModelError, match="codes, scale and zero point of a weight do not fit together"):
        dequantized(codes, scale, None)
    large = dequantized(ArrayData(np.zeros((400, 300), np.int8)), scale, None)
    with pytest.raises(ModelError, match="codes, scale and zero point of a weight do not fit together"):
        large.load()


def test_dequantized_payloads_are_lazy_and_keep_the_type_of_the_scale() -> None:
    codes = np.random.default_rng(0).integers(-8, 8, (300, 400)).astype(ml_dtypes.int4)
    packed = constant("c", codes).tensor_data.to_proto("").raw_data
    stored = PackedTensor(TensorProto.INT4, codes.shape, packed)
    scale = np.random.default_rng(1).uniform(size=400).astype(np.float16)
    found = dequantized(stored, ArrayData(scale), None)
    assert type(found).__name__ == "ComputedPayload"
    assert found.dtype == np.float16
    assert_same_bits(found.load(), by_onnxruntime("DequantizeLinear", [codes, scale], {"axis": 1}))


def test_values_are_called_as_they_were_before_they_became_codes() -> None:
    names = Names(Graph(outputs=[Constant("taken", np.float32([1]))]))
    assert value_name("w.codes", names) == "w"
    assert value_name("w.codes", names) == "w.codes.values"
    assert value_name("v_quantized", names) == "v"
    assert value_name("taken.codes", names, otherwise="kept") == "kept"
    assert value_name("c", names) == "c.values"
