"""The accuracy methods in order: each is kept only if the whole model has less error, and its gain is recorded."""

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
from onnxq.calibration.methods import format_method
from onnxq.config.effort import AccuracyEffort
from onnxq.errors import tolerate
from onnxq.numerics.affine import sqnr_of_ratio
from onnxq.planning.plan import Plan
from onnxq.search.activation_methods import with_equalization, with_ranges
from onnxq.search.cross_validation import AlgorithmResult, CrossValidator
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.profiling import PlanProfiler
from onnxq.search.weight_methods import with_awq, with_gptq, with_requested_rows
from onnxq.system.resources import NEVER, Deadline, Progress

TRAINING = "training"
"""Method name of the gain of training, which comes after all methods."""


_LOG = logging.getLogger(__name__)
# Trials that a method needs besides its choice of ranges, and the fewest trials for that choice.
_TRIALS, _FEWEST = 4, 2
# Seconds to build a model, before one was built.
_BUILD_SECONDS = 0.2
# Limit in processes that run the float model, because some models take a hundred times as long to load as to run.
_MOST_PROCESSES = 30
# A smaller gain is not worth encodings that are harder to explain.
_WORTH_DB = 0.05


@dataclass(frozen=True)
class MethodGain:
    """The effect of one method.

    Attributes:
        before: SQNR in decibels of the worst output without it, on the evaluation samples; probabilities are compared
            by their logarithms.
        after: SQNR with the part that was kept.
        kept: what was kept, in words; empty if nothing was.
        left: why nothing, or not all, was kept; empty otherwise.
        where: the tensors or nodes that changed; empty if all did, or nothing was kept. For GPTQ, these are the tensors
            that the rounded weights multiply.
        device: what trained, with the times of a step if it was chosen by them; empty if there was no choice.
    """

    method: str
    before: float
    after: float
    kept: str
    seconds: float
    left: str = ""
    where: tuple[str, ...] = ()
    device: str = ""


@dataclass(frozen=True, eq=False)
class RefinedEncoding:
    """The encoding after all methods were tried.

    Attributes:
        basis: the encoding with the kept methods.
        unequalized: the recipe without channel scales; None if there are no channel scales.
        spared: SQNR in decibels without any method, if it was high enough to try none; None otherwise.
    """

    basis: AlgorithmResult
    gains: tuple[MethodGain, ...] = ()
    unequalized: EncodingConfig | None = None
    spared: float | None = None

    def with_factors_of(self, config: EncodingConfig, decibels: float, reason: str) -> RefinedEncoding:
        """Return the same with a recipe that has fewer channel scales or none, and record the reason.

        `decibels` is the SQNR of the worst output with this recipe.
        """
        basis = replace(self.basis, config=config)
        kept, where = _kept("equalization", basis, replace(config, equalization=NOTHING))
        gains = (
            replace(one, after=decibels if kept else one.before, kept=kept, left=reason, where=where)
            if one.method == "equalization"
            else one
            for one in self.gains
        )
        return RefinedEncoding(basis, tuple(gains))


def apply_requested_methods(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: AccuracyEffort
) -> AlgorithmResult:
    """Apply GPTQ if the spec of a weight requests it; otherwise return the basis."""
    if not requests_methods(plan) or basis.config.gptq is not None or validator.evaluator.bench.is_large:
        return basis
    return with_requested_rows(validator, plan, basis, accuracy)


def requests_methods(plan: Plan) -> bool:
    """Return whether the spec of a weight requests an encoder that uses activations."""
    weights = (weight.spec for decision in plan.decisions for weight in decision.weights)
    return any(encoder_named(spec.method).sums is not None for spec in weights)


def refine(
    validator: CrossValidator,
    plan: Plan,
    basis: AlgorithmResult,
    accuracy: AccuracyEffort,
    progress: Progress,
    until: Deadline = NEVER,
    enough: float = math.inf,
) -> RefinedEncoding:
    """Try the accuracy methods one after the other, each on top of the results before it.

    Nothing is tried with a single sample, with a plan that quantizes nothing, or if a spec follows another toolkit's
    arithmetic bit by bit.

    Args:
        validator: evaluates results.
        plan: the mode and formats of each node.
        basis: the encoding to start from.
        accuracy: the methods to try, and their effort.
        progress: called at the stage ``refine``.
        until: no method starts that may not end by then. Below full effort, the time is also limited to a multiple of a
            process that runs the float model.
        enough: SQNR in decibels from which nothing is tried, unless at full effort.
    """
    start, runs = time.monotonic(), validator.evaluator.answered.seconds * len(validator.evaluator.answered.samples)
    if not accuracy.thorough:
        evaluator = replace(validator.evaluator, statistics=basis.statistics)
        until = until.at_most(_MOST_PROCESSES * evaluator.process_seconds(evaluator.answered.seconds))
        if (reached := evaluator.sqnr(plan, basis.config)) >= enough:
            return RefinedEncoding(basis, spared=reached)

    gains: list[MethodGain] = []
    ranges = basis.config
    # Embeddings are a matter of the plan, not of the encoding.
    known = tuple(name for name in accuracy.methods if name in CHOOSERS)
    methods = known if len(validator.samples) > 1 and _is_free(plan) else ()
    trial = max(runs + _BUILD_SECONDS, time.monotonic() - start)
    for number, name in enumerate(methods):
        progress("refine", number, len(methods))
        start, before = time.monotonic(), basis
        if number == 0 and until.left >= (_TRIALS + _FEWEST) * trial:
            # This evaluation is needed anyway, and shows how long a trial takes on this machine now.
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
        left, basis = found.left or "no lower error", replace(found, left="")
        if reached < were + _WORTH_DB:
            # It helped on held-out samples, but not on all evaluation samples.
            basis, reached = before, were
        (kept, where), seconds = _kept(name, basis, before.config), time.monotonic() - start
        gains.append(MethodGain(name, were, reached, kept, seconds, "" if kept else left, where))
        _LOG.debug("%s: %.1f -> %.1f dB in %.1f s, kept: %s", name, were, reached, seconds, kept or "nothing")
        if name == "ranges":
            ranges = basis.config
    if methods:
        progress("refine", len(methods), len(methods))
    config = basis.config
    unequalized = replace(config, equalization=NOTHING, ranges=ranges.ranges, own_ranges=ranges.own_ranges)
    return RefinedEncoding(basis, tuple(gains), unequalized if config.equalization.factors else None)


def _is_free(plan: Plan) -> bool:
    """Return whether anything is quantized, and no spec follows another toolkit."""
    weights = (weight.spec for decision in plan.decisions for weight in decision.weights)
    specs = [*weights, *(activation.spec for activation in plan.activations)]
    return bool(specs) and not any(spec.is_followed for spec in specs)


def _decibels(validator: CrossValidator, plan: Plan, basis: AlgorithmResult) -> float:
    return sqnr_of_ratio(pooled(replace(validator.evaluator, statistics=basis.statistics).nsr(plan, basis.config)))


def _kept(name: str, basis: AlgorithmResult, before: EncodingConfig) -> tuple[str, tuple[str, ...]]:
    """Return what was kept of a method, in words, and where; empty if nothing was."""
    found = basis.config
    if found.key == before.key:
        return "", ()
    own = f" and {len(found.own_ranges)} tensors of their own" if found.own_ranges else ""
    places = {
        "ranges": (f"{format_method(found.ranges) or found.ranges}{own}", found.own_ranges),
        "equalization": (f"{len(found.equalization.factors)} tensors", found.equalization.factors),
        "awq": (f"{len(found.awq.factors)} tensors", found.awq.factors),
        "gptq": (
            f"weights of at most {found.gptq.bits} bits" if found.gptq else "",
            tensors_seen(basis.statistics, "hessian"),
        ),
    }
    kept, where = places[name]
    return kept, tuple(where)


# The table of methods

CHOOSERS: Mapping[str, Callable[[CrossValidator, Plan, AlgorithmResult, AccuracyEffort], AlgorithmResult]] = (
    MappingProxyType(
        {
            "ranges": with_ranges,
            "equalization": with_equalization,
            "awq": with_awq,
            "gptq": with_gptq,
        }
    )
)
"""The function of each accuracy method, by name."""


# Which channel scales a model can afford

# A smaller difference is not visible in such short timings.
_SAME_SPEED = 0.98
# If a model misses its aim by more, most of it stays in float, and the search weighs the cost of scales.
_FAR_DB = 3.0
# Models to find the needed channel scales; with more groups than models, the result says little.
_MOST_GROUPS = 12


def drop_costly_scales(profiler: PlanProfiler, plan: Plan, refined: RefinedEncoding, aim: float) -> RefinedEncoding:
    """Drop channel scales that cost time, unless the accuracy needs them.

    Scales at boundaries between floats and quantized values prevent the fastest kernels. Scales that add no node are
    free.

    1. Keep all scales if all are free, or if the model misses the aim by far.
    2. Keep only the free scales if their SQNR is higher.
    3. Keep all scales if the model is then as fast as with the free ones, or if times are unknown.
    4. Otherwise keep the free scales. If they miss the aim, add the costly scales that the accuracy needs.
    5. If that misses the aim too, take the more accurate of both that is faster than float, or else only the free
    scales.

    `plan` has as many integer nodes as the scheme allows. `aim` is an SQNR in decibels.
    """
    if refined.unequalized is None:
        return refined
    evaluator, every = profiler.evaluator, refined.basis.config
    graph = evaluator.bench.graph
    free = select_free_scales(graph, plan, every.equalization)
    if free.key == every.equalization.key or evaluator.sqnr(plan, every) < aim - _FAR_DB:
        return refined
    fewer = replace(every, equalization=free) if free.factors else refined.unequalized
    if evaluator.sqnr(plan, fewer) > evaluator.sqnr(plan, every):
        return _with(evaluator, plan, refined, fewer, "the model is more accurate without")
    speeds = profiler.speeds_of([evaluator.candidate(plan, config).path for config in (every, fewer)])
    # Without times, no scale is known to be costly.
    if any(map(math.isnan, speeds)) or speeds[0] >= _SAME_SPEED * speeds[1]:
        return refined
    taken = fewer
    if evaluator.sqnr(plan, fewer) < aim:
        taken = _needed(evaluator, plan, every, costly_scales(graph, plan, every.equalization), aim)
    if evaluator.sqnr(plan, taken) < aim:
        # The fewer nodes must be left in float to reach the aim, the more time the scales may cost.
        paying = [config for config, speed in zip((taken, fewer), speeds, strict=True) if speed > 1]
        taken = max(paying or [fewer], key=lambda one: evaluator.sqnr(plan, one))
    if taken is every:
        return refined
    return _with(evaluator, plan, refined, taken, f"the model is {speeds[1] / speeds[0]:.2f}x as fast without")


def _with(
    evaluator: PlanEvaluator, plan: Plan, refined: RefinedEncoding, taken: EncodingConfig, reason: str
) -> RefinedEncoding:
    reached = sqnr_of_ratio(pooled(evaluator.nsr(plan, taken))) if taken.equalization.factors else math.nan
    return refined.with_factors_of(taken, reached, reason)


def _needed(
    evaluator: PlanEvaluator, plan: Plan, every: EncodingConfig, groups: Sequence[frozenset[str]], aim: float
) -> EncodingConfig:
    """Drop the costly scales that the accuracy does not need, by bisection over `groups` in a few models.

    A part is dropped if the aim is reached without it, or if no SQNR is lost. Otherwise its halves are tried. With too
    many groups, all are kept.
    """
    kept, pending = every, deque([groups] if 0 < len(groups) <= _MOST_GROUPS else [])
    for _ in range(_MOST_GROUPS):
        if not pending:
            break
        part = pending.popleft()
        left = kept.equalization.factors.keys() - frozenset().union(*part)
        other = replace(kept, equalization=kept.equalization.select(left))
        if evaluator.sqnr(plan, other) >= min(aim, evaluator.sqnr(plan, kept)):
            kept = other
        elif len(part) > 1:
            middle = len(part) // 2
            pending += (part[:middle], part[middle:])
    return kept
