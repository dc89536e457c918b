"""Whether samples are in the unit that a model was trained with, as its first layers show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.runner import read_without_data
from onnxq.calibration.stage import Stage, stages
from onnxq.calibration.taps import tensor_types
from onnxq.data.inputs import Sample, is_floating
from onnxq.ir import Graph, Node, Tensor, Variable, is_fixed, optional
from onnxq.ops import Role, operator_of

# Of twelve networks of images, sound and text the first sums are 0.8 to 3 times as large as their biases, and 200 to
# 900 times or 0.003 to 0.01 times where samples are in 0..255 instead of 0..1 or the other way round.
_MANY = 40.0
# Without training sums grow with the root of their terms beside biases; most first layers sum up so many.
_USUAL_TERMS = 27
_SHIFTS = frozenset({"Add", "Sub"})
_AFFINE = _SHIFTS | {"Div", "Mul"}
# Values of a tensor that tell its size.
_TELLING = 1 << 16
# Less keeps logarithms and divisors from zero.
_SMALLEST_SHIFT = 0.01


class _Probe(NamedTuple):
    """A tensor behind an input whose size a model knows.

    Attributes:
        input: name of the input.
        node: which makes the tensor.
        tensor: its name.
        offset: what is taken off its values.
        size: how large they are then in training, about.
        terms: how many numbers were summed up for each.
        centred: whether each channel, the second axis, has a mean of about 0 in training.
    """

    input: str
    node: str
    tensor: str
    offset: NDArray[Any]
    size: float
    terms: int = 1
    centred: bool = False

    @property
    def most(self) -> float:
        """How many times as large as expected values are beyond doubt."""
        return _MANY * math.sqrt(max(1.0, self.terms / _USUAL_TERMS))

    def factor(self, arrays: Sequence[NDArray[Any]]) -> float:
        """Return how many times as large as expected values are, or how widely spread where their mean is 0."""
        # Infinite values have no size, which is none that is doubted.
        with np.errstate(invalid="ignore"):
            values = [_thinned(array - self.offset.astype(array.dtype)) for array in arrays if array.size]
        if not values:
            return 0.0
        size = math.sqrt(float(np.mean([np.square(one).mean() for one in values]))) / self.size
        if not self.centred or size >= self.most:
            return size
        channels = np.concatenate([np.moveaxis(one, 1, 0).reshape(one.shape[1], -1) for one in values], axis=1)
        return math.sqrt(float(channels.var(axis=1).mean())) / self.size


def _thinned(array: NDArray[Any]) -> NDArray[np.float64]:
    """Return evenly spaced values of the last axis of an array, of a large one so many as tell its size."""
    return np.asarray(array[..., :: math.ceil(array.size / _TELLING)] if array.ndim else array, np.float64)


def units(prepared: Path, graph: Graph, samples: Sequence[Sample]) -> Iterator[str]:
    """Say in sentences which inputs are far larger or smaller than those that the model was trained with.

    The first sums behind an input are about as large as their biases, which take off what training has seen in the
    mean. So are the means that it takes off itself, and what a normalization gives beside its factors.

    Args:
        prepared: file of the prepared float model, whose normalizations are folded as far as they can be.
        graph: of that model.
        samples: to run.
    """
    # What bodies read of an input cannot be an output.
    outside = frozenset(graph.nodes)
    probes = [probe for tensor in graph.inputs for probe in _probes(tensor, outside)]
    model = read_without_data(prepared)
    known = tensor_types(model) if probes else {}
    names = list(dict.fromkeys(probe.tensor for probe in probes if probe.tensor in known))
    if not names or not samples:
        return
    parts = stages(prepared, names)
    found = [_run_until(names, parts, sample) for sample in samples]
    told = set()
    for probe in (probe for probe in probes if probe.tensor in known):
        factor = probe.factor([values[probe.tensor] for values in found])
        if probe.input in told or not 0 < factor < math.inf or 1 / _MANY < factor < probe.most:
            continue
        told.add(probe.input)
        much = f"{factor:.0f} times as large" if factor > 1 else f"only {factor:.2g} times as large"
        wanted = "0..255 where 0..1 is" if factor > 1 else "0..1 where 0..255 is"
        yield (
            f"input {probe.input} makes the values of node {probe.node} {much} as its parameters let expect; check the "
            f"unit of the samples, such as {wanted} wanted"
        )


def _run_until(names: Sequence[str], parts: Sequence[Stage], sample: Sample) -> Mapping[str, NDArray[Any]]:
    """Return a sample and what is made of it, up to the last of some tensors."""
    values: dict[str, NDArray[Any]] = dict(sample)
    for part in parts:
        if all(name in values for name in names):
            break
        values |= part.run(values)
    return values


def _probes(given: Tensor, outside: Set[Node]) -> Iterator[_Probe]:
    """Yield what is known of the first layers behind an input, through nodes that move, shift and scale values."""
    if not isinstance(given, Variable) or given.dtype is None or not is_floating(np.dtype(given.dtype)):
        return
    pending: list[Tensor] = [given]
    seen: set[Tensor] = set()
    while pending:
        tensor = pending.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        for reader in filter(outside.__contains__, tensor.outputs):
            if _moves(reader) or (reader.op in _AFFINE and any(map(is_fixed, reader.inputs))):
                pending += reader.outputs
            probe = _shift(given.name, reader) if reader.op in _SHIFTS else _layer(given.name, reader)
            if probe is not None and tensor in reader.inputs[:2]:
                yield probe


def _moves(node: Node) -> bool:
    operator = operator_of(node)
    return operator is not None and (operator.role is Role.CARRIER or node.op in ("Cast", "Identity"))


def _shift(given: str, node: Node) -> _Probe | None:
    """Return what a shift knows of data whose mean in training it takes off, or which it moves about 0."""
    constant = next(filter(is_fixed, node.inputs), None)
    if constant is None or sum(extent > 1 for extent in constant.shape) > 1 or not constant.nbytes:
        return None
    shift = constant.values.astype(np.float64) * (-1 if node.op == "Sub" and constant is node.inputs[1] else 1)
    size = float(np.sqrt(np.square(shift).mean()))
    return _Probe(given, node.name, node.outputs[0].name, shift, size) if size >= _SMALLEST_SHIFT else None


def _layer(given: str, node: Node) -> _Probe | None:
    """Return what a product knows of its sums by its bias, or a normalization by its factors."""
    if node.op == "BatchNormalization" and node.inputs[0].shape is not None:
        factors, offset, rank = node.inputs[1], node.inputs[2], len(node.inputs[0].shape)
        return _probe(given, node, factors, offset, rank, centred=True)
    operator = operator_of(node)
    if operator is None or operator.bias is None or operator.channels is None or not is_fixed(node.inputs[1]):
        return None
    bias, weight = optional(node, operator.bias), node.inputs[1]
    terms = int(np.prod(weight.shape)) // max(weight.shape[operator.weights[1].channels(node)], 1)
    return _probe(given, node, bias, bias, len(weight.shape), terms=terms)


def _probe(
    given: str, node: Node, sizes: Tensor | None, offset: Tensor | None, rank: int, **facts: Any
) -> _Probe | None:
    """Return the probe of a node that adds an offset for each channel, the second axis, to values of such sizes."""
    if not is_fixed(sizes) or not is_fixed(offset) or len(offset.shape) != 1:
        return None
    size = float(np.sqrt(np.square(sizes.values.astype(np.float64)).mean()))
    shape = (1, -1, *[1] * (rank - 2))
    return _Probe(given, node.name, node.outputs[0].name, offset.values.reshape(shape), size, **facts) if size else None
