"""Channel maps: which input channel each channel of an output comes from.

A rule applies if each output channel is proportional to one input channel. A factor on an input channel then becomes
the same factor on its output channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnxq.ir import Node, Tensor


class ChannelMap(NamedTuple):
    """Where the channels of an input are found in an output.

    Attributes:
        output: index of the output.
        axis: channel axis of the output.
        of: the input channel of each output channel from ``first`` on, int64.
        first: the first output channel that comes from this input.
    """

    output: int
    axis: int
    of: NDArray[np.int64]
    first: int = 0


ChannelMapRule: TypeAlias = "Callable[[Node, int, int], tuple[ChannelMap, ...] | str]"
"""Maps a node, the index of an activation input and its channel axis to channel maps, or to why there are none."""


def alike(node: Node, index: int, axis: int) -> tuple[ChannelMap, ...] | str:
    """Rule for operators whose output has the channels of the input along the same axis."""
    return _passed(node, index, axis, 0, axis)


def aligned(node: Node, index: int, axis: int) -> tuple[ChannelMap, ...] | str:
    """Rule for operators that broadcast their inputs to the shape of the output."""
    return _passed(node, index, axis, 0, axis + _rank(node.outputs[0]) - _rank(node.inputs[index]))


def scaled(node: Node, index: int, axis: int) -> tuple[ChannelMap, ...] | str:
    """Rule for Mul: follow the computed input with the most axes longer than 1, and the first of equal ones."""
    sizes = [0 if not tensor.inputs else sum(extent != 1 for extent in tensor.shape or ()) for tensor in node.inputs]
    if sizes[index] < max(sizes) or sizes.index(max(sizes)) != index:
        return "is what another tensor is multiplied by"
    return aligned(node, index, axis)


def concatenated(node: Node, index: int, axis: int) -> tuple[ChannelMap, ...] | str:
    """Rule for Concat."""
    along = _axis(node, node.outputs[0])
    if axis != along:
        return alike(node, index, axis)
    extents = [_extent(tensor, along) for tensor in node.inputs]
    if 0 in extents:
        return "is joined to channels of unknown number"
    return (ChannelMap(0, along, np.arange(extents[index]), sum(extents[:index])),)


def picked(node: Node, index: int, axis: int) -> tuple[ChannelMap, ...] | str:
    """Rule for Gather along an axis other than the channel axis."""
    along, behind = _axis(node, node.inputs[0], 0), _rank(node.outputs[0]) - _rank(node.inputs[0])
    if axis == along:
        return "is picked from by channel"
    return _passed(node, index, axis, 0, axis if axis < along else axis + behind)


def split(node: Node, index: int, axis: int) -> tuple[ChannelMap, ...] | str:
    """Rule for Split."""
    outputs = range(len(node.outputs))
    along = _axis(node, node.inputs[0], 0)
    if axis != along:
        maps = [_passed(node, index, axis, output, axis) for output in outputs]
        return next((entry for entry in maps if isinstance(entry, str)), "") or tuple(entry[0] for entry in maps)  # type: ignore[misc]
    extents = [_extent(tensor, along) for tensor in node.outputs]
    if 0 in extents or sum(extents) != _extent(node.inputs[0], along):
        return "is split into channels of unknown number"
    starts = np.cumsum([0, *extents])
    return tuple(ChannelMap(output, along, np.arange(starts[output], starts[output + 1])) for output in outputs)


def transposed(node: Node, index: int, axis: int) -> tuple[ChannelMap, ...] | str:
    """Rule for Transpose."""
    order = list(node.attrs.get("perm") or range(_rank(node.inputs[0]))[::-1])
    if axis not in order:
        return "has an unknown number of dimensions"
    return _passed(node, index, axis, 0, order.index(axis))


def reshaped(node: Node, index: int, axis: int) -> tuple[ChannelMap, ...] | str:
    """Rule for Reshape, Flatten, Squeeze and Unsqueeze.

    A channel axis is found if as many elements follow it as before, or if each channel becomes several adjacent ones.
    """
    before, after = node.inputs[index].shape or (), node.outputs[0].shape or ()
    channels, inner = _extent(node.inputs[index], axis), _volume(before[axis + 1 :])
    for place in range(len(after) - 1, -1, -1):
        extent, behind = _extent(node.outputs[0], place), _volume(after[place + 1 :])
        if not channels or not extent or not inner or not behind:
            break
        if extent % channels == 0 and behind * (extent // channels) == inner:
            return (ChannelMap(0, place, np.repeat(np.arange(channels), extent // channels)),)
    return "is reshaped so that its channels cannot be followed"


def _passed(node: Node, index: int, axis: int, output: int, place: int) -> tuple[ChannelMap, ...] | str:
    channels = _extent(node.inputs[index], axis)
    if not channels or place < 0 or _extent(node.outputs[output], place) != channels:
        return "is broadcast to more channels than it has, or to an unknown number"
    return (ChannelMap(output, place, np.arange(channels)),)


def _rank(tensor: Tensor) -> int:
    return len(tensor.shape or ())


def _extent(tensor: Tensor, axis: int) -> int:
    shape = tensor.shape or ()
    extent: Any = shape[axis] if 0 <= axis < len(shape) else 0
    return extent if isinstance(extent, int) else 0


def _volume(shape: Sequence[Any]) -> int:
    return math.prod(shape) if all(isinstance(extent, int) for extent in shape) else 0


def _axis(node: Node, tensor: Tensor, default: int = 0) -> int:
    axis = node.attrs.get("axis", default)
    return int(axis) % max(_rank(tensor), 1)
