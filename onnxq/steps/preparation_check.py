"""Whether preparing keeps what a float model computes and its speed, and which passes do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from onnxq.calibration.provenance import model_digest, sample_digest
from onnxq.data.inputs import Sample
from onnxq.errors import DataError, is_fatal
from onnxq.evaluation.latency import NOT_SLOWER, measure_latencies
from onnxq.preparing.equivalence import Original, find_culprits, original
from onnxq.runtime.engine import Engine
from onnxq.runtime.local import OnnxRuntime
from onnxq.runtime.sessions import Session, open_session, output_names, run
from onnxq.search.cost_cache import CostCache, cost_key

# A share of an output's largest value that rounding alone does not make up.
_TOLERANCE = 1e-2
# Open sessions run so often by turns; a prepared model that is so fast in them is not looked at more closely.
_RUNS, _FAST_ENOUGH = 3, 0.9
# Rounds, and runs of each model in a round, of the look that decides.
_ROUNDS, _RUNS_OF_ROUND = 9, 8
# No further round begins after so many times the seconds of a look, since large models take long to load.
_PATIENCE = 5.0


@dataclass(frozen=True, eq=False)
class PreparationCheck:
    """Compares prepared float models with the model as it was given.

    Attributes:
        reference: file of the model as it was given.
        samples: on which both run.
        seconds: for a look at the speed; 0 leaves it out.
        engine: what times both models.
        costs: speeds that were measured before, to which new ones are added.
        compares: whether outputs are compared, which passes of the user's may change.
    """

    reference: Path
    samples: Sequence[Sample]
    seconds: float
    engine: Engine
    costs: CostCache
    compares: bool = True

    def fault(self, prepared: Path) -> str:
        """Say what is wrong with a prepared model; an empty string where nothing is."""
        session = open_session(prepared)
        return (self._difference(prepared, session) if self.compares else "") or self._slowness(prepared, session)

    def _difference(self, prepared: Path, session: Session) -> str:
        """Compare outputs as the runtime computes them, and without its optimisations where these differ."""
        names = output_names(session)
        expected = self._answers
        if all(
            _agree(one, other)
            for sample, outputs in zip(self.samples, expected, strict=True)
            for one, other in zip(outputs, run(session, sample, names), strict=True)
        ):
            return ""
        if self._original is None:
            return ""
        found = self._original.difference(prepared)
        if found.share <= _TOLERANCE:
            return ""
        return f"it changes output {found.output!r} by {found.share:.2g} of its largest value"

    def _slowness(self, prepared: Path, session: Session) -> str:
        if self.seconds <= 0:
            return ""
        asked = f"{self.engine.name}, {self.engine.version}, {self.engine.threads_given} threads"
        key = cost_key(model_digest(prepared), map(sample_digest, self.samples), "prepared", asked)
        # What was decided by an earlier look is decided alike.
        speed = (
            self.costs.speeds[key]
            if key in self.costs.speeds
            else self.costs.speed(key, self._speed(prepared, session))
        )
        return "" if speed >= NOT_SLOWER else f"it makes the float model {speed:.2f} times as fast"

    def _speed(self, prepared: Path, session: Session) -> float:
        """Return how many times as fast as the given model a prepared one is; 1 if it is not shown to be slower."""
        if isinstance(self.engine, OnnxRuntime) and self._glance(session) >= _FAST_ENOUGH:
            return 1.0
        [found] = measure_latencies(
            (self.reference, prepared),
            self.samples,
            seconds=self.seconds,
            rounds=_ROUNDS,
            patience=_PATIENCE * self.seconds,
            enough=_RUNS_OF_ROUND,
            engine=self.engine,
        )
        return found.speed if found.is_bounded and found.interval[1] < NOT_SLOWER else 1.0

    def _glance(self, session: Session) -> float:
        """Return how many times as fast a prepared model runs in sessions that are open already."""
        seconds = np.array([[_seconds(one, self.samples) for one in (self._given, session)] for _ in range(_RUNS)])
        given, prepared = np.median(seconds, axis=0)
        return float(given / prepared)

    @cached_property
    def _given(self) -> Session:
        return open_session(self.reference)

    @cached_property
    def _answers(self) -> Sequence[Sequence[object]]:
        names = output_names(self._given)
        return [run(self._given, sample, names) for sample in self.samples]

    @cached_property
    def _original(self) -> Original | None:
        """The model as it was given, run without optimisations; None if its answers change from run to run."""
        try:
            return original(self.reference, self.samples)
        except DataError:
            return None


def _seconds(session: Session, samples: Sequence[Sample]) -> float:
    start = time.perf_counter()
    for sample in samples:
        run(session, sample)
    return time.perf_counter() - start


def harmful_steps(
    check: PreparationCheck, names: Sequence[str], prepare: Callable[[frozenset[str]], Path]
) -> Mapping[str, str]:
    """Return the steps of the canonical form that change outputs or make a model slower, each with the reason.

    Args:
        check: compares a prepared model with the model as it was given.
        names: the steps that changed something.
        prepare: writes the model without some steps.
    """

    def fault_without(without: frozenset[str]) -> str:
        try:
            return check.fault(prepare(without))
        except Exception as error:
            if is_fatal(error):
                raise
            return f"it fails: {type(error).__name__}: {error}"

    return find_culprits(names, fault_without)


def _agree(one: object, other: object) -> bool:
    """Whether two outputs are equal but for rounding; decisions that rounding may change are not looked at."""
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return type(one) is type(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind not in "fV":
        return True
    first, second = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(first)
    if not np.array_equal(finite, np.isfinite(second)):
        return False
    largest = np.abs(first[finite]).max(initial=0.0)
    return bool(np.abs(first[finite] - second[finite]).max(initial=0.0) <= _TOLERANCE * largest)
