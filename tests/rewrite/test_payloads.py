"""Values that are computed when they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from onnxq.ir import ArrayData, TensorData
from onnxq.rewrite.constant_folding import DerivedPayload, derived

LARGE = np.arange(300 * 200, dtype=np.float16).reshape(300, 200)


def test_few_values_are_derived_at_once() -> None:
    found = derived(ArrayData(LARGE[:3]), np.transpose)
    assert isinstance(found, ArrayData)
    np.testing.assert_array_equal(found.load(), LARGE[:3].T)


def test_many_values_are_derived_when_they_are_asked_for() -> None:
    seen: list[int] = []

    def transpose(array: np.ndarray) -> np.ndarray:
        seen.append(array.strides[0])
        return array.T

    found = derived(ArrayData(LARGE), transpose)
    assert seen == [0], "one element told the shape"
    assert (found.shape, found.onnx_dtype, found.nbytes) == ((200, 300), TensorProto.FLOAT16, 120_000)
    assert found.load().flags.c_contiguous
    assert b"".join(found.chunks()) == found.to_proto("w").raw_data == LARGE.T.tobytes()


def test_types_are_changed_as_well() -> None:
    found = derived(ArrayData(LARGE), lambda array: array.astype(np.float32), np.dtype(np.float32))
    assert (found.shape, found.onnx_dtype) == (LARGE.shape, TensorProto.FLOAT)
    np.testing.assert_array_equal(found.load(), LARGE.astype(np.float32))


def test_what_cannot_be_derived_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="reshape"):
        derived(ArrayData(LARGE), lambda array: array.reshape(7, -1))


def test_a_chain_of_thousands_is_followed_without_recursion() -> None:
    found: TensorData = ArrayData(LARGE)
    for _ in range(5001):
        found = derived(found, np.transpose)
    assert isinstance(found, DerivedPayload)
    np.testing.assert_array_equal(found.load(), LARGE.T)
