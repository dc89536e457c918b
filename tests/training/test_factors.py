"""Factors of channels along weights are those that migration has there, and none reaches beyond its bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from onnxq.algorithms.equalization import ChannelScales, WeightRescaling
from onnxq.ir import Node, Variable, constant
from onnxq.training.quantizers import SharedChannelScales, TensorChannelScales, WeightChannelScales

VALUES = np.linspace(0.2, 1, 6)


def own(values: NDArray[np.float64] = VALUES, axis: int = 1) -> TensorChannelScales:
    return TensorChannelScales(SharedChannelScales(values, np.ones(len(values), bool)), torch.arange(len(values)), axis)


@pytest.mark.parametrize(
    ("op", "attributes", "shape", "made"),
    [
        ("MatMul", {}, (6, 4), 4),
        ("Gemm", {"transB": 1}, (4, 6), 4),
        ("Conv", {}, (4, 6, 3, 3), 4),
        ("Conv", {"group": 6}, (6, 1, 3, 3), 6),
        ("Conv", {"group": 2}, (4, 3, 1, 1), 4),
    ],
)
def test_along_a_weight_they_are_those_of_migration(
    op: str, attributes: dict[str, int], shape: tuple[int, ...], made: int
) -> None:
    node = Node(op, "n", attributes, [Variable("x"), constant("w", np.ones(shape, np.float32))], [Variable("y")])
    behind = np.linspace(0.3, 1, made)
    expected = WeightRescaling(ChannelScales(1, VALUES), ChannelScales(1, behind)).weight(node, 1, np.ones(shape))
    times = WeightChannelScales(own().in_weight(node, 1, read=True), own(behind).in_weight(node, 1, read=False))()
    np.testing.assert_allclose(np.broadcast_to(times.detach().numpy(), shape), expected, rtol=1e-6)
    assert times.numel() <= np.prod(shape[:2])


def test_none_grows_beyond_1_nor_does_one_that_is_not_free_change() -> None:
    shared = SharedChannelScales(np.array([0.5, 0.9, 0.9]), np.array([True, True, False]))
    with torch.no_grad():
        shared.log_channel_scales.fill_(0.5)
    assert shared().tolist() == pytest.approx([0.5 * np.exp(0.5), 1, 0.9])


def test_where_all_are_given_nothing_learns() -> None:
    assert not SharedChannelScales(np.array([2.0, 0.5]), np.zeros(2, bool)).log_channel_scales.requires_grad
