"""Cross-validation: each half of the samples evaluates what was found on the other half."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias, TypeVar

import numpy as np

from onnxq.algorithms.activation_params import requests_for
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.equalization import EqualizationGroup, find_groups
from onnxq.algorithms.range_search import NsrBySample, is_significant_reduction, pooled
from onnxq.calibration.accumulators import Request
from onnxq.calibration.methods import CalibrationMethod
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.effort import AccuracyEffort
from onnxq.data.dataset import Subset, evenly_spaced_indices, group_by_file, halves
from onnxq.data.inputs import SampleSource
from onnxq.evaluation.bounds import student_t_quantile
from onnxq.ir import Graph, constants
from onnxq.planning.plan import Plan
from onnxq.search.evaluator import PlanEvaluator, measure_errors
from onnxq.search.prepared_model import PreparedModel
from onnxq.system.resources import Progress, silent

Groups = tuple[int, ...]
"""Indices of the groups of samples that something is found on."""
ALL: Groups = (0, 1, 2)

# Each sample costs a run of the float model, and more find hardly anything better. With half as many, errors of weights
# cancel less well (a small ViT with blocks of 4 bits: 29.8 instead of 30.2 dB).
_MOST = 512
# More samples hardly show better whether ranges hold on others.
_MOST_HELD_OUT = 16
WORTH = 0.977
"""The best of several candidates lowers the error by 0.1 dB by luck alone."""
# Half of the samples may show 1 dB more error although all show less; a larger loss is hardly ever made up for.
_HOPELESS = 1.26
# If the error of all samples is surely lower, half of them seldom show 0.4 dB more.
_UNLIKELY = 1.1
# Probability that a change without effect lowers the error by more than one standard error.
_CHANCE = 0.16
# Significance at which the second fold is not asked.
_STRICT_SIGNIFICANCE = 0.01


@dataclass(frozen=True, eq=False)
class AlgorithmResult:
    """An encoding config and the statistics that it rests on.

    Attributes:
        left: why the last method does not apply, in words; empty if it was tried.
    """

    config: EncodingConfig
    statistics: CalibrationStatistics
    left: str = ""

    def unfit(self, reason: str) -> AlgorithmResult:
        """Return the same result with the reason why a method does not apply."""
        return replace(self, left=f"it does not apply: {reason}")


LARGE = "the model is above 1 GiB"
"""Reason of methods that would build a model, or observe much of its data, too often."""

Finding: TypeAlias = Callable[[Groups], AlgorithmResult]
"""Maps groups of samples to the result of a method on them."""
Found = TypeVar("Found", bound=Finding)


def split_groups(samples: SampleSource, count: int) -> tuple[Subset, ...]:
    """Split samples into the two halves that evaluate candidates, and all others; 512 samples at most.

    If samples share files, each half also gets the samples that share a file with it. These do not evaluate anything.
    `count` is the number of samples that evaluate.
    """
    holdouts = halves(samples, count)
    others = sorted(set(range(len(samples))).difference(*holdouts))
    kept = {others[place] for place in evenly_spaced_indices(len(others), _MOST - sum(map(len, holdouts)))}
    groups = [set(half) for half in holdouts]
    for file in group_by_file(samples):
        near = next((group for group in groups if not group.isdisjoint(file)), None)
        if near is not None:
            near.update(kept.intersection(file))
    groups.append(kept.difference(*groups))
    return tuple(Subset(samples, sorted(places)) for places in groups)


@dataclass(frozen=True, eq=False)
class CrossValidator:
    """Samples in three groups: the two halves that evaluate candidates, and all others.

    A fold fits on one half and the others, and the left-out half evaluates the fit. The final result is fitted on all
    three groups.

    Attributes:
        samples: all samples, at least two.
    """

    evaluator: PlanEvaluator
    samples: SampleSource

    @cached_property
    def groups(self) -> tuple[Subset, ...]:
        """The samples by group, at most 512 in all."""
        return split_groups(self.samples, len(self.evaluator.answered.samples))

    @property
    def found_on(self) -> tuple[Groups, Groups]:
        """The groups that each fold fits on."""
        return (1, 2), (0, 2)

    @cached_property
    def _holdouts(self) -> tuple[PlanEvaluator, PlanEvaluator]:
        """The evaluator of each fold."""
        one, other = halves(self.samples, len(self.evaluator.answered.samples))
        places = sorted((*one, *other))
        return self.evaluator.part(list(map(places.index, one))), self.evaluator.part(list(map(places.index, other)))

    def of(self, groups: Groups, most: int) -> Subset:
        """Return at most `most` samples of some groups, evenly spaced."""
        places = sorted(place for group in groups for place in self.groups[group].places)
        return Subset(self.samples, [places[place] for place in evenly_spaced_indices(len(places), most)])

    def lowest_error(self, plan: Plan, findings: Sequence[Found]) -> Found:
        """Return the finding with the lowest error in the first fold."""
        if len(findings) == 1:
            return findings[0]
        seen = [pooled(nsr) for nsr in self._seen(plan, ((0, one) for one in findings))]
        return findings[seen.index(min(seen))]

    def kept(
        self,
        plan: Plan,
        basis: AlgorithmResult,
        findings: Sequence[Finding],
        worth: float = WORTH,
    ) -> AlgorithmResult:
        """Fit the best finding on all samples, or return the basis if no finding improves on it.

        `worth` is the largest ratio of the new error to the old one that counts as better, over both folds.
        """
        best = self.lowest_error(plan, findings)
        return best(ALL) if self.improves(plan, best, lambda _: basis, worth) else basis

    def improves(self, plan: Plan, finding: Finding, other: Finding, worth: float = WORTH) -> bool:
        """Return whether a finding has a lower error than another one over both folds.

        The second fold is skipped if the first shows a loss that cannot be made up for, or a gain without doubt.

        `worth` is the largest ratio of the new error to the other one that counts as better.
        """
        was, now = self._seen(plan, ((0, other), (0, finding)))
        if not pooled(now) < _HOPELESS * worth * pooled(was):
            return False
        if len(was) > 1 and is_significant_reduction(was, now, student_t_quantile(len(was) - 1, _STRICT_SIGNIFICANCE)):
            return True
        first = pooled(was), pooled(now)
        was, now = self._seen(plan, ((1, other), (1, finding)))
        return first[1] + pooled(now) < worth * (first[0] + pooled(was))

    def improves_significantly(self, plan: Plan, finding: Finding, other: Finding) -> bool:
        """Return whether a finding has a significantly lower error than another one, sample by sample.

        All samples together have to show a drop of more than one standard error. If they are few, Student's t raises
        this bar. The second fold is skipped if the first shows a loss that is hardly ever made up for.
        """
        before: list[NsrBySample] = []
        found: list[NsrBySample] = []
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
        """Return an evaluator whose samples have no part in its statistics.

        Statistics come from the samples that evaluate candidates, and the other samples evaluate. If there are hardly
        any others, one half evaluates and the rest gives the statistics.
        """
        bench = self.evaluator.bench
        if len(self.groups[2]) < len(self.groups[1]):
            # Outputs of the float model, and of models tried before, are known for these samples.
            statistics = bench.calibrate(plan, self.of((0, 2), _MOST), silent)
            return replace(self._holdouts[1], statistics=statistics)
        statistics = bench.calibrate(plan, self.of((0, 1), _MOST), silent)
        none = replace(self.evaluator.part(()), statistics=statistics)
        return none.joined(self.of((2,), _MOST_HELD_OUT))

    def _seen(self, plan: Plan, requested: Iterable[tuple[int, Finding]]) -> Iterator[NsrBySample]:
        """Yield the errors of findings in their folds, in order."""

        def each() -> Iterator[tuple[PlanEvaluator, Plan, EncodingConfig]]:
            for fold, finding in requested:
                basis = finding(self.found_on[fold])
                yield replace(self._holdouts[fold], statistics=basis.statistics), plan, basis.config

        return measure_errors(each())


# Calibration for cross-validation: the samples run once, and each group has its own statistics


def observe_groups(
    bench: PreparedModel,
    plan: Plan,
    samples: SampleSource,
    accuracy: AccuracyEffort,
    methods: Sequence[CalibrationMethod],
    progress: Progress,
) -> None:
    """Collect the statistics of each group of samples, so that accuracy methods can be cross-validated.

    Nothing is collected without accuracy methods, or if the groups do not hold all samples. A large model is not
    observed either.

    `plan` has all possible nodes static. Statistics are kept for each of the calibration methods `methods`.
    """
    if not accuracy.methods:
        return
    groups = split_groups(samples, accuracy.evaluation_samples(len(samples)))
    requests = requests_for(plan, methods)
    if bench.is_large or not requests or sum(map(len, groups)) < len(samples):
        return
    instrumented = {request.tensor for request in requests}
    apart = channel_requests(bench.graph, find_groups(bench.graph, plan).found).values()
    # With another tensor the model would be cut elsewhere, and kernels might round differently.
    known = [request for request in apart if request.tensor in instrumented]
    bench.grouped.observe(bench.prepared, groups, requests, known, partial(progress, "calibrate"))


def channel_requests(graph: Graph, found: Iterable[EqualizationGroup]) -> dict[str, Request]:
    """Return the requests for tensors of equalization groups, by name, without constants and tensors in bodies."""
    known = {tensor.name for tensor in constants(graph)}
    return {
        name: Request(name, "channel-ranges", own.axis)
        for site in found
        for name, own in site.tensors.items()
        if name not in known and name not in site.inside
    }
