"""Which constants of a node are worth storing as codes, and along which axes those have scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np
from onnx import TensorProto

from onnxq.graph import Constant, Node, Tensor, is_fixed, onnx_dtype, operator_key, optional
from onnxq.operators import OPERATORS, operator_of
from onnxq.planning.obstacles import volume
from onnxq.planning.plan import Weight
from onnxq.scheme import Granularity, Spec

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})

# Below this a weight saves less than the nodes that decode it cost.
_SMALLEST_STORED_WEIGHT = 256

# A constant that is no weight saves nothing to speak of below this.
_SMALLEST_STORED_CONSTANT = 4096
_VALUES_PER_SCALE = 32
# So many of its values are looked at, times a power of two that makes short fractions whole.
_LOOKED_AT, _SHORT_FRACTION = 4096, 64.0


def weight_at(node: Node, index: int, spec: Spec) -> Weight:
    """Return the weight at an input of a node."""
    operator, tensor = OPERATORS[operator_key(node)], node.inputs[index]
    return Weight(
        index,
        tensor.name,
        spec,
        operator.weights[index].channels(node),
        volume(tensor.shape),
        operator.weights[index].reduction(node),
    )


def large_weights(node: Node, spec: Spec) -> Iterator[Weight]:
    """Yield the weights of a node, and whatever else it holds of learned numbers that are worth storing as codes."""
    operator = operator_of(node)
    for index in operator.weights if operator else ():
        tensor = optional(node, index)
        if not _is_table(tensor, _SMALLEST_STORED_WEIGHT):
            continue
        weight = weight_at(node, index, spec)
        rank = len(tensor.shape)
        # A damaged model's weight may lack an axis that its operator speaks of.
        if all(-rank <= axis < rank for axis in (weight.axis, weight.reduction_axis)):
            yield replace(weight, spec=_with_full_blocks(spec, tensor.shape, weight.reduction_axis))
    if (operator is not None and operator.settings) or node.bodies():
        return
    named = {*operator.weights, operator.bias} if operator else set()
    for index, tensor in enumerate(node.inputs):
        if index not in named and _is_table(tensor, _SMALLEST_STORED_CONSTANT) and _is_learned(tensor):
            axis = _finest_axis(tensor.shape)
            yield Weight(index, tensor.name, spec, axis, volume(tensor.shape), len(tensor.shape) - 1)


def _is_table(tensor: Tensor | None, least: int) -> TypeGuard[Constant]:
    """Whether a tensor is stored floats of two axes or more and at least so many elements."""
    return (
        is_fixed(tensor) and onnx_dtype(tensor) in _FLOATS and volume(tensor.shape) >= least and len(tensor.shape) >= 2
    )


def _is_learned(tensor: Constant) -> bool:
    """Whether the values of a constant are finite and not all short fractions, as in grids, anchors and masks.

    Those say where something lies, and coarser ones would name other places.
    """
    values = tensor.values.astype(np.float32, copy=False).reshape(-1)
    if not np.isfinite(values).all():
        return False
    sample = values[:: max(1, values.size // _LOOKED_AT)].astype(np.float64)
    return bool(np.mod(sample * _SHORT_FRACTION, 1).any())


def _finest_axis(shape: Sequence[int]) -> int:
    """Return the longest axis of which each index still has enough values to be worth a scale of its own."""
    elements = volume(shape)
    axes = [axis for axis, extent in enumerate(shape) if elements >= _VALUES_PER_SCALE * extent]
    return max(axes, key=lambda axis: shape[axis], default=0)


def every_weight(node: Node, spec: Spec) -> Iterator[Weight]:
    """Yield the float initializers of any operator that can be parameters: no settings, numbers or masks."""
    operator = operator_of(node)
    if (operator is not None and operator.settings) or node.bodies():
        return
    for index, tensor in enumerate(node.inputs):
        if (
            is_fixed(tensor)
            and onnx_dtype(tensor) in _FLOATS
            and volume(tensor.shape)
            and tensor.shape
            and np.isfinite(tensor.values.astype(np.float32)).all()
        ):
            # Blocks lie along the last axes, whatever the operator sums over.
            yield Weight(index, tensor.name, spec, 0, volume(tensor.shape), -1)


def _with_full_blocks(spec: Spec, shape: tuple[int, ...], axis: int) -> Spec:
    """Return the spec per channel where blocks would not be half full, as in kernels that sum over a few channels.

    Blocks lie along one axis, so every place in such a kernel would have scales of its own.
    """
    short = isinstance(spec.per, tuple) and len(spec.per) == 1 and 2 * shape[axis] < spec.per[0]
    return replace(spec, per=Granularity.CHANNEL) if short and len(shape) > 2 else spec
