"""What `onnxq sensitivity` reports: error and time of every tensor, and of every node in each of its options."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxq.config.scheme import Mode, QuantSpec
from onnxq.errors import check_name
from onnxq.ir import Node, all_graphs
from onnxq.numerics.affine import decibels, sqnr_of_ratio
from onnxq.planning.plan import Activation, Decision
from onnxq.search.costs import INTEGERS, Costs, Noise
from onnxq.search.search import Choices, Search
from onnxq.search.sensitivity import QuantizerId, quantizers_of, worst_output_nsr
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
        tensors = [(one.tensor, one.format, _figure(one.sqnr), _figure(one.quantize, 3)) for one in self.tensors]
        nodes = [
            (one.node, one.op_type, one.mode, _figure(one.sqnr), _figure(one.milliseconds, 3)) for one in self.nodes
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
        tensors = sorted(self.tensors, key=lambda one: _place(order, one.tensor, one.sqnr, _borders(one)))
        nodes = sorted(self.nodes, key=lambda one: _place(order, one.node, one.sqnr, one.milliseconds))
        return replace(self, tensors=tuple(tensors[:top]), nodes=tuple(nodes[:top]))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite SQNR (no error at all) becomes the word Infinity."""
        return dict(to_plain(self))


def measure_sensitivity(search: Search) -> Sensitivity:
    """Measure the error of each tensor and weight with all else in float, and the time of each node in each option.

    Progress is reported at the stages ``profile`` and ``sensitivity``. If time is too short to measure everything
    alone, groups of neighbors are measured.
    """
    scheme, _ = search.scheme(search.workshop.model.plan({}))
    choices = Choices(search, scheme)
    costs, reference = choices.costs, search.workshop.reference
    # A search leaves out the options that are slower than float; users see what these would add.
    noise = choices.noise_of(lambda name, time: True)
    return Sensitivity(
        scheme.plan.scheme,
        scheme.plan.target,
        len(reference.samples),
        sqnr_of_ratio(worst_output_nsr(noise.scheme.joint)),
        tuple(_tensors(costs, noise, reference.views.names)),
        tuple(_nodes(costs, noise)),
    )


def _tensors(costs: Costs, noise: Noise, outputs: Sequence[str]) -> Iterator[TensorCost]:
    borders = {border.tensor: border for border in costs.borders} if costs.is_timed else {}
    for one in costs.full.activations:
        border = borders.get(one.tensor)
        times = (None, None) if border is None else (border.quantize / 1e6, border.dequantize / 1e6)
        yield TensorCost(one.tensor, one.spec.format, *_measured(one, noise, outputs), *times)


def _measured(one: Activation, noise: Noise, outputs: Sequence[str]) -> tuple[float | None, bool, str]:
    """Return the SQNR of a tensor, whether it was measured alone, and the worst output."""
    quantizer, scheme = QuantizerId(one.tensor), noise.scheme
    if quantizer not in scheme.ratios:
        return None, False, ""
    ratios = scheme.ratios[quantizer]
    output = outputs[int(np.argmax(ratios))] if outputs else ""
    return sqnr_of_ratio(worst_output_nsr(ratios)), quantizer in scheme.alone, output


def _nodes(costs: Costs, noise: Noise) -> Iterator[NodeCost]:
    decisions = costs.full.by_node
    for scope in all_graphs(costs.graph):
        for node in scope.nodes:
            if node.name in decisions:
                one = decisions[node.name]
                options = tuple(_options_of(node, one, costs, noise))
                yield NodeCost(
                    one.node, one.op_type, one.mode, _milliseconds(costs, costs.floats.nodes, one.node), options
                )


def _options_of(node: Node, decision: Decision, costs: Costs, noise: Noise) -> Iterator[OptionCost]:
    weight = decision.weights[0].spec if decision.weights else None
    own = noise.scheme.nodes.get(node.name)
    if decision.mode is Mode.STATIC:
        sqnr = sqnr_of_ratio(noise.scheme.of(quantizers_of(node, costs.full, costs.target)))
        yield OptionCost(Mode.STATIC, weight, _milliseconds(costs, costs.static_times, node.name), sqnr)
    for offer in costs.offers:
        if node.name in offer.nodes:
            ratio = noise.offers[offer.mode].nodes.get(node.name) if offer.mode in noise.offers else None
            alone = None if ratio is None else sqnr_of_ratio(ratio)
            time = _milliseconds(costs, costs.offered(offer.mode), node.name)
            yield OptionCost(offer.mode, offer.weight or weight, time, alone)
    if decision.weights and own is not None:
        mode = decision.mode if decision.mode is Mode.WEIGHT_ONLY else Mode.STORAGE
        # A stored integer node computes as in float; other nodes compute as they were profiled.
        times = costs.floats if decision.mode in INTEGERS else costs.scheme
        yield OptionCost(mode, weight, _milliseconds(costs, times.nodes, node.name), sqnr_of_ratio(own))


def _milliseconds(costs: Costs, nanoseconds: Mapping[str, float], name: str) -> float | None:
    return nanoseconds[name] / 1e6 if costs.is_timed and name in nanoseconds else None


def _figure(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or math.isinf(value) else f"{value:.{digits}f}"


def _borders(one: TensorCost) -> float | None:
    return None if one.quantize is None else one.quantize + (one.dequantize or 0.0)


def _place(order: str, name: str, sqnr: float | None, milliseconds: float | None) -> tuple[float, str]:
    """Return the sort key of a row; unknown figures come last."""
    known = {
        # `sorted` is stable.
        "graph": 0.0,
        "error": math.inf if sqnr is None else sqnr,
        "time": math.inf if milliseconds is None else -milliseconds,
        "name": 0.0,
    }
    return known[order], "" if order == "graph" else name
