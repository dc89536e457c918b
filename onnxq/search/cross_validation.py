"""Cross-validation: what is found on some of the samples is evaluated on others, and the other way round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import numpy as np

from onnxq.algorithms.activation_params import requests_for
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.equalization import EqualizationGroup, EqualizationStrength, find_groups
from onnxq.algorithms.range_search import Noise, is_significant_reduction, pooled
from onnxq.calibration.accumulators import Request
from onnxq.calibration.methods import CalibrationMethod
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.effort import Accuracy
from onnxq.data.dataset import Subset, evenly_spaced_indices, group_by_file, halves
from onnxq.data.inputs import SampleSource
from onnxq.evaluation.bounds import student_t_quantile
from onnxq.ir import Graph, constants
from onnxq.planning.plan import Plan
from onnxq.search.evaluator import PlanEvaluator, measure_errors
from onnxq.search.prepared_model import PreparedModel
from onnxq.system.resources import Progress, silent

Groups = tuple[int, ...]
"""Which of the groups of samples something is found on."""
ALL: Groups = (0, 1, 2)

# Each sample costs a run of the float model, and more find hardly anything better. With half as many, errors of weights
# cancel less well (a small ViT with blocks of 4 bits: 29.8 instead of 30.2 dB).
_MOST = 512
# More tell hardly better whether ranges hold on others.
_MOST_HELD_OUT = 16
WORTH = 0.977
"""Of several findings one lowers the noise by 0.1 dB by luck alone."""
# Half of the samples may see 1 dB more noise where all see less; more than that is hardly ever made up for.
_HOPELESS = 1.26
# What all see surely less of, half of them seldom see 0.4 dB more of.
_UNLIKELY = 1.1
# How often what changes nothing takes off more than one standard error.
_CHANCE = 0.16
# So seldom does it take off so much that nobody asks others, and so much that one fold decides where one is to.
_NO_DOUBT, _LITTLE_DOUBT = 0.01, 0.1


@dataclass(frozen=True, eq=False)
class AlgorithmResult:
    """What codes are chosen by.

    Attributes:
        recipe: how.
        evidence: what it rests on.
        settings: how the factors that migrate follow from samples, by site.
        left: why the method that was asked last does not apply, in words; empty where it was tried.
    """

    recipe: EncodingConfig
    evidence: CalibrationStatistics
    settings: Mapping[EqualizationGroup, EqualizationStrength] = field(default_factory=lambda: MappingProxyType({}))
    left: str = ""

    def unfit(self, reason: str) -> AlgorithmResult:
        """Return the same, which a method leaves as it is, as it does not apply for that reason."""
        return replace(self, left=f"it does not apply: {reason}")


LARGE = "the model is above 1 GiB"
"""Why methods do not apply that build a model, or see much of its data, too often for that."""

Finding: TypeAlias = Callable[[Groups], AlgorithmResult]
"""What a method makes of some groups of samples."""
Found = TypeVar("Found", bound=Finding)


def split_groups(samples: SampleSource, judging: int) -> tuple[Subset, ...]:
    """Return the two halves of those samples by which candidates are judged, and others, at most 512 in all.

    Where samples share files, each half has those too that share one with it, by which nothing is judged.

    Args:
        samples: all of them.
        judging: how many judge.
    """
    judges = halves(samples, judging)
    others = sorted(set(range(len(samples))).difference(*judges))
    kept = {others[place] for place in evenly_spaced_indices(len(others), _MOST - sum(map(len, judges)))}
    groups = [set(half) for half in judges]
    for file in group_by_file(samples):
        near = next((group for group in groups if not group.isdisjoint(file)), None)
        if near is not None:
            near.update(kept.intersection(file))
    groups.append(kept.difference(*groups))
    return tuple(Subset(samples, sorted(places)) for places in groups)


@dataclass(frozen=True, eq=False)
class CrossValidator:
    """The samples in three groups: the two halves of those that judge candidates, and all others.

    What a fold finds, it finds on one half and the others; the half that was left out judges it. What is taken in the
    end is found on all.

    Attributes:
        evaluator: build candidates and judge them.
        samples: all of them, two at least.
    """

    evaluator: PlanEvaluator
    samples: SampleSource

    @cached_property
    def groups(self) -> tuple[Subset, ...]:
        """The samples by group, at most 512 in all."""
        return split_groups(self.samples, len(self.evaluator.answered.samples))

    @property
    def found_on(self) -> tuple[Groups, Groups]:
        """The groups on which each fold finds."""
        return (1, 2), (0, 2)

    @cached_property
    def _judges(self) -> tuple[PlanEvaluator, PlanEvaluator]:
        """What judges each fold."""
        one, other = halves(self.samples, len(self.evaluator.answered.samples))
        places = sorted((*one, *other))
        return self.evaluator.part(list(map(places.index, one))), self.evaluator.part(list(map(places.index, other)))

    def of(self, groups: Groups, most: int) -> Subset:
        """Return at most so many samples of some groups, evenly spaced."""
        places = sorted(place for group in groups for place in self.groups[group].places)
        return Subset(self.samples, [places[place] for place in evenly_spaced_indices(len(places), most)])

    def lowest_error(self, plan: Plan, findings: Sequence[Found]) -> Found:
        """Return the finding with which the first fold has the least noise."""
        if len(findings) == 1:
            return findings[0]
        seen = [pooled(noise) for noise in self._seen(plan, ((0, one) for one in findings))]
        return findings[seen.index(min(seen))]

    def kept(
        self,
        plan: Plan,
        basis: AlgorithmResult,
        findings: Sequence[Finding],
        worth: float = WORTH,
        *,
        once: bool = False,
    ) -> AlgorithmResult:
        """Return what the best of some findings makes of all samples, or the basis where none is worth it.

        Args:
            plan: what becomes of each node.
            basis: what there is without them.
            findings: of which the first fold says which is the best.
            worth: how many times the noise of the basis it may leave at most, as both folds see it.
            once: whether the first fold decides by itself, see `improves`.
        """
        best = self.lowest_error(plan, findings)
        return best(ALL) if self.improves(plan, best, lambda _: basis, worth, once=once) else basis

    def improves(
        self, plan: Plan, finding: Finding, other: Finding, worth: float = WORTH, *, once: bool = False
    ) -> bool:
        """Return whether a finding leaves less noise than another, as both folds see it.

        The second fold finds nothing where what the first sees cannot be made up for, or leaves no doubt.

        Args:
            plan: what becomes of each node.
            finding: the one.
            other: the other.
            worth: how many times the noise of the other it may leave at most.
            once: whether the first fold decides by itself: what is little in doubt there pays.
        """
        was, now = self._seen(plan, ((0, other), (0, finding)))
        if not pooled(now) < _HOPELESS * worth * pooled(was):
            return False
        is_sure = len(was) > 1 and is_significant_reduction(
            was, now, student_t_quantile(len(was) - 1, _LITTLE_DOUBT if once else _NO_DOUBT)
        )
        if is_sure or once:
            return is_sure
        first = pooled(was), pooled(now)
        was, now = self._seen(plan, ((1, other), (1, finding)))
        return first[1] + pooled(now) < worth * (first[0] + pooled(was))

    def improves_significantly(self, plan: Plan, finding: Finding, other: Finding) -> bool:
        """Return whether a finding leaves less noise than another by more than chance, sample by sample.

        All samples together have to see more than one standard error less, or where they are few, as much more as
        Student's t allows for. The second fold finds nothing where the first sees so much more that this is hardly ever
        made up for by so much.

        Args:
            plan: what becomes of each node.
            finding: the one.
            other: the other.
        """
        before: list[Noise] = []
        found: list[Noise] = []
        for fold in range(2):
            was, now = self._seen(plan, ((fold, other), (fold, finding)))
            if not pooled(now) < _UNLIKELY * pooled(was) and not fold:
                return False
            before.append(was)
            found.append(now)
        freedom = max(sum(map(len, found)) - 1, 1)
        return is_significant_reduction(
            np.concatenate(before), np.concatenate(found), student_t_quantile(freedom, _CHANCE)
        )

    def held_out_evaluator(self, plan: Plan) -> PlanEvaluator:
        """Return an evaluator whose samples have no part in the ranges and means of its statistics.

        It is made of the samples that judge candidates, for others to judge, or where there are hardly any others, of
        one half for the other.
        """
        bench = self.evaluator.bench
        if len(self.groups[2]) < len(self.groups[1]):
            # What the float model gives for these is known, and so is what models give that were tried before.
            evidence = bench.calibrate(plan, self.of((0, 2), _MOST), silent)
            return replace(self._judges[1], evidence=evidence)
        evidence = bench.calibrate(plan, self.of((0, 1), _MOST), silent)
        none = replace(self.evaluator.part(()), evidence=evidence)
        return none.joined(self.of((2,), _MOST_HELD_OUT))

    def _seen(self, plan: Plan, asked: Iterable[tuple[int, Finding]]) -> Iterator[Noise]:
        """Yield the noise that a fold sees of a finding, one after the other."""

        def each() -> Iterator[tuple[PlanEvaluator, Plan, EncodingConfig]]:
            for fold, finding in asked:
                basis = finding(self.found_on[fold])
                yield replace(self._judges[fold], evidence=basis.evidence), plan, basis.recipe

        return measure_errors(each())


# Calibration for cross-validation: the samples run once, and each group has its own statistics.


def observe_groups(
    bench: PreparedModel,
    plan: Plan,
    samples: SampleSource,
    accuracy: Accuracy,
    methods: Sequence[CalibrationMethod],
    progress: Progress,
) -> None:
    """Let the bench know what each of the groups shows by which methods of accuracy are judged.

    Args:
        bench: has the model.
        plan: the one in which every node is static that can be.
        samples: by which codes are chosen.
        accuracy: what is tried, without which nothing is observed.
        methods: of ranges, for any of which evidence is kept.
        progress: told of the stage ``calibrate``.
    """
    if not accuracy.methods:
        return
    groups = split_groups(samples, accuracy.judges(len(samples)))
    requests = requests_for(plan, methods)
    if bench.is_large or not requests or sum(map(len, groups)) < len(samples):
        return
    tapped = {request.tensor for request in requests}
    apart = channel_requests(bench.graph, find_groups(bench.graph, plan).found).values()
    # With another tensor the model would be cut elsewhere, and kernels might round otherwise.
    known = [request for request in apart if request.tensor in tapped]
    bench.grouped.observe(bench.prepared, groups, requests, known, partial(progress, "calibrate"))


def channel_requests(graph: Graph, found: Iterable[EqualizationGroup]) -> dict[str, Request]:
    """Return what is wanted of the tensors of sites that neither are constants nor lie in bodies, by name."""
    known = {tensor.name for tensor in constants(graph)}
    return {
        name: Request(name, "channel-ranges", own.axis)
        for site in found
        for name, own in site.tensors.items()
        if name not in known and name not in site.inside
    }
