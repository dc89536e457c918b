"""Sensitivities: the error that each quantizer adds to each output, measured in one session with switches."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from statistics import median
from types import MappingProxyType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.calibration.accumulators import Range
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode
from onnxq.data.inputs import Sample
from onnxq.evaluation.comparison import ComparisonSession
from onnxq.evaluation.sqnr import Pair, nsr_by_sample
from onnxq.ir import Graph, Node, all_graphs, is_constant
from onnxq.numerics.affine import sqnr_of_ratio, worst_ratio
from onnxq.passes.quantize.fake_quant_switches import FakeQuantSwitches
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Plan
from onnxq.runtime.targets import Target
from onnxq.search.activation_methods import error_share
from onnxq.search.cost_model import outputs_quantized
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.search import NodeSensitivity


@dataclass(frozen=True, order=True)
class QuantizerId:
    """A quantizer.

    Attributes:
        name: a quantized tensor, or a node with quantized weights or dynamic activations.
        is_node: True for a node.
    """

    name: str
    is_node: bool = False


@dataclass(frozen=True, eq=False)
class QuantizerToggleSession:
    """The float model with a switch for each quantizer."""

    evaluator: PlanEvaluator
    view: ComparisonSession
    switches: FakeQuantSwitches

    @classmethod
    def of(cls, evaluator: PlanEvaluator, plan: Plan, config: EncodingConfig, nodes: Set[str] | None = None) -> Self:
        """Build the model with switches for all quantizers of a plan, or only for the own quantizers of `nodes`."""
        path = evaluator.bench.prepared.with_name("switched.onnx")
        switches = evaluator.bench.build_switched(plan, evaluator.statistics, config, path, nodes)
        large = evaluator.bench.is_large
        return cls(evaluator, evaluator.answered.views.open(path, mapped=large, at_once=not large), switches)

    @property
    def sources(self) -> tuple[QuantizerId, ...]:
        """All quantizers, tensors first."""
        return (
            *map(QuantizerId, self.switches.tensors),
            *(QuantizerId(node, is_node=True) for node in self.switches.nodes),
        )

    def nsr_by_set(
        self, sets: Iterable[Collection[QuantizerId]], samples: Sequence[int]
    ) -> Iterator[NDArray[np.float64]]:
        """Return the noise-to-signal ratio of each output for several sets of quantizers; see `nsr_by_sample`.

        Args:
            sets: sets of quantizers that are on; all else is float.
            samples: indices of the samples to run.

        Returns:
            For each set float64 of shape (samples, outputs), in units of the signal of these samples.
        """
        return map(nsr_by_sample, self._pairs(sets, samples))

    def _pairs(self, sets: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[list[Pair]]:
        expected, given = self.evaluator.answered.expected, self.evaluator.answered.given
        fed = ({**given[place], **self._switched(quantized)} for quantized in sets for place in samples)
        answers = self.view.run_each(fed)
        while some := list(islice(answers, len(samples))):
            yield list(zip((expected[place] for place in samples), some, strict=True))

    def _switched(self, quantized: Collection[QuantizerId]) -> Sample:
        values = np.zeros(len(self.switches), np.bool_)
        values[[self._place(source) for source in quantized]] = True
        return {self.switches.name: values}

    def _place(self, source: QuantizerId) -> int:
        return (self.switches.nodes if source.is_node else self.switches.tensors)[source.name]


def typical_sample(nsr: NDArray[np.float64]) -> int:
    """Return the index of the median sample by cumulative error, from the lowest error on.

    This is the sample of highest error if it has half of the total error.

    >>> typical_sample(np.array([5.0, 1.0, 3.0])), typical_sample(np.array([5.0, 1.0, 5.0, 4.0, 6.0]))
    (0, 2)
    """
    order = np.argsort(nsr, kind="stable")
    return int(order[int(np.searchsorted(np.cumsum(nsr[order]), nsr.sum() / 2))])


# Error that each tensor and each node's weights add to each output, with everything else in float

Ratios = NDArray[np.float64]
"""Noise-to-signal ratio of each output."""

# Replaces the ratio of outputs that are not finite, or of integers that differ, because sums need a finite number.
LARGEST_NSR = 1e10
# Share of the measurements for groups of one size.
_FIRST_LOOK = 4 / 5
# Share of the runs for the first look, at one sample; the rest goes to the highest errors on the other samples.
_FIRST_PART = 0.6
# Fewest measurements that give a result, however few runs are allowed.
_FEWEST = 16
# The shortest run in seconds that a clock can measure.
_SHORTEST = 1e-6
# A smaller error counts as none.
_LEAST = 1e-30
# Groups with a smaller share of the error are not split.
_NEGLIGIBLE = 0.0125


class SensitivityProbe(Protocol):
    """Measures the error of sets of quantizers; see `QuantizerToggleSession`."""

    @property
    def sources(self) -> tuple[QuantizerId, ...]:
        """All quantizers, in the order of the plan."""
        ...

    def nsr_by_set(
        self, sets: Iterable[Collection[QuantizerId]], samples: Sequence[int]
    ) -> Iterator[NDArray[np.float64]]:
        """Return the noise-to-signal ratio by sample and output for several sets of quantizers."""
        ...


@dataclass(frozen=True, eq=False)
class Sensitivities:
    """The error that each quantizer adds, and the error of all together.

    Attributes:
        ratios: noise-to-signal ratio of each output by quantizer, measured alone or as its share of a group.
        errors: standard error of the ratio at the worst output, for quantizers measured on several samples.
        alone: the quantizers that were measured alone.
        joint: noise-to-signal ratio of each output with all quantizers.
    """

    ratios: Mapping[QuantizerId, Ratios] = field(default_factory=lambda: MappingProxyType({}))
    errors: Mapping[QuantizerId, float] = field(default_factory=lambda: MappingProxyType({}))
    alone: frozenset[QuantizerId] = frozenset()
    joint: Ratios = field(default_factory=lambda: np.zeros(0))

    @cached_property
    def tensors(self) -> Mapping[str, float]:
        """The ratio of each tensor at its worst output."""
        return {source.name: worst_output_nsr(ratio) for source, ratio in self.ratios.items() if not source.is_node}

    @cached_property
    def nodes(self) -> Mapping[str, float]:
        """The ratio of each node's own quantizers, such as its weights, at its worst output."""
        return {source.name: worst_output_nsr(ratio) for source, ratio in self.ratios.items() if source.is_node}

    @property
    def share_of_nodes(self) -> float:
        """The share of the nodes' own quantizers, such as weights, in the total error."""
        total = self.of(self.ratios)
        return self.of(source for source in self.ratios if source.is_node) / total if total else 0.0

    def of(self, sources: Iterable[QuantizerId]) -> float:
        """Return the ratio at the worst output of the sum of some quantizers."""
        known = [self.ratios[source] for source in sources if source in self.ratios]
        return worst_output_nsr(np.sum(known, axis=0)) if known else 0.0

    def together(self, sources: Iterable[QuantizerId]) -> Ratios:
        """Return the predicted ratio of each output with some quantizers on together.

        The joint ratio of all quantizers (J) is measured. It is above their sum (S) if they err alike, and below it if
        quantizers hide earlier errors. The fewer quantizers, the nearer is the prediction to their own sum (s):
        1 / prediction = 1 / s + 1 / J - 1 / S.
        """
        known = [self.ratios[source] for source in sources if source in self.ratios]
        summed, everything = (np.atleast_1d(np.sum(some, axis=0)) for some in (known, list(self.ratios.values())))
        if not (known and self.joint.size):
            return summed
        one, whole, joint = (np.maximum(ratio, _LEAST) for ratio in (summed, everything, self.joint))
        return np.where(summed > 0, 1 / (1 / one + 1 / joint - 1 / whole), 0.0)


NO_ERROR = Sensitivities()
"""No quantizer adds any error."""


def worst_output_nsr(ratios: Ratios) -> float:
    """Return the ratio at the worst output, limited to a finite number."""
    return min(worst_ratio(ratios), LARGEST_NSR)


def likely_shares(plan: Plan, statistics: CalibrationStatistics) -> Mapping[QuantizerId, float]:
    """Return the noise-to-signal ratio of each tensor of a plan, estimated from its histogram.

    Neighbors pass similar shares of their error on to an output. So these ratios divide an error that was measured of a
    group.
    """
    specs = plan.calibrated
    seen = {tensor: statistics.of(tensor) for tensor in specs}
    known = (tensor for tensor, one in seen.items() if one.find(Histogram) and one.need(Range).count)
    return {QuantizerId(tensor): error_share(seen[tensor], specs[tensor]) for tensor in known}


def measure_sensitivities(
    board: SensitivityProbe,
    samples: int,
    runs: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    shares: Mapping[QuantizerId, float] = MappingProxyType({}),
    longest: float = math.inf,
) -> Sensitivities:
    """Measure the error that each quantizer adds; those with the highest error on all samples.

    1. Measure all quantizers together on every sample. The first look uses the median sample by cumulative error.
    2. Measure each quantizer alone on it if there are enough runs. Otherwise measure groups of neighbors, and split the
    groups with the highest error.
    3. Measure single quantizers on all samples, highest error first, until the runs are used up.

    A quantizer seen on one sample only counts by its share of the joint error of all samples. This is too much for
    weights with a low error in samples where tensors have a high one.

    Args:
        board: measures sets of quantizers.
        samples: number of its samples.
        runs: number of sample runs; unlike seconds, they are the same every time. 0 measures only all quantizers
            together.
        progress: called with the number of measurements done, and the number expected.
        shares: divide the error of groups; see `likely_shares`.
        longest: seconds that the runs may take; slow runs, such as with thousands of switches, are cut to fit.
    """
    sources, everything = board.sources, tuple(range(samples))
    if not sources or not samples:
        return Sensitivities()
    start = time.monotonic()
    [by_sample] = map(_finite, board.nsr_by_set([sources], everything))
    affordable = longest / max((time.monotonic() - start) / samples, _SHORTEST)
    joint = by_sample.sum(0)
    place = typical_sample(by_sample[:, int(joint.argmax())]) if len(joint) else 0
    measured = 0
    alone: dict[QuantizerId, Ratios] = {}

    def measure(groups: Sequence[Sequence[QuantizerId]]) -> list[Ratios]:
        nonlocal measured
        found: list[Ratios] = []
        for ratios in board.nsr_by_set(map(frozenset, groups), [place]):
            measured += 1
            progress(measured, max(most, measured))
            found.append(_finite(ratios).sum(0))
        alone.update((group[0], ratios) for group, ratios in zip(groups, found, strict=True) if len(group) == 1)
        return found

    wanted = max(int(_FIRST_PART * (runs - samples)), _FEWEST) if runs > 0 else 0
    most = int(min(wanted, len(sources), affordable))
    [whole] = (_finite(ratios).sum(0) for ratios in board.nsr_by_set([sources], [place]))
    ratios = attribute_error(sources, measure, whole=whole, most=most, negligible=_NEGLIGIBLE, shares=shares)
    # The signal of the outputs and the error differ between this sample and all samples.
    scale = np.divide(joint, whole, out=np.ones_like(joint), where=whole > 0)
    found = {source: ratio * scale for source, ratio in ratios.items()}
    errors: dict[QuantizerId, float] = {}
    others = [other for other in everything if other != place]
    order = _by_loudness(found, joint)
    for number, source in enumerate(order, 1):
        if not others or measured + (number + 1) * samples > min(runs, affordable):
            break
        progress(measured + number, measured + len(order))
        [seen] = map(_finite, board.nsr_by_set([{source}], everything))
        found[source] = seen.sum(0)
        alone[source] = found[source]
        at = int(np.argmax(found[source]))
        errors[source] = float(seen[:, at].std(ddof=1) * math.sqrt(samples))
    return Sensitivities(found, errors, frozenset(alone), joint)


def _finite(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.nan_to_num(ratios, nan=LARGEST_NSR, posinf=LARGEST_NSR).clip(0.0, LARGEST_NSR))


def _by_loudness(ratios: Mapping[QuantizerId, Ratios], joint: Ratios) -> list[QuantizerId]:
    """Return the quantizers by their share of the error of any output, highest first."""
    shares = {
        source: worst_output_nsr(np.divide(ratio, joint, out=np.zeros_like(joint), where=joint > 0))
        for source, ratio in ratios.items()
    }
    return sorted(shares, key=lambda source: -shares[source])


def attribute_error(
    units: Sequence[QuantizerId],
    measure: Callable[[Sequence[Sequence[QuantizerId]]], list[Ratios]],
    *,
    whole: Ratios,
    most: int,
    negligible: float,
    shares: Mapping[QuantizerId, float] = MappingProxyType({}),
) -> dict[QuantizerId, Ratios]:
    """Return the error of each unit, measured alone or, if that takes too many measurements, in groups of neighbors.

    1. Four fifths of the measurements go to groups of one size, of two units at least, to separate units of low error
    too.
    2. With the rest, the group with the highest error is split in two, again and again. The errors of its halves alone
    divide the error of the group.
    3. The error of a group that is not split is divided among its units by `shares`.

    Args:
        units: in the order of the data flow, so that neighbors share boundaries.
        measure: returns the noise-to-signal ratio of each group at each output, with everything else off.
        whole: the ratios of all units together.
        most: number of measurements at most.
        negligible: share of the total error below which a group is not split.
        shares: in any unit of measure; unknown units get the median.
    """
    if most >= len(units):
        return dict(zip(units, measure([[unit] for unit in units]), strict=True))
    usual = median(shares.values()) if shares else 1.0
    count = max(min(int(_FIRST_LOOK * most), len(units) // 2), 1)
    bounds = [round(index * len(units) / count) for index in range(count + 1)]
    groups = [units[start:stop] for start, stop in pairwise(bounds)]
    measured = count if count > 1 else 0
    first = zip(groups, measure(groups) if measured else [whole], strict=True)
    heap = [(-_share(ratio, whole), number, group, ratio) for number, (group, ratio) in enumerate(first)]
    heapq.heapify(heap)
    found: dict[QuantizerId, Ratios] = {}
    number = len(heap)
    while heap:
        share, _, group, ratio = heapq.heappop(heap)
        if len(group) <= 1 or -share <= negligible or measured + 2 > most:
            parts = np.array([shares.get(unit, usual) for unit in group]) + _LEAST
            found.update({unit: ratio * part for unit, part in zip(group, parts / parts.sum(), strict=True)})
            continue
        middle = len(group) // 2
        halves = (group[:middle], group[middle:])
        one, other = measure(halves)
        total = one + other
        for half, own in zip(halves, (one, other), strict=True):
            # Errors in the same direction make more together than the sum of both alone.
            part = ratio * np.divide(own, total, out=np.full_like(total, 1 / 2), where=total > 0)
            heapq.heappush(heap, (-_share(part, whole), number, half, part))
            number += 1
        measured += 2
    return {unit: found[unit] for unit in units}


def _share(ratio: Ratios, whole: Ratios) -> float:
    return worst_output_nsr(np.divide(ratio, whole, out=np.zeros_like(ratio), where=whole > 0))


# Error of the nodes of a model that is too large to measure each alone: groups of one kind of layer, by depth

_Kind = tuple[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, eq=False)
class ProbeByLayerKind:
    """A probe whose neighbors are layers of one kind.

    In a network with repeated blocks, layers are of one kind if they have the same operator and weight shapes. Groups
    of neighbors then show the error of a kind of layer at some depth, in few measurements.
    """

    probe: SensitivityProbe
    graph: Graph

    @cached_property
    def sources(self) -> tuple[QuantizerId, ...]:
        """All quantizers: tensors, then nodes, each by the kind of its layer, then by depth."""
        kinds = self._kinds()
        places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds.values()))}
        return tuple(
            sorted(self.probe.sources, key=lambda one: (one.is_node, places[kinds[one]] if one in kinds else -1))
        )

    def nsr_by_set(
        self, sets: Iterable[Collection[QuantizerId]], samples: Sequence[int]
    ) -> Iterator[NDArray[np.float64]]:
        """Return the noise-to-signal ratio by sample and output for several sets of quantizers."""
        return self.probe.nsr_by_set(sets, samples)

    def _kinds(self) -> dict[QuantizerId, _Kind]:
        found: dict[QuantizerId, _Kind] = {}
        for scope in all_graphs(self.graph):
            for node in scope.nodes:
                kind = node.op, tuple(tensor.shape for tensor in node.inputs if is_constant(tensor))
                found[QuantizerId(node.name, is_node=True)] = kind
                found.update((QuantizerId(tensor.name), kind) for tensor in node.outputs)
        return found


def quantizers_of(node: Node, plan: Plan, target: Target) -> Iterator[QuantizerId]:
    """Yield the quantizers that are on if only this node is static."""
    yield QuantizerId(node.name, is_node=True)
    given = node.outputs if outputs_quantized(node, target) else ()
    for tensor in dict.fromkeys((*data_inputs(node), *given)):
        if tensor.name in plan.by_tensor:
            yield QuantizerId(tensor.name)


def sensitivity_by_node(
    graph: Graph, target: Target, measure: Callable[[], Sensitivities]
) -> Callable[[Plan, Set[Mode]], list[NodeSensitivity]]:
    """Return a function that gives the error of a plan's weighted nodes in some modes.

    `measure` is called at each use of this function.
    """
    nodes: Mapping[str, Node] = {node.name: node for scope in all_graphs(graph) for node in scope.nodes}

    def sensitivities_of_nodes(plan: Plan, modes: Set[Mode]) -> list[NodeSensitivity]:
        known = measure()

        def of(name: str, mode: Mode) -> float:
            own = (QuantizerId(name, is_node=True),)
            return sqnr_of_ratio(known.of(quantizers_of(nodes[name], plan, target) if mode is Mode.STATIC else own))

        wanted = (one for one in plan.decisions if one.mode in modes and one.weights)
        return [NodeSensitivity(one.node, one.mode, of(one.node, one.mode)) for one in wanted]

    return sensitivities_of_nodes
