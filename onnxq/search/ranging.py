"""Ranges chosen by measuring: one method for all tensors, and others where they lower the noise of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxq.algorithms.flat_ends import Within, flat_ends
from onnxq.algorithms.parameters import found_range
from onnxq.algorithms.range_choice import Noise, Range, RangeChoice, choose_ranges, pooled
from onnxq.algorithms.recipe import Recipe
from onnxq.calibration.accumulators import Range as Seen
from onnxq.calibration.methods import FIRST_RANGES, Grid, RangeMethod, bins_of_data, ends_of_data, expected_errors
from onnxq.calibration.statistics import Evidence, TensorEvidence
from onnxq.numerics.spec import Spec
from onnxq.planning.plan import Plan
from onnxq.search.effort import Accuracy
from onnxq.search.folds import WORTH, Basis, Folds
from onnxq.search.trials import Trials


def with_ranges(
    folds: Folds, plan: Plan, basis: Basis, accuracy: Accuracy, methods: Sequence[RangeMethod] = FIRST_RANGES
) -> Basis:
    """Return the basis with the ranges of least noise, see `choose_ranges`, where they hold on samples held out.

    Those of tensors end where what follows is flat, see `flat_ends`, where that takes off noise.

    Args:
        folds: judges candidates.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: how many models to build at most.
        methods: to choose from; the first is taken where nothing is better.
    """
    if not plan.calibrated:
        return basis.unfit("no range of data is found by samples")
    trials = replace(folds.trials, evidence=basis.evidence)
    recipe = _narrowed(trials, plan, basis.recipe)

    def measure(choice: RangeChoice[RangeMethod]) -> Noise:
        return trials.noise(plan, _chosen(recipe, choice))

    # Tensors are looked at one by one only where models are left for them.
    ranges = ranges_by_tensor(plan, basis.evidence, methods) if accuracy.models > len(methods) else {}
    patience = 2 if accuracy.thorough else 1
    choice = choose_ranges(ranges, measure, most=accuracy.models, methods=methods, patience=patience)
    found = replace(basis, recipe=_chosen(recipe, choice))
    kept = found.recipe.key != recipe.key and _holds(folds, plan, found, recipe)
    return found if kept else replace(basis, recipe=recipe)


def _narrowed(trials: Trials, plan: Plan, recipe: Recipe) -> Recipe:
    """Return a recipe whose ranges end where what follows is flat, where that takes off noise.

    Where functions are flat no samples say, so that none are held out, and no chance is allowed for.
    """
    ends = flat_ends(trials.bench.graph, plan, trials.evidence)
    own = {tensor: Within(recipe.own_ranges.get(tensor, recipe.ranges), *both) for tensor, both in ends.items()}
    found = replace(recipe, own_ranges={**recipe.own_ranges, **own})
    return found if own and pooled(trials.noise(plan, found)) < pooled(trials.noise(plan, recipe)) else recipe


def _chosen(recipe: Recipe, choice: RangeChoice[RangeMethod]) -> Recipe:
    """Return a recipe with these ranges, which end where its own do."""
    ends = {tensor: one for tensor, one in recipe.own_ranges.items() if isinstance(one, Within)}
    own = {tensor: replace(one, method=choice.of(tensor)) for tensor, one in ends.items()}
    return replace(recipe, ranges=choice.default, own_ranges={**choice.own, **own})


def _holds(folds: Folds, plan: Plan, found: Basis, before: Recipe) -> bool:
    """Whether ranges leave less noise than those before on samples that neither are made of.

    Ranges that clip fit the samples that they are made of, the more so the fewer these are. Those before are only made
    anew where they would win with what they know of the samples that judge.
    """
    held_out = folds.held_out(plan)
    now = pooled(held_out.noise(plan, found.recipe))
    knowing = replace(held_out, evidence=found.evidence)
    return any(now < WORTH * pooled(trials.noise(plan, before)) for trials in (knowing, held_out))


def ranges_by_tensor(
    plan: Plan, evidence: Evidence, methods: Sequence[RangeMethod]
) -> dict[str, dict[RangeMethod, Range]]:
    """Return the range that each method means for each tensor of a plan, tensors of much noise for their signal first.

    Args:
        plan: names the tensors and their specs.
        evidence: of the tensors.
        methods: hashable range methods.
    """
    specs = plan.calibrated
    seen = {tensor: evidence.of(tensor) for tensor in specs if evidence.of(tensor).need(Seen).count}
    order = sorted(seen, key=lambda tensor: -noise_share(seen[tensor], specs[tensor]))
    by_name = plan.by_tensor
    return {tensor: {method: found_range(by_name[tensor], evidence, method) for method in methods} for tensor in order}


def noise_share(seen: TensorEvidence, spec: Spec) -> float:
    """Return the squared error that codes from minimum to maximum have, in units of the variance of the data."""
    data = bins_of_data(seen)
    low, high = ends_of_data(seen)
    error = float(expected_errors(data, np.array([low]), np.array([high]), Grid.of(spec))[0])
    centers = (data.edges[:-1] + data.edges[1:]) / 2 / (max(-data.minimum, data.maximum) or 1.0)
    weights = data.counts / data.counts.sum()
    variance = float(weights @ np.square(centers - weights @ centers))
    return error / variance if variance > 0 else 0.0
