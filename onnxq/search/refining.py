"""All accuracy methods in order, each kept only where it lowers the noise of the whole model, and what each bought."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace

from onnxq.algorithms.encoders import encoder_named
from onnxq.algorithms.migration import NOTHING
from onnxq.algorithms.noting import tensors_seen
from onnxq.algorithms.range_choice import pooled
from onnxq.algorithms.recipe import Recipe
from onnxq.calibration.methods import range_text
from onnxq.errors import tolerate
from onnxq.numerics.affine import decibels
from onnxq.planning.plan import Plan
from onnxq.search.effort import Accuracy
from onnxq.search.folds import Basis, Folds
from onnxq.system.resources import NEVER, Deadline, Progress

TRAINING = "training"
"""What a gain of training is called, which comes after all methods."""


_LOG = logging.getLogger(__name__)
# Trials that a method takes beside those in which it chooses ranges, and the fewest of these that tell anything.
_TRIALS, _FEWEST = 4, 2
# Seconds that a model takes to be built, before one was.
_BUILDING = 0.2
# Some models take a hundred times as long to load as to run: so many processes that run the float model are enough.
_PROCESSES = 30
# Less, in decibels, is not worth codes that are harder to explain.
_WORTH = 0.05


@dataclass(frozen=True)
class Gain:
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
class Refined:
    """How codes are chosen after all methods were tried.

    Attributes:
        basis: the methods that were kept, with what they found.
        gains: of each method that was tried.
        unmigrated: the recipe as it would be without factors of channels; None where there are none.
        spared: SQNR in decibels without any method where this was so much that none was tried; None elsewhere.
    """

    basis: Basis
    gains: tuple[Gain, ...] = ()
    unmigrated: Recipe | None = None
    spared: float | None = None

    def with_factors_of(self, recipe: Recipe, decibels: float, reason: str) -> Refined:
        """Return the same by a recipe with fewer factors of channels, or none, and why the others were left after all.

        Args:
            recipe: in the place of that of the basis.
            decibels: SQNR of the worst output with it.
            reason: in words.
        """
        basis = replace(self.basis, recipe=recipe)
        kept, where = _kept("migration", basis, replace(recipe, migration=NOTHING))
        gains = (
            replace(one, after=decibels if kept else one.before, kept=kept, left=reason, where=where)
            if one.method == "migration"
            else one
            for one in self.gains
        )
        return Refined(basis, tuple(gains))


def asked_for(folds: Folds, plan: Plan, basis: Basis, accuracy: Accuracy) -> Basis:
    """Return what codes are chosen by where weights of a plan ask for data by their Spec; the same where none does.

    Args:
        folds: the samples.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: what the Gram matrices of data may take.
    """
    weights = (weight.spec for decision in plan.decisions for weight in decision.weights)
    asked = any(encoder_named(spec.method).sums is not None for spec in weights)
    if not asked or basis.recipe.compensation is not None or folds.trials.bench.is_large:
        return basis
    from onnxq.search.rounding import with_asked_rows

    return with_asked_rows(folds, plan, basis, accuracy)


def refine(
    folds: Folds,
    plan: Plan,
    basis: Basis,
    accuracy: Accuracy,
    progress: Progress,
    until: Deadline = NEVER,
    enough: float = math.inf,
) -> Refined:
    """Try the methods one after the other, each on what the ones before it have found.

    With a single sample, or a plan without codes, nothing can be told, and nothing is tried; nor where another
    toolkit's arithmetic is followed to the last bit.

    Args:
        folds: judge what is found.
        plan: what becomes of each node.
        basis: what codes are chosen by before.
        accuracy: which methods are tried, and how much.
        progress: told of the stage ``refine``.
        until: no method begins that may not end by then; without all effort, nor one that may end after many times
            the time in which a process runs the float model over the samples.
        enough: decibels that are not improved on, unless with all effort.
    """
    start, runs = time.monotonic(), folds.trials.answered.seconds * len(folds.trials.answered.samples)
    if not accuracy.thorough:
        trials = replace(folds.trials, evidence=basis.evidence)
        until = until.at_most(_PROCESSES * trials.process_seconds(trials.answered.seconds))
        if (reached := trials.sqnr(plan, basis.recipe)) >= enough:
            return Refined(basis, spared=reached)
    from onnxq.search.choosers import CHOOSERS

    gains: list[Gain] = []
    ranges = basis.recipe
    # Tables are no matter of how codes are chosen, but of the plan.
    known = tuple(name for name in accuracy.methods if name in CHOOSERS)
    methods = known if len(folds.samples) > 1 and _is_free(plan) else ()
    trial = max(runs + _BUILDING, time.monotonic() - start)
    for number, name in enumerate(methods):
        progress("refine", number, len(methods))
        start, before = time.monotonic(), basis
        if number == 0 and until.left >= (_TRIALS + _FEWEST) * trial:
            # What is needed anyway tells how long a trial takes on this machine at this moment.
            _decibels(folds, plan, before)
            trial = max(trial, time.monotonic() - start)
        affordable = until.left / trial - _TRIALS
        if affordable < _FEWEST:
            break
        were = reached = _decibels(folds, plan, before)
        found = replace(before, left="it failed")
        with tolerate(f"accuracy method {name!r}"):
            tried = CHOOSERS[name](folds, plan, before, replace(accuracy, models=int(min(accuracy.models, affordable))))
            reached, found = _decibels(folds, plan, tried), tried
        left, basis = found.left or "no less noise", replace(found, left="")
        if reached < were + _WORTH:
            # It paid on samples that it had not used, but not on all that candidates are judged by.
            basis, reached = before, were
        (kept, where), seconds = _kept(name, basis, before.recipe), time.monotonic() - start
        gains.append(Gain(name, were, reached, kept, seconds, "" if kept else left, where))
        _LOG.debug("%s: %.1f -> %.1f dB in %.1f s, kept: %s", name, were, reached, seconds, kept or "nothing")
        if name == "ranges":
            ranges = basis.recipe
    if methods:
        progress("refine", len(methods), len(methods))
    recipe = basis.recipe
    unmigrated = replace(recipe, migration=NOTHING, ranges=ranges.ranges, own_ranges=ranges.own_ranges)
    return Refined(basis, tuple(gains), unmigrated if recipe.migration.factors else None)


def _is_free(plan: Plan) -> bool:
    """Whether anything becomes codes, and all of it as we choose."""
    weights = (weight.spec for decision in plan.decisions for weight in decision.weights)
    specs = [*weights, *(activation.spec for activation in plan.activations)]
    return bool(specs) and not any(spec.is_followed for spec in specs)


def _decibels(folds: Folds, plan: Plan, basis: Basis) -> float:
    return decibels(pooled(replace(folds.trials, evidence=basis.evidence).noise(plan, basis.recipe)))


def _kept(name: str, basis: Basis, before: Recipe) -> tuple[str, tuple[str, ...]]:
    """Return how much of a method was kept, and where, or nothing."""
    found = basis.recipe
    if found.key == before.key:
        return "", ()
    own = f" and {len(found.own_ranges)} tensors of their own" if found.own_ranges else ""
    places = {
        "ranges": (f"{range_text(found.ranges) or found.ranges}{own}", found.own_ranges),
        "migration": (f"{len(found.migration.factors)} tensors", found.migration.factors),
        "scaling": (f"{len(found.scaling.factors)} tensors", found.scaling.factors),
        "compensation": (
            f"weights of at most {found.compensation.bits} bits" if found.compensation else "",
            tensors_seen(basis.evidence, "gram"),
        ),
        "bias": (f"{len(found.biases)} biases", found.biases),
    }
    kept, where = places[name]
    return kept, tuple(where)
