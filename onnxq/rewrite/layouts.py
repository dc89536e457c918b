"""Orders of axes: which operators work in any, and what changes in them for another.

A permutation says of a tensor that its axis ``i`` is axis ``permutation[i]`` of the tensor in the new layout, as in
``Transpose<perm = permutation>(new)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from onnxq.ir.elements import Constant, Node, Tensor, constant
from onnxq.ir.scopes import Names

Permutation: TypeAlias = tuple[int, ...]

_ELEMENTWISE: Final = frozenset(
    {"Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "Cast", "Ceil", "Celu"}
    | {"Clip", "Cos", "Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater"}
    | {"GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less"}
    | {"LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow"}
    | {"Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus"}
    | {"Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor"}
)
_REDUCTIONS: Final = frozenset(
    {"ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"}
    | {"ReduceProd", "ReduceSum", "ReduceSumSquare"}
)
_CHANNELS_FIRST: Final = frozenset(
    {"AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool"}
    | {"GlobalMaxPool", "InstanceNormalization", "MaxPool", "SpaceToDepth"}
)
_ON_AXES: Final = {"Concat": 0, "Pad": 3, "Slice": 3, "Split": 0, **dict.fromkeys(_REDUCTIONS, 1)}
"""Operators that name axes, and the input that names them where the opset has one."""


def inverse(permutation: Sequence[int]) -> Permutation:
    """Return the permutation that undoes another.

    >>> inverse((0, 2, 3, 1))
    (0, 3, 1, 2)
    """
    return tuple(int(index) for index in np.argsort(permutation))


def composed(first: Sequence[int], second: Sequence[int]) -> Permutation:
    """Return the permutation of two Transposes, the one behind the other.

    >>> composed((0, 2, 3, 1), (0, 3, 1, 2))
    (0, 1, 2, 3)
    """
    return tuple(first[axis] for axis in second)


def channels_last(rank: int) -> Permutation:
    """Return the permutation by which an image with its channels first becomes one with its channels last.

    >>> channels_last(4)
    (0, 2, 3, 1)
    """
    return (0, *range(2, rank), 1)


def feeds_channels_first(tensor: Tensor) -> bool:
    """Whether a node reads the tensor as an image whose channels come first."""
    readers = [reader for reader in tensor.outputs if reader.op in _CHANNELS_FIRST and not reader.domain]
    return any(reader.inputs[0] is tensor for reader in readers)


def permutation_of(node: Node) -> Permutation | None:
    """Return what a Transpose does, or None for other nodes, and where it is not known."""
    if node.op != "Transpose" or node.domain or len(node.inputs) != 1:
        return None
    rank = _rank(node.inputs[0])
    given = node.attrs.get("perm", None if rank is None else range(rank)[::-1])
    return None if given is None or sorted(given) != list(range(len(given))) else tuple(given)


def rank_in_any_layout(node: Node) -> int:
    """Return the rank of the tensors that a node reads and makes when it works in any layout, else 0."""
    if node.domain or not (node.op in _ELEMENTWISE or node.op in _ON_AXES):
        return 0
    ranks = {_rank(tensor) for tensor in (*laid_out(node), *(tensor for tensor in node.outputs if tensor.name))}
    rank = next(iter(ranks)) if len(ranks) == 1 else None
    if rank is None or rank < 2 or not laid_out(node):
        return 0
    works = _elementwise_in(node, rank) if node.op in _ELEMENTWISE else _on_known_axes(node, rank)
    return rank if works else 0


def laid_out(node: Node) -> list[Tensor]:
    """Return the variables that a node reads in the layout of its result."""
    read = node.inputs if node.op in _ELEMENTWISE or node.op == "Concat" else node.inputs[:1]
    return [tensor for tensor in read if tensor.name and not _is_fixed(tensor) and _rank(tensor) != 0]


def turn(node: Node, permutation: Permutation, names: Names) -> None:
    """Let a node that works in any layout work in the new one: its constants and axes, not its inputs."""
    if node.op in _ELEMENTWISE or node.op == "Concat":
        for index, tensor in enumerate(node.inputs):
            if _is_fixed(tensor) and any(size != 1 for size in tensor.shape):
                node.inputs[index] = _turned(tensor, permutation, names)
    if node.op in ("Concat", "Split"):
        node.attrs["axis"] = permutation[node.attrs.get("axis", 0)]
    elif node.op in _ON_AXES:
        _rename_axes(node, permutation, names)


def loses_order(node: Node, permutation: Permutation) -> bool:
    """Whether a node drops so many axes of its data that its result is the same in the new layout."""
    shape = node.inputs[0].shape if node.inputs else None
    if node.domain or shape is None or len(shape) != len(permutation):
        return False
    long = [permutation[axis] for axis, size in enumerate(shape) if size != 1]
    if node.op == "Flatten":
        return node.attrs.get("axis", 1) == 1 and permutation[0] == 0 and long == sorted(long)
    if node.op == "Reshape":
        target = _numbers(node, 1)
        if target is None or 0 in target[1:] or long != sorted(long):
            return False
        return target[:1] != [0] or (permutation[0] == 0 and not node.attrs.get("allowzero", 0))
    if node.op == "Squeeze" or (node.op in _REDUCTIONS and not node.attrs.get("keepdims", 1)):
        axes = _axes(node, len(shape))
        left = [permutation[axis] for axis in range(len(shape)) if axis not in (axes or ())]
        return axes is not None and left == sorted(left)
    return False


def lose(node: Node, permutation: Permutation, names: Names) -> None:
    """Let a node that drops axes drop those of the new layout."""
    if node.op not in ("Flatten", "Reshape"):
        _rename_axes(node, permutation, names)


def _rank(tensor: Tensor) -> int | None:
    return None if tensor.shape is None else len(tensor.shape)


def _is_fixed(tensor: Tensor) -> bool:
    return isinstance(tensor, Constant) and tensor.input_source is None


def _elementwise_in(node: Node, rank: int) -> bool:
    # Before opset 7 an attribute says along which axis an operand lies.
    constants = [tensor for tensor in node.inputs if _is_fixed(tensor)]
    fits = all(len(tensor.shape) <= rank for tensor in constants)
    return fits and not {"axis", "broadcast"} & set(node.attrs)


def _on_known_axes(node: Node, rank: int) -> bool:
    if node.op == "Concat":
        return "axis" in node.attrs and all(len(tensor.shape) == rank for tensor in node.inputs if _is_fixed(tensor))
    if node.op == "Split":
        return node.attrs.get("axis", 0) in range(-rank, rank)
    if node.op in _REDUCTIONS and not node.attrs.get("keepdims", 1):
        return False
    if node.op == "Pad":
        flat = node.attrs.get("pads", _numbers(node, 1))
        return flat is not None and (_axes(node, rank) is not None) and len(flat) == 2 * len(_axes(node, rank) or ())
    return _axes(node, rank) is not None


def _axes(node: Node, rank: int) -> list[int] | None:
    """Return the axes that a node names, counted from the front; None where they are not known."""
    index = 1 if node.op == "Squeeze" else _ON_AXES[node.op]
    given = node.attrs.get("axes")
    if given is None and index < len(node.inputs) and node.inputs[index].name:
        given = _numbers(node, index)
        if given is None:
            return None
    elif given is None:
        given = _default_axes(node, rank)
    fits = given is not None and all(-rank <= axis < rank for axis in given)
    return [int(axis) % rank for axis in given] if fits and given is not None else None


def _default_axes(node: Node, rank: int) -> Sequence[int] | None:
    if node.op == "Slice":
        starts = node.attrs.get("starts", _numbers(node, 1))
        return None if starts is None else range(len(starts))
    if node.op == "Squeeze" or node.attrs.get("noop_with_empty_axes", 0):
        return None
    return range(rank)


def _numbers(node: Node, index: int) -> list[int] | None:
    tensor = node.inputs[index] if index < len(node.inputs) else None
    return [int(number) for number in tensor.values.reshape(-1)] if tensor is not None and _is_fixed(tensor) else None


def _rename_axes(node: Node, permutation: Permutation, names: Names) -> None:
    index = 1 if node.op == "Squeeze" else _ON_AXES[node.op]
    given = index < len(node.inputs) and bool(node.inputs[index].name)
    if node.op == "Pad" and not given:
        _reorder_pads(node, permutation, names)
        return
    axes = [permutation[axis] for axis in _axes(node, len(permutation)) or ()]
    if given or (node.op == "Slice" and "starts" not in node.attrs):
        base = node.inputs[index].name if given else f"{node.name or node.op}.axes"
        dtype = node.inputs[index].dtype if given else node.inputs[1].dtype
        named = constant(names.fresh(f"{base}.turned"), np.array(axes, dtype))
        if index < len(node.inputs):
            node.inputs[index] = named
        else:
            node.inputs.append(named)
    elif "axes" in node.attrs or node.op == "Slice":
        node.attrs["axes"] = axes


def _reorder_pads(node: Node, permutation: Permutation, names: Names) -> None:
    rank = len(permutation)
    old: Any = node.attrs.get("pads", _numbers(node, 1))
    pads = [old[axis + side] for side in (0, rank) for axis in inverse(permutation)]
    if "pads" in node.attrs:
        node.attrs["pads"] = pads
    else:
        node.inputs[1] = constant(names.fresh(f"{node.inputs[1].name}.turned"), np.array(pads, np.int64))


def _turned(tensor: Constant, permutation: Permutation, names: Names) -> Constant:
    values = tensor.values
    wide = values.reshape((1,) * (len(permutation) - values.ndim) + values.shape)
    return constant(names.fresh(f"{tensor.name}.turned"), np.ascontiguousarray(wide.transpose(inverse(permutation))))
