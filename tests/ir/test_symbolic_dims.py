"""Arithmetic on numbers and names: what it gives, and that a name never stands for what may be negative."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnxq.ir.symbolic_dims import (
    SymbolicDim,
    choose,
    equal,
    is_bounded,
    larger,
    minus,
    negation,
    numbers_only,
    over,
    plus,
    remainder,
    smaller,
    times,
)


@pytest.mark.parametrize(
    ("compute", "operands", "expected"),
    [
        (plus, (2, 3), 5),
        (plus, ("a", 2), "(2+a)"),
        (plus, ("a", -2), None),
        (plus, ("b", "a"), "(a+b)"),
        (minus, (2, 5), -3),
        (minus, ("a", "a"), 0),
        (minus, ("a", 0), "a"),
        (minus, ("a", "b"), None),
        (minus, (None, 0), None),
        (times, ("a", 0), 0),
        (times, (None, 0), None),
        (times, ("a", None), None),
        (times, (1, "a"), "a"),
        (times, ("a", -1), None),
        (over, (7, 2), 3),
        (over, (-7, 2), -3),
        (over, (7, 0), None),
        (over, ("a", 1), "a"),
        (over, ("a", 2), "(a/2)"),
        (over, ("a", -2), None),
        (remainder, (7, 4), 3),
        (remainder, (-7, 4), None),
        (remainder, ("a", 4), None),
        (smaller, ("a", "a"), "a"),
        (smaller, ("a", 4), "min(4,a)"),
        (smaller, ("a", -4), None),
        (larger, (3, 4), 4),
        (larger, ("a", "a"), "a"),
        (larger, ("a", 4), None),
        (equal, (3, 3), True),
        (equal, ("a", -1), False),
        (equal, ("a", 0), None),
        (equal, ("a", "b"), None),
        (equal, (None, None), None),
        (choose, (True, "a", 1), "a"),
        (choose, (False, "a", 1), 1),
        (choose, (None, "a", "a"), "a"),
        (choose, (None, "a", 1), None),
        (negation, (True,), False),
        (negation, (None,), None),
        (numbers_only(lambda one, other: one > other), (3, 2), True),
        (numbers_only(lambda one, other: one > other), ("a", 2), None),
    ],
)
def test_operations(
    compute: Callable[..., SymbolicDim], operands: tuple[SymbolicDim, ...], expected: SymbolicDim
) -> None:
    found = compute(*operands)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("extent", "by", "bounded"),
    [
        (smaller("a", 4), "a", True),
        (smaller("a", 1), "a", False),
        (smaller("a", 4), "b", False),
        ("min(a", "a", False),
        ("a", "a", False),
    ],
)
def test_minima_with_numbers_above_one(extent: str, by: str, bounded: bool) -> None:
    assert is_bounded(extent, by) is bounded
