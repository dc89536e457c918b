"""All accuracy methods in order, each kept only where it lowers the noise of the whole model, and what each bought."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from onnxq.accuracy.effort import Accuracy
from onnxq.accuracy.migrating import choose_migration
from onnxq.accuracy.recipes import Recipes
from onnxq.accuracy.rounding import FEW_BITS, MOST_BITS, Rounding
from onnxq.encoding.range_choice import worst
from onnxq.encoding.recipe import Recipe
from onnxq.evidence.evidence import Evidence
from onnxq.numbers.spec import Method
from onnxq.planning.plan import Plan
from onnxq.progress import Progress
from onnxq.samples.inputs import SampleSource
from onnxq.trials import Trials

_FOLLOWED = frozenset({Method.BURN, Method.TORCH})


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
    """

    method: str
    before: float
    after: float
    kept: str
    seconds: float


@dataclass(frozen=True, eq=False)
class Refined:
    """How codes are chosen after all methods were tried.

    Attributes:
        recipe: the methods that were kept, with what they found.
        evidence: what it rests on.
        gains: of each method that was tried.
    """

    recipe: Recipe
    evidence: Evidence
    gains: tuple[Gain, ...] = ()


@dataclass(frozen=True, eq=False)
class Refining:
    """What methods may use.

    Attributes:
        trials: builds candidates and judges them on a few samples.
        plan: the one that has as many integers as the scheme allows.
        samples: all of them.
        accuracy: how much is tried.
        progress: told of the stage ``refine``.
    """

    trials: Trials
    plan: Plan
    samples: SampleSource
    accuracy: Accuracy
    progress: Progress

    def run(self, recipe: Recipe) -> Refined:
        """Try the methods one after the other, each on what the ones before it have found.

        With a single sample, or a plan without codes, nothing can be told, and nothing is tried; nor where another
        toolkit's arithmetic is followed to the last bit.
        """
        found, gains = Refined(recipe, self.trials.evidence), []
        methods = self.accuracy.methods if len(self.samples) > 1 and self._is_free else ()
        for number, name in enumerate(methods):
            self.progress("refine", number, len(methods))
            start, before = time.monotonic(), found
            found = METHODS[name](replace(self, trials=replace(self.trials, evidence=before.evidence)), before)
            reached, were = self._decibels(found), self._decibels(before)
            if reached < were:
                # It paid on samples that it had not used, but not where candidates are judged.
                found, reached = before, were
            gains.append(Gain(name, were, reached, _kept(name, found.recipe, before.recipe), time.monotonic() - start))
        if methods:
            self.progress("refine", len(methods), len(methods))
        return replace(found, gains=tuple(gains))

    @property
    def _is_free(self) -> bool:
        """Whether anything becomes codes, and all of it as we choose."""
        weights = (weight.spec for decision in self.plan.decisions for weight in decision.weights)
        specs = [*weights, *(activation.spec for activation in self.plan.activations)]
        return bool(specs) and not any(spec.method in _FOLLOWED for spec in specs)

    def _decibels(self, found: Refined) -> float:
        noise = worst(replace(self.trials, evidence=found.evidence).noise(self.plan, found.recipe))
        return -10 * math.log10(noise) if noise > 0 else math.inf


def _ranges(of: Refining, found: Refined) -> Refined:
    recipe = Recipes(of.trials, of.samples).with_ranges(of.plan, found.recipe, of.accuracy.models)
    return replace(found, recipe=recipe)


def _migration(of: Refining, found: Refined) -> Refined:
    chosen = choose_migration(of.trials.bench, of.plan, of.samples, found.recipe, of.accuracy)
    return replace(found, recipe=replace(found.recipe, migration=chosen.migration))


def _compensation(of: Refining, found: Refined) -> Refined:
    rounding = Rounding(of.trials.bench, of.trials.bench.prepared, of.samples, of.progress)
    bits = MOST_BITS if of.accuracy.one_by_one else FEW_BITS
    recipe, evidence = rounding.choose(of.plan, found.recipe, found.evidence, bits)
    return replace(found, recipe=recipe, evidence=evidence)


def _bias(of: Refining, found: Refined) -> Refined:
    return replace(found, recipe=Recipes(of.trials, of.samples).with_biases(of.plan, found.recipe))


METHODS: Mapping[str, Callable[[Refining, Refined], Refined]] = MappingProxyType(
    {"ranges": _ranges, "migration": _migration, "compensation": _compensation, "bias": _bias}
)
"""Every method by its name."""


def _kept(name: str, found: Recipe, before: Recipe) -> str:
    """Return how much of a method was kept, or nothing."""
    if name == "ranges":
        own = f" and {len(found.own_ranges)} tensors of their own" if found.own_ranges else ""
        return f"{found.ranges!r}{own}" if found.key != before.key else ""
    if found is before:
        return ""
    if name == "migration" and found.migration.factors:
        return f"{len(found.migration.factors)} tensors"
    if name == "compensation" and found.compensation is not None:
        return f"weights of at most {found.compensation.bits} bits"
    return f"{len(found.biases)} biases" if name == "bias" and found.biases else ""
