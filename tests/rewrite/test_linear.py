"""What DequantizeLinear means where onnxruntime has no say; tests of decoded weights compare the rest with it."""

from __future__ import annotations

import numpy as np

from onnxq.rewrite.constant_folding import dequantize_linear


def test_wide_codes_are_subtracted_before_they_are_rounded() -> None:
    codes = np.array([2**31 - 1, 2**31 - 2], np.int32)
    found = dequantize_linear(codes, np.float32(1), np.array(2**31 - 3, np.int32))
    np.testing.assert_array_equal(found, np.float32([2, 1]))


def test_blocks_lie_along_their_axis() -> None:
    codes = np.ones((2, 5), np.int8)
    found = dequantize_linear(codes, np.float32([[1, 2, 3], [4, 5, 6]]), None, 1, 2)
    assert found.tolist() == [[1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]


def test_a_single_wide_number_is_decoded() -> None:
    found = dequantize_linear(np.array(939, np.int32), np.array([0.5], np.float32), np.array(0, np.int32))
    assert (found.shape, found.dtype, float(found)) == ((), np.float32, 469.5)
