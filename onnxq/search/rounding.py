"""Whether errors of rounding that cancel pay: told on samples that the Gram matrices have not seen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial, reduce
from types import MappingProxyType

from onnxq.algorithms.encoders import weight_requests
from onnxq.algorithms.gptq import Compensation
from onnxq.algorithms.migration import NOTHING
from onnxq.algorithms.range_choice import pooled
from onnxq.algorithms.recipe import Recipe
from onnxq.calibration.accumulators import Request
from onnxq.calibration.collect import collect
from onnxq.calibration.hessian import Gram
from onnxq.calibration.statistics import Evidence
from onnxq.planning.plan import Plan
from onnxq.search.dividing import SCALING_WORTH, gram_workers
from onnxq.search.effort import Accuracy
from onnxq.search.folds import ALL, LARGE, Basis, Finding, Folds, Groups

# The fewer samples there are for the columns of a weight, the more damping it takes.
_DAMPINGS = (0.01, 0.1, 0.3)
_LIKELIEST = 0.1
# Less than this part of all noise is not worth the Gram matrices: without any of it there would be 1.2 dB less.
_SHARE = 0.25


def with_compensation(folds: Folds, plan: Plan, basis: Basis, accuracy: Accuracy) -> Basis:
    """Return the basis with weights rounded so that their errors cancel, where that lowers the noise.

    Args:
        folds: say whether it does.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: weights of how many bits are tried, and what their Gram matrices may take.
    """
    bench = folds.trials.bench
    first = Compensation.of_samples(
        sum(map(len, folds.groups)), bits=accuracy.compensated_bits, memory=accuracy.gram_bytes
    )
    requests = weight_requests(plan, bench.graph, first)
    if reason := _obstacle(folds, plan, basis, first, requests):
        return basis.unfit(reason)

    @cache
    def seen(group: int) -> Evidence:
        return collect(bench.prepared, folds.groups[group], requests, workers=gram_workers(accuracy))

    @cache
    def joined(groups: Groups) -> Evidence:
        return _joined(basis.evidence, reduce(Evidence.plus, map(seen, groups)))

    def found(recipe: Recipe, damping: float, groups: Groups) -> Basis:
        compensated = replace(recipe, compensation=replace(first, damping=damping))
        return replace(basis, recipe=compensated, evidence=joined(groups))

    def quietest(recipe: Recipe) -> partial[Basis]:
        tried = [partial(found, recipe, damping) for damping in _DAMPINGS]
        return folds.quietest(plan, tried)

    def plain(groups: Groups) -> Basis:
        return basis

    # What is no better with the likeliest damping pays with no other.
    tried: list[Finding] = [plain, partial(found, basis.recipe, _LIKELIEST)]
    if folds.quietest(plan, tried) is plain:
        return basis
    best = quietest(replace(basis.recipe, scaling=NOTHING))
    # Factors that pay where weights are rounded to their nearest codes need not do so where their errors cancel.
    if basis.recipe.scaling.factors and folds.pays(plan, scaled := quietest(basis.recipe), best, SCALING_WORTH):
        best = scaled
    # Errors that cancel on few samples need not do so on others.
    return best(ALL) if folds.surely_pays(plan, best, plain) else basis


def _obstacle(folds: Folds, plan: Plan, basis: Basis, first: Compensation, requests: Sequence[Request]) -> str:
    """Return why errors of rounding are not made to cancel, or an empty string."""
    bench = folds.trials.bench
    if bench.is_large:
        return LARGE
    if not requests and weight_requests(plan, bench.graph, replace(first, memory=sys.maxsize)):
        return "Gram matrices of the data have no room in memory"
    if not requests:
        return f"no weights of {first.bits} bits or fewer are multiplied by data that can be seen"
    return "" if _matters(folds, plan, basis) else "weights alone make hardly any of the noise"


def _matters(folds: Folds, plan: Plan, basis: Basis) -> bool:
    """Whether rounded weights alone make a good part of the noise, as they do where data stays float."""
    from onnxq.search.switchboard import Switchboard

    if not plan.activations:
        return True
    trials = replace(folds.trials, evidence=basis.evidence)
    weighted = {decision.node for decision in plan.decisions if decision.weights}
    alone = Switchboard.of(trials, plan, basis.recipe, weighted)
    [noise] = alone.noises([alone.sources], range(len(trials.answered.samples)))
    return pooled(noise) >= _SHARE * pooled(trials.noise(plan, basis.recipe))


def with_asked_rows(folds: Folds, plan: Plan, basis: Basis, accuracy: Accuracy) -> Basis:
    """Return a basis by which the errors of those weights cancel whose Spec asks for that, without judging it.

    Args:
        folds: the samples.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: what the Gram matrices may take.
    """
    samples = sum(map(len, folds.groups))
    asked = Compensation.of_samples(samples, _LIKELIEST, bits=0, memory=accuracy.gram_bytes)
    observed = {request.tensor for request in weight_requests(plan, folds.trials.bench.graph, asked)}
    compensated = replace(basis, recipe=replace(basis.recipe, compensation=asked))
    return with_seen_rows(folds, plan, compensated, sorted(observed))


def with_seen_rows(folds: Folds, plan: Plan, basis: Basis, observed: Sequence[str]) -> Basis:
    """Return a basis whose weights are compensated with the Gram matrices for that, summed up as they once were.

    Args:
        folds: the samples.
        plan: what becomes of each node.
        basis: what codes are chosen by, a compensation among it.
        observed: all tensors whose Gram matrices were seen then, which the plan may need no more.
    """
    bench, compensation = folds.trials.bench, basis.recipe.compensation
    wanted = weight_requests(plan, bench.graph, compensation) if compensation is not None else ()
    # What had no room in memory then was rounded.
    requests = tuple(request for request in wanted if request.tensor in observed)
    groups = [folds.groups[group] for group in ALL if requests and len(folds.groups[group])]
    grams = [collect(bench.prepared, group, requests, others=observed) for group in groups]
    return replace(basis, evidence=_joined(basis.evidence, reduce(Evidence.plus, grams))) if grams else basis


def _joined(evidence: Evidence, grams: Evidence) -> Evidence:
    """Return the evidence with Gram matrices beside, whose samples are not all of its own."""
    # Rows that wait are multiplied now, and not again for every candidate.
    whole = {one: gram.multiplied() for one, gram in grams.statistics.items() if isinstance(gram, Gram)}
    return replace(evidence, statistics=MappingProxyType({**evidence.statistics, **whole}))
