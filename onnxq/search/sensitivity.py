"""Sensitivities: the error that each quantizer adds to each output, measured in one session with toggles."""

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
from onnxq.evaluation.sqnr import Pair, influence_by_sample, nsr_by_sample
from onnxq.ir import Graph, Node, all_graphs, is_constant
from onnxq.numerics.affine import sqnr_of_ratio, worst_ratio
from onnxq.passes.quantize.fake_quant_switches import FakeQuantSwitches
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Plan
from onnxq.runtime.targets import Target
from onnxq.search.activation_methods import noise_share
from onnxq.search.cost_model import outputs_quantized
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.search import NodeSensitivity


@dataclass(frozen=True, order=True)
class QuantizerId:
    """Where noise comes from.

    Attributes:
        name: of a tensor that becomes codes, or of a node whose weights or dynamic data do.
        is_node: which of the two.
    """

    name: str
    is_node: bool = False


@dataclass(frozen=True, eq=False)
class QuantizerToggleSession:
    """The float model with switches.

    Attributes:
        evaluator: the samples, and what the float model gives for them.
        view: the model with switches.
        switches: the input that says what is codes.
    """

    evaluator: PlanEvaluator
    view: ComparisonSession
    switches: FakeQuantSwitches

    @classmethod
    def of(cls, evaluator: PlanEvaluator, plan: Plan, recipe: EncodingConfig, nodes: Set[str] | None = None) -> Self:
        """Build the model that answers for everything that a plan makes codes of.

        Args:
            evaluator: builds from the same evidence as candidates are.
            plan: says what becomes codes.
            recipe: how these are chosen.
            nodes: those whose own codes are asked about, and no tensors; None asks about all.
        """
        path = evaluator.bench.prepared.with_name("switched.onnx")
        switches = evaluator.bench.build_switched(plan, evaluator.evidence, recipe, path, nodes)
        large = evaluator.bench.is_large
        return cls(evaluator, evaluator.answered.views.open(path, mapped=large, at_once=not large), switches)

    @property
    def sources(self) -> tuple[QuantizerId, ...]:
        """All there are, tensors first."""
        return (
            *map(QuantizerId, self.switches.tensors),
            *(QuantizerId(node, is_node=True) for node in self.switches.nodes),
        )

    def noises(self, asked: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        """Return the noise-to-signal ratio of each output for several sets of codes, see `nsr_by_sample`.

        Args:
            asked: what is codes in each; all else is float.
            samples: places of those to run.

        Returns:
            For each set float64 of shape (samples, outputs), in units of the signal of these samples.
        """
        return map(nsr_by_sample, self._pairs(asked, samples))

    def everything(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the noise of all there are together, and how much each sample counts, see `influence_by_sample`.

        Returns:
            Both float64 of shape (samples, outputs).
        """
        [pairs] = self._pairs([self.sources], range(len(self.evaluator.answered.samples)))
        return nsr_by_sample(pairs), influence_by_sample(pairs, self.evaluator.answered.files)

    def _pairs(self, asked: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[list[Pair]]:
        """Yield what the float model and the one with some sets of codes gave for samples."""
        expected, given = self.evaluator.answered.expected, self.evaluator.answered.given
        fed = ({**given[place], **self._switched(coded)} for coded in asked for place in samples)
        answers = self.view.run_each(fed)
        while some := list(islice(answers, len(samples))):
            yield list(zip((expected[place] for place in samples), some, strict=True))

    def _switched(self, coded: Collection[QuantizerId]) -> Sample:
        values = np.zeros(len(self.switches), np.bool_)
        values[[self._place(source) for source in coded]] = True
        return {self.switches.name: values}

    def _place(self, source: QuantizerId) -> int:
        return (self.switches.nodes if source.is_node else self.switches.tensors)[source.name]


# What each sample counts where noise is measured to choose plans by.

# However much or little of what can be trusted depends on a sample: without the codes that make it so noisy, as in the
# plans that will do, it is noisy no more.
_LEAST_WEIGHT, _MOST_WEIGHT = 0.3, 6.0


def sample_weights(noises: NDArray[np.float64], influences: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what each sample counts at each output, so that the noise of all samples stays what it is.

    Args:
        noises: noise-to-signal ratio with all codes, of shape (samples, outputs).
        influences: how much what can be trusted depends on each, of the same shape; see `onnxq.evaluation.bounds`.

    Returns:
        float64 of the same shape.

    >>> sample_weights(np.array([[1.0], [1.0], [4.0]]), np.array([[-2.0], [1.0], [99.0]])).round(2).tolist()
    [[0.07], [0.24], [1.42]]
    """
    weights = influences.clip(_LEAST_WEIGHT, _MOST_WEIGHT)
    weighed = (weights * noises).sum(0)
    return np.asarray(weights * np.divide(noises.sum(0), weighed, out=np.ones_like(weighed), where=weighed > 0))


def typical_sample(noises: NDArray[np.float64]) -> int:
    """Return the place of the sample with which half of the noise of all is reached, from the quietest on.

    That is the noisiest one where it has half of the noise, and else one like most.

    >>> typical_sample(np.array([5.0, 1.0, 3.0])), typical_sample(np.array([5.0, 1.0, 5.0, 4.0, 6.0]))
    (0, 2)
    """
    order = np.argsort(noises, kind="stable")
    return int(order[int(np.searchsorted(np.cumsum(noises[order]), noises.sum() / 2))])


# What each tensor and each node's weights add in noise to each output, measured with everything else in float.

Ratios = NDArray[np.float64]
"""Noise-to-signal ratio of each output."""

# Stands for outputs that are not finite, or integers that differ: noise has to be a number to be weighed.
LARGEST_NSR = 1e10
# Part of the questions that goes to groups of one size.
_FIRST_LOOK = 4 / 5
# Part of the runs that goes to the first look, at one sample; the rest is for the noisiest on the others.
_FIRST_PART = 0.6
# Questions without which nothing is known, however few runs are to be made.
_FEWEST = 16
# Seconds of a run that no clock tells from none.
_SHORTEST = 1e-6
# Less noise is none.
_LEAST = 1e-30
# Groups that hold less of the noise are not split.
_QUIET = 0.0125


class SensitivityProbe(Protocol):
    """Answers what some codes do; see `QuantizerToggleSession`."""

    @property
    def sources(self) -> tuple[QuantizerId, ...]:
        """All there are, in the order of the plan."""
        ...

    def noises(self, asked: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        """Return the noise-to-signal ratio by sample and output for several sets of codes."""
        ...

    def everything(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the noise of all sources together, and how much each sample counts, by sample and output."""
        ...


@dataclass(frozen=True, eq=False)
class Sensitivities:
    """What codes add in noise, and what they do together.

    Attributes:
        ratios: noise-to-signal ratio of each output, by source: alone, or as the share of a group.
        errors: standard error of the ratio at the worst output, of those that were measured on several samples.
        alone: the sources that were measured alone.
        joint: noise-to-signal ratio of each output with all of them.
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
        """The ratio of what a node alone has as codes, such as its weights, at its worst output."""
        return {source.name: worst_output_nsr(ratio) for source, ratio in self.ratios.items() if source.is_node}

    @property
    def share_of_nodes(self) -> float:
        """The part of the noise of all codes that those make which nodes alone have, such as of weights."""
        total = self.of(self.ratios)
        return self.of(source for source in self.ratios if source.is_node) / total if total else 0.0

    def of(self, sources: Iterable[QuantizerId]) -> float:
        """Return the ratio of the sum of some sources at the worst output."""
        known = [self.ratios[source] for source in sources if source in self.ratios]
        return worst_output_nsr(np.sum(known, axis=0)) if known else 0.0

    def together(self, sources: Iterable[QuantizerId]) -> Ratios:
        """Return the ratio of each output that is predicted for some sources together.

        What all make together is measured, and is more than their sum where they err alike, and less where codes hide
        the errors of others before them. The fewer they are, the nearer to their sum: signal-to-noise ratios, which
        are the inverse, are by the same more or less than those of the sums.
        """
        known = [self.ratios[source] for source in sources if source in self.ratios]
        summed, everything = (np.atleast_1d(np.sum(some, axis=0)) for some in (known, list(self.ratios.values())))
        if not (known and self.joint.size):
            return summed
        one, whole, joint = (np.maximum(ratio, _LEAST) for ratio in (summed, everything, self.joint))
        return np.where(summed > 0, 1 / (1 / one + 1 / joint - 1 / whole), 0.0)

    def of_plan(self, plan: Plan) -> float:
        """Return the ratio that is predicted for a plan whose codes are those that were measured."""
        tensors = (QuantizerId(one.tensor) for one in plan.activations)
        nodes = (QuantizerId(one.node, is_node=True) for one in plan.decisions if one.mode is not Mode.FLOAT)
        return worst_output_nsr(self.together((*tensors, *nodes)))


NO_ERROR = Sensitivities()
"""Nothing adds any noise."""


def worst_output_nsr(ratios: Ratios) -> float:
    """Return the ratio at the worst output, a number also where that is not finite."""
    return min(worst_ratio(ratios), LARGEST_NSR)


def likely_shares(plan: Plan, evidence: CalibrationStatistics) -> Mapping[QuantizerId, float]:
    """Return the noise-to-signal ratio of each tensor of a plan where it becomes codes, as its histogram tells it.

    What of it reaches an output is much the same for neighbours, so this is how noise that was measured of some
    together is likely divided among them.
    """
    specs = plan.calibrated
    seen = {tensor: evidence.of(tensor) for tensor in specs}
    known = (tensor for tensor, one in seen.items() if one.find(Histogram) and one.need(Range).count)
    return {QuantizerId(tensor): noise_share(seen[tensor], specs[tensor]) for tensor in known}


def measure_sensitivities(
    board: SensitivityProbe,
    samples: int,
    runs: int,
    told: Callable[[int, int], None] = lambda done, total: None,
    *,
    shares: Mapping[QuantizerId, float] = MappingProxyType({}),
    longest: float = math.inf,
    weighed: bool = False,
) -> Sensitivities:
    """Measure what each source adds in noise, the noisiest on all samples.

    The first look is at one sample, up to which the noise with all codes comes to half of it all, from the quietest on:
    each source alone where there are runs enough, else groups of neighbours, of which the noisiest are split. All are
    then measured on the other samples too, noisiest first, as far as the runs go. What was seen on one sample alone
    counts for all as a share of what all sources do together, which is measured on every sample: too much where weights
    are quiet in samples in which tensors are not.

    Args:
        board: answers questions.
        samples: how many it has.
        runs: how often to run a sample: unlike seconds, they are the same the next time. 0 asks nothing but what all
            sources do together.
        told: called with how many questions were answered, and how many there may be.
        shares: by which the noise of groups is divided, see `likely_shares`.
        longest: seconds that the runs may take, of which there are fewer where they would take longer, as those of
            thousands of switches may.
        weighed: whether samples count by how much what can be trusted depends on them, so that what is noisy in the few
            that decide is noisier than what is noisy in others. What all sources do together stays what it is.

    Returns:
        The noises of all sources.
    """
    sources, everything = board.sources, tuple(range(samples))
    if not sources or not samples:
        return Sensitivities()
    start = time.monotonic()
    by_sample, influence = board.everything()
    affordable = longest / max((time.monotonic() - start) / samples, _SHORTEST)
    by_sample = _finite(by_sample)
    weights = sample_weights(by_sample, influence) if weighed else np.ones_like(by_sample)
    by_sample = weights * by_sample
    joint = by_sample.sum(0)
    place = typical_sample(by_sample[:, int(joint.argmax())]) if len(joint) else 0
    asked = 0
    alone: dict[QuantizerId, Ratios] = {}

    def measure(groups: Sequence[Sequence[QuantizerId]]) -> list[Ratios]:
        nonlocal asked
        found: list[Ratios] = []
        for ratios in board.noises(map(frozenset, groups), [place]):
            asked += 1
            told(asked, max(most, asked))
            found.append(_finite(ratios).sum(0))
        alone.update((group[0], ratios) for group, ratios in zip(groups, found, strict=True) if len(group) == 1)
        return found

    wanted = max(int(_FIRST_PART * (runs - samples)), _FEWEST) if runs > 0 else 0
    most = int(min(wanted, len(sources), affordable))
    [whole] = (_finite(ratios).sum(0) for ratios in board.noises([sources], [place]))
    ratios = attribute_error(sources, measure, whole=whole, most=most, negligible=_QUIET, shares=shares)
    # The outputs' signals and how noisy the sample is are not those of all.
    scale = np.divide(joint, whole, out=np.ones_like(joint), where=whole > 0)
    found = {source: ratio * scale for source, ratio in ratios.items()}
    errors: dict[QuantizerId, float] = {}
    others = [other for other in everything if other != place]
    order = _by_loudness(found, joint)
    for number, source in enumerate(order, 1):
        if not others or asked + (number + 1) * samples > min(runs, affordable):
            break
        told(asked + number, asked + len(order))
        [seen] = (weights * _finite(ratios) for ratios in board.noises([{source}], everything))
        found[source] = seen.sum(0)
        alone[source] = found[source]
        at = int(np.argmax(found[source]))
        errors[source] = float(seen[:, at].std(ddof=1) * math.sqrt(samples))
    return Sensitivities(found, errors, frozenset(alone), joint)


def _finite(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.nan_to_num(ratios, nan=LARGEST_NSR, posinf=LARGEST_NSR).clip(0.0, LARGEST_NSR))


def _by_loudness(ratios: Mapping[QuantizerId, Ratios], joint: Ratios) -> list[QuantizerId]:
    """Return the sources by their part of the noise of any output, noisiest first."""
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
    """Tell how much noise each unit adds, from measuring it alone, or, where that is too much, groups of neighbours.

    Four fifths of the measurements go to groups of one size, two units at least, so that quiet units can be told apart
    too; with the rest the noisiest group is split in two each time, and what the halves make alone says how its noise
    is divided among them. The noise of a group that is not split is divided among its units by their likely shares.

    Args:
        units: in the order in which data flows, so that neighbours share borders.
        measure: groups to the noise-to-signal ratio of each at each output with everything else silent.
        whole: the ratios of all units together.
        most: measurements to make at most.
        negligible: the part of the whole's noise below which a group is not split.
        shares: in any unit; units of which none is known have the median.

    Returns:
        Noise-to-signal ratios by unit.
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
            # Errors that point the same way make more together than the sum of what they make alone.
            part = ratio * np.divide(own, total, out=np.full_like(total, 1 / 2), where=total > 0)
            heapq.heappush(heap, (-_share(part, whole), number, half, part))
            number += 1
        measured += 2
    return {unit: found[unit] for unit in units}


def _share(ratio: Ratios, whole: Ratios) -> float:
    return worst_output_nsr(np.divide(ratio, whole, out=np.zeros_like(ratio), where=whole > 0))


# Noise of the nodes of a model that is too large to look at each alone: groups of one kind of layer, by depth.

_Kind = tuple[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, eq=False)
class ProbeByLayerKind:
    """Questions about the same codes, in an order in which neighbours are layers of one kind.

    The layers of a network that repeats its blocks are alike where they have the same operator and weights of the same
    shapes, and next to one another where they follow on one another in that, so groups of neighbours say what a kind
    of layer adds at some depth, in few questions.

    Attributes:
        asked: answers.
        graph: the prepared graph.
    """

    asked: SensitivityProbe
    graph: Graph

    @cached_property
    def sources(self) -> tuple[QuantizerId, ...]:
        """All there are: tensors, then nodes, each by the kind of layer that they belong to, and by depth in that."""
        kinds = self._kinds()
        places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds.values()))}
        return tuple(
            sorted(self.asked.sources, key=lambda one: (one.is_node, places[kinds[one]] if one in kinds else -1))
        )

    def noises(self, asked: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        """Return the noise-to-signal ratio by sample and output for several sets of codes."""
        return self.asked.noises(asked, samples)

    def everything(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the noise of all codes together, and how much each sample counts, by sample and output."""
        return self.asked.everything()

    def _kinds(self) -> dict[QuantizerId, _Kind]:
        found: dict[QuantizerId, _Kind] = {}
        for scope in all_graphs(self.graph):
            for node in scope.nodes:
                kind = node.op, tuple(tensor.shape for tensor in node.inputs if is_constant(tensor))
                found[QuantizerId(node.name, is_node=True)] = kind
                found.update((QuantizerId(tensor.name), kind) for tensor in node.outputs)
        return found


def quantizers_of(node: Node, plan: Plan, target: Target) -> Iterator[QuantizerId]:
    """Yield what becomes codes when a node and nothing else is static."""
    yield QuantizerId(node.name, is_node=True)
    given = node.outputs if outputs_quantized(node, target) else ()
    for tensor in dict.fromkeys((*data_inputs(node), *given)):
        if tensor.name in plan.by_tensor:
            yield QuantizerId(tensor.name)


def sensitivity_by_node(
    graph: Graph, target: Target, measure: Callable[[], Sensitivities]
) -> Callable[[Plan, Set[Mode]], list[NodeSensitivity]]:
    """Return what tells the noise of a plan's weighted nodes of some modes.

    Args:
        graph: the prepared graph.
        target: the runtime.
        measure: what codes add in noise; asked when it is first needed.
    """
    nodes: Mapping[str, Node] = {node.name: node for scope in all_graphs(graph) for node in scope.nodes}

    def told(plan: Plan, modes: Set[Mode]) -> list[NodeSensitivity]:
        known = measure()

        def of(name: str, mode: Mode) -> float:
            own = (QuantizerId(name, is_node=True),)
            return sqnr_of_ratio(known.of(quantizers_of(nodes[name], plan, target) if mode is Mode.STATIC else own))

        wanted = (one for one in plan.decisions if one.mode in modes and one.weights)
        return [NodeSensitivity(one.node, one.mode, of(one.node, one.mode)) for one in wanted]

    return told
