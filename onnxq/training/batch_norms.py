"""What batch normalization multiplied weights with when it was folded into them, found by comparing both models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.ir import Graph, is_fixed, nodes
from onnxq.planning.plan import Plan

_WEIGHT = 1
# Folding computes in float64 and stores float32.
_SAME = 1e-5

Factors = Mapping[str, NDArray[np.float32]]
"""By node, what its weight was multiplied with, of a shape that broadcasts with it."""


def folded_factors(source: Graph, prepared: Graph, plan: Plan) -> dict[str, NDArray[np.float32]]:
    """Return what weights of a prepared graph are in units of those that it was made of.

    A normalization with frozen statistics multiplies each channel of the weight in front of it with its own scale over
    the deviation that it has seen. Channels that it multiplied with zero have a factor of one. Weights that were
    changed in another way, or not at all, are none of the keys.

    Args:
        source: as the user gave it.
        prepared: what was made of it.
        plan: says which weights become codes.
    """
    before = {node.name: node for _, node in nodes(source) if len(node.inputs) > _WEIGHT}
    found = {}
    for _, node in nodes(prepared):
        decision, twin = plan.by_node.get(node.name), before.get(node.name)
        weight = next((one for one in (decision.weights if decision else ()) if one.index == _WEIGHT), None)
        if weight is None or twin is None or not is_fixed(twin.inputs[_WEIGHT]):
            continue
        values, folded = twin.inputs[_WEIGHT].values, node.inputs[_WEIGHT].values
        if values.shape == folded.shape and values.dtype == folded.dtype == np.float32:
            factor = _factor(values, folded, weight.of_rank(values.ndim).axis)
            if factor is not None:
                found[node.name] = factor
    return found


def _factor(values: NDArray[Any], folded: NDArray[Any], axis: int) -> NDArray[np.float32] | None:
    """Return one factor for each entry along an axis, or None where folding is no such product or changes nothing."""
    wide, product = np.asarray(values, np.float64), np.asarray(folded, np.float64)
    others = tuple(one for one in range(wide.ndim) if one != axis % wide.ndim)
    energy = np.square(wide).sum(others, keepdims=True)
    factor = (wide * product).sum(others, keepdims=True) / np.where(energy > 0, energy, 1)
    if np.abs(wide * factor - product).max(initial=0) > _SAME * np.abs(product).max(initial=0) or (factor == 1).all():
        return None
    return np.where(factor == 0, 1, factor).astype(np.float32)
