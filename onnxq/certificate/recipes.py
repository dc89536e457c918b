"""Recipes of inputs that look like samples: random entries of quantiles, alike where neighbours are alike there."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence

import numpy as np

from onnxq.certificate.certificate import InputRecipe
from onnxq.data.inputs import Input, Sample
from onnxq.errors import DataError
from onnxq.runtime.sessions import Array

TABLES = 4
"""Tables of a recipe at most."""

_QUANTILES, _TOKENS, _COLUMNS, _COLUMN_ENTRIES = 32, 64, 64, 256
# A sample of this many times the entries of a table has one of its own, which then tells little of the sample.
_LONG = 8
# Elements of a sample whose free dimensions are halved, to a multiple of a step.
_LARGE, _STEP = 1 << 17, 32
# Elements of each sample that quantiles are taken of, and samples and elements along an axis that correlate.
_POOLED, _CORNERS, _CORNER = 1 << 14, 4, 64
_CORRELATED = 0.5
_SETTLED_BY_COLUMN = 0.5
_TYPES = frozenset(
    (
        *("float16", "float32", "float64", "bool", "string"),
        *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)),
    )
)


def describe_inputs(inputs: Sequence[Input], samples: Sequence[Sample]) -> Iterator[tuple[InputRecipe, ...]]:
    """Yield recipes of all inputs, for each shape to try in turn.

    Raises:
        DataError: no values can be made for an input.
    """
    for entry in inputs:
        ranks = {np.ndim(sample[entry.name]) if entry.name in sample else -1 for sample in samples}
        if _type(entry) not in _TYPES or len(ranks) > 1 or -1 in ranks:
            raise DataError(f"no values can be made for input {entry}")
    if not inputs:
        raise DataError("the model has no input")
    values = {entry.name: [np.asarray(sample[entry.name]) for sample in samples] for entry in inputs}
    for shapes in _shapes(inputs, samples):
        pairs = zip(inputs, shapes, strict=True)
        yield tuple(describe_input(entry, values[entry.name], shape) for entry, shape in pairs)


def describe_input(entry: Input, values: Sequence[Array], shape: tuple[int, ...]) -> InputRecipe:
    """Return a recipe of values that are distributed and correlated as an input's samples are."""
    kind = _type(entry)
    grain = tuple(_grain(values, axis) for axis in range(values[0].ndim))
    if kind == "string":
        return InputRecipe(entry.name, kind, shape, grain, _categories(values))
    axis = _column_axis(values) if kind.startswith("float") else None
    if axis is not None:
        columns, stride = _columns(values, axis), math.prod(shape[axis + 1 :])
        table = packed(_quantiles(columns, min(_QUANTILES, _COLUMN_ENTRIES // len(columns))))
        return InputRecipe(entry.name, kind, shape, grain, (table,), len(columns), stride)
    count = _QUANTILES if kind.startswith("float") else _TOKENS
    parts = [value.reshape(-1)[:: value.size // _POOLED + 1] for value in values]
    if min(part.size for part in parts) < _LONG * count:
        pooled = np.concatenate(parts)
        # A decoder's past is empty before its first token.
        parts = [pooled if pooled.size else np.zeros(1, pooled.dtype)]
    tables = [_quantiles(part, count) for part in parts[:: max(len(parts) // TABLES, 1)]]
    return InputRecipe(entry.name, kind, shape, grain, tuple(map(packed, tables)))


def _quantiles(values: Array, count: int) -> Array:
    # numpy's own loads a package that nothing else needs.
    return np.sort(values, axis=-1)[..., (np.arange(count) * 2 + 1) * values.shape[-1] // (2 * count)]


def packed(values: Array) -> str:
    """Return the bytes of values in base64."""
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def _type(entry: Input) -> str:
    return "string" if entry.dtype.hasobject or entry.dtype.kind in "SU" else entry.dtype.name


def _grain(values: Sequence[Array], axis: int) -> int:
    """Return the largest power of two by which neighbours along an axis are still correlated."""
    grain = 1
    corners = [value[tuple(slice(_CORNER) for _ in value.shape)] for value in values[:_CORNERS]]
    while all(corner.dtype.kind in "fiub" and corner.shape[axis] > grain for corner in corners):
        pairs = [_neighbours(corner, axis, grain) for corner in corners]
        before, after = (np.concatenate(side) for side in zip(*pairs, strict=True))
        if not before.size:
            break
        centre = before.mean()
        spread = float(np.square(before - centre).sum() * np.square(after - centre).sum())
        if not spread or float(((before - centre) * (after - centre)).sum()) < _CORRELATED * math.sqrt(spread):
            break
        grain *= 2
    return grain


def _neighbours(values: Array, axis: int, lag: int) -> tuple[Array, Array]:
    moved = np.moveaxis(values, axis, 0).astype(np.float64)
    return moved[:-lag].reshape(-1), moved[lag:].reshape(-1)


def _column_axis(values: Sequence[Array]) -> int | None:
    """Return the axis, the last or the second, whose entries have values of their own, as columns of a table do."""
    for axis in {values[0].ndim - 1: 0, 1: 0} if values[0].ndim > 1 else ():
        if len({value.shape[axis] for value in values}) > 1 or not 1 < values[0].shape[axis] <= _COLUMNS:
            continue
        rows = _columns(values, axis)
        if not rows.size:
            continue
        total = float(rows.astype(np.float64).var())
        if total and float(rows.mean(axis=1, dtype=np.float64).var()) > _SETTLED_BY_COLUMN * total:
            return axis
    return None


def _columns(values: Sequence[Array], axis: int) -> Array:
    rows = [np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1) for value in values]
    return np.concatenate([row[:, :: row.size // _POOLED + 1] for row in rows], 1)


def _categories(values: Sequence[Array]) -> tuple[str, ...]:
    """Return the strings that several samples have, which are no secret of one of them."""
    seen: dict[str, int] = {}
    for value in values:
        for text in {str(text) for text in value.flat}:
            seen[text] = seen.get(text, 0) + 1
    common = sorted(text for text, count in seen.items() if count > 1 and len(text) <= 32)
    return tuple(common[:16]) or ("text",)


def _shapes(inputs: Sequence[Input], looked: Sequence[Sample]) -> list[tuple[tuple[int, ...], ...]]:
    """Return shapes to try in turn: the least sample's with one row, and before it half of large free dimensions."""
    least = min(looked, key=lambda sample: sum(np.asarray(value).size for value in sample.values()))
    whole = [(entry, np.asarray(least[entry.name]).shape) for entry in inputs]
    is_large = sum(math.prod(shape) for _, shape in whole) > _LARGE
    return [tuple(_fewer(*pair, halved=halved) for pair in whole) for halved in (True, False)[not is_large :]]


def _fewer(entry: Input, shape: tuple[int, ...], *, halved: bool) -> tuple[int, ...]:
    free = [not isinstance(dim, int) for dim in entry.shape or [None] * len(shape)]
    # Models halve the sizes of images several times.
    halves = [dim // 2 // _STEP * _STEP for dim in shape]
    dims = [
        half if halved and is_free and half else dim for dim, half, is_free in zip(shape, halves, free, strict=True)
    ]
    return (1, *dims[1:]) if entry.batched and free[0] else tuple(dims)
