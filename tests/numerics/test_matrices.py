"""Matrices of a weight hold the values of one sum in a row, and go back to the weight."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.numerics.matrices import Matrices


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_one_matrix_with_a_row_for_each_output(transposed: bool) -> None:
    values = np.arange(24).reshape(4, 6)
    matrices = Matrices.of_product((4, 6), transposed=transposed)
    np.testing.assert_array_equal(matrices.view(values)[0], values if transposed else values.T)
    np.testing.assert_array_equal(matrices.back(matrices.view(values), (4, 6)), values)


def test_a_convolution_has_a_matrix_for_each_group() -> None:
    values = np.arange(6 * 2 * 3 * 3).reshape(6, 2, 3, 3)
    matrices = Matrices.of_convolution(values.shape, 3)
    view = matrices.view(values)
    assert view.shape == (3, 2, 18)
    np.testing.assert_array_equal(view[1, 0], values[2].reshape(-1))
    np.testing.assert_array_equal(matrices.back(view, values.shape), values)


def test_cells_have_a_matrix_for_each_direction() -> None:
    values = np.arange(2 * 12 * 5).reshape(2, 12, 5)
    matrices = Matrices.of_cell(values.shape)
    assert matrices.view(values).shape == (2, 12, 5)
    np.testing.assert_array_equal(matrices.back(matrices.view(values), values.shape), values)
