"""Weights that several nodes read along different axes, so that one set of codes does not serve all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from onnxq.config.scheme import Granularity
from onnxq.ir import Constant, Node
from onnxq.numerics.pairs import Pairs
from onnxq.planning.plan import Decision, Weight

# A second copy of fewer values is nothing to tell.
_LARGE: Final = 1 << 14


def with_second_layouts(nodes: Sequence[Node], decisions: Sequence[Decision]) -> Iterator[Decision]:
    """Yield the decisions; one whose weight is stored a second time says for which node it is stored already.

    Args:
        nodes: of a prepared graph.
        decisions: what becomes of each.
    """
    stored: dict[Constant, dict[Weight, Node]] = defaultdict(dict)
    for node, decision in zip(nodes, decisions, strict=True):
        for weight in decision.weights:
            if weight.elements < _LARGE:
                continue
            tensor = node.inputs[weight.index]
            kind, others = weight.of_rank(len(tensor.shape)), stored[tensor]
            # Quantized values that are fitted in pairs depend on the axis even with one scale.
            if kind.spec.per is Granularity.TENSOR and kind.pairs is Pairs.NONE:
                kind = replace(kind, axis=0, reduction_axis=0)
            if others and kind not in others:
                first = next(iter(others.values())).name
                told = f"its weight is stored a second time, as node {first} reads it along another axis"
                decision = replace(decision, reason=f"{decision.reason}; {told}")
            others.setdefault(kind, node)
        yield decision
