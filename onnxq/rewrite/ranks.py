"""What is known of how many dimensions tensors have."""

from __future__ import annotations

from collections.abc import Sequence

from onnxq.ir.elements import Constant, Node, Tensor
from onnxq.rewrite.patterns import Match


def rank(tensor: Tensor) -> int | None:
    """Return how many dimensions a tensor has, or None while that is unknown."""
    return None if tensor.shape is None else len(tensor.shape)


def may_widen(found: Match, data: Tensor) -> bool:
    """Whether constants of a match, which broadcast, may give its result more dimensions than the data has."""
    most = rank(data) or 0
    operands = (tensor for node in found.nodes for tensor in node.inputs)
    return any(isinstance(tensor, Constant) and len(tensor.shape) > most for tensor in operands)


def reduces_last_axis(node: Node) -> bool:
    """Whether a node reduces its data along the last axis alone, which an attribute or a constant input says."""
    axes = node.attrs.get("axes")
    if len(node.inputs) > 1 and isinstance(node.inputs[1], Constant) and node.inputs[1].input_source is None:
        axes = node.inputs[1].values.reshape(-1).tolist()
    return isinstance(axes, list) and len(axes) == 1 and axes[0] in (-1, (rank(node.inputs[0]) or 0) - 1)


def same_extents(first: Sequence[int | str | None], second: Sequence[int | str | None]) -> bool:
    """Whether two runs of dimensions are equal for certain; a name stands for one number everywhere in a model.

    >>> same_extents(["N", 3], ["N", 3]), same_extents([None], [None]), same_extents([2], ["N"])
    (True, False, False)
    """
    return len(first) == len(second) and all(
        one is not None and one == other for one, other in zip(first, second, strict=True)
    )
