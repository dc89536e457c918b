"""Operators that only lay elements out anew, as views that numpy makes without touching them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
View = Callable[[Array], Array]
"""From the array that is read to one that shows its elements otherwise."""

# Shapes and axes are inputs since these versions; below them they are attributes, where they are read alike.
_RESHAPE_READS_SHAPE: Final = 5

OPEN_ENDS: Final = (np.iinfo(np.int32).max, np.iinfo(np.int64).max)
"""Ends of a Slice that stand for none: onnxruntime takes them so for steps backwards too, ONNX only for others."""


def view_of(op: str, attributes: Mapping[str, Any], parameters: Sequence[Array | None], opset: int) -> View | None:
    """Return what an operator of the default domain does to its first input, or None when it is no such operator.

    Args:
        op: its op type.
        attributes: its attributes.
        parameters: its other inputs, None where one is left out.
        opset: version of the default domain.

    >>> view = view_of("Transpose", {"perm": [1, 0]}, [], 17)
    >>> view(np.array([[1, 2], [3, 4]])).tolist()
    [[1, 3], [2, 4]]
    """
    if op not in _VIEWS or (op == "Reshape" and opset < _RESHAPE_READS_SHAPE):
        return None
    return lambda array: _VIEWS[op](array, attributes, parameters)


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
    wanted = _numbers(parameters, 0)
    if wanted is None:
        raise ValueError("it has no shape")
    if attributes.get("allowzero", 0):
        return array.reshape(wanted)
    return array.reshape([array.shape[axis] if extent == 0 else extent for axis, extent in enumerate(wanted)])


def _squeeze(array: Array, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> Array:
    axes = _axes(attributes, parameters)
    return array.squeeze() if axes is None else array.squeeze(tuple(axes))


def _unsqueeze(array: Array, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> Array:
    axes = _axes(attributes, parameters)
    if axes is None:
        raise ValueError("it has no axes")
    return np.expand_dims(array, tuple(axes))


def _slice(array: Array, attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> Array:
    starts, ends, axes, steps = (
        attributes.get(name) if (given := _numbers(parameters, place)) is None else given
        for place, name in enumerate(("starts", "ends", "axes", "steps"))
    )
    if starts is None or ends is None:
        raise ValueError("it has no bounds")
    cuts = [slice(None)] * array.ndim
    for start, end, axis, step in zip_longest(
        starts, ends, range(len(starts)) if axes is None else axes, [1] * len(starts) if steps is None else steps
    ):
        cuts[axis] = _cut(array.shape[axis], start, end, step)
    return array[tuple(cuts)]


def _cut(extent: int, start: int, end: int, step: int) -> slice:
    """Return a slice of Python for bounds of ONNX, which may lie far outside."""
    if step < 0 and end in OPEN_ENDS:
        raise ValueError("runtimes do not agree where a Slice that steps backwards to no end stops")
    start, end = (bound + extent if bound < 0 else bound for bound in (start, end))
    if step > 0:
        return slice(max(start, 0), max(end, 0), step)
    start = min(max(start, 0), extent - 1)
    # Below the first element Python would begin to count from the end.
    return slice(start, end if end >= 0 else None, step) if extent else slice(0, 0, step)


def _axes(attributes: Mapping[str, Any], parameters: Sequence[Array | None]) -> list[int] | None:
    given = _numbers(parameters, 0)
    return attributes.get("axes") if given is None else given


def _numbers(parameters: Sequence[Array | None], place: int) -> list[int] | None:
    given = parameters[place] if place < len(parameters) else None
    return None if given is None else [int(number) for number in given.reshape(-1)]


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
"""The operators that are views of what they read."""
