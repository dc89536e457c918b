"""Which constants of a node are worth storing as codes, and along which axes those have scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy as np
from onnx import TensorProto

from onnxq.config.scheme import Granularity, Spec
from onnxq.ir import Constant, Node, Tensor, is_fixed, onnx_dtype, operator_key, optional
from onnxq.numerics.blocks import block_shape, grid_shape
from onnxq.numerics.formats import format_named
from onnxq.numerics.scale_formats import scale_format_named
from onnxq.ops import OPERATORS, operator_of
from onnxq.planning.obstacles import volume
from onnxq.planning.plan import Weight

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})

# Below this a weight saves less than the nodes that decode it cost.
_SMALLEST_STORED_WEIGHT = 256

# With fewer bits one scale for a whole weight is too coarse.
_FINE_BITS = 8

# A constant that is no weight saves nothing to speak of below this.
_SMALLEST_STORED_CONSTANT = 4096
_VALUES_PER_SCALE = 32
# So many of its values are looked at, times a power of two that makes short fractions whole.
_LOOKED_AT, _SHORT_FRACTION = 4096, 64.0


def weight_at(node: Node, index: int, spec: Spec) -> Weight:
    """Return the weight at an input of a node, with a spec whose scales do not outweigh what its codes save."""
    operator, tensor = OPERATORS[operator_key(node)], node.inputs[index]
    axes = operator.weights[index]
    weight = Weight(index, tensor.name, spec, axes.channels(node), volume(tensor.shape), axes.reduction(node))
    return replace(weight, spec=_worthwhile(weight, tensor) or spec)


def large_weights(node: Node, spec: Spec) -> Iterator[Weight]:
    """Yield the weights of a node, and whatever else it holds of learned numbers that are worth storing as codes."""
    operator = operator_of(node)
    for index, axis_of in operator.weights.items() if operator else ():
        tensor = optional(node, index)
        if not _is_table(tensor, _SMALLEST_STORED_WEIGHT):
            continue
        axes = axis_of.channels(node), axis_of.reduction(node)
        rank = len(tensor.shape)
        # A damaged model's weight may lack an axis that its operator speaks of.
        if all(-rank <= axis < rank for axis in axes):
            full = _with_full_blocks(spec, tensor.shape, axes[1])
            yield from _saving(Weight(index, tensor.name, full, axes[0], volume(tensor.shape), axes[1]), tensor)
    if (operator is not None and operator.settings) or node.bodies():
        return
    named = {*operator.weights, operator.bias} if operator else set()
    for index, tensor in enumerate(node.inputs):
        if index not in named and _is_table(tensor, _SMALLEST_STORED_CONSTANT) and _is_learned(tensor):
            axis = _finest_axis(tensor.shape)
            weight = Weight(index, tensor.name, spec, axis, volume(tensor.shape), len(tensor.shape) - 1)
            yield from _saving(weight, tensor)


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


def _saving(weight: Weight, tensor: Constant) -> Iterator[Weight]:
    """Yield a weight with a spec that saves bytes, or nothing where none does."""
    if spec := _worthwhile(weight, tensor):
        yield replace(weight, spec=spec)


def _worthwhile(weight: Weight, tensor: Constant) -> Spec | None:
    """Return the spec of a weight, with one scale for the whole tensor where more take too much, or None where all do.

    Scales of channels take too much where they take as much as codes of 8 bits and more: those of twice the bits and
    one scale would be as small. What a toolkit's arithmetic says stays, and so does the granularity of small weights.
    """
    spec = weight.spec
    shape = tuple(tensor.shape)
    misfit = isinstance(spec.per, tuple) and len(spec.per) > len(shape)
    if spec.is_followed or misfit or weight.elements < _SMALLEST_STORED_WEIGHT:
        return spec
    # Scales of a small range are for several that one more multiplies.
    scale = "float32" if spec.two_level else spec.scale
    single = replace(spec, per=Granularity.TENSOR, two_level=False, scale=scale)
    for one in (spec, single):
        codes, scales = stored_bytes(replace(weight, spec=one), shape)
        few = format_named(one.format).bits < _FINE_BITS
        fine = one.per is not Granularity.CHANNEL or few or scales < codes
        if fine and codes + scales < weight.elements * tensor.dtype.itemsize:
            return one
    return None


def stored_bytes(weight: Weight, shape: Sequence[int]) -> tuple[int, int]:
    """Return how many bytes the codes of a weight take, and its scales and zero points.

    >>> stored_bytes(Weight(0, "table", Spec("int8", Granularity.CHANNEL), axis=0, reduction_axis=-1), (1000, 16))
    (16000, 4000)
    """
    spec, format = weight.spec, format_named(weight.spec.format)
    block = block_shape(spec.per, shape, channel_axis=weight.axis, reduction_axis=weight.reduction_axis)
    each = scale_format_named(spec.scale).dtype.itemsize + (0 if spec.symmetric else format.bits / 8)
    return math.ceil(volume(shape) * format.bits / 8), math.ceil(volume(grid_shape(shape, block)) * each)


def _with_full_blocks(spec: Spec, shape: tuple[int, ...], axis: int) -> Spec:
    """Return the spec per channel where blocks would not be half full, as in kernels that sum over a few channels.

    Blocks lie along one axis, so every place in such a kernel would have scales of its own.
    """
    short = isinstance(spec.per, tuple) and len(spec.per) == 1 and 2 * shape[axis] < spec.per[0]
    return replace(spec, per=Granularity.CHANNEL) if short and len(shape) > 2 else spec
