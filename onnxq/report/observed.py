"""What was seen of tensors and weights, small enough to be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onnxq.calibration.evidence import Evidence
from onnxq.calibration.histogram import Histogram
from onnxq.ir import Graph, nodes
from onnxq.planning.plan import Plan

_BARS = 48
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class TensorValues:
    """The values of a calibrated tensor beside the range that its codes span.

    Attributes:
        tensor: its name.
        low: the smallest value that was seen.
        high: the largest.
        range: of the codes.
        clipped: share of the values that lie outside the range.
        counts: how many values lie in each of equally wide bars from the smallest to the largest.
    """

    tensor: str
    low: float
    high: float
    range: tuple[float, float]
    clipped: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class WeightChannels:
    """How far the output channels of a weight are apart.

    Attributes:
        node: that reads it.
        tensor: its name.
        channels: how many there are.
        maxima: least, lower quartile, median, upper quartile and greatest of the channels' largest magnitudes.
    """

    node: str
    tensor: str
    channels: int
    maxima: tuple[float, float, float, float, float]


def tensor_values(plan: Plan, evidence: Evidence) -> tuple[TensorValues, ...]:
    """Return the values of each tensor of which a histogram was kept, in the plan's order.

    Tensors whose channels are divided by factors are left out: their ranges are of other values.

    Args:
        plan: with the ranges that were found.
        evidence: what samples have shown.
    """
    return tuple(_tensor_values(plan, evidence))


def _tensor_values(plan: Plan, evidence: Evidence) -> Iterator[TensorValues]:
    for activation in plan.activations:
        seen = evidence.of(activation.tensor).find(Histogram)
        known = activation.known_range
        if seen is None or known is None or activation.factors or not len(seen.whole.counts):
            continue
        bins = seen.whole
        centres = np.clip((bins.edges[:-1] + bins.edges[1:]) / 2, bins.minimum, bins.maximum)
        counts, _ = np.histogram(centres, _BARS, (bins.minimum, bins.maximum), weights=bins.counts)
        outside = bins.counts[(centres < known[0]) | (centres > known[1])].sum()
        clipped = float(outside / bins.counts.sum())
        bars = tuple(int(count) for count in counts)
        yield TensorValues(activation.tensor, bins.minimum, bins.maximum, known, clipped, bars)


def weight_channels(plan: Plan, graph: Graph) -> tuple[WeightChannels, ...]:
    """Return how far the channels of each weight that becomes codes are apart, in the plan's order.

    Args:
        plan: what becomes of the nodes.
        graph: the prepared graph, with float weights.
    """
    by_name = {node.name: node for _, node in nodes(graph)}
    found = []
    for decision in plan.decisions:
        for weight in decision.weights:
            values = np.asarray(by_name[decision.node].inputs[weight.index].values, np.float32)
            if not values.size:
                continue
            axis = weight.axis % values.ndim
            others = tuple(other for other in range(values.ndim) if other != axis)
            maxima = np.maximum(values.max(others), -values.min(others))
            # Quantiles between two values in a line; those of numpy load its masked arrays.
            places = np.multiply(_QUARTERS, maxima.size - 1)
            least, lower, middle, upper, most = map(float, np.interp(places, np.arange(maxima.size), np.sort(maxima)))
            five = least, lower, middle, upper, most
            found.append(WeightChannels(decision.node, weight.tensor, int(maxima.size), five))
    return tuple(found)
