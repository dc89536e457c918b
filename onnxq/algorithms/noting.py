"""Recipes in plans: everything that decides codes, so that a plan is carried out again to the same bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxq.algorithms.flat_ends import unlimited
from onnxq.algorithms.gptq import Compensation
from onnxq.algorithms.migration import Factors, Migration
from onnxq.algorithms.parameters import channel_means, found_range
from onnxq.algorithms.recipe import Recipe
from onnxq.calibration.methods import MinMax, parse_range, range_text
from onnxq.calibration.statistics import Evidence
from onnxq.planning.plan import Activation, Damping, Decision, Plan, Scaling

_LAST = -1


def noted(plan: Plan, recipe: Recipe, evidence: Evidence) -> Plan:
    """Return a plan that says by which recipe, and from which ranges, its model was built.

    Not in it are biases that were corrected and weights whose errors cancel, which are as large as the model: they
    follow from the same samples again.

    Args:
        plan: what was built.
        recipe: how its codes were chosen.
        evidence: what its codes rest on. Means that were not observed, by which no bias was corrected, are left out.
    """
    means = channel_means(plan, evidence)

    def observed(decision: Decision) -> Decision:
        known = decision.mean is None or decision.mean.tensor in means
        return decision if known else replace(decision, mean=None)

    return replace(
        plan,
        decisions=tuple(map(observed, plan.decisions)),
        activations=tuple(_with_recipe(one, recipe, evidence) for one in plan.activations),
        ranges=range_text(recipe.ranges) if plan.preparation is None else plan.ranges,
        accuracy=recipe.accuracy,
        damping=_damping(recipe, evidence),
        scaling=tuple(Scaling(name, tuple(map(float, one.values))) for name, one in recipe.scaling.factors.items()),
        observed=plan.observed or tensors_seen(evidence),
    )


def _damping(recipe: Recipe, evidence: Evidence) -> Damping | None:
    compensation = recipe.compensation
    return Damping(compensation.damping, compensation.bits, tensors_seen(evidence, "gram")) if compensation else None


def tensors_seen(evidence: Evidence, kind: str = "") -> tuple[str, ...]:
    """Return the tensors of which there is a kind of evidence; where none is named, any but that of weights."""
    requests = (one for one in evidence.statistics if (one.kind == kind if kind else one.kind != "gram"))
    return tuple(dict.fromkeys(one.tensor for one in requests))


def _with_recipe(activation: Activation, recipe: Recipe, evidence: Evidence) -> Activation:
    method, factors = recipe.own_ranges.get(activation.tensor), recipe.migration.factors.get(activation.tensor)
    found = activation.found_range
    if activation.fixed_range is None:
        low, high = found_range(activation, evidence, method or recipe.ranges)
        found = float(low), float(high)
    return replace(
        activation,
        ranges=activation.ranges if method is None else range_text(unlimited(method)),
        found_range=found,
        factors=tuple(map(float, factors.values)) if factors is not None else (),
        channels=factors.axis if factors is not None else 0,
    )


def recipe_of(plan: Plan, samples: int) -> Recipe:
    """Return the recipe that `noted` has put into a plan, but for the biases, which are to be found anew.

    Args:
        plan: from a report or file.
        samples: how many samples its compensation rests on.

    Raises:
        SchemeError: a range is still to be found, and the method is not known.
    """
    # Where all ranges are known, the package whose method found them need not be installed.
    open_ones = {one.tensor: one.ranges for one in plan.activations if one.known_range is None}
    methods = {tensor: parse_range(text) for tensor, text in open_ones.items() if text}
    factors = {one.tensor: Factors(one.channels, np.array(one.factors)) for one in plan.activations if one.factors}
    damping = plan.damping
    return Recipe(
        parse_range(plan.ranges) if plan.ranges and open_ones else MinMax(),
        methods,
        compensation=Compensation.of_samples(samples, damping.share, damping.bits) if damping is not None else None,
        migration=Migration(factors),
        scaling=Migration({one.tensor: Factors(_LAST, np.array(one.factors)) for one in plan.scaling}),
    )
