"""All accuracy methods in order, each kept only if the whole model has less error, and what each gained."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from onnxq.algorithms.encoders import encoder_named
from onnxq.algorithms.encoding_config import EncodingConfig, tensors_seen
from onnxq.algorithms.equalization import NOTHING, costly_scales, select_free_scales
from onnxq.algorithms.range_search import pooled
from onnxq.calibration.methods import format_method, required_kinds
from onnxq.config.effort import FULL, Accuracy
from onnxq.data.dataset import Subset
from onnxq.errors import tolerate
from onnxq.numerics.affine import sqnr_of_ratio
from onnxq.planning.plan import Plan
from onnxq.search.activation_methods import refit_equalization, with_equalization, with_ranges
from onnxq.search.cross_validation import AlgorithmResult, CrossValidator
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.profiling import PlanProfiler
from onnxq.search.weight_methods import with_asked_rows, with_awq, with_bias_correction, with_decided_biases, with_gptq
from onnxq.system.resources import NEVER, Deadline, Progress, silent

TRAINING = "training"
"""What a gain of training is called, which comes after all methods."""


_LOG = logging.getLogger(__name__)
# Trials that a method takes beside those in which it chooses ranges, and the fewest of these that tell anything.
_TRIALS, _FEWEST = 4, 2
# Seconds that a model takes to be built, before one was.
_BUILD_SECONDS = 0.2
# Some models take a hundred times as long to load as to run: so many processes that run the float model are enough.
_MOST_PROCESSES = 30
# Less, in decibels, is not worth codes that are harder to explain.
_WORTH_DB = 0.05


@dataclass(frozen=True)
class MethodGain:
    """What one method did.

    Attributes:
        method: its name.
        before: SQNR in decibels of the worst output without it, on the samples by which candidates are judged;
            probabilities count by their logarithms.
        after: with what was kept of it.
        kept: how much of it was kept, in words; empty where nothing was.
        seconds: that it took.
        left: why nothing, or not all, was kept; empty where it was.
        where: names of the tensors whose ranges or factors were kept, those of data that rounded weights multiply, or
            the nodes whose biases or tables were; empty where all are, or nothing was kept.
    """

    method: str
    before: float
    after: float
    kept: str
    seconds: float
    left: str = ""
    where: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class RefinedEncoding:
    """How codes are chosen after all methods were tried.

    Attributes:
        basis: the methods that were kept, with what they found.
        gains: of each method that was tried.
        unmigrated: the recipe as it would be without factors of channels; None where there are none.
        spared: SQNR in decibels without any method where this was so much that none was tried; None elsewhere.
    """

    basis: AlgorithmResult
    gains: tuple[MethodGain, ...] = ()
    unmigrated: EncodingConfig | None = None
    spared: float | None = None

    def with_factors_of(self, recipe: EncodingConfig, decibels: float, reason: str) -> RefinedEncoding:
        """Return the same by a recipe with fewer factors of channels, or none, and why the others were left after all.

        Args:
            recipe: in the place of that of the basis.
            decibels: SQNR of the worst output with it.
            reason: in words.
        """
        basis = replace(self.basis, recipe=recipe)
        kept, where = _kept("equalization", basis, replace(recipe, migration=NOTHING))
        gains = (
            replace(one, after=decibels if kept else one.before, kept=kept, left=reason, where=where)
            if one.method == "equalization"
            else one
            for one in self.gains
        )
        return RefinedEncoding(basis, tuple(gains))


def apply_requested_methods(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: Accuracy
) -> AlgorithmResult:
    """Return what codes are chosen by where weights of a plan ask for data by their Spec; the same where none does.

    Args:
        validator: the samples.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: what the Gram matrices of data may take.
    """
    weights = (weight.spec for decision in plan.decisions for weight in decision.weights)
    asked = any(encoder_named(spec.method).sums is not None for spec in weights)
    if not asked or basis.recipe.compensation is not None or validator.evaluator.bench.is_large:
        return basis
    return with_asked_rows(validator, plan, basis, accuracy)


def refine(
    validator: CrossValidator,
    plan: Plan,
    basis: AlgorithmResult,
    accuracy: Accuracy,
    progress: Progress,
    until: Deadline = NEVER,
    enough: float = math.inf,
) -> RefinedEncoding:
    """Try the methods one after the other, each on what the ones before it have found.

    With a single sample, or a plan without codes, nothing can be told, and nothing is tried; nor where another
    toolkit's arithmetic is followed to the last bit.

    Args:
        validator: judge what is found.
        plan: what becomes of each node.
        basis: what codes are chosen by before.
        accuracy: which methods are tried, and how much.
        progress: told of the stage ``refine``.
        until: no method begins that may not end by then; without all effort, nor one that may end after many times
            the time in which a process runs the float model over the samples.
        enough: decibels that are not improved on, unless with all effort.
    """
    start, runs = time.monotonic(), validator.evaluator.answered.seconds * len(validator.evaluator.answered.samples)
    if not accuracy.thorough:
        evaluator = replace(validator.evaluator, evidence=basis.evidence)
        until = until.at_most(_MOST_PROCESSES * evaluator.process_seconds(evaluator.answered.seconds))
        if (reached := evaluator.sqnr(plan, basis.recipe)) >= enough:
            return RefinedEncoding(basis, spared=reached)

    gains: list[MethodGain] = []
    ranges = basis.recipe
    # Tables are no matter of how codes are chosen, but of the plan.
    known = tuple(name for name in accuracy.methods if name in CHOOSERS)
    methods = known if len(validator.samples) > 1 and _is_free(plan) else ()
    trial = max(runs + _BUILD_SECONDS, time.monotonic() - start)
    for number, name in enumerate(methods):
        progress("refine", number, len(methods))
        start, before = time.monotonic(), basis
        if number == 0 and until.left >= (_TRIALS + _FEWEST) * trial:
            # What is needed anyway tells how long a trial takes on this machine at this moment.
            _decibels(validator, plan, before)
            trial = max(trial, time.monotonic() - start)
        affordable = until.left / trial - _TRIALS
        if affordable < _FEWEST:
            break
        were = reached = _decibels(validator, plan, before)
        found = replace(before, left="it failed")
        with tolerate(f"accuracy method {name!r}"):
            tried = CHOOSERS[name](
                validator, plan, before, replace(accuracy, models=int(min(accuracy.models, affordable)))
            )
            reached, found = _decibels(validator, plan, tried), tried
        left, basis = found.left or "no less noise", replace(found, left="")
        if reached < were + _WORTH_DB:
            # It paid on samples that it had not used, but not on all that candidates are judged by.
            basis, reached = before, were
        (kept, where), seconds = _kept(name, basis, before.recipe), time.monotonic() - start
        gains.append(MethodGain(name, were, reached, kept, seconds, "" if kept else left, where))
        _LOG.debug("%s: %.1f -> %.1f dB in %.1f s, kept: %s", name, were, reached, seconds, kept or "nothing")
        if name == "ranges":
            ranges = basis.recipe
    if methods:
        progress("refine", len(methods), len(methods))
    recipe = basis.recipe
    unmigrated = replace(recipe, migration=NOTHING, ranges=ranges.ranges, own_ranges=ranges.own_ranges)
    return RefinedEncoding(basis, tuple(gains), unmigrated if recipe.migration.factors else None)


def _is_free(plan: Plan) -> bool:
    """Whether anything becomes codes, and all of it as we choose."""
    weights = (weight.spec for decision in plan.decisions for weight in decision.weights)
    specs = [*weights, *(activation.spec for activation in plan.activations)]
    return bool(specs) and not any(spec.is_followed for spec in specs)


def _decibels(validator: CrossValidator, plan: Plan, basis: AlgorithmResult) -> float:
    return sqnr_of_ratio(pooled(replace(validator.evaluator, evidence=basis.evidence).noise(plan, basis.recipe)))


def _kept(name: str, basis: AlgorithmResult, before: EncodingConfig) -> tuple[str, tuple[str, ...]]:
    """Return how much of a method was kept, and where, or nothing."""
    found = basis.recipe
    if found.key == before.key:
        return "", ()
    own = f" and {len(found.own_ranges)} tensors of their own" if found.own_ranges else ""
    places = {
        "ranges": (f"{format_method(found.ranges) or found.ranges}{own}", found.own_ranges),
        "equalization": (f"{len(found.migration.factors)} tensors", found.migration.factors),
        "awq": (f"{len(found.scaling.factors)} tensors", found.scaling.factors),
        "gptq": (
            f"weights of at most {found.compensation.bits} bits" if found.compensation else "",
            tensors_seen(basis.evidence, "hessian"),
        ),
        "bias-correction": (f"{len(found.biases)} biases", found.biases),
    }
    kept, where = places[name]
    return kept, tuple(where)


# The table of methods that choose codes; what carries one out is loaded only where methods are tried.

CHOOSERS: Mapping[str, Callable[[CrossValidator, Plan, AlgorithmResult, Accuracy], AlgorithmResult]] = MappingProxyType(
    {
        "ranges": with_ranges,
        "equalization": with_equalization,
        "awq": with_awq,
        "gptq": with_gptq,
        "bias-correction": with_bias_correction,
    }
)
"""What carries out each method that chooses codes, by its name."""


# Ranges and factors found again on more samples, once it is settled what they are found by.


def refit(validator: CrossValidator, full: Plan, plan: Plan, basis: AlgorithmResult, more: Subset) -> AlgorithmResult:
    """Return a basis whose ranges and factors of channels are those of all samples.

    Means and Gram matrices stay: a plan holds ranges and factors, and what it does not hold is found again from the
    samples that it was chosen by.

    Args:
        validator: the samples that it was chosen by.
        full: the plan that the factors were found for.
        plan: the one that was chosen.
        basis: what its codes are chosen by.
        more: samples beside those of the folds.
    """
    bench, methods = validator.evaluator.bench, basis.recipe.methods
    seen = bench.calibrate(full, more, silent, methods=methods)
    kinds = {"range", *required_kinds(methods)}
    evidence = basis.evidence.plus(seen.select(one for one in seen.statistics if one.kind in kinds))
    basis = replace(basis, evidence=evidence)
    # Factors that were left, since they cost time, stay left.
    migration = refit_equalization(bench, (*validator.groups, more), full, basis).select(basis.recipe.migration.factors)
    basis = replace(basis, recipe=replace(basis.recipe, migration=migration))
    return with_decided_biases(validator, plan, basis, FULL) if basis.recipe.biases else basis


# Which factors of channels a model can afford: those that cost it no time, or that fidelity needs.

# Less is not seen in so short a time.
_SAME_SPEED = 0.98
# Where a model misses its aim by so many decibels, most of it stays in float, and the search weighs what factors cost.
_FAR_DB = 3.0
# Models that tell which of the factors fidelity needs; of more groups so few tell little.
_MOST_GROUPS = 12


def drop_costly_scales(profiler: PlanProfiler, plan: Plan, refined: RefinedEncoding, aim: float) -> RefinedEncoding:
    """Return what was refined with all factors of channels, or without those that cost time and fidelity does not need.

    Where floats become codes or codes floats, factors keep kernels from being the fastest there are; those that cost no
    node cost no time. The latter alone are taken where the model is more faithful so, and all are kept where it is as
    fast with them; else the latter are taken, where these miss the aim all but those that fidelity does not need, and
    where that misses it too, the more faithful of both with which the model is faster than in float. All are kept too
    where the model is far from the aim with them.

    Args:
        profiler: builds, times and judges.
        plan: the one in which as much is integer as the scheme allows.
        refined: how its codes are chosen best.
        aim: how faithful the model has to be, in decibels.
    """
    if refined.unmigrated is None:
        return refined
    evaluator, every = profiler.evaluator, refined.basis.recipe
    graph = evaluator.bench.graph
    free = select_free_scales(graph, plan, every.migration)
    if free.key == every.migration.key or evaluator.sqnr(plan, every) < aim - _FAR_DB:
        return refined
    fewer = replace(every, migration=free) if free.factors else refined.unmigrated
    if evaluator.sqnr(plan, fewer) > evaluator.sqnr(plan, every):
        return _with(evaluator, plan, refined, fewer, "the model is more faithful without")
    speeds = profiler.speeds_of([evaluator.candidate(plan, recipe).path for recipe in (every, fewer)])
    # Without times nothing says that any factors cost time.
    if any(map(math.isnan, speeds)) or speeds[0] >= _SAME_SPEED * speeds[1]:
        return refined
    taken = fewer
    if evaluator.sqnr(plan, fewer) < aim:
        taken = _needed(evaluator, plan, every, costly_scales(graph, plan, every.migration), aim)
    if evaluator.sqnr(plan, taken) < aim:
        # The less there is to be left in float until the aim is reached, the more time is there to be paid with.
        paying = [recipe for recipe, speed in zip((taken, fewer), speeds, strict=True) if speed > 1]
        taken = max(paying or [fewer], key=lambda one: evaluator.sqnr(plan, one))
    if taken is every:
        return refined
    return _with(evaluator, plan, refined, taken, f"the model is {speeds[1] / speeds[0]:.2f}x as fast without")


def _with(
    evaluator: PlanEvaluator, plan: Plan, refined: RefinedEncoding, taken: EncodingConfig, reason: str
) -> RefinedEncoding:
    """Return what was refined with the factors of a recipe, and why without the others."""
    reached = sqnr_of_ratio(pooled(evaluator.noise(plan, taken))) if taken.migration.factors else math.nan
    return refined.with_factors_of(taken, reached, reason)


def _needed(
    evaluator: PlanEvaluator, plan: Plan, every: EncodingConfig, groups: Sequence[frozenset[str]], aim: float
) -> EncodingConfig:
    """Return a recipe without the factors that fidelity does not need, as far as a few models tell.

    What goes is told by halves, the larger parts first: a part goes whole where the aim is reached without it, or
    nothing is lost; else one half of it is tried after the other.

    Args:
        evaluator: build and judge.
        plan: what becomes of each node.
        every: with all factors.
        groups: tensors whose factors cost time, those together that have them together or not at all; where there are
            many, all are kept.
        aim: how faithful the model has to be, in decibels.
    """
    kept, pending = every, deque([groups] if 0 < len(groups) <= _MOST_GROUPS else [])
    for _ in range(_MOST_GROUPS):
        if not pending:
            break
        part = pending.popleft()
        left = kept.migration.factors.keys() - frozenset().union(*part)
        other = replace(kept, migration=kept.migration.select(left))
        if evaluator.sqnr(plan, other) >= min(aim, evaluator.sqnr(plan, kept)):
            kept = other
        elif len(part) > 1:
            middle = len(part) // 2
            pending += (part[:middle], part[middle:])
    return kept
