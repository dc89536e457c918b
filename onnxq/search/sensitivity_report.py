"""What `onnxq sensitivity` reports: error and time of every tensor, and of every node in each of its options."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxq.config.scheme import Mode, QuantSpec
from onnxq.errors import check_name
from onnxq.numerics.affine import decibels, sqnr_of_ratio
from onnxq.planning.plan import Activation, Decision
from onnxq.search.costs import INTEGERS, Costs
from onnxq.search.search import Chooser, Search
from onnxq.search.sensitivity import QuantizerId, Sensitivities, worst_output_nsr
from onnxq.system.html_table import html_table
from onnxq.system.records import to_plain

ORDERS = ("graph", "error", "time", "name")
"""Sort orders of tensors and nodes: as in the graph, or by error, time or name."""


@dataclass(frozen=True)
class TensorCost:
    """The cost of quantizing a tensor with a fixed scale.

    Attributes:
        sqnr: SQNR in decibels of the worst output with only this tensor quantized. None if the tensor only passes on
            quantized values, which adds no error.
        alone: True if it was measured alone; otherwise the SQNR is its share of a group of neighbors.
        quantize: milliseconds to quantize it from floats; None if unknown.
        dequantize: milliseconds to dequantize it; None if unknown.
    """

    tensor: str
    format: str
    sqnr: float | None
    alone: bool
    output: str
    quantize: float | None
    dequantize: float | None


@dataclass(frozen=True)
class OptionCost:
    """The cost of a node in one of its options.

    Attributes:
        mode: static, dynamic, weight-only or storage (dequantized at load).
        weight: spec of its weights; None if it has none.
        milliseconds: time of a run with the slowdown that the node causes around it; None if unknown.
        sqnr: SQNR in decibels of the worst output with only this node in this option; None if unknown.
    """

    mode: Mode
    weight: QuantSpec | None
    milliseconds: float | None
    sqnr: float | None


@dataclass(frozen=True)
class NodeCost:
    """The cost of a node in float and in each of its other options.

    Attributes:
        milliseconds: time of a run in float, with the nodes that the runtime fuses into it; None if unknown.
    """

    node: str
    op_type: str
    mode: Mode
    milliseconds: float | None
    options: tuple[OptionCost, ...]

    @property
    def sqnr(self) -> float:
        """SQNR in decibels of the option with the highest error."""
        return min((option.sqnr for option in self.options if option.sqnr is not None), default=math.inf)


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """The cost of quantizing each part of a model.

    Attributes:
        samples: number of samples that errors were measured on.
        sqnr: SQNR in decibels of the worst output with everything quantized.
        tensors: the tensors that the scheme quantizes, in graph order.
        nodes: all nodes, in graph order.
        scheme: name of the scheme.
        target: name of the target.

    >>> import onnxq
    >>> onnxq.sensitivity("model.onnx", "data/").sqnr  # doctest: +SKIP
    34.9
    """

    scheme: str
    target: str
    samples: int
    sqnr: float
    tensors: tuple[TensorCost, ...]
    nodes: tuple[NodeCost, ...]

    def __repr__(self) -> str:
        return f"Sensitivity({self._summary}; {len(self.tensors)} tensors, {len(self.nodes)} nodes)"

    def _repr_html_(self) -> str:
        tensors = [(cost.tensor, cost.format, _figure(cost.sqnr), _figure(cost.quantize, 3)) for cost in self.tensors]
        nodes = [
            (cost.node, cost.op_type, cost.mode, _figure(cost.sqnr), _figure(cost.milliseconds, 3))
            for cost in self.nodes
        ]
        return html_table(self._summary, ("tensor", "format", "SQNR alone, dB", "quantize, ms"), tensors) + html_table(
            "", ("node", "operator", "mode", "lowest SQNR alone, dB", "in float, ms"), nodes
        )

    @property
    def _summary(self) -> str:
        return f"{decibels(self.sqnr)} with all quantized by {self.scheme} for {self.target}, on {self.samples} samples"

    def ordered(self, order: str, top: int | None = None) -> Sensitivity:
        """Return the same with tensors and nodes sorted by one of `ORDERS`.

        `top` limits the number of tensors and of nodes; None keeps all.

        Raises:
            SchemeError: if `order` is unknown.
        """
        check_name("order", order, ORDERS)
        tensors = sorted(self.tensors, key=lambda cost: _rank(order, cost.tensor, cost.sqnr, _borders(cost)))
        nodes = sorted(self.nodes, key=lambda cost: _rank(order, cost.node, cost.sqnr, cost.milliseconds))
        return replace(self, tensors=tuple(tensors[:top]), nodes=tuple(nodes[:top]))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite SQNR (no error at all) becomes the word Infinity."""
        return dict(to_plain(self))


def measure_sensitivity(search: Search) -> Sensitivity:
    """Measure the error of each tensor and weight with all else in float, and the time of each node in each option.

    Progress is reported at the stages ``profile`` and ``sensitivity``. If time is too short to measure everything
    alone, groups of neighbors are measured.
    """
    scheme, _ = search.first(search.workshop.model.plan({}))
    chooser = Chooser(search, scheme)
    costs, reference = chooser.costs, search.workshop.reference
    # A search leaves out the options that are slower than float; users see what these would add.
    noise = chooser.noise_of(lambda name, time: True)
    return Sensitivity(
        scheme.plan.scheme,
        scheme.plan.target,
        len(reference.samples),
        sqnr_of_ratio(worst_output_nsr(noise.joint)),
        tuple(_tensors(costs, noise, reference.views.names)),
        tuple(_node_cost(decision, costs, noise) for decision in costs.full.decisions),
    )


def _tensors(costs: Costs, noise: Sensitivities, outputs: Sequence[str]) -> Iterator[TensorCost]:
    borders = {border.tensor: border for border in costs.borders} if costs.has_times else {}
    for activation in costs.full.activations:
        border = borders.get(activation.tensor)
        times = (None, None) if border is None else (border.quantize / 1e6, border.dequantize / 1e6)
        yield TensorCost(activation.tensor, activation.spec.format, *_measured(activation, noise, outputs), *times)


def _measured(activation: Activation, noise: Sensitivities, outputs: Sequence[str]) -> tuple[float | None, bool, str]:
    """Return the SQNR of a tensor, whether it was measured alone, and the worst output."""
    quantizer = QuantizerId(activation.tensor)
    if quantizer not in noise.ratios:
        return None, False, ""
    ratios = noise.ratios[quantizer]
    output = outputs[int(np.argmax(ratios))] if outputs else ""
    return sqnr_of_ratio(worst_output_nsr(ratios)), quantizer in noise.alone, output


def _node_cost(decision: Decision, costs: Costs, noise: Sensitivities) -> NodeCost:
    time = _milliseconds(costs, costs.floats.nodes, decision.node)
    options = tuple(_options_of(decision, costs, noise))
    return NodeCost(decision.node, decision.op_type, decision.mode, time, options)


def _options_of(decision: Decision, costs: Costs, noise: Sensitivities) -> Iterator[OptionCost]:
    node, weight = decision.node, decision.weights[0].spec if decision.weights else None
    if decision.mode is Mode.STATIC:
        sqnr = sqnr_of_ratio(costs.error_of(node, noise))
        yield OptionCost(Mode.STATIC, weight, _milliseconds(costs, costs.static_times, node), sqnr)
    for offer in costs.offers:
        if node in offer.nodes:
            ratio = noise.modes.get(offer.mode, {}).get(node)
            alone = None if ratio is None else sqnr_of_ratio(ratio)
            time = _milliseconds(costs, costs.offered[offer.mode], node)
            yield OptionCost(offer.mode, offer.weight or weight, time, alone)
    if decision.weights and node in noise.nodes:
        mode = decision.mode if decision.mode is Mode.WEIGHT_ONLY else Mode.STORAGE
        # A stored integer node computes as in float; other nodes compute as they were profiled.
        times = costs.floats if decision.mode in INTEGERS else costs.full_times
        yield OptionCost(mode, weight, _milliseconds(costs, times.nodes, node), sqnr_of_ratio(noise.nodes[node]))


def _milliseconds(costs: Costs, nanoseconds: Mapping[str, float], name: str) -> float | None:
    return nanoseconds[name] / 1e6 if costs.has_times and name in nanoseconds else None


def _figure(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or math.isinf(value) else f"{value:.{digits}f}"


def _borders(cost: TensorCost) -> float | None:
    return None if cost.quantize is None else cost.quantize + (cost.dequantize or 0.0)


def _rank(order: str, name: str, sqnr: float | None, milliseconds: float | None) -> tuple[float, str]:
    """Return the sort key of a row; unknown figures come last."""
    figures = {"error": math.inf if sqnr is None else sqnr, "time": math.inf if milliseconds is None else -milliseconds}
    # `sorted` is stable, so the graph needs no key.
    return figures.get(order, 0.0), "" if order == "graph" else name
