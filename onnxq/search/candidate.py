"""Candidates: plans whose models are built, and compared with the float model on the search samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode
from onnxq.data.dataset import Subset, halves
from onnxq.data.inputs import SampleSource
from onnxq.evaluation.comparison import ComparisonSession
from onnxq.evaluation.reference import ReferenceOutputs
from onnxq.evaluation.sqnr import estimate_sqnr, nsr_by_sample
from onnxq.numerics.affine import sqnr_of_ratio, worst_ratio
from onnxq.passes.preparing.placing import quantized_tensors
from onnxq.planning.plan import Plan
from onnxq.runtime.sessions import return_memory
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.sensitivity import SwitchedSession
from onnxq.system.failures import tolerate
from onnxq.system.publish import data_file, stored_bytes
from onnxq.system.resources import Progress, silent

# Seconds that a process takes before its first run, which are the same for all models.
_STARTUP_SECONDS = 0.4
_NUMBERS = itertools.count()


@dataclass(frozen=True, eq=False)
class Recipe:
    """How the values of a plan are encoded.

    Attributes:
        config: calibration methods, factors of channels and GPTQ.
        statistics: what these rest on.
    """

    config: EncodingConfig
    statistics: CalibrationStatistics


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan with its encoding, the file of its model, and what was measured of it.

    Attributes:
        path: file of the model, which nothing else writes to.
        quantized: the tensor of the prepared model that each Q/DQ node stands for.
        bound: decibels that the worst output has on unseen samples with 95 % confidence; -inf if it does not run.
        nsr: noise-to-signal ratio by search sample and output.
        speed: how many times as fast as the float model it ran beside other candidates; None if it was not timed.
        nanoseconds: time of a run that its costs predict; None if no times are known.
        expected: noise-to-signal ratio that the errors of its quantizers predict; None if they are not known.
    """

    plan: Plan
    recipe: Recipe
    path: Path
    quantized: Mapping[str, str]
    bound: float
    nsr: NDArray[np.float64]
    speed: float | None = None
    nanoseconds: float | None = None
    expected: float | None = None

    @property
    def key(self) -> Hashable:
        """Equal for candidates whose models are the same."""
        return _key(self.plan, self.recipe)

    @property
    def sqnr(self) -> float:
        """The SQNR of the worst output over all search samples."""
        return sqnr_of_ratio(worst_ratio(self.nsr.sum(0)))

    @property
    def bytes(self) -> float:
        """The size of its file, with the weights beside it; infinite if there is none."""
        return stored_bytes(self.path, (data_file(self.path),)) if self.path.exists() else math.inf


@dataclass(frozen=True, eq=False)
class Workshop:
    """Builds the models of plans, and runs them on the search samples beside the float model.

    Attributes:
        model: the prepared float model.
        reference: the search samples, with the outputs of the model as it was given.
        statistics: of the calibration.
        name: file name of the models.
        external_data: whether their weights lie in a file beside them.
        tried: the candidates so far by what makes their models, in the order in which they were built.
        progress: told of each candidate.
    """

    model: PreparedModel
    reference: ReferenceOutputs
    statistics: CalibrationStatistics
    name: str
    external_data: bool = False
    tried: dict[Hashable, Candidate] = field(default_factory=dict)
    progress: Progress = silent

    @classmethod
    def of(
        cls,
        model: PreparedModel,
        reference: Path,
        samples: SampleSource,
        statistics: CalibrationStatistics,
        name: str,
        *,
        count: int,
        external_data: bool = False,
        progress: Progress = silent,
    ) -> Workshop:
        """Run the float model on some samples, evenly spaced.

        Args:
            model: the prepared float model.
            reference: file of the model as it was given.
            samples: to choose by.
            statistics: of the calibration.
            name: file name of the models.
            count: number of the search samples; large outputs reduce it.
            external_data: see `Workshop`.
            progress: see `Workshop`.
        """

        def answered(count: int) -> ReferenceOutputs:
            places = sorted(itertools.chain.from_iterable(halves(samples, count)))
            return ReferenceOutputs.of(reference, model.prepared, Subset(samples, places))

        outputs = answered(count)
        if (few := len(outputs.samples)) < min(count, len(samples)):
            # Fewer samples are spread anew.
            outputs = answered(few)
        return cls(model, outputs, statistics, name, external_data, progress=progress)

    @property
    def run_seconds(self) -> float:
        """Seconds of a run of the float model."""
        return self.reference.seconds

    @property
    def process_seconds(self) -> float:
        """Seconds of a process that runs the float model over the search samples, the unit of a search's time."""
        return _STARTUP_SECONDS + len(self.reference.samples) * self.run_seconds

    def measured(
        self,
        plan: Plan,
        recipe: Recipe,
        nanoseconds: float | None = None,
        expected: float | None = None,
        least: float = -math.inf,
    ) -> Candidate:
        """Return the candidate of a plan and a recipe: built and run now, or the known one with the same model.

        The file of a new candidate whose bound is below `least` is removed.
        """
        key = _key(plan, recipe)
        candidate = self.tried.get(key)
        if candidate is None:
            candidate = self.built(plan, recipe, runs=True)
            if candidate.bound < least:
                candidate.path.unlink(missing_ok=True)
                data_file(candidate.path).unlink(missing_ok=True)
            self.progress("search", len(self.tried) + 1, 0)
        self.tried[key] = replace(
            candidate, nanoseconds=nanoseconds or candidate.nanoseconds, expected=expected or candidate.expected
        )
        return self.tried[key]

    def built(self, plan: Plan, recipe: Recipe, *, runs: bool = False) -> Candidate:
        """Build the model of a plan and a recipe, and run it on the search samples if it `runs`."""
        path = self.new_path()
        quantized: Mapping[str, str] = {}
        bound, nsr = -math.inf, np.full((1, 1), np.inf)
        with tolerate("a model that was tried") if runs else nullcontext():
            graph = self.model.build(plan, recipe.statistics, recipe.config, path, external_data=self.external_data)
            if runs:
                quantized = quantized_tensors(graph, self.model.graph)
                del graph
                bound, nsr = self._errors(plan, path)
        return Candidate(plan, recipe, path, quantized, bound, nsr)

    def new_path(self) -> Path:
        """Return the path of a new model, in a folder of its own."""
        folder = self.model.prepared.with_name(f"candidate.{next(_NUMBERS)}")
        folder.mkdir()
        return folder / self.name

    def _errors(self, plan: Plan, path: Path) -> tuple[float, NDArray[np.float64]]:
        session = self._opened(path, optimize=not self.model.is_large or multiplies_integers(plan))
        pairs = list(zip(self.reference.expected, session.run_each(self.reference.given), strict=True))
        del session
        if self.model.is_large:
            return_memory()
        return estimate_sqnr(pairs, self.reference.files), nsr_by_sample(pairs)

    def _opened(self, path: Path, *, optimize: bool = True) -> ComparisonSession:
        large = self.model.is_large
        # Without integer kernels, a large model dequantizes its weights in each run, optimized or not.
        return self.reference.views.open(path, optimize=optimize, mapped=large, at_once=not large)

    def switched(self, plan: Plan, recipe: Recipe, nodes: Set[str] | None = None) -> SwitchedSession:
        """Build the float model with a switch for each quantizer of a plan, or for the own ones of `nodes`."""
        path = self.model.prepared.with_name("switched.onnx")
        switches = self.model.build_switched(plan, recipe.statistics, recipe.config, path, nodes)
        return SwitchedSession(self.reference, self._opened(path), switches)

    def part(self, places: Sequence[int], statistics: CalibrationStatistics) -> Workshop:
        """Return a workshop on some of the search samples, with candidates and statistics of its own."""
        return replace(self, reference=self.reference.part(places), statistics=statistics, tried={})


def _key(plan: Plan, recipe: Recipe) -> Hashable:
    return plan.effect, recipe.config.key, id(recipe.statistics)


def multiplies_integers(plan: Plan) -> bool:
    """Return whether a plan has integer kernels."""
    return bool(plan.count(Mode.STATIC) or plan.count(Mode.DYNAMIC))
