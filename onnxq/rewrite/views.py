"""Operators whose result is a view of their first input, as functions of numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import numpy as np

from onnxq.numerics.affine import Array

View = Callable[[Array], Array]
"""Function from an array to a view of it."""

_OPEN_ENDS: Final = (np.iinfo(np.int32).max, np.iinfo(np.int64).max)
"""Ends of a Slice that mean "to the end": in ONNX for positive steps only, in onnxruntime for all."""


def view_of(op: str, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> View | None:
    """Return the view that an operator of the default domain makes of its first input, or None for other operators.

    Args:
        op: its op type.
        attributes: its attributes.
        parameters: its other inputs; None for an absent one.

    >>> view = view_of("Transpose", {"perm": [1, 0]}, [])
    >>> view(np.array([[1, 2], [3, 4]])).tolist()
    [[1, 3], [2, 4]]
    """
    return (lambda array: _VIEWS[op](array, attributes, parameters)) if op in _VIEWS else None


def _identity(array: Array, _: Mapping[str, Any], __: Sequence[Array | None]) -> Array:
    return array


def _transpose(array: Array, attributes: Mapping[str, Any], _: Sequence[Array | None]) -> Array:
    return array.transpose(attributes.get("perm"))


def _flatten(array: Array, attributes: Mapping[str, Any], _: Sequence[Array | None]) -> Array:
    axis = attributes.get("axis", 1)
    if not -array.ndim <= axis <= array.ndim:
        raise ValueError(f"there is no axis {axis}")
    axis = axis + array.ndim if axis < 0 else axis
    return array.reshape(math.prod(array.shape[:axis]), math.prod(array.shape[axis:]))


def _reshape(array: Array, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> Array:
    wanted = _parameter(attributes, "shape", parameters, 0)
    if wanted is None:
        raise ValueError("it has no shape")
    if attributes.get("allowzero", 0):
        return array.reshape(wanted)
    return array.reshape([array.shape[axis] if extent == 0 else extent for axis, extent in enumerate(wanted)])


def _squeeze(array: Array, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> Array:
    axes = _parameter(attributes, "axes", parameters, 0)
    return array.squeeze() if axes is None else array.squeeze(tuple(axes))


def _unsqueeze(array: Array, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> Array:
    axes = _parameter(attributes, "axes", parameters, 0)
    if axes is None:
        raise ValueError("it has no axes")
    return np.expand_dims(array, tuple(axes))


def _slice(array: Array, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> Array:
    names = ("starts", "ends", "axes", "steps")
    starts, ends, axes, steps = (_parameter(attributes, name, parameters, place) for place, name in enumerate(names))
    if starts is None or ends is None:
        raise ValueError("it has no bounds")
    cuts = [slice(None)] * array.ndim
    for start, end, axis, step in zip_longest(
        starts, ends, range(len(starts)) if axes is None else axes, [1] * len(starts) if steps is None else steps
    ):
        cuts[axis] = _cut(array.shape[axis], start, end, step)
    return array[tuple(cuts)]


def _cut(extent: int, start: int, end: int, step: int) -> slice:
    if step < 0 and end in _OPEN_ENDS:
        raise ValueError("runtimes do not agree where a Slice that steps backwards to no end stops")
    start, end = (bound + extent if bound < 0 else bound for bound in (start, end))
    if step > 0:
        return slice(max(start, 0), max(end, 0), step)
    start = min(max(start, 0), extent - 1)
    # Python would count an end below 0 from the end of the axis.
    return slice(start, end if end >= 0 else None, step) if extent else slice(0, 0, step)


def _parameter(
    attributes: Mapping[str, Any], name: str, parameters: Sequence[Array | None], place: int
) -> list[int] | None:
    """Return an attribute of old opsets, or the input that took its place."""
    parameter = parameters[place] if place < len(parameters) else None
    return attributes.get(name) if parameter is None else [int(number) for number in parameter.reshape(-1)]


_VIEWS: Final[Mapping[str, Callable[[Array, Mapping[str, Any], Sequence[Array | None]], Array]]] = {
    "Flatten": _flatten,
    "Identity": _identity,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
VIEWS: Final = frozenset(_VIEWS)
"""Operators whose result is a view of their first input."""
