"""A model is opened and prepared, without passes that change what it computes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import onnx

from onnxq.algorithms.encodings import EncodingCache
from onnxq.calibration.data import Data
from onnxq.config.scheme import Mode, Scheme
from onnxq.data.inputs import Sample, SampleSource, is_floating
from onnxq.data.samples import evenly
from onnxq.errors import (
    CandidateError,
    DataError,
    LoadError,
    ModelError,
    OutputError,
    PassError,
    SchemeError,
    check_type,
)
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.goal import Goal, lack
from onnxq.ir import Graph, as_graph, save
from onnxq.ir.queries import all_nodes
from onnxq.ir.reader import refuse_overwriting
from onnxq.ir.stored_tensors import is_large
from onnxq.lowering.kernels import DOMAIN
from onnxq.passes.preparing.equivalence import Original, find_culprits, original
from onnxq.passes.preparing.named_passes import Step, as_passes
from onnxq.passes.preparing.preparation import (
    canonical_steps,
    check_float_model,
    check_plan,
    counts_of,
    external_bytes,
    prepare_in_place,
    reference_file,
)
from onnxq.passes.preparing.rewriting import apply_to_float
from onnxq.pipeline.request import Budget, QuantizationRequest
from onnxq.planning.plan import DECODING, Plan, stored_instead
from onnxq.rewrite import PassResult
from onnxq.runtime.engine import Preloader
from onnxq.runtime.engines import TargetEngine
from onnxq.runtime.sessions import Array, Session, open_session, output_names, run, runtime_reason
from onnxq.runtime.targets import target_named
from onnxq.search.prepared_model import PreparedModel, open_prepared_model
from onnxq.search.times import MeasuredTimes
from onnxq.system.failures import note_failure
from onnxq.system.publish import check_output, data_file, stored_bytes

Model = str | Path | onnx.ModelProto | Any
"""A file, a ModelProto, or a GraphSurgeon graph."""


@dataclass(frozen=True)
class Form:
    """How a model is prepared: what the rungs of the ladder vary.

    Attributes:
        without: names of `canonical_steps` that are left out.
        stored_because: why weights are only stored, and everything is computed in float; empty where they are not.
    """

    without: frozenset[str] = frozenset()
    stored_because: str = ""

    def leaving_out(self, steps: Iterable[str]) -> Form:
        """Return the same without some steps."""
        return replace(self, without=self.without.union(steps))

    def stored(self, reason: str) -> Form:
        """Return the same with weights that are only stored: the model computes in float what the float model does."""
        return replace(self, stored_because=reason)

    @property
    def as_given(self) -> Form:
        """The same without any canonical step, so that the model stays as it was given."""
        return self.leaving_out(canonical_steps())

    def scheme_for(self, scheme: Scheme) -> Scheme:
        """Return the scheme that the model is prepared for: without integers, where weights are only stored."""
        if not self.stored_because:
            return scheme
        rules = tuple(replace(rule, mode=Mode.STORAGE) if rule.mode in DECODING else rule for rule in scheme.rules)
        return replace(scheme, rules=rules)


def apply_own_passes(model: Model, prepare: Sequence[Step]) -> Graph:
    """Return a graph of the model after passes of the user's."""
    passes, graph = as_passes(prepare), as_graph(model)
    apply_to_float(graph, passes)
    check_float_model(graph)
    return graph


def open_prepared(
    graph: Graph, request: QuantizationRequest, folder: Path, *, measured: bool, form: Form = Form()
) -> PreparedModel:
    """Prepare a model after passes of the user's.

    Args:
        graph: the model, which changes.
        request: what is to become of it.
        folder: for the prepared model.
        measured: whether a search measures time.
        form: of the prepared model.
    """
    has_own = any(node.domain == DOMAIN for _, node in all_nodes(graph))
    emit, target = request.emit(measured=measured, has_own=has_own), target_named(request.target)
    scheme = form.scheme_for(request.scheme)
    bench = open_prepared_model(graph, scheme, target, folder, emit, request.replay, form.without)
    if not form.stored_because:
        return bench
    bench = replace(bench, scheme=request.scheme)
    return replace(bench, stored=stored_instead(bench.plan({}), form.stored_because))


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


# Samples that a prepared float model runs beside the given one.
_RUN_PREPARED = 2
# A float model of up to so many bytes becomes one file, even if its weights were external: one file is easier to keep.
_ONE_FILE = 1 << 30
# Errors of the machine and of the user, which leaving out steps may hide but cannot mend. Without some steps, patterns
# of a scheme may match nothing.
_OF_MACHINE = (MemoryError, OutputError)
_NOT_OF_STEPS = (*_OF_MACHINE, SchemeError)


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
        form: in which it was prepared.
        left_out: steps of the canonical form that failed or changed outputs, each with the reason.
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
    form: Form
    left_out: Mapping[str, str]

    @property
    def float_bytes(self) -> int:
        """Size of the float model with its external data."""
        return stored_bytes(self.reference) + self.external


@dataclass(frozen=True, eq=False)
class Preparer:
    """Prepares a float model in any form, and keeps it as it was given beside that.

    Attributes:
        model: a float model.
        request: what is to become of it.
        folder: holds a working folder for each form, so that one that fails overwrites nothing.
        output: the file to write.
        budget: whether time is measured, and in how many threads models run.
        target_engine: runs and times models.
        times: what was measured before on this machine.
    """

    model: Model
    request: QuantizationRequest
    folder: Path
    output: Path | None
    budget: Budget
    target_engine: TargetEngine
    times: MeasuredTimes

    def prepared(self, form: Form = Form()) -> PreparedRun:
        """Prepare the model, without steps that fail."""
        source = Path(self.model) if isinstance(self.model, str | Path) else None
        passes, graph = as_passes(self.request.prepare), as_graph(self.model)
        if self.output is not None:
            refuse_overwriting(graph, data_file(self.output))
        reference, external = reference_file(graph, self.model, self.folder), external_bytes(graph)
        # Loaded before anything is rewritten, so that its errors name the user's file.
        ahead = Preloader(self.target_engine.elsewhere, loads=self.budget.measures and not is_large(reference))
        ahead.load(reference)
        applied = apply_to_float(graph, passes)
        check_float_model(graph)
        left_out: Mapping[str, str] = {}
        try:
            bench = self._opened(graph, form)
        except Exception as error:
            if isinstance(error, _NOT_OF_STEPS):
                raise
            if self.request.replay is None:
                left_out = find_culprits(
                    canonical_steps(), _failure(error), lambda without: self._fault(form.leaving_out(without))
                )
            # What fails without any of these steps is no fault of theirs.
            if not left_out or not note_failure(f"preparing with {', '.join(left_out)}", error):
                raise
            form = form.leaving_out(left_out)
            bench = self._opened(self._rewritten, form)
        check_plan(self.request.replay or bench.plan({}), bench.graph)
        ahead.expect(bench.prepared)
        return PreparedRun(
            name=str(source) if source else type(self.model).__name__,
            reference=reference,
            result_name=self.output.name if self.output is not None else "model.onnx",
            external_data=external > 0 and stored_bytes(reference) + external > _ONE_FILE,
            bench=replace(bench, encoding_cache=EncodingCache(), progress=self.budget.progress),
            replay=self.request.replay,
            external=external,
            applied=applied,
            output=self.output,
            target_engine=self.target_engine,
            times=self.times,
            ahead=ahead,
            form=form,
            left_out=left_out,
        )

    def checked(self, ready: PreparedRun, samples: SampleSource) -> PreparedRun:
        """Run a prepared model beside the given one, and prepare it without the steps that change outputs.

        A large model is not run, and a plan to carry out was made for what it names.

        Raises:
            ModelError: without these steps, an output still changes that no comparison with a candidate covers.
        """
        bench, names = ready.bench, tuple(counts_of(ready.bench.making.applied))
        if bench.is_large or ready.replay is not None:
            return ready
        # The user's passes may change what nothing compares.
        own = bool(self.request.prepare)
        uncompared = () if own else ComparisonSpec.of(ready.reference, bench.prepared).uncompared
        if not names and not uncompared:
            return ready
        looked = tuple(evenly(samples, _RUN_PREPARED))
        check = PreparationCheck(ready.reference, looked, self.budget.threads, compares=not own)
        fault = self._fault_of(bench, ready.form, check)
        left_out = find_culprits(names, fault, lambda without: self._fault(ready.form.leaving_out(without), check))
        if left_out:
            again = self.prepared(ready.form.leaving_out(left_out))
            ready = replace(again, left_out={**ready.left_out, **left_out, **again.left_out})
        if uncompared:
            check.check_outputs(uncompared, self._compared(ready.bench, ready.form))
        return ready

    def check_own_passes(self, ready: PreparedRun, samples: SampleSource, goal: Goal) -> None:
        """Refuse the first of the user's passes after which the float model itself misses the goal.

        A large model is not run. With a metric, or if the result is forced, only a model that does not run is refused.

        Raises:
            PassError: the rewritten float model does not run, or its outputs miss the goal beside the given one's.
        """
        if not any(ready.applied) or ready.bench.is_large:
            return
        passes, looked = as_passes(self.request.prepare), tuple(evenly(samples, _RUN_PREPARED))
        path = self.folder / "own.onnx"

        def lacks(count: int) -> str:
            save(apply_own_passes(self.model, passes[:count]), path, external_data=True, linked=True)
            try:
                agreement = compare_files(ready.reference, path, looked)
            except (LoadError, CandidateError, DataError) as error:
                if not count:
                    raise
                # A given model that does not run either is no fault of a pass.
                lacks(0)
                return f"it does not run ({runtime_reason(error.__cause__ or error)})"
            return "" if goal.metric is not None or goal.force else lack(agreement, goal, "the float model")

        if lacks(len(passes)):
            # The first pass after which outputs differ is named, even if a later one mends a part of it.
            faults = ((count, what) for count in range(1, len(passes) + 1) if (what := lacks(count)))
            first, what = next(faults, (len(passes), "its outputs change from run to run"))
            raise PassError(
                f"pass {type(passes[first - 1]).__name__} changes the float model: {what}; correct the pass, or leave "
                "it out"
            )

    def _fault(self, form: Form, check: PreparationCheck | None = None) -> str:
        """Prepare the model in a form, and say what is wrong with it; an empty string where nothing is."""
        try:
            bench = self._opened(self._rewritten, form)
        except Exception as error:
            if isinstance(error, _OF_MACHINE):
                raise
            return _failure(error)
        fault = self._fault_of(bench, form, check) if check is not None else ""
        shutil.rmtree(bench.prepared.parent)
        return fault

    def _fault_of(self, bench: PreparedModel, form: Form, check: PreparationCheck) -> str:
        """Say what is wrong with a model that was prepared in a form; an empty string where nothing is."""
        try:
            return check.fault(self._compared(bench, form))
        except Exception as error:
            if isinstance(error, _OF_MACHINE):
                raise
            return _failure(error)

    def _compared(self, bench: PreparedModel, form: Form) -> Path:
        """Return the file of a prepared model that computes in the types of the given one."""
        if not bench.making.half:
            return bench.prepared
        graph, path = self._rewritten, bench.prepared.with_name("narrow.onnx")
        prepare_in_place(graph, opset=bench.graph.opset, without=form.without)
        save(graph, path, external_data=True, linked=True)
        return path

    def _opened(self, graph: Graph, form: Form) -> PreparedModel:
        measured = self.budget.measures and self.target_engine.engine is not None
        folder = Path(mkdtemp(prefix="attempt", dir=self.folder))
        return open_prepared(graph, self.request, folder, measured=measured, form=form)

    @property
    def _rewritten(self) -> Graph:
        """A new graph of the model after passes of the user's."""
        return apply_own_passes(self.model, self.request.prepare)


def _failure(error: Exception) -> str:
    return f"it fails with {type(error).__name__}: {error}"


# A share of an output's largest value that rounding alone does not make up, and a share of the elements of an output
# of integers: of a picture's labels rounding may turn over a few.
_TOLERANCE = 1e-2


@dataclass(frozen=True, eq=False)
class PreparationCheck:
    """Compares prepared float models with the model as it was given.

    Attributes:
        reference: file of the model as it was given.
        samples: on which both run.
        threads: inside an operator; None takes as many as there are cores.
        compares: whether outputs are compared, which passes of the user's may change.
    """

    reference: Path
    samples: Sequence[Sample]
    threads: int | None = None
    compares: bool = True

    def fault(self, prepared: Path) -> str:
        """Say what is wrong with a prepared model; an empty string where nothing is."""
        # The given model runs first, so that one session at a time holds the weights.
        expected = self._answers if self.compares else ()
        session = self._opened(prepared, is_made=True)
        return self._difference(prepared, session, expected)

    def check_outputs(self, names: Sequence[str], prepared: Path) -> None:
        """Refuse a prepared model that changes outputs which no comparison with a candidate covers.

        Raises:
            ModelError: the sentence names the output.
        """
        if self._original is None:
            return
        difference = self._original.only(names).difference(prepared)
        if difference.share > _TOLERANCE:
            raise ModelError(
                f"output {difference.output!r} changes when the model is prepared (functions are inlined, the opset is "
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
        difference = self._original.difference(prepared)
        if difference.share <= _TOLERANCE:
            return ""
        return f"it changes output {difference.output!r} by {difference.share:.2g} of its largest value"

    @cached_property
    def _answers(self) -> Sequence[Sequence[object]]:
        session = self._opened(self.reference)
        return [run(session, sample, output_names(session)) for sample in self.samples]

    def _opened(self, model: Path, *, is_made: bool = False) -> Session:
        return open_session(model, threads=self.threads, is_made=is_made, few_runs=True)

    @cached_property
    def _original(self) -> Original | None:
        """The model as it was given, run without optimisations; None if its answers change from run to run."""
        try:
            return original(self.reference, self.samples)
        except DataError:
            return None


def _agree(first: object, second: object) -> bool:
    """Whether two outputs are equal but for rounding."""
    if type(first) is not type(second):
        return False
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_agree, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_agree(value, second[key]) for key, value in first.items())
    return _arrays_agree(np.asarray(first), np.asarray(second))


def _arrays_agree(first: Array, second: Array) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not is_floating(first.dtype):
        return not first.size or float(np.mean(first != second)) <= _TOLERANCE
    first, second = first.astype(np.float64), second.astype(np.float64)
    finite = np.isfinite(first)
    # Infinities have a sign, and NaN is none.
    if not np.array_equal(first[~finite], second[~finite], equal_nan=True) or not np.isfinite(second[finite]).all():
        return False
    largest = np.abs(first[finite]).max(initial=0.0)
    return bool(np.abs(first[finite] - second[finite]).max(initial=0.0) <= _TOLERANCE * largest)
