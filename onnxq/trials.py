"""Plans tried out: their models built, run on a few samples, and judged beside the float model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.encoding.recipe import Recipe
from onnxq.evidence.evidence import Evidence
from onnxq.judging.trust import Trust, noise_by_sample, trust
from onnxq.judging.views import Views
from onnxq.planning.plan import Plan
from onnxq.runtime import return_memory
from onnxq.samples.inputs import Sample
from onnxq.workbench import Workbench

TRIED_SAMPLES = 16
"""By how many samples candidates are judged: each costs time in every trial; the confidence bound allows for it."""


@dataclass(frozen=True, eq=False)
class Trials:
    """What is needed to build a plan's model and see how far it is from the float model.

    Attributes:
        bench: builds the models.
        evidence: of the plan's activations.
        samples: the samples that every candidate runs.
        views: by what candidates are compared with the float model.
        expected: what is compared of the float model, for each sample.
        seconds: of a run of the float model.
        measured: what was found of plans so far.
    """

    bench: Workbench
    evidence: Evidence
    samples: tuple[Sample, ...]
    views: Views
    expected: tuple[tuple[Any, ...], ...]
    seconds: float = 0.0
    measured: dict[object, tuple[Trust, NDArray[np.float64]]] = field(default_factory=dict)

    @classmethod
    def of(cls, bench: Workbench, reference: Path, samples: Iterable[Sample], evidence: Evidence) -> Trials:
        """Run the float model once on a few samples, whose outputs are kept, so that plans can be tried against it."""
        kept = tuple(samples)
        views = Views.of(reference, bench.prepared)
        view = views.open(reference)
        start = time.perf_counter()
        expected = tuple(tuple(view.run(sample)) for sample in kept)
        seconds = (time.perf_counter() - start) / max(len(kept), 1)
        return cls(bench, evidence, kept, views, expected, seconds)

    def part(self, places: slice) -> Trials:
        """Return trials on some of the samples, for which the float model does not run again."""
        return replace(self, samples=self.samples[places], expected=self.expected[places], measured={})

    def joined(self, reference: Path, samples: Iterable[Sample]) -> Trials:
        """Return trials on more samples, on which the float model runs now."""
        more = Trials.of(self.bench, reference, samples, self.evidence)
        return replace(self, samples=self.samples + more.samples, expected=self.expected + more.expected, measured={})

    def sqnr(self, plan: Plan, recipe: Recipe) -> float:
        """Return the SQNR in decibels that a plan's model can be trusted to have on samples it has not seen."""
        return self.trust(plan, recipe).sqnr

    def trust(self, plan: Plan, recipe: Recipe) -> Trust:
        """Build and run a plan's model; what was measured before is remembered."""
        return self._measured(plan, recipe)[0]

    def noise(self, plan: Plan, recipe: Recipe) -> NDArray[np.float64]:
        """Return what each sample adds to the noise at each output, see `noise_by_sample`."""
        return self._measured(plan, recipe)[1]

    def _measured(self, plan: Plan, recipe: Recipe) -> tuple[Trust, NDArray[np.float64]]:
        key = plan.effect, recipe.key
        if key not in self.measured:
            pairs = self._outputs(plan, recipe)
            self.measured[key] = trust(pairs), noise_by_sample(pairs)
        return self.measured[key]

    def _outputs(self, plan: Plan, recipe: Recipe) -> list[tuple[tuple[Any, ...], list[Any]]]:
        """Build a plan's model and return the float model's outputs and its own for each sample."""
        # What an optimised session makes of the weights of a large model would all be in memory.
        large = self.bench.is_large
        view = self.views.open(self.candidate(plan, recipe), optimize=not large, mapped=large)
        pairs = zip(self.samples, self.expected, strict=True)
        outputs = [(expected, view.run(sample)) for sample, expected in pairs]
        if large:
            del view
            return_memory()
        return outputs

    def candidate(self, plan: Plan, recipe: Recipe) -> Path:
        """Build a plan's model and return its file, which the next candidate overwrites."""
        path = self.bench.prepared.with_name("candidate.onnx")
        self.bench.build(plan, self.evidence, recipe, path, external_data=self.bench.is_large)
        return path
