"""What `onnxq sensitivity` reports: error and time of every tensor, and of every node in each of its options."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxq.config.scheme import Mode, QuantSpec
from onnxq.errors import check_name
from onnxq.ir import Node, all_graphs
from onnxq.numerics.affine import decibels, sqnr_of_ratio
from onnxq.planning.plan import Activation, Decision, Demotion
from onnxq.search.cost_model import CostModel
from onnxq.search.kernel_times import UNTIMED
from onnxq.search.profiling import PlanProfiler, measure_option_sensitivities, offered_options, profile_costs
from onnxq.search.sensitivity import QuantizerId, quantizers_of, worst_output_nsr
from onnxq.search.tradeoff import OptionSensitivities
from onnxq.system.records import html_table, to_plain

ORDERS = ("graph", "error", "time", "name")
"""Sort orders of tensors and nodes: as in the graph, or by error, time or name."""

# Share of the time after which no more options are profiled.
_PROFILED = 1 / 4
# The shortest run in seconds that a clock can measure.
_SHORTEST_RUN = 1e-6


@dataclass(frozen=True)
class TensorCost:
    """The cost of quantizing a tensor with a fixed scale.

    Attributes:
        sqnr: SQNR in decibels of the worst output with only this tensor quantized. None if the tensor only passes on
            quantized values, which adds no error.
        error: standard error of the SQNR in decibels; None if it was measured on one sample.
        alone: True if it was measured alone; otherwise the SQNR is its share of a group of neighbors.
        quantize: milliseconds to quantize it from floats; None if unknown.
        dequantize: milliseconds to dequantize it; None if unknown.
    """

    tensor: str
    format: str
    sqnr: float | None
    error: float | None
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


def measure_sensitivity(profiler: PlanProfiler, *, timed: bool, seconds: float) -> Sensitivity:
    """Measure the error of each tensor and weight with all else in float, and the time of each node in each option.

    Progress is reported at the stages ``profile`` and ``sensitivities``. If `seconds` is too short to measure
    everything alone, groups of neighbors are measured.
    """
    start, full, evaluator = time.monotonic(), profiler.plan({}), profiler.evaluator
    graph, target = evaluator.bench.graph, evaluator.bench.target
    integers = (Mode.STATIC, Mode.DYNAMIC)
    stored = Demotion(Mode.STORAGE, "stored to see what others are without integers")
    stores = {one.node: stored for one in full.decisions if one.mode in integers}
    if timed:
        latest = start + _PROFILED * seconds
        costs = profile_costs(profiler, graph, target, stores, latest=latest, progress=profiler.progress)
    else:
        # Each option of a large model would need another model with all weights.
        offers = [] if evaluator.bench.is_large else offered_options(profiler, full, target, stores)
        expressed = tuple(one for one in offers if profiler.expresses(one.plan))
        costs = CostModel(graph, target, full, UNTIMED, UNTIMED, expressed)
    rest = max(seconds - (time.monotonic() - start), 0.0)
    runs = math.ceil(rest / max(evaluator.answered.seconds, _SHORTEST_RUN))
    sensitivities = measure_option_sensitivities(profiler, full, stores, {one: one.nodes for one in costs.offers}, runs)
    return Sensitivity(
        full.scheme,
        full.target,
        len(evaluator.answered.samples),
        sqnr_of_ratio(worst_output_nsr(sensitivities.static.joint)),
        tuple(_tensors(costs, sensitivities, evaluator.answered.views.names)),
        tuple(_nodes(costs, sensitivities)),
    )


def _tensors(costs: CostModel, sensitivities: OptionSensitivities, outputs: Sequence[str]) -> Iterator[TensorCost]:
    borders = {border.tensor: border for border in costs.borders}
    for one in costs.full.activations:
        border = borders.get(one.tensor)
        times = (None, None) if border is None else (border.quantize / 1e6, border.dequantize / 1e6)
        yield TensorCost(one.tensor, one.spec.format, *_measured(one, sensitivities, outputs), *times)


def _measured(
    one: Activation, sensitivities: OptionSensitivities, outputs: Sequence[str]
) -> tuple[float | None, float | None, bool, str]:
    """Return the SQNR of a tensor, its standard error, whether it was measured alone, and the worst output."""
    source, found = QuantizerId(one.tensor), sensitivities.static
    if source not in found.ratios:
        return None, None, False, ""
    ratios = found.ratios[source]
    ratio, error = worst_output_nsr(ratios), found.errors.get(source)
    relative = 10 / math.log(10) * error / ratio if error is not None and ratio > 0 else None
    output = outputs[int(np.argmax(ratios))] if outputs else ""
    return sqnr_of_ratio(ratio), relative, source in found.alone, output


def _nodes(costs: CostModel, sensitivities: OptionSensitivities) -> Iterator[NodeCost]:
    decisions = costs.full.by_node
    for scope in all_graphs(costs.graph):
        for node in scope.nodes:
            if node.name in decisions:
                one = decisions[node.name]
                options = tuple(_options_of(node, one, costs, sensitivities))
                yield NodeCost(one.node, one.op_type, one.mode, _milliseconds(costs.floats.nodes, one.node), options)


def _options_of(
    node: Node, decision: Decision, costs: CostModel, sensitivities: OptionSensitivities
) -> Iterator[OptionCost]:
    weight = decision.weights[0].spec if decision.weights else None
    own = sensitivities.static.nodes.get(node.name)
    if decision.mode is Mode.STATIC:
        sqnr = sqnr_of_ratio(sensitivities.static.of(quantizers_of(node, costs.full, costs.target)))
        yield OptionCost(Mode.STATIC, weight, _milliseconds(costs.static_nodes, node.name), sqnr)
    for offer in costs.offers:
        if node.name in offer.nodes:
            other = offer.alternative
            times = costs.offered[other] if costs.floats.nodes else {}
            ratio = sensitivities.alternatives[other].nodes.get(node.name)
            alone = None if ratio is None else sqnr_of_ratio(ratio)
            yield OptionCost(other.mode, other.weight or weight, _milliseconds(times, node.name), alone)
    if decision.weights and own is not None:
        mode = decision.mode if decision.mode is Mode.WEIGHT_ONLY else Mode.STORAGE
        # A compressed integer node computes as in float; other nodes compute as they were profiled.
        known = costs.floats if decision.mode in (Mode.STATIC, Mode.DYNAMIC) else costs.static
        yield OptionCost(mode, weight, _milliseconds(known.nodes, node.name), sqnr_of_ratio(own))


def _milliseconds(nanoseconds: Mapping[str, float], name: str) -> float | None:
    return nanoseconds[name] / 1e6 if name in nanoseconds else None


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
