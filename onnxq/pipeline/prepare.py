"""The first step: a model is opened and prepared, without passes that change what it computes or make it slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import onnx

from onnxq.algorithms.encodings import EncodingCache
from onnxq.calibration.data import Data
from onnxq.calibration.provenance import model_digest, sample_digest
from onnxq.config.scheme import Mode
from onnxq.data.inputs import Sample, SampleSource, is_floating
from onnxq.data.samples import evenly
from onnxq.errors import (
    DataError,
    LoadError,
    ModelError,
    OutputError,
    PassError,
    SchemeError,
    check_type,
    is_fatal,
    note_failure,
)
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.goal import Goal, lack
from onnxq.evaluation.latency import NOT_SLOWER, measure_latencies
from onnxq.ir import Graph, as_graph, save
from onnxq.ir.protos import is_large
from onnxq.ir.queries import all_nodes
from onnxq.ir.reader import refuse_overwriting
from onnxq.lowering.kernels import DOMAIN
from onnxq.passes.preparing.equivalence import Original, find_culprits, original
from onnxq.passes.preparing.named_passes import Step, as_passes
from onnxq.passes.preparing.preparation import (
    canonical_steps,
    check_float_model,
    counts_of,
    external_bytes,
    prepare_in_place,
    reference_file,
)
from onnxq.passes.preparing.rewriting import apply_to_float
from onnxq.pipeline.request import Budget, QuantizationRequest
from onnxq.planning.plan import DECODING, Demotion, Plan
from onnxq.rewrite import PassResult
from onnxq.runtime.engine import Engine, OnnxRuntime, Preloader
from onnxq.runtime.engines import TargetEngine
from onnxq.runtime.sessions import Array, Session, open_session, output_names, run
from onnxq.runtime.targets import target_named
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.search.times import MeasuredTimes, times_key
from onnxq.system.publish import check_output, data_file, stored_bytes
from onnxq.system.resources import NEVER, Deadline

Model = str | Path | onnx.ModelProto | Any
"""A file, a ModelProto, or a GraphSurgeon graph."""


def apply_own_passes(model: Model, prepare: Sequence[Step]) -> Graph:
    """Return a graph of the model after passes of the user's."""
    passes, graph = as_passes(prepare), as_graph(model)
    apply_to_float(graph, passes)
    check_float_model(graph)
    return graph


def open_prepared(graph: Graph, wanted: QuantizationRequest, folder: Path, *, measured: bool) -> PreparedModel:
    """Open the workbench of a model after passes of the user's, given whether a search measures time."""
    has_own = any(node.domain == DOMAIN for _, node in all_nodes(graph))
    emit, target = wanted.emit(measured=measured, has_own=has_own), target_named(wanted.target)
    target = target.keeping_forms if wanted.keeps_forms else target
    given = wanted.replay, wanted.without
    bench = open_prepared_model(graph, wanted.prepared_for, target, folder, emit, *given)
    if not wanted.stored_because:
        return bench
    bench = replace(bench, scheme=wanted.scheme)
    stored = {
        one.node: Demotion(Mode.STORAGE, wanted.stored_because)
        for one in bench.plan({}).decisions
        if one.mode in DECODING and one.weights
    }
    return replace(bench, stored=stored)


def check_output_path(output: str | Path | None, model: Model, budget: Budget, data: Data | None) -> Path | None:
    """Return the file to write, which is neither the model nor what else is read or written.

    Raises:
        OutputError: it cannot be written, or is one of those.
    """
    check_type(output, (str, Path, type(None)), "the output", "a path, or None to write nothing")
    if output is None:
        return None
    output = Path(output)
    check_output(output, Path(model) if isinstance(model, str | Path) else None, data.given if data else ())
    own = {output.resolve(), data_file(output).resolve()}
    if budget.times_path is not None and budget.times_path.resolve() in own:
        raise OutputError(f"times cannot be kept in the output {output}; give another name")
    return output


# Seconds of a look at the speed of the prepared float model, the part of the time left that it may take, and samples.
_LOOK_AT_PREPARATION, _PART_FOR_PREPARATION, _RUN_PREPARED = 1.0, 0.02, 2
# A float model of up to so many bytes becomes one file, even if its weights were external: one file is easier to keep.
_ONE_FILE = 1 << 30
# Errors of the user's and of the machine, which leaving out steps may hide and does not mend.
_NOT_OF_STEPS = (MemoryError, OutputError, SchemeError)


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """A float model that plans are made for.

    Attributes:
        name: where it came from.
        reference: file of the model as it was given.
        result_name: file name of the models that are built.
        external_data: whether their weights lie in a file beside them.
        bench: the model as it was prepared, with what is wanted of it.
        replay: a plan to carry out.
        external: bytes of the values that lie outside the model file.
        applied: the user's passes.
        output: the file to write; None writes nothing.
        target_engine: runs and times models.
        times: what was measured before on this machine, to which more is added.
        ahead: has the engine load the float model while samples are run.
        is_stored: whether weights are only stored.
        left_out: steps of the canonical form that failed, each with the reason.
    """

    name: str
    reference: Path
    result_name: str
    external_data: bool
    bench: PreparedModel
    replay: Plan | None
    external: int
    applied: tuple[PassResult, ...]
    output: Path | None
    target_engine: TargetEngine
    times: MeasuredTimes
    ahead: Preloader
    is_stored: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def float_bytes(self) -> int:
        """Size of the float model with its external data."""
        return stored_bytes(self.reference) + self.external


def prepare_model(
    model: Model,
    wanted: QuantizationRequest,
    folder: Path,
    output: Path | None,
    budget: Budget,
    target_engine: TargetEngine | None = None,
    times: MeasuredTimes | None = None,
) -> PreparedRun:
    """Prepare a model in a working folder of its own, and keep it as it was given beside that.

    An attempt that fails overwrites nothing of the attempts before.

    Args:
        model: a float model.
        wanted: what is to become of it.
        folder: holds the working folders of all attempts.
        output: the file to write; None writes nothing.
        budget: the file of times, and whether time is measured.
        target_engine: runs and times models; None stands for onnxruntime in this process.
        times: what was measured before; None reads it from the file of the budget.
    """
    target_engine = target_engine or TargetEngine(OnnxRuntime(threads=budget.threads))
    times = times or MeasuredTimes.opened(budget.times_path)
    source = Path(model) if isinstance(model, str | Path) else None
    passes, graph = as_passes(wanted.prepare), as_graph(model)
    if output is not None:
        refuse_overwriting(graph, data_file(output))
    reference, external = reference_file(graph, model, folder), external_bytes(graph)
    # What it refuses is told of the file that users know.
    ahead = Preloader(target_engine.elsewhere, loads=budget.measures and not is_large(reference))
    ahead.load(reference)
    applied = apply_to_float(graph, passes)
    check_float_model(graph)
    measured = budget.measures and target_engine.engine is not None
    folder = Path(mkdtemp(prefix="attempt", dir=folder))
    bench, left_out = _opened(graph, model, wanted, folder, measured=measured)
    bench = replace(bench, encoding_cache=EncodingCache(), progress=budget.progress)
    name = str(source) if source else type(model).__name__
    built = output.name if output is not None else "model.onnx"
    is_external = external > 0 and stored_bytes(reference) + external > _ONE_FILE
    ahead.expect(bench.prepared)
    given = name, reference, built, is_external, bench, wanted.replay, external, applied, output, target_engine
    return PreparedRun(*given, times, ahead, is_stored=bool(wanted.stored_because), left_out=left_out)


def _opened(
    graph: Graph, model: Model, wanted: QuantizationRequest, folder: Path, *, measured: bool
) -> tuple[PreparedModel, Mapping[str, str]]:
    """Open the workbench, without the steps of the canonical form that fail, which are returned with their errors."""
    try:
        return open_prepared(graph, wanted, folder, measured=measured), {}
    except Exception as error:
        if isinstance(error, _NOT_OF_STEPS):
            raise
        left_out = _failing_steps(model, wanted, folder, measured=measured) if wanted.replay is None else {}
        # What fails without any of these steps is no fault of theirs.
        if not left_out or not note_failure(f"preparing with {', '.join(left_out)}", error):
            raise
    fewer = replace(wanted, without=wanted.without | left_out.keys())
    return open_prepared(apply_own_passes(model, wanted.prepare), fewer, folder, measured=measured), left_out


def _failing_steps(model: Model, wanted: QuantizationRequest, folder: Path, *, measured: bool) -> Mapping[str, str]:
    def fault_without(without: frozenset[str]) -> str:
        fewer = replace(wanted, without=wanted.without | without)
        try:
            open_prepared(apply_own_passes(model, wanted.prepare), fewer, folder, measured=measured)
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            return f"it fails with {type(error).__name__}: {error}"
        return ""

    return find_culprits(canonical_steps(), fault_without)


def check_own_passes(
    model: PreparedRun, given: Model, wanted: QuantizationRequest, samples: SampleSource, goal: Goal
) -> None:
    """Refuse the first of the user's passes after which the float model itself misses the goal.

    A large model is not run. Nothing is refused with a metric, or if the result is forced.

    Raises:
        PassError: the rewritten float model does not load, or its outputs miss the goal beside the given one's.
    """
    if not any(model.applied) or goal.metric is not None or goal.force or model.bench.is_large:
        return
    passes, looked = as_passes(wanted.prepare), tuple(evenly(samples, _RUN_PREPARED))
    path = model.bench.prepared.parent / "own.onnx"

    def lacks(count: int) -> str:
        save(apply_own_passes(given, passes[:count]), path, external_data=True, linked=True)
        try:
            return lack(compare_files(model.reference, path, looked), goal, "the float model")
        except LoadError as error:
            return str(error)

    if lacks(len(passes)):
        # A later pass may mend what an earlier one breaks, so passes are added one by one.
        first, what = next((one, what) for one in range(1, len(passes) + 1) if (what := lacks(one)))
        raise PassError(
            f"pass {type(passes[first - 1]).__name__} changes the float model: {what}; correct the pass, or leave it "
            "out"
        )


def steps_to_leave_out(
    model: PreparedRun,
    given: Model,
    wanted: QuantizationRequest,
    samples: SampleSource,
    budget: Budget,
    deadline: Deadline = NEVER,
) -> Mapping[str, str]:
    """Return the steps of the canonical form that change outputs or make the model slower, each with the reason.

    The prepared float model runs beside the one that was given. A large one is not run, and a plan to carry out was
    made for what it names.

    Args:
        model: as it was prepared.
        given: the model as it was given.
        wanted: what is to become of it.
        samples: of which a few are run.
        budget: whether time is measured.
        deadline: a look at the speed takes a small part of the time that is left.

    Raises:
        ModelError: without these steps, an output still changes that no comparison with a candidate covers.
    """
    bench = model.bench
    names = tuple(counts_of(bench.making.applied))
    if bench.is_large or model.replay is not None:
        return {}
    # The user's passes may change what nothing compares.
    uncompared = () if wanted.prepare else ComparisonSpec.of(model.reference, bench.prepared).uncompared
    if not names and not uncompared:
        return {}
    timed = budget.measures and model.target_engine.engine is not None
    seconds = min(_LOOK_AT_PREPARATION, deadline.left * _PART_FOR_PREPARATION) if timed else 0.0
    folder = bench.prepared.parent
    engines = model.target_engine.caching(folder) or (OnnxRuntime(folder, budget.threads),)
    looked = tuple(evenly(samples, _RUN_PREPARED))
    check = PreparationCheck(model.reference, looked, seconds, engines, model.times, compares=not wanted.prepare)

    def prepare(without: frozenset[str]) -> Path:
        if not without and not bench.making.steps:
            return bench.prepared
        graph = apply_own_passes(given, wanted.prepare)
        prepare_in_place(graph, opset=bench.graph.opset, without=without | wanted.without)
        path = folder / "preparation.onnx"
        save(graph, path, external_data=True, linked=True)
        return path

    harmful = harmful_steps(check, names, prepare) if names else {}
    if uncompared:
        check.check_outputs(uncompared, prepare(frozenset(harmful)))
    return harmful


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
        engines: what times both models, each on its own.
        times: speeds that were measured before, to which new ones are added.
        compares: whether outputs are compared, which passes of the user's may change.
    """

    reference: Path
    samples: Sequence[Sample]
    seconds: float
    engines: Sequence[Engine]
    times: MeasuredTimes
    compares: bool = True

    def fault(self, prepared: Path) -> str:
        """Say what is wrong with a prepared model; an empty string where nothing is."""
        # The given model runs first, so that without timing one session at a time holds the weights.
        expected = self._answers if self.compares else ()
        threads = self.engines[0].threads_given
        session = open_session(prepared, threads=threads, is_made=True, few_runs=self.seconds <= 0)
        fault = self._difference(prepared, session, expected)
        return fault or next(filter(None, (self._slowness(prepared, session, one) for one in self.engines)), "")

    def check_outputs(self, names: Sequence[str], prepared: Path) -> None:
        """Refuse a prepared model that changes outputs which no comparison with a candidate covers.

        Raises:
            ModelError: the sentence names the output.
        """
        if self._original is None:
            return
        found = self._original.only(names).difference(prepared)
        if found.share > _TOLERANCE:
            raise ModelError(
                f"output {found.output!r} changes when the model is prepared (functions are inlined, the opset is "
                "raised), expected the values of the given model; export it without functions or at a later opset, "
                "and report it"
            )

    def _difference(self, prepared: Path, session: Session, expected: Sequence[Sequence[object]]) -> str:
        """Compare outputs as the runtime computes them, and without its optimisations where these differ."""
        names = output_names(session)
        if not expected or all(
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

    def _slowness(self, prepared: Path, session: Session, engine: Engine) -> str:
        if self.seconds <= 0:
            return ""
        what = f"prepared beside {model_digest(self.reference)}"
        key = times_key(model_digest(prepared), map(sample_digest, self.samples), what, engine)
        speed = self.times.speeds.get(key)
        if speed is None:
            speed = self.times.speed(key, self._speed(prepared, session, engine))
        return "" if speed >= NOT_SLOWER else f"it makes the float model {speed:.2f} times as fast"

    def _speed(self, prepared: Path, session: Session, engine: Engine) -> float:
        """Return how many times as fast as the given model a prepared one is; 1 if it is not shown to be slower."""
        # The open sessions have the first engine's threads.
        opened = engine is self.engines[0] and isinstance(engine, OnnxRuntime)
        if opened and self._glance(prepared, session) >= NOT_SLOWER:
            return 1.0
        [found] = measure_latencies(
            (self.reference, prepared),
            self.samples,
            seconds=self.seconds,
            rounds=_ROUNDS,
            patience=_PATIENCE * self.seconds,
            enough=_RUNS_OF_ROUND,
            engine=engine,
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
        return open_session(self.reference, threads=self.engines[0].threads_given)

    @cached_property
    def _answers(self) -> Sequence[Sequence[object]]:
        threads = self.engines[0].threads_given
        session = self._given if self.seconds > 0 else open_session(self.reference, threads=threads, few_runs=True)
        return [run(session, sample, output_names(session)) for sample in self.samples]

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
