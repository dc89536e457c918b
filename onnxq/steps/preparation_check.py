"""Whether preparing keeps what a float model computes and its speed, and which passes do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from onnxq.calibration.provenance import model_digest, sample_digest
from onnxq.data.inputs import Sample, is_floating
from onnxq.errors import DataError, is_fatal
from onnxq.evaluation.latency import NOT_SLOWER, measure_latencies
from onnxq.preparing.equivalence import Original, find_culprits, original
from onnxq.runtime.engine import Engine, OnnxRuntime
from onnxq.runtime.sessions import Array, Session, open_session, output_names, run
from onnxq.search.cost_cache import CostCache, cost_key

# A share of an output's largest value that rounding alone does not make up, and a share of the elements of an output
# of integers: of a picture's labels rounding may turn over a few.
_TOLERANCE = 1e-2
# Open sessions run by turns for so long, and at least so often; the noise of fewer runs exceeds the 3 % in question.
_GLANCE_SECONDS, _FEWEST_RUNS = 0.1, 3
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
        session = open_session(prepared, threads=self.engine.threads_given, is_made=True)
        return (self._difference(prepared, session) if self.compares else "") or self._slowness(prepared, session)

    def _difference(self, prepared: Path, session: Session) -> str:
        """Compare outputs as the runtime computes them, and without its optimisations where these differ."""
        names = output_names(session)
        expected = self._answers
        if all(
            _agree(one, other)
            for sample, outputs in zip(self.samples, expected, strict=True)
            for one, other in zip(outputs, run(session, sample, names, made=prepared), strict=True)
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
        if isinstance(self.engine, OnnxRuntime) and self._glance(prepared, session) >= NOT_SLOWER:
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

    def _glance(self, prepared: Path, session: Session) -> float:
        """Return how many times as fast a prepared model runs in sessions that are open already."""
        seconds: list[tuple[float, float]] = []
        start = time.perf_counter()
        while len(seconds) < _FEWEST_RUNS or time.perf_counter() - start < _GLANCE_SECONDS:
            seconds.append((_seconds(self._given, self.samples), _seconds(session, self.samples, prepared)))
        given, taken = np.median(seconds, axis=0)
        return float(given / taken)

    @cached_property
    def _given(self) -> Session:
        return open_session(self.reference, threads=self.engine.threads_given)

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


def _seconds(session: Session, samples: Sequence[Sample], made: Path | None = None) -> float:
    start = time.perf_counter()
    for sample in samples:
        run(session, sample, made=made)
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
    """Whether two outputs are equal but for rounding."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_agree(value, other[key]) for key, value in one.items())
    return _arrays_agree(np.asarray(one), np.asarray(other))


def _arrays_agree(one: Array, other: Array) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not is_floating(one.dtype):
        return not one.size or float(np.mean(one != other)) <= _TOLERANCE
    first, second = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(first)
    # Infinities have a sign, and NaN is none.
    if not np.array_equal(first[~finite], second[~finite], equal_nan=True) or not np.isfinite(second[finite]).all():
        return False
    largest = np.abs(first[finite]).max(initial=0.0)
    return bool(np.abs(first[finite] - second[finite]).max(initial=0.0) <= _TOLERANCE * largest)
