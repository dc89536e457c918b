"""Channels through operators."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.ir import Node, Variable
from onnxq.ops.channel_maps import (
    ChannelMapRule,
    aligned,
    concatenated,
    picked,
    reshaped,
    scaled,
    split,
    transposed,
)


def node(op: str, inputs: list[list[int | None]], outputs: list[list[int | None]], **attributes: object) -> Node:
    given = [Variable(f"i{at}", np.dtype(np.float32), shape) for at, shape in enumerate(inputs)]
    made = [Variable(f"o{at}", np.dtype(np.float32), shape) for at, shape in enumerate(outputs)]
    return Node(op, "n", attributes, given, made)


@pytest.mark.parametrize(
    ("before", "after", "axis", "repeats"),
    [
        ([1, 3, 1, 1], [1, 3], 1, 1),
        ([1, 3, 2, 2], [1, 12], 1, 4),
        ([None, 3, 2, 2], [None, 3, 4], 1, 1),
        ([1, 3], [1, 3, 1, 1], 1, 1),
    ],
)
def test_a_reshape_is_followed(before: list[int | None], after: list[int | None], axis: int, repeats: int) -> None:
    (passage,) = reshaped(node("Reshape", [before], [after]), 0, axis)
    np.testing.assert_array_equal(passage.of, np.repeat(np.arange(3), repeats))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("before", "after"), [([1, 6, 4], [1, 2, 3, 4]), ([1, 6, None], [1, 6, None, 1]), ([1, 6, 2], [12])]
)
def test_a_reshape_that_takes_channels_apart_or_mixes_samples(
    before: list[int | None], after: list[int | None]
) -> None:
    found = reshaped(node("Reshape", [before], [after]), 0, 1)
    assert isinstance(found, str) or len(found[0].of) == after[found[0].axis]


def test_concat_puts_channels_behind_each_other() -> None:
    one = node("Concat", [[1, 2, 4], [1, 3, 4]], [[1, 5, 4]], axis=1)
    (passage,) = concatenated(one, 1, 1)
    assert (passage.axis, passage.first, list(passage.of)) == (1, 2, [0, 1, 2])  # type: ignore[union-attr]


def test_split_gives_each_output_its_own() -> None:
    found = split(node("Split", [[1, 5]], [[1, 2], [1, 3]], axis=1), 0, 1)
    assert [list(passage.of) for passage in found] == [[0, 1], [2, 3, 4]]  # type: ignore[union-attr]


def test_the_larger_factor_of_a_product_keeps_its_channels() -> None:
    product = node("Mul", [[1, 4, 1, 1], [1, 4, 8, 8]], [[1, 4, 8, 8]])
    for tensor in product.inputs:
        tensor.inputs.append(Node("Conv", "c"))
    assert isinstance(scaled(product, 0, 1), str)
    assert not isinstance(scaled(product, 1, 1), str)


def test_transposed_picked_and_broadcast() -> None:
    assert transposed(node("Transpose", [[1, 3, 8]], [[1, 8, 3]], perm=[0, 2, 1]), 0, 1)[0].axis == 2  # type: ignore[union-attr]
    assert picked(node("Gather", [[1, 3, 8]], [[1, 3]], axis=2), 0, 1)[0].axis == 1  # type: ignore[union-attr]
    assert isinstance(picked(node("Gather", [[1, 3, 8]], [[1, 8]], axis=1), 0, 1), str)
    assert isinstance(aligned(node("Add", [[1, 1, 8], [1, 3, 8]], [[1, 3, 8]]), 0, 1), str)


@pytest.mark.parametrize(
    ("op", "rule"),
    [("Reshape", reshaped), ("Unsqueeze", reshaped), ("Transpose", transposed), ("Concat", concatenated)],
)
def test_channels_of_unknown_shapes_are_not_followed(op: str, rule: ChannelMapRule) -> None:
    unknown = Node(op, "n", {"axis": 1}, [Variable("x", np.float32)], [Variable("y", np.float32)])
    assert isinstance(rule(unknown, 0, 1), str)
