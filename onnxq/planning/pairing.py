"""Which weights stand for pairs of products that an integer kernel may add in 16 bits."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from onnxq.config.scheme import Mode, Spec
from onnxq.ir import Node
from onnxq.numerics.formats import format_named
from onnxq.numerics.pairs import Pairs, may_be_paired
from onnxq.planning.plan import Decision, Weight
from onnxq.runtime.targets import Target

_INTEGERS = frozenset({Mode.STATIC, Mode.DYNAMIC})
# Of the weights of convolutions over lines and images.
_MOST_AXES = 4
# So many values along each axis tell two tables apart; such as they do not may have the same codes.
_LOOKED_AT = 16


def with_pairs(nodes: Iterable[Node], decisions: Iterable[Decision], target: Target) -> Iterator[Decision]:
    """Yield the decisions, each with the pairs that the target's integer kernels make of its weights.

    Tables that are equal, or the transpose of one another, are stored once, so that all have the codes of one that is
    multiplied in pairs.

    Args:
        nodes: in the order of the decisions.
        decisions: for these nodes.
        target: the runtime.
    """
    found = list(zip(nodes, decisions, strict=True))
    own = {(node, one): _pairs(node, decision, one, target) for node, decision in found for one in decision.weights}
    paired, plain = (
        {_size(*use) for use, pairs in own.items() if (pairs is Pairs.NONE) == way} for way in (False, True)
    )
    both = paired & plain
    looks = {use: _look(*use) for use in own if _size(*use) in both}
    shared = {looks[use]: own[use] for use in looks if own[use] is not Pairs.NONE}
    for node, decision in found:
        pairs = [shared.get(looks.get((node, one)), own[node, one]) for one in decision.weights]
        if any(one is not Pairs.NONE for one in pairs):
            weights = (replace(one, pairs=kind) for one, kind in zip(decision.weights, pairs, strict=True))
            decision = replace(decision, weights=tuple(weights))
        yield decision


def _pairs(node: Node, decision: Decision, weight: Weight, target: Target) -> Pairs:
    paired = may_be_paired(format_named(weight.spec.format))
    if decision.mode not in _INTEGERS or not paired or weight.spec.is_followed or _is_depthwise(node):
        return Pairs.NONE
    return target.kernels.pairs if node.op == "Conv" else Pairs.TAP


def _is_depthwise(node: Node) -> bool:
    """Whether a convolution has one channel in each group, whose products its kernels add in 32 bits."""
    if node.op != "Conv":
        return False
    shape = tuple(node.inputs[1].shape)
    return len(shape) <= _MOST_AXES and shape[:2] == (node.attrs.get("group", 1), 1)


def _size(node: Node, weight: Weight) -> tuple[Spec, int, int]:
    """Return what weights that share codes have in common."""
    return weight.spec, weight.elements, node.inputs[weight.index].shape[weight.axis]


def _look(node: Node, weight: Weight) -> Hashable:
    """Return what tells weights apart that are not stored once; those of other ranks than 2 are where they are one."""
    source = node.inputs[weight.index]
    if len(source.shape) != 2:
        return weight.of_rank(len(source.shape))
    rows = np.moveaxis(source.values, weight.axis, 0)
    steps = (max(extent // _LOOKED_AT, 1) for extent in rows.shape)
    seen = rows[tuple(slice(None, None, step) for step in steps)]
    return weight.spec, rows.shape, seen.tobytes()
