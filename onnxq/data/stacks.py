"""Arrays that hold one sample or a stack of them, told by what the model wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from onnxq.data.inputs import Input, Shape


def stack_size(shapes: Mapping[str, Shape], inputs: Sequence[Input]) -> int | None:
    """Return how many samples are stacked in arrays of these shapes, or None for a single sample."""
    given = [entry for entry in inputs if entry.name in shapes or not entry.optional]
    if {entry.name for entry in given} != set(shapes) or any(entry.shape is None for entry in given):
        return None
    pairs = [(shapes[entry.name], entry) for entry in given]
    leading = {shape[0] if shape else None for shape, _ in pairs}
    if len(leading) != 1 or None in leading:
        return None
    size = leading.pop()
    if all(len(shape) == len(entry.shape or ()) + 1 for shape, entry in pairs):
        return size
    batched = all(len(shape) == len(entry.shape or ()) and entry.batched for shape, entry in pairs)
    return size if batched and size != 1 else None


def is_batch(shapes: Mapping[str, Shape], inputs: Sequence[Input]) -> bool:
    """Return whether the model takes arrays of these shapes as they are, with as many rows as they have.

    >>> import numpy as np
    >>> from onnxq.data.inputs import Input
    >>> row, one = (Input("x", np.dtype(np.float32), (first, 3)) for first in ("batch", 1))
    >>> is_batch({"x": (1024, 3)}, [row]), is_batch({"x": (1024, 3)}, [one]), is_batch({"x": (9, 1024, 3)}, [row])
    (True, False, False)
    """
    shaped = [entry.shape for entry in inputs if entry.name in shapes and entry.shape]
    return all(not isinstance(shape[0], int) for shape in shaped) and all(
        len(shapes[entry.name]) == len(entry.shape or ()) for entry in inputs if entry.name in shapes
    )


def sample_shape(shape: Shape, entry: Input | None, count: int | None) -> Shape:
    """Return the shape of one sample of so many in an array."""
    if count is None or entry is None or entry.shape is None:
        return shape
    return shape[1:] if len(shape) > len(entry.shape) else (1, *shape[1:])


def as_sample(row: NDArray[Any], entry: Input) -> NDArray[Any]:
    """Return a row of a stack with the axis that counts samples, where the model wants one."""
    return row if entry.shape is None or row.ndim == len(entry.shape) else row[None]
