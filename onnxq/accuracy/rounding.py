"""Whether errors of rounding that cancel pay: tried on samples that the Gram matrices have not seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from onnxq.encoding.compensating import Compensation
from onnxq.encoding.range_choice import worst
from onnxq.encoding.recipe import Recipe
from onnxq.evidence.evidence import Evidence
from onnxq.evidence.gram import Gram
from onnxq.evidence.requests import Request
from onnxq.execution.runner import collect
from onnxq.planning.plan import Plan
from onnxq.progress import Progress
from onnxq.samples.data import evenly
from onnxq.samples.inputs import Sample, SampleSource
from onnxq.trials import Trials
from onnxq.workbench import Workbench

FEW_BITS = 4
"""Weights of so few bits gain several decibels; those of 8 bits little, for as much time."""

MOST_BITS = 8
"""Codes of more bits are so fine that rounding is no matter."""

# The fewer samples there are for the columns of a weight, the more damping it takes.
_DAMPINGS = (0.01, 0.1, 0.3)
_MOST_SAMPLES = 16


@dataclass(frozen=True)
class Half:
    """Every second sample.

    Attributes:
        samples: all of them.
        odd: whether it is the second, fourth and so on.
    """

    samples: SampleSource
    odd: bool

    def __len__(self) -> int:
        return (len(self.samples) + (not self.odd)) // 2

    def __iter__(self) -> Iterator[Sample]:
        return (sample for index, sample in enumerate(self.samples) if index % 2 == self.odd)


@dataclass(frozen=True, eq=False)
class Rounding:
    """What it takes to find out how weights are rounded best.

    Attributes:
        bench: plans and builds.
        reference: file of the float model.
        samples: the data; one half of them shows Gram matrices, the other tells whether these have helped.
        progress: told how many samples were run.
    """

    bench: Workbench
    reference: Path
    samples: SampleSource
    progress: Progress

    def choose(self, plan: Plan, recipe: Recipe, evidence: Evidence, bits: int = FEW_BITS) -> tuple[Recipe, Evidence]:
        """Return a recipe by which the errors of weights cancel, and evidence for it, where that lowers the noise.

        Args:
            plan: what is built.
            recipe: how codes are chosen without it.
            evidence: that the recipe rests on.
            bits: weights of more bits are left out.
        """
        first = Compensation.of_samples(len(self.samples), bits=bits)
        requests = first.requests(plan, self.bench.graph)
        if not requests or len(self.samples) < 2 or self.bench.is_large:
            return recipe, evidence
        shown, kept = Half(self.samples, odd=False), Half(self.samples, odd=True)
        grams = self._collected(shown, requests)
        tried = evenly(kept, _MOST_SAMPLES)
        trials = Trials.of(self.bench, self.reference, tried, _joined(evidence, grams))
        recipes = (recipe, *(replace(recipe, compensation=replace(first, damping=one)) for one in _DAMPINGS))
        best = min(recipes, key=lambda one: worst(trials.noise(plan, one)))
        if best is recipe:
            return recipe, evidence
        return best, _joined(evidence, grams.plus(self._collected(kept, requests)))

    def _collected(self, samples: SampleSource, requests: tuple[Request, ...]) -> Evidence:
        def told(done: int, total: int) -> None:
            self.progress("calibrate", done, total)

        return collect(self.bench.prepared, samples, requests, progress=told)


def _joined(evidence: Evidence, grams: Evidence) -> Evidence:
    """Return the evidence with Gram matrices beside, whose samples are not all of its own."""
    # Rows that wait are multiplied now, and not again for every candidate.
    whole = {one: gram.multiplied() for one, gram in grams.statistics.items() if isinstance(gram, Gram)}
    return replace(evidence, statistics=MappingProxyType({**evidence.statistics, **whole}))
