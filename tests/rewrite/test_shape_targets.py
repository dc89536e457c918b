"""Shapes that operators give, and targets of numbers alone that give the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxq.rewrite.shapes import broadcast, expand_target, expanded, reshape_target, reshaped, sliced

LAST = np.iinfo(np.int64).max


@pytest.mark.parametrize(
    ("data", "target", "expected"),
    [
        ([2, 6], [3, 4], [3, 4]),
        (["a", 6], [0, 2, -1], ["a", 2, 3]),
        (["a", "b", 6], ["a", "b", 2, 3], ["a", "b", 2, 3]),
        (["a", "b", 6], [-1, 6], ["(a*b)", 6]),
        (["a", "b"], ["b", None], ["b", "a"]),
        (["a", 6], ["b", -1], ["b", None]),
        ([None, 6], [-1, 3], [None, 3]),
        (["a", 6], [-1, 4], [None, 4]),
        (None, [0, 3, -1], [None, 3, None]),
        ([2], [0, 0, -1], [2, None, None]),
        (["a", 4], [-1, -1], [None, None]),
    ],
)
def test_reshape_gives(data: Any, target: list[Any], expected: list[Any]) -> None:
    assert reshaped(data, target) == expected


def test_a_literal_zero_is_a_dimension() -> None:
    assert reshaped(["a", 0], [0, 3], literal=True) == [0, 3]
    assert reshape_target(["a", 0], [0, "a"], literal=True) is None
    assert reshape_target(["a", 4], ["a", 2, 2], literal=True) == [0, 2, 2]


@pytest.mark.parametrize(
    ("data", "target", "expected"),
    [
        (["a", "b", 6], ["a", "b", 2, 3], [0, 0, 2, 3]),
        (["a", "b", 6], ["a", "c", 2, 3], None),
        ([4, "b", 6], [0, "c", 2, 3], [0, -1, 2, 3]),
        ([0, "b", 6], [0, "c", 2, 3], None),
        (["a", "b", 6], [None, 2, 3], [-1, 2, 3]),
        (["a", "b", 6], [0, "b", -1], [0, 0, -1]),
        (["a", "b", 6], ["c", "d", 6], None),
        (["a", "b", 6], ["c", -1], None),
        ([None, 6], [None, 2, 3], [-1, 2, 3]),
        ([None, None, 6], [None, None, 2, 3], None),
        (None, ["a", 6], [-1, 6]),
        (["a"], [1, "a"], [1, -1]),
        ([4], [2, 2], [2, 2]),
    ],
)
def test_targets_of_reshape(data: Any, target: list[Any], expected: list[int] | None) -> None:
    assert reshape_target(data, target) == expected


@pytest.mark.parametrize(
    ("target", "expected"), [(["a", -1], [0, -1]), (["a", "c"], None), (["c", 6], [-1, 6]), (["a", "b"], [0, 0])]
)
def test_beside_a_dimension_that_may_be_empty_none_is_inferred(target: list[Any], expected: list[int] | None) -> None:
    assert reshape_target(["a", "b", 6], target) == expected


@pytest.mark.parametrize(
    ("data", "target", "shape", "numbers"),
    [
        (["a", 1], ["a", "b"], ["a", "b"], None),
        (["a", 1], ["a", 4], ["a", 4], [1, 4]),
        (["a", 4], [2, "a", 1], [2, "a", 4], [2, 1, 1]),
        (["b", "a", 4], ["a", 4], ["b", "a", 4], [1, 4]),
        (["a"], ["b"], [None], None),
        ([], [3], [3], [3]),
        ([3], [], [3], []),
        (["a"], [None], [None], None),
    ],
)
def test_expand(data: Any, target: list[Any], shape: list[Any], numbers: list[int] | None) -> None:
    assert expanded(data, target) == shape
    assert expand_target(data, target) == numbers


@pytest.mark.parametrize(
    ("extent", "start", "end", "step", "expected"),
    [
        (7, 1, -1, 2, 3),
        (7, 5, 2, 1, 0),
        (7, 6, 0, -1, None),
        (64, 0, "a", 1, "min(64,a)"),
        (64, 1, "a", 1, None),
        ("a", 0, "a", 1, "a"),
        ("a", 0, LAST, 1, "a"),
        ("a", 0, -1, 1, None),
        (None, 0, 4, 1, None),
    ],
)
def test_slices_take(extent: Any, start: Any, end: Any, step: Any, expected: Any) -> None:
    assert sliced(extent, start, end, step) == expected


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([["a", 1], ["b", 4]], [None, 4]),
        ([["a", 3], [3]], ["a", 3]),
        ([["a"], ["min(64,a)"]], ["a"]),
        ([["a"], ["min(1,a)"]], [None]),
        ([["a"], [None]], [None]),
        ([[1], [None]], [None]),
        ([["a"], [7]], [7]),
        ([[], []], []),
        ([[1], [1]], [1]),
    ],
)
def test_shapes_broadcast_to(shapes: list[Any], expected: list[Any]) -> None:
    assert broadcast(shapes) == expected
