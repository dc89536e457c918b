"""How scales lie over weights, as shapes."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.algorithms.encoders import encode_array
from onnxq.config.scheme import Granularity, QuantSpec
from onnxq.lowering.layout import Layout, Linear, transposed

WEIGHT = np.random.default_rng(0).normal(size=(6, 70)).astype(np.float32)


def layout(granularity: Granularity | tuple[int, ...]) -> Layout:
    return Layout.of(encode_array(WEIGHT, QuantSpec("int8", granularity), channel_axis=0, reduction_axis=1))


@pytest.mark.parametrize(
    ("granularity", "blocked", "padded", "split", "scale"),
    [
        (Granularity.TENSOR, (), (6, 70), (6, 70), (1, 1)),
        (Granularity.CHANNEL, (), (6, 70), (6, 70), (6, 1)),
        ((35,), (1,), (6, 70), (6, 2, 35), (6, 2, 1)),
        ((32,), (1,), (6, 96), (6, 3, 32), (6, 3, 1)),
        ((128,), (), (6, 70), (6, 70), (6, 1)),
        ((4, 16), (0, 1), (8, 80), (2, 4, 5, 16), (2, 1, 5, 1)),
        ((1, 1), (), (6, 70), (6, 70), (6, 70)),
    ],
)
def test_blocks_become_axes_of_their_own(
    granularity: Granularity | tuple[int, ...],
    blocked: tuple[int, ...],
    padded: tuple[int, ...],
    split: tuple[int, ...],
    scale: tuple[int, ...],
) -> None:
    found = layout(granularity)
    assert (found.blocked, found.padded, found.split, found.split_scale) == (blocked, padded, split, scale)


@pytest.mark.parametrize(
    ("granularity", "linear"),
    [
        (Granularity.TENSOR, Linear(None, None, ())),
        (Granularity.CHANNEL, Linear(0, None, (6,))),
        ((32,), Linear(1, 32, (6, 3))),
        ((128,), Linear(0, None, (6,))),
        ((4, 16), None),
        ((4, 70), None),
        ((1, 1), None),
    ],
)
def test_one_dequantizelinear_has_one_axis(granularity: Granularity | tuple[int, ...], linear: Linear | None) -> None:
    assert layout(granularity).linear == linear


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.CHANNEL, (32,), (4, 16)])
def test_a_transposed_weight_means_the_transposed_values(granularity: Granularity | tuple[int, ...]) -> None:
    quantized = encode_array(WEIGHT, QuantSpec("uint4", granularity, symmetric=False), channel_axis=0, reduction_axis=1)
    np.testing.assert_array_equal(transposed(quantized).dequantize(), quantized.dequantize().T)
