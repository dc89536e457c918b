"""Views of arrays are what onnxruntime computes, whatever the bounds and axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bits import Array, assert_same_bits, by_onnxruntime

from onnxq.rewrite.constant_folding import VIEWS, view_of

CUBE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
FAR = 2**62


def numbers(*values: int) -> Array:
    return np.array(values, np.int64)


CASES: list[tuple[str, Array, dict[str, Any], list[Array]]] = [
    ("Identity", CUBE, {}, []),
    ("Transpose", CUBE, {}, []),
    ("Transpose", CUBE, {"perm": [1, 2, 0]}, []),
    ("Flatten", CUBE, {}, []),
    ("Flatten", CUBE, {"axis": 0}, []),
    ("Flatten", CUBE, {"axis": -1}, []),
    ("Flatten", CUBE, {"axis": 3}, []),
    ("Reshape", CUBE, {}, [numbers(0, -1)]),
    ("Reshape", CUBE, {}, [numbers(4, 0, 2)]),
    ("Reshape", CUBE[:, :0], {"allowzero": 1}, [numbers(0, 7)]),
    ("Squeeze", CUBE[:1, :, :1], {}, []),
    ("Squeeze", CUBE[:1, :, :1], {}, [numbers(-1)]),
    ("Unsqueeze", CUBE, {}, [numbers(0, -1)]),
    ("Unsqueeze", CUBE, {}, [numbers(3, 1)]),
    ("Slice", CUBE, {}, [numbers(1), numbers(FAR)]),
    ("Slice", CUBE, {}, [numbers(-FAR), numbers(-1), numbers(-1)]),
    ("Slice", CUBE, {}, [numbers(0, 1), numbers(1, 9), numbers(2, 0)]),
    ("Slice", CUBE, {}, [numbers(FAR), numbers(-FAR), numbers(2), numbers(-2)]),
    ("Slice", CUBE, {}, [numbers(-FAR), numbers(-FAR), numbers(2), numbers(-1)]),
    ("Slice", CUBE, {}, [numbers(2), numbers(0), numbers(1), numbers(-1)]),
    ("Slice", CUBE, {}, [numbers(3), numbers(1), numbers(2)]),
]


@pytest.mark.parametrize(("op", "array", "attributes", "parameters"), CASES)
def test_views_are_what_onnxruntime_computes(
    op: str, array: Array, attributes: dict[str, Any], parameters: list[Array]
) -> None:
    view = view_of(op, attributes, parameters, 25)
    assert view is not None
    found = view(array)
    assert np.may_share_memory(found, array) or not found.size
    expected = by_onnxruntime(op, [np.ascontiguousarray(array), *parameters], attributes, np.float32)
    assert_same_bits(np.ascontiguousarray(found), expected)


def test_every_view_is_tried() -> None:
    assert {op for op, *_ in CASES} == VIEWS


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("Squeeze", {"axes": [0]}),
        ("Unsqueeze", {"axes": [1]}),
        ("Slice", {"starts": [0], "ends": [1], "axes": [1]}),
    ],
)
def test_bounds_and_axes_of_old_operators_are_attributes(op: str, attributes: dict[str, Any]) -> None:
    array = CUBE[:1]
    view = view_of(op, attributes, [], 9)
    assert view is not None
    assert view(array).shape == {"Squeeze": (3, 4), "Unsqueeze": (1, 1, 3, 4), "Slice": (1, 1, 4)}[op]


@pytest.mark.parametrize(
    ("op", "attributes", "parameters"),
    [
        ("Transpose", {"perm": [0, 0, 1]}, []),
        ("Flatten", {"axis": 4}, []),
        ("Reshape", {}, [numbers(5, 5)]),
        ("Reshape", {}, []),
        ("Squeeze", {}, [numbers(0)]),
        ("Unsqueeze", {}, []),
        ("Slice", {}, [numbers(0)]),
        ("Slice", {}, [numbers(0), numbers(1), numbers(0), numbers(0)]),
        ("Slice", {}, [numbers(0), numbers(1), numbers(7)]),
        ("Slice", {}, [numbers(0), numbers(2**31 - 1), numbers(0), numbers(-1)]),
        ("Slice", {}, [numbers(2), numbers(2**63 - 1), numbers(0), numbers(-1)]),
    ],
)
def test_what_does_not_fit_is_refused(op: str, attributes: dict[str, Any], parameters: list[Array]) -> None:
    view = view_of(op, attributes, parameters, 25)
    assert view is not None
    with pytest.raises((ValueError, TypeError, IndexError)):
        view(CUBE)


def test_what_looks_at_elements_is_no_view() -> None:
    assert view_of("Add", {}, [], 25) is None
    assert view_of("Reshape", {"shape": [4]}, [], 1) is None
