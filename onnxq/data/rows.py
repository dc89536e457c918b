"""Rows as libraries give them, such as batches of tensors or records of columns, as samples of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.data.inputs import Input, Sample, is_floating, required
from onnxq.data.stacks import as_sample, stack_size
from onnxq.errors import DataError


def samples_of(row: object, inputs: Sequence[Input], where: str) -> Iterator[Sample]:
    """Yield the samples that a row holds: one, or as many as are stacked in it.

    A mapping is matched by name, and what no input is called is left out, such as labels. A tuple or list gives the
    inputs in the model's order, and what is more than inputs is left out likewise; anything else is the one input.
    Tensors become arrays, floats and integers take the width that the model wants where no value is lost, and the axis
    that counts samples is added where it lacks.

    Args:
        row: a mapping, a tuple, or an array or tensor.
        inputs: what the model wants.
        where: what errors call the row.

    Raises:
        DataError: it holds nothing for an input, or what is no array.

    >>> entry = Input("x", np.dtype(np.float32), ("N", 2))
    >>> [sample["x"].tolist() for sample in samples_of((np.ones((2, 2)), [0, 1]), [entry], "batch 0")]
    [[[1.0, 1.0]], [[1.0, 1.0]]]
    """
    wanted = {entry.name: entry for entry in inputs}
    arrays = {name: _array(value, wanted[name], where) for name, value in _named(row, inputs, where).items()}
    count = stack_size({name: array.shape for name, array in arrays.items()}, inputs)
    if count is None:
        yield arrays
        return
    for index in range(count):
        yield {name: as_sample(array[index], wanted[name]) for name, array in arrays.items()}


def is_sample(row: object) -> bool:
    """Whether a row is a sample already, which is then checked as it is."""
    return isinstance(row, Mapping) and all(isinstance(value, np.ndarray | np.generic) for value in row.values())


def _named(row: object, inputs: Sequence[Input], where: str) -> Mapping[str, object]:
    """Return what a row holds for each input."""
    if isinstance(row, Mapping):
        found = {entry.name: row[entry.name] for entry in inputs if entry.name in row}
        if lacking := [entry for entry in required(inputs) if entry.name not in found]:
            raise DataError(
                f"{where} has {', '.join(map(str, row)) or 'nothing'}, expected also {lacking[0]}; rename what holds it"
            )
        return found
    values = row if isinstance(row, tuple | list) else (row,)
    if len(values) < len(required(inputs)):
        raise DataError(
            f"{where} has {len(values)} values, expected one for each of {', '.join(str(one) for one in inputs)}; give "
            "them in this order, or by name"
        )
    return {entry.name: value for entry, value in zip(required(inputs), values, strict=False)}


def _array(value: Any, entry: Input, where: str) -> NDArray[Any]:
    """Return a tensor, list or number as an array of the type that an input wants, where that loses nothing."""
    try:
        # PyTorch's tensors, also those of other devices and with gradients; TensorFlow's give arrays by themselves.
        value = value.detach().cpu() if hasattr(value, "detach") else value
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where}: {entry.name!r} of type {type(value).__name__} is no array: {str(error)[:200]}; make it one"
        ) from error
    if entry.shape is not None and entry.batched and array.ndim == len(entry.shape) - 1:
        array = array[None]
    return _cast(array, entry)


def _cast(array: NDArray[Any], entry: Input) -> NDArray[Any]:
    both_floats = is_floating(array.dtype) and is_floating(entry.dtype)
    both_whole = array.dtype.kind in "iub" and entry.dtype.kind in "iub"
    if array.dtype == entry.dtype or not (both_floats or both_whole):
        # What changes the meaning of values, as from pixels to floats, is told when the sample is checked.
        return array
    cast = array.astype(entry.dtype)
    return cast if both_floats or bool((cast == array).all()) else array
