"""Recipes chosen by measuring: ranges tensor by tensor, and biases in order, each kept only where noise falls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onnxq.encoding.codes import encode
from onnxq.encoding.range_choice import Range, RangeChoice, choose_ranges, worst
from onnxq.encoding.recipe import Recipe
from onnxq.encoding.sequential_bias import layers_of, with_sequential_biases
from onnxq.evidence.evidence import Evidence, TensorEvidence
from onnxq.evidence.range_table import FIRST_RANGES
from onnxq.evidence.ranges import RangeMethod, bins_of_data, ends_of_data
from onnxq.evidence.squared_error import Grid, expected_errors
from onnxq.evidence.value_range import Range as Seen
from onnxq.numbers.spec import Spec
from onnxq.planning.plan import Plan
from onnxq.samples.data import even_places
from onnxq.samples.inputs import Sample, SampleSource
from onnxq.samples.stretches import picked
from onnxq.trials import Trials
from onnxq.workbench import Workbench

# More find other means hardly better, and each costs three runs of the float model.
_BIAS_SAMPLES = 32
# With fewer beside those that candidates are judged by, half of these are taken.
_FEWEST = 8


@dataclass(frozen=True, eq=False)
class Recipes:
    """Finds the recipe of least noise for a plan.

    Attributes:
        trials: builds candidates and knows what the float model gives for a few of the samples.
        samples: all of them.
    """

    trials: Trials
    samples: SampleSource

    def with_ranges(
        self, plan: Plan, recipe: Recipe, most: int, methods: Sequence[RangeMethod] = FIRST_RANGES
    ) -> Recipe:
        """Return the recipe with the ranges of least noise, see `choose_ranges`.

        Args:
            plan: what becomes of each node.
            recipe: how codes are chosen otherwise.
            most: models to build at most.
            methods: to choose from; the first is taken where nothing is better.
        """
        if not plan.calibrated:
            return recipe

        def measure(choice: RangeChoice[RangeMethod]) -> NDArray[np.float64]:
            return self.trials.noise(plan, recipe.with_choice(choice))

        ranges = ranges_by_tensor(plan, self.trials.evidence, methods)
        return recipe.with_choice(choose_ranges(ranges, measure, most=most, methods=methods))

    def with_biases(self, plan: Plan, recipe: Recipe) -> Recipe:
        """Return the recipe with biases corrected in order, where these lower the noise; else without.

        They are found on samples that candidates are not judged by; where there are too few of these, on half of those
        that are, and judged by the other half; what has paid is then found on all of them.

        Args:
            plan: what becomes of each node.
            recipe: how codes are chosen; its biases were those of another plan.
        """
        bench, judged = self.trials.bench, self.trials.samples
        recipe = replace(recipe, biases={})
        if bench.is_large or not layers_of(bench.graph, plan):
            return recipe
        evidence, usual = self.trials.evidence, fitting(self.samples, len(judged))
        if len(self.samples) - len(judged) >= _FEWEST:
            found = corrected(bench, evidence, plan, recipe, usual)
            return found if self._is_quieter(plan, found, recipe, slice(None)) else recipe
        half = corrected(bench, evidence, plan, recipe, judged[::2])
        if len(judged) < 2 or not self._is_quieter(plan, half, recipe, slice(1, None, 2)):
            return recipe
        return corrected(bench, evidence, plan, recipe, usual)

    def _is_quieter(self, plan: Plan, found: Recipe, recipe: Recipe, rows: slice) -> bool:
        # One question, unlike one for each tensor: which of the two is likelier to be the better needs no more.
        return worst(self.trials.noise(plan, found)[rows]) < worst(self.trials.noise(plan, recipe)[rows])


def fitting(samples: SampleSource, judged: int) -> Iterator[Sample]:
    """Yield the samples on which biases are found: others than those by which candidates are judged, or these.

    Args:
        samples: all of them.
        judged: by how many candidates are judged.
    """
    reserved = even_places(len(samples), judged)
    others = [index for index in range(len(samples)) if index not in set(reserved)]
    if len(others) < _FEWEST:
        return picked(samples, reserved)
    return picked(samples, [others[place] for place in even_places(len(others), _BIAS_SAMPLES)])


def corrected(bench: Workbench, evidence: Evidence, plan: Plan, recipe: Recipe, samples: Iterable[Sample]) -> Recipe:
    """Return a recipe with biases that are corrected in order, as samples say; see `with_sequential_biases`."""
    codes = encode(plan, bench.graph, evidence, recipe, bench.codes)
    return with_sequential_biases(recipe, plan, bench.graph, codes, bench.prepared, samples)


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
    return {tensor: {method: method(seen[tensor], specs[tensor]) for method in methods} for tensor in order}


def noise_share(seen: TensorEvidence, spec: Spec) -> float:
    """Return the squared error that codes from minimum to maximum have, in units of the variance of the data."""
    data = bins_of_data(seen)
    low, high = ends_of_data(seen)
    error = float(expected_errors(data, np.array([low]), np.array([high]), Grid.of(spec))[0])
    centers = (data.edges[:-1] + data.edges[1:]) / 2 / (max(-data.minimum, data.maximum) or 1.0)
    weights = data.counts / data.counts.sum()
    variance = float(weights @ np.square(centers - weights @ centers))
    return error / variance if variance > 0 else 0.0
