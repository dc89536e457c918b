"""Shapes with names that Reshape, Expand, Slice and broadcasting give, and targets without unknown numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from onnxq.ir.elements import Shape
from onnxq.ir.shape_entries import Entry, is_bounded, product, smaller

_LAST = np.iinfo(np.int64).max


def reshaped(data: Shape | None, target: Sequence[Entry], *, literal: bool = False) -> list[Any]:
    """Return the shape that Reshape gives.

    Args:
        data: the shape of its data, None while the rank is unknown.
        target: what it is to become; 0 copies a dimension, -1 takes what is left.
        literal: whether 0 is a number like others (``allowzero``).

    >>> reshaped(["batch", 7, 6], [0, 7, -1, 2])
    ['batch', 7, 3, 2]
    """
    made: list[Any] = list(target)
    for place, entry in enumerate(target):
        if entry == 0 and not literal:
            made[place] = data[place] if data is not None and place < len(data) else None
    # What is -1 and what is unknown here follow from the other dimensions alike, where there is one of them.
    free = [place for place, extent in enumerate(made) if extent is None or extent == -1]
    if len(free) == 1:
        rest = [extent for place, extent in enumerate(made) if place != free[0]]
        made[free[0]] = None if data is None else _quotient(data, rest)
    return [None if place in free and extent == -1 else extent for place, extent in enumerate(made)]


def reshape_target(
    data: Shape | None, target: Sequence[Entry], *, literal: bool = False, empty: bool = True
) -> list[int] | None:
    """Return a target of Reshape made of numbers alone that gives the same, or None.

    Args:
        data: the shape of its data, None while the rank is unknown.
        target: what it is to become.
        literal: whether 0 is a number like others (``allowzero``).
        empty: whether a name may stand for 0; no runtime infers a dimension (-1) beside a copied one (0) that is 0.

    >>> reshape_target(["batch", "seq", 192], ["batch", "seq", 3, 64])
    [0, 0, 3, 64]
    >>> reshape_target(["batch", 64, 64], ["batch", 8, 8, 64]), reshape_target(["rows", 64], ["batch", "seq", 64])
    ([0, 8, 8, 64], None)
    """
    if literal and 0 in target:
        return None
    known = data or []
    found: list[int | None] = [
        entry if isinstance(entry, int) else 0 if place < len(known) and _is_same(known[place], entry) else None
        for place, entry in enumerate(target)
    ]
    copied = [known[place] if place < len(known) else None for place, entry in enumerate(found) if entry == 0]
    if found.count(None) > 1 or (None in found and (-1 in found or (empty and not all(map(_is_filled, copied))))):
        return None
    return [-1 if extent is None else extent for extent in found]


def expanded(data: Shape, target: Sequence[Entry]) -> list[Any]:
    """Return the shape that Expand gives.

    >>> expanded(["batch", 1, 4], ["seq", 1])
    ['batch', 'seq', 4]
    """
    return broadcast([data, list(target)])


def expand_target(data: Shape, target: Sequence[Entry]) -> list[int] | None:
    """Return a target of Expand made of numbers alone that gives the same, or None.

    >>> expand_target(["batch", 1, "seq"], ["batch", 6, "seq"])
    [1, 6, 1]
    """
    found = [
        1 if _is_same(extent, entry) else entry
        for extent, entry in zip(_aligned(data, len(target)), target, strict=True)
    ]
    return [entry for entry in found if isinstance(entry, int)] if all(isinstance(e, int) for e in found) else None


def sliced(extent: Entry, start: Entry, end: Entry, step: Entry) -> Entry:
    """Return how many entries a Slice takes of an axis.

    >>> sliced(7, 1, -1, 2), sliced(64, 0, "seq", 1), sliced("seq", 0, 2**63 - 1, 1)
    (3, 'min(64,seq)', 'seq')
    """
    if all(isinstance(number, int) for number in (extent, start, end, step)):
        return len(range(*slice(start, end, step).indices(extent))) if step > 0 else None  # type: ignore[operator, arg-type]
    if start != 0 or step != 1:
        return None
    return extent if end in (extent, _LAST) else smaller(extent, end)


def broadcast(shapes: Sequence[Shape]) -> list[Any]:
    """Return the shape that shapes broadcast to, as far as it can be told.

    Where a name and its minimum with a number meet, the minimum is the name, for nothing else fits.

    >>> broadcast([["batch", "seq", 8], ["min(64,seq)", 1]]), broadcast([["a"], ["b"]])
    (['batch', 'seq', 8], [None])
    """
    rank = max(map(len, shapes), default=0)
    aligned = (_aligned(shape, rank) for shape in shapes)
    return [_common(set(extents) - {1}) for extents in zip(*aligned, strict=True)]


def _common(extents: set[Entry]) -> Entry:
    numbers = [extent for extent in extents if isinstance(extent, int)]
    if len(extents) <= 1 or numbers:
        return numbers[0] if numbers else next(iter(extents), 1)
    names = [extent for extent in extents if isinstance(extent, str)]
    whole = {one for one in names if all(other == one or is_bounded(other, one) for other in names)}
    return None if None in extents or len(whole) != 1 else whole.pop()


def _aligned(shape: Sequence[Any], rank: int) -> list[Any]:
    return [*[1] * (rank - len(shape)), *shape][-rank:] if rank else []


def _is_filled(extent: Entry) -> bool:
    return isinstance(extent, int) and extent > 0


def _is_same(extent: Entry, entry: Entry) -> bool:
    return isinstance(entry, str) and extent == entry


def _quotient(data: Shape, rest: Sequence[Entry]) -> Entry:
    """Return what is left of the elements of data when the other dimensions are taken out."""
    if None in data or None in rest:
        return None
    names = Counter(extent for extent in data if isinstance(extent, str))
    taken = Counter(extent for extent in rest if isinstance(extent, str))
    whole = prod(extent for extent in data if isinstance(extent, int))
    part = prod(extent for extent in rest if isinstance(extent, int))
    if taken - names or not part or whole % part:
        return None
    return product([whole // part, *sorted((names - taken).elements())])
