"""Shape arithmetic as values: small integer tensors whose entries are numbers, names of dimensions, or unknown."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxq.ir.data_types import numpy_dtype
from onnxq.ir.elements import Constant, Node, Shape
from onnxq.ir.shape_entries import (
    Entry,
    choose,
    equal,
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
from onnxq.rewrite.constants.moves import OPEN_ENDS

MOST_ENTRIES: Final = 256
"""Longer tensors are no shape arithmetic."""


@dataclass(frozen=True, eq=False)
class Value:
    """What is known of a small tensor of integers or truth values.

    Attributes:
        entries: an array of `Entry`.
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
        """What is equal for values of equal entries, shape and type."""
        return self.dtype, self.entries.shape, tuple(self.entries.flat)

    @property
    def array(self) -> npt.NDArray[Any]:
        """The entries as numbers of the type; they must be known."""
        return self.entries.astype(self.dtype)

    @property
    def numbers(self) -> list[int]:
        """The entries as a flat list; they must be known."""
        if not self.known:
            raise ValueError("an entry is not known")
        return [int(entry) for entry in self.entries.flat]


def value_of(tensor: Constant) -> Value | None:
    """Return a constant as a value: None when it is long, not of integers, or a caller can override it."""
    plain = tensor.dtype.kind == "b" or (tensor.dtype.kind in "iu" and tensor.dtype.isbuiltin == 1)
    if tensor.input_source is not None or not plain or prod(tensor.shape) > MOST_ENTRIES:
        return None
    return Value(np.asarray(tensor.values).astype(object), tensor.dtype)


def shape_value(shape: Shape, start: int = 0, end: int | None = None) -> Value:
    """Return what a Shape operator gives for a tensor of this shape."""
    sound = [None if isinstance(extent, int) and extent < 0 else extent for extent in shape]
    return Value(_array(sound[start:end]), np.dtype(np.int64))


def evaluate(node: Node, inputs: Sequence[Value | None], shapes: Sequence[Shape | None]) -> Value | None:
    """Return the value of a node's first output, or None when it is not known.

    Args:
        node: a node of an ONNX operator; it may be ill-formed.
        inputs: what is known of the values of its inputs, None for one left out.
        shapes: the shapes of its inputs.
    """
    compute = _OPERATORS.get(node.op)
    if compute is None or node.domain:
        return None
    try:
        made = compute(_Call(node, list(inputs), list(shapes)))
    # Whatever an operator cannot be applied to has no value; the model as a whole is judged elsewhere.
    except (ValueError, IndexError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return made if made is not None and made.entries.size <= MOST_ENTRIES else None


@dataclass(frozen=True, eq=False)
class _Call:
    """A node with what is known of its inputs."""

    node: Node
    inputs: list[Value | None]
    shapes: list[Shape | None]

    def value(self, index: int = 0) -> Value:
        found = self.inputs[index]
        if found is None:
            raise ValueError("the input is not known")
        return found

    def numbers(self, index: int, attribute: str) -> list[int] | None:
        """Integers that are an input or, in older operators, an attribute; None when they are left out."""
        if attribute in self.node.attrs:
            return [int(number) for number in self.node.attrs[attribute]]
        if index < len(self.node.inputs) and self.node.inputs[index].name:
            return self.value(index).numbers
        return None

    def with_entries(self, entries: Any) -> Value:
        return Value(np.asarray(entries, object), self.value().dtype)


def _array(entries: Sequence[Entry]) -> npt.NDArray[Any]:
    made = np.empty(len(entries), object)
    made[:] = entries
    return made


def _elementwise(compute: Callable[..., Entry], operands: int = 2, truth: bool = False) -> Callable[[_Call], Value]:
    """Apply to each entry; operators of any number of operands, such as Max, apply to two at a time."""
    ufunc = np.frompyfunc(compute, operands, 1)

    def apply(call: _Call) -> Value:
        read = [call.value(index) for index in range(len(call.node.inputs))]
        entries = [value.entries for value in read]
        dtype = np.dtype(bool) if truth else read[-1].dtype
        return _bounded(reduce(ufunc, entries) if operands == 2 else ufunc(*entries), dtype)

    return apply


def _bounded(entries: Any, dtype: np.dtype[Any]) -> Value:
    """Forget numbers that the type cannot hold."""
    made = np.asarray(entries, object)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        fits = np.frompyfunc(
            lambda entry: entry if not isinstance(entry, int) or bounds.min <= entry <= bounds.max else None, 1, 1
        )
        made = np.asarray(fits(made), object)
    return Value(made, dtype)


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


def _slice(call: _Call) -> Value:
    starts, ends = call.numbers(1, "starts") or [], call.numbers(2, "ends") or []
    entries = call.value().entries
    axes = call.numbers(3, "axes") or list(range(len(starts)))
    steps = call.numbers(4, "steps") or [1] * len(starts)
    where = [slice(None)] * entries.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0 and end in OPEN_ENDS:
            raise ValueError("runtimes do not agree where it stops")
        extent = entries.shape[axis]
        # Python takes an end of -1 from the end; ONNX does so once, and then clamps.
        first, last = (place + extent if place < 0 else place for place in (start, end))
        low, high = (0, extent) if step > 0 else (-1, extent - 1)
        stop = min(max(last, low), high)
        where[axis] = slice(min(max(first, 0), high), stop if stop >= 0 else None, step)
    return call.with_entries(entries[tuple(where)])


def _squeeze(call: _Call) -> Value:
    axes = call.numbers(1, "axes")
    return call.with_entries(np.squeeze(call.value().entries, None if axes is None else tuple(axes)))


def _unsqueeze(call: _Call) -> Value:
    axes = call.numbers(1, "axes")
    return call.with_entries(np.expand_dims(call.value().entries, tuple(axes or ())))


def _concat(call: _Call) -> Value:
    read = [call.value(index) for index in range(len(call.node.inputs))]
    return call.with_entries(np.concatenate([value.entries for value in read], axis=call.node.attrs["axis"]))


def _reshape(call: _Call) -> Value:
    entries = call.value().entries
    zero = call.node.attrs.get("allowzero", 0)
    target = call.numbers(1, "shape") or []
    return call.with_entries(
        entries.reshape([entries.shape[i] if not (extent or zero) else extent for i, extent in enumerate(target)])
    )


def _transpose(call: _Call) -> Value:
    return call.with_entries(np.transpose(call.value().entries, call.node.attrs.get("perm")))


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
    made = range(start, limit, delta)
    return call.with_entries(_array(list(made))) if len(made) <= MOST_ENTRIES else None


def _product(call: _Call) -> Value | None:
    value, axes = call.value(), call.numbers(1, "axes")
    keeps = axes is None and call.node.attrs.get("noop_with_empty_axes", 0)
    if value.entries.ndim != 1 or axes not in (None, [0], [-1]) or keeps:
        return None
    made = np.array(product(value.entries), object)
    return _bounded(made.reshape(1) if call.node.attrs.get("keepdims", 1) else made, value.dtype)


_OPERATORS: Final[Mapping[str, Callable[[_Call], Value | None]]] = {
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
    "Identity": lambda call: call.value(),
    "Less": _elementwise(numbers_only(lambda one, other: one < other), truth=True),
    "Max": _elementwise(larger),
    "Min": _elementwise(smaller),
    "Mod": _elementwise(remainder),
    "Mul": _elementwise(times),
    "Not": _elementwise(negation, 1, truth=True),
    "Or": _elementwise(numbers_only(lambda one, other: bool(one or other)), truth=True),
    "Range": _range,
    "ReduceProd": _product,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _elementwise(minus),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _elementwise(choose, 3),
}
