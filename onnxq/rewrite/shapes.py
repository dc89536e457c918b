"""Symbolic shapes: dimensions that are numbers or names, Reshape targets, and evaluation of shape arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.ir.data_types import numpy_dtype
from onnxq.ir.elements import Constant, Node, Shape, Tensor
from onnxq.ir.symbolic_dims import (
    SymbolicDim,
    choose,
    equal,
    is_bounded,
    is_zero_with,
    larger,
    minus,
    negation,
    numbers_only,
    over,
    plus,
    product,
    remainder,
    smaller,
    times,
)
from onnxq.rewrite.views import VIEWS, view_of

_LAST = np.iinfo(np.int64).max


def reshaped(data: Shape | None, target: Sequence[SymbolicDim], *, literal: bool = False) -> list[Any]:
    """Return the shape that Reshape gives, unless two entries of the target are 0 at once.

    Args:
        data: the shape of its data; None if the rank is unknown.
        target: the requested shape; 0 copies a dimension, -1 takes the rest.
        literal: whether 0 means a dimension of size 0 (``allowzero``).

    >>> reshaped(["batch", 7, 6], [0, 7, -1, 2])
    ['batch', 7, 3, 2]
    >>> reshaped(["(batch*seq)", 64], ["batch", "seq", 64]), reshaped(["rows", 64], ["batch", "seq", 64])
    (['batch', 'seq', 64], [None, None, 64])
    """
    copied = [*(data or []), *[None] * len(target)]
    size = None if {-1, None} & {*target} else product(extent for extent in data or [] if extent is not None)
    shape = list(target) if literal else [_dimension(*pair, size) for pair in zip(target, copied, strict=False)]
    unknown = [index for index, extent in enumerate(shape) if extent is None or extent == -1]
    if len(unknown) == 1 and data is not None:
        rest = [extent for index, extent in enumerate(shape) if index != unknown[0]]
        # A dimension of -1 excludes others that are 0. A computed one may have any size beside them.
        if -1 in shape or all(map(_is_filled, rest)):
            shape[unknown[0]] = _quotient(data, rest)
    return [None if extent == -1 else extent for extent in shape]


def _dimension(entry: SymbolicDim, copied: SymbolicDim, size: SymbolicDim) -> SymbolicDim:
    """Return the dimension for an entry of a target.

    A named entry that is 0 copies a dimension, too. That is 0 if the copied one is, and impossible if the data has no
    elements, since the shape would have some. Otherwise, the dimension is not known.

    Args:
        entry: of the target.
        copied: the dimension of the data at the same place.
        size: number of elements of the data; None if another dimension may be inferred as 0.
    """
    if isinstance(entry, str):
        return entry if is_zero_with(copied, entry) or is_zero_with(size, entry) else None
    return copied if entry == 0 else entry


def reshape_target(
    data: Shape | None, target: Sequence[SymbolicDim], *, literal: bool = False, empty: bool = True
) -> list[int] | None:
    """Return a Reshape target of numbers alone that gives the same shape, or None.

    Args:
        data: the shape of its data; None if the rank is unknown.
        target: the requested shape.
        literal: whether 0 means a dimension of size 0 (``allowzero``).
        empty: whether a named dimension may be 0. No runtime infers a dimension (-1) beside a copied one (0) that is 0.

    >>> reshape_target(["batch", "seq", 192], ["batch", "seq", 3, 64])
    [0, 0, 3, 64]
    >>> reshape_target(["batch", 64, 64], ["batch", 8, 8, 64]), reshape_target(["rows", 64], ["batch", "seq", 64])
    ([0, 8, 8, 64], None)
    """
    if literal and 0 in target:
        return None
    shape = data or []
    entries: list[int | None] = [
        entry if isinstance(entry, int) else 0 if place < len(shape) and _is_same(shape[place], entry) else None
        for place, entry in enumerate(target)
    ]
    copied = [shape[place] if place < len(shape) else None for place, entry in enumerate(entries) if entry == 0]
    if entries.count(None) > 1 or (None in entries and (-1 in entries or (empty and not all(map(_is_filled, copied))))):
        return None
    return [-1 if extent is None else extent for extent in entries]


def expand_target(data: Shape, target: Sequence[SymbolicDim]) -> list[int] | None:
    """Return an Expand target of numbers alone that gives the same shape, or None.

    >>> expand_target(["batch", 1, "seq"], ["batch", 6, "seq"])
    [1, 6, 1]
    """
    entries = [
        1 if _is_same(extent, entry) else entry
        for extent, entry in zip(_aligned(data, len(target)), target, strict=True)
    ]
    return [entry for entry in entries if isinstance(entry, int)] if all(isinstance(e, int) for e in entries) else None


def sliced(extent: SymbolicDim, start: SymbolicDim, end: SymbolicDim, step: SymbolicDim) -> SymbolicDim:
    """Return the number of entries that a Slice takes from an axis; None if it is unknown.

    >>> sliced(7, 1, -1, 2), sliced(64, 0, "seq", 1), sliced("seq", 0, 2**63 - 1, 1)
    (3, 'min(64,seq)', 'seq')
    """
    if all(isinstance(number, int) for number in (extent, start, end, step)):
        return len(range(*slice(start, end, step).indices(extent))) if step > 0 else None  # type: ignore[operator, arg-type]
    if start != 0 or step != 1:
        return None
    return extent if end in (extent, _LAST) else smaller(extent, end)


def named_shape(tensor: Tensor) -> list[Any] | None:
    """Return the shape of a tensor with a unique name for each unknown dimension; None if its rank is unknown."""
    if tensor.shape is None:
        return None
    return [f"{tensor.name}#{place}" if extent is None else extent for place, extent in enumerate(tensor.shape)]


def broadcast(shapes: Sequence[Shape]) -> list[Any]:
    """Return the shape that shapes broadcast to, as in Expand; None for each dimension that is unknown.

    A name and its minimum with a number broadcast to the name, because no other value fits.

    >>> broadcast([["batch", "seq", 8], ["min(64,seq)", 1]]), broadcast([["a"], ["b"]])
    (['batch', 'seq', 8], [None])
    """
    rank = max(map(len, shapes), default=0)
    aligned = (_aligned(shape, rank) for shape in shapes)
    return [_common(set(extents) - {1}) for extents in zip(*aligned, strict=True)]


def _common(extents: set[SymbolicDim]) -> SymbolicDim:
    numbers = [extent for extent in extents if isinstance(extent, int)]
    if len(extents) <= 1 or numbers:
        return numbers[0] if numbers else next(iter(extents), 1)
    names = [extent for extent in extents if isinstance(extent, str)]
    whole = {name for name in names if all(bound == name or is_bounded(bound, name) for bound in names)}
    return None if None in extents or len(whole) != 1 else whole.pop()


def _aligned(shape: Sequence[Any], rank: int) -> list[Any]:
    return [*[1] * (rank - len(shape)), *shape][-rank:] if rank else []


def _is_filled(extent: SymbolicDim) -> bool:
    return isinstance(extent, int) and extent > 0


def _is_same(extent: SymbolicDim, entry: SymbolicDim) -> bool:
    return isinstance(entry, str) and extent == entry


def _quotient(data: Shape, rest: Sequence[SymbolicDim]) -> SymbolicDim:
    if None in data or None in rest:
        return None
    names = Counter(extent for extent in data if isinstance(extent, str))
    taken = Counter(extent for extent in rest if isinstance(extent, str))
    whole = prod(extent for extent in data if isinstance(extent, int))
    part = prod(extent for extent in rest if isinstance(extent, int))
    if taken - names or not part or whole % part:
        return None
    return product([whole // part, *sorted((names - taken).elements())])


# Shape arithmetic -----------------------------------------------------------------------------------------------------

MOST_ENTRIES: Final = 256
"""Longer tensors do not count as shape arithmetic."""


@dataclass(frozen=True, eq=False)
class Value:
    """The known content of a small tensor of integers or booleans.

    Attributes:
        entries: an array of `SymbolicDim`.
        dtype: the tensor's type.
    """

    entries: npt.NDArray[Any]
    dtype: np.dtype[Any]

    @property
    def known(self) -> bool:
        """Whether all entries are numbers."""
        return all(isinstance(entry, int) for entry in self.entries.flat)

    @property
    def named(self) -> bool:
        """Whether all entries are numbers or names."""
        return None not in self.entries.flat

    @property
    def content(self) -> Hashable:
        """A key that is equal for values of equal entries, shape and type."""
        return self.dtype, self.entries.shape, tuple(self.entries.flat)

    @property
    def array(self) -> npt.NDArray[Any]:
        """The entries as an array of ``dtype``; all must be numbers."""
        return self.entries.astype(self.dtype)

    @property
    def numbers(self) -> list[int]:
        """The entries as a flat list.

        Raises:
            ValueError: An entry is not a number.
        """
        if not self.known:
            raise ValueError("an entry is not known")
        return [int(entry) for entry in self.entries.flat]


def value_of(tensor: Constant) -> Value | None:
    """Return a constant as a value; None if it is long, not of integers or booleans, or a caller can override it."""
    plain = tensor.dtype.kind == "b" or (tensor.dtype.kind in "iu" and tensor.dtype.isbuiltin == 1)
    if tensor.overridable_input is not None or not plain or prod(tensor.shape) > MOST_ENTRIES:
        return None
    return Value(np.asarray(tensor.values).astype(object), tensor.dtype)


def shape_value(shape: Shape, start: int = 0, end: int | None = None) -> Value:
    """Return the output of a Shape operator for a tensor of this shape."""
    sound = [None if isinstance(extent, int) and extent < 0 else extent for extent in shape]
    return Value(_array(sound[start:end]), np.dtype(np.int64))


def evaluate(node: Node, inputs: Sequence[Value | None], shapes: Sequence[Shape | None]) -> Value | None:
    """Return the value of a node's first output, or None if it is unknown.

    Args:
        node: may be ill-formed; its value is then unknown.
        inputs: the known values of its inputs; None for an unknown or absent one.
        shapes: the shapes of its inputs.
    """
    compute = _OPERATORS.get(node.op)
    if compute is None or node.domain:
        return None
    try:
        value = compute(_Call(node, list(inputs), list(shapes)))
    # Ill-formed nodes have no value; model checks report them elsewhere.
    except (ValueError, IndexError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return value if value is not None and value.entries.size <= MOST_ENTRIES else None


@dataclass(frozen=True, eq=False)
class _Call:
    """A node and the known values and shapes of its inputs."""

    node: Node
    inputs: list[Value | None]
    shapes: list[Shape | None]

    def value(self, index: int = 0) -> Value:
        known_value = self.inputs[index]
        if known_value is None:
            raise ValueError("the input is not known")
        return known_value

    def numbers(self, index: int, attribute: str) -> list[int] | None:
        if attribute in self.node.attrs:
            return [int(number) for number in self.node.attrs[attribute]]
        if index < len(self.node.inputs) and self.node.inputs[index].name:
            return self.value(index).numbers
        return None

    def with_entries(self, entries: Any) -> Value:
        return Value(np.asarray(entries, object), self.value().dtype)


def _array(entries: Sequence[SymbolicDim]) -> npt.NDArray[Any]:
    array = np.empty(len(entries), object)
    array[:] = entries
    return array


def _elementwise(
    compute: Callable[..., SymbolicDim], operands: int = 2, truth: bool = False
) -> Callable[[_Call], Value]:
    """Operators with any number of operands, such as Max, apply to two at a time."""
    ufunc = np.frompyfunc(compute, operands, 1)

    def apply(call: _Call) -> Value:
        read = [call.value(index) for index in range(len(call.node.inputs))]
        entries = [value.entries for value in read]
        dtype = np.dtype(bool) if truth else read[-1].dtype
        return _bounded(reduce(ufunc, entries) if operands == 2 else ufunc(*entries), dtype)

    return apply


def _bounded(entries: Any, dtype: np.dtype[Any]) -> Value:
    """Numbers that the type cannot hold become unknown."""
    array = np.asarray(entries, object)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        fits = np.frompyfunc(
            lambda entry: entry if not isinstance(entry, int) or bounds.min <= entry <= bounds.max else None, 1, 1
        )
        array = np.asarray(fits(array), object)
    return Value(array, dtype)


def _shape(call: _Call) -> Value | None:
    shape = call.shapes[0]
    attrs = call.node.attrs
    return None if shape is None else shape_value(shape, attrs.get("start", 0), attrs.get("end"))


def _size(call: _Call) -> Value | None:
    shape = call.shapes[0]
    if shape is None:
        return None
    return Value(np.array(product(shape), object), np.dtype(np.int64))


def _cast(call: _Call) -> Value | None:
    dtype = np.dtype(numpy_dtype(int(call.node.attrs["to"])))
    if dtype.kind not in "iu" or not dtype.isbuiltin or call.value().dtype.kind == "b":
        return None
    return _bounded(call.value().entries, dtype)


def _gather(call: _Call) -> Value:
    indices = call.value(1)
    places = np.asarray(indices.numbers, np.int64).reshape(indices.entries.shape)
    return call.with_entries(np.take(call.value().entries, places, axis=call.node.attrs.get("axis", 0)))


def _moved(call: _Call) -> Value | None:
    parameters = [
        np.array(call.value(index).numbers, np.int64) if tensor.name else None
        for index, tensor in enumerate(call.node.inputs[1:], 1)
    ]
    view = view_of(call.node.op, call.node.attrs, parameters)
    return None if view is None else call.with_entries(view(call.value().entries))


def _concat(call: _Call) -> Value:
    read = [call.value(index) for index in range(len(call.node.inputs))]
    return call.with_entries(np.concatenate([value.entries for value in read], axis=call.node.attrs["axis"]))


def _expand(call: _Call) -> Value:
    entries, target = call.value().entries, call.value(1).numbers
    shape = np.broadcast_shapes(entries.shape, tuple(target))
    if prod(shape) > MOST_ENTRIES:
        raise ValueError("it is long")
    return call.with_entries(np.broadcast_to(entries, shape))


def _constant_of_shape(call: _Call) -> Value | None:
    shape = call.value().numbers
    filling = call.node.attrs.get("value")
    if not isinstance(filling, Constant) or filling.dtype.kind not in "iub" or prod(shape) > MOST_ENTRIES:
        return None
    return Value(np.full(shape, filling.values.item(), object), filling.dtype)


def _range(call: _Call) -> Value | None:
    start, limit, delta = (number for index in range(3) for number in call.value(index).numbers)
    numbers = range(start, limit, delta)
    return call.with_entries(_array(list(numbers))) if len(numbers) <= MOST_ENTRIES else None


def _product(call: _Call) -> Value | None:
    value, axes = call.value(), call.numbers(1, "axes")
    keeps = axes is None and call.node.attrs.get("noop_with_empty_axes", 0)
    if value.entries.ndim != 1 or axes not in (None, [0], [-1]) or keeps:
        return None
    total = np.array(product(value.entries), object)
    return _bounded(total.reshape(1) if call.node.attrs.get("keepdims", 1) else total, value.dtype)


_OPERATORS: Final[Mapping[str, Callable[[_Call], Value | None]]] = {
    **dict.fromkeys(VIEWS, _moved),
    "Add": _elementwise(plus),
    "And": _elementwise(numbers_only(lambda one, other: bool(one and other)), truth=True),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": _elementwise(over),
    "Equal": _elementwise(equal, truth=True),
    "Expand": _expand,
    "Gather": _gather,
    "Greater": _elementwise(numbers_only(lambda one, other: one > other), truth=True),
    "Less": _elementwise(numbers_only(lambda one, other: one < other), truth=True),
    "Max": _elementwise(larger),
    "Min": _elementwise(smaller),
    "Mod": _elementwise(remainder),
    "Mul": _elementwise(times),
    "Not": _elementwise(negation, 1, truth=True),
    "Or": _elementwise(numbers_only(lambda one, other: bool(one or other)), truth=True),
    "Range": _range,
    "ReduceProd": _product,
    "Shape": _shape,
    "Size": _size,
    "Sub": _elementwise(minus),
    "Where": _elementwise(choose, 3),
}
