"""The way through the house: quantize(), the list of all steps in one place, and some of them alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnxq.calibration.data import Data, SamplesLike
from onnxq.config.scheme import Scheme
from onnxq.errors import SchemeError, collect_failures, note_failure, tolerate
from onnxq.evaluation.goal import MINIMUM_SQNR, Goal
from onnxq.ir import Graph
from onnxq.planning.plan import Plan
from onnxq.preparing.named_passes import Step
from onnxq.preparing.preparation import check_plan
from onnxq.report import Report, check_fidelity, check_gain, check_speed
from onnxq.report.parts import Stopwatch
from onnxq.runtime.engines import start_engine_for
from onnxq.runtime.targets import DEFAULT_TARGET, target_named
from onnxq.search.prepared_model import PreparedModel
from onnxq.steps.budget import Budget
from onnxq.steps.forms import hopeless_forms, slowed_by_forms
from onnxq.steps.opening import Model, checked_output, opened, rewritten
from onnxq.steps.reporting import reported
from onnxq.steps.steps import (
    Evidenced,
    Prepared,
    Settled,
    chooser_of,
    evidenced,
    first_recipe,
    methods_tried,
    prepared,
    published,
    samples_of,
    settled,
    steps_to_leave_out,
    tried,
)
from onnxq.steps.wanted import Wanted
from onnxq.system.isolation import allow_another_try, earlier_crashes, forbid_another_try
from onnxq.system.publish import staging
from onnxq.system.resources import Deadline

if TYPE_CHECKING:
    from onnxq.report.explanation import Explanation
    from onnxq.search.sensitivity_report import Sensitivity

_LOG = logging.getLogger(__name__)
# After the first crash nothing is searched, and after the second the graph stays as it was given.
_MOST_CRASHES = 2
_FAILED = "the search for something faster failed"
_SLOWER = "what the search found, and stored weights of the prepared model, were slower than the float model"


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized model and how it came about.

    Attributes:
        graph: the model; onnxq.save writes it.
        report: what was decided and measured.
    """

    graph: Graph
    report: Report

    def __repr__(self) -> str:
        return f"Quantized({self.report})"

    def _repr_html_(self) -> str:
        """Return what notebooks show: the report."""
        return self.report._repr_html_()


def quantize(
    model: Model,
    data: SamplesLike | Data,
    output: str | Path | None = None,
    *,
    scheme: str | Scheme | Plan = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
    goal: float | Goal = MINIMUM_SQNR,
    budget: str | Budget = "fast",
) -> Quantized:
    """Quantize a float model, verify the result against the float model, and write it when it is good enough.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        data: representative samples: a file or folder (see open_samples), dictionaries of arrays by input, or Data.
        output: file to write; None writes nothing. An existing file is replaced only by a verified one.
        scheme: a preset's name, a scheme's TOML file, a Scheme, or a Plan of an earlier report or file to carry out as
            it is, on its own target and without a search.
        target: a name of TARGETS.
        prepare: passes of your own, or texts that name them (see pass_named), which rewrite the float model before
            onnxq prepares it. The result is compared with the model as it was given all the same.
        goal: the decibels that the worst output must have, or a Goal.
        budget: ``fast``, ``full`` or ``off``, or a Budget.

    Returns:
        The quantized graph and the report.

    Raises:
        ModelError: the model cannot be read, is quantized already, or holds nothing to quantize.
        DataError: the samples do not fit the model, or do not run what the plan to carry out has scales in, or the file
            of node times is none.
        SchemeError: the scheme, target or a pattern is wrong, a number is out of range, or an argument is of another
            type.
        OutputError: the output cannot be written, or is the file of node times.
        PassError: one of your passes fails, or changes the names of inputs or outputs.
        FidelityError: the result misses the goal, or a search ended with one that is neither smaller nor faster than
            the float model; nothing was written.
    """
    wanted, data, budget = Wanted.of(scheme, target, prepare), Data.of(data), Budget.of(budget)
    goal = Goal.of(goal)
    return carried_out(model, data, checked_output(output, model, budget, data), wanted, goal, budget)


Trainer = Callable[[Prepared, Evidenced, Settled], Settled]
"""Trains what was settled, and leaves the model that is better where it is staged."""


@dataclass(frozen=True, eq=False)
class _Attempt:
    """A model that was prepared and calibrated, and what was chosen for it; None if its form is hopeless."""

    ready: Prepared
    seen: Evidenced
    found: Settled | None

    @property
    def keeps_up(self) -> bool:
        """Whether the model that is staged is not slower than the float model."""
        return self.found is not None and self.found.chosen.keeps_up

    def with_search_of(self, other: _Attempt) -> _Attempt:
        """Return the same with what the search of another attempt measured, none of whose plans was taken."""
        if self.found is None or other.found is None:
            return self
        chosen, searched = self.found.chosen, other.found.chosen.outcome
        outcome = replace(
            chosen.outcome,
            measured=chosen.outcome.measured + searched.measured,
            sensitivities=searched.sensitivities,
            frontier=tuple(replace(point, chosen=False) for point in searched.frontier),
        )
        return replace(self, found=replace(self.found, chosen=replace(chosen, outcome=outcome)))

    @property
    def is_slowed_by_forms(self) -> bool:
        """Whether operators may keep the form they had, which may be faster."""
        return self.found is None or slowed_by_forms(self.ready, self.found)


def carried_out(
    model: Model,
    data: Data,
    output: Path | None,
    wanted: Wanted,
    goal: Goal,
    budget: Budget,
    trainer: Trainer | None = None,
) -> Quantized:
    """Do all steps of quantize() in order, given what its arguments mean.

    A search that fails, or that finds nothing as fast as the float model, is followed by weights that are only stored:
    on the prepared graph, then on the graph as it was given.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        data: representative samples.
        output: file to write, from `checked_output`.
        wanted: what is to become of the model.
        goal: how faithful the result has to be.
        budget: what may be spent.
        trainer: a step of training before the report; None leaves it out.
    """
    budget.check(goal)
    watch, deadline = Stopwatch(), Deadline.within(budget.seconds)
    engine, unmeasured = start_engine_for(target_named(wanted.target), budget.engine, budget.threads)
    # What is taken as it is, without a search, is wanted whatever it gains.
    searched = budget.effort is not None and wanted.replay is None
    with engine or nullcontext(), staging(output) as folder, collect_failures() as failures:
        crashes = earlier_crashes()
        for crash in crashes:
            note_failure("what was tried before", crash)
        if searched and len(crashes) < _MOST_CRASHES:
            allow_another_try()
        elif crashes:
            wanted = wanted.as_given
        if goal.prefers_size:
            from onnxq.search.fallback import COARSER_OPSET

            wanted = replace(wanted, least=COARSER_OPSET)
        ready = prepared(model, wanted, folder, output, budget, engine)
        samples = samples_of(ready, data, goal, budget)
        left_out = dict(ready.left_out)
        wanted = replace(wanted, without=wanted.without | left_out.keys())
        if harmful := steps_to_leave_out(ready, model, wanted, samples, budget, deadline):
            left_out |= harmful
            wanted = replace(wanted, without=wanted.without | left_out.keys())
            ready = prepared(model, wanted, folder, output, budget, engine, ready.costs)
        watch.lap("prepare")

        def attempt(ready: Prepared, data: Data, budget: Budget) -> _Attempt:
            seen = evidenced(ready, data, methods_tried(ready, budget), goal, budget, samples)
            watch.lap("calibrate")
            for doubt in seen.doubts if data is given else ():
                _LOG.warning("%s", doubt)
            if hopeless_forms(ready, seen, goal, budget, deadline):
                watch.lap("try forms")
                return _Attempt(ready, seen, None)
            found = settled(ready, seen, goal, budget, deadline, is_last=trainer is None)
            watch.lap("choose and verify")
            return _Attempt(ready, seen, found)

        def again(variant: Wanted) -> _Attempt:
            other = prepared(model, variant, folder, output, budget, engine, ready.costs)
            return attempt(other, replace(data, statistics=None), budget.without_statistics())

        given = data
        try:
            if searched:
                done = _first_that_keeps_up(wanted, lambda: attempt(ready, data, budget), again)
            else:
                done = attempt(ready, data, budget)
                done = again(replace(wanted, keeps_forms=True)) if done.is_slowed_by_forms else done
            assert done.found is not None
            found = done.found
            if trainer is not None:
                found = trainer(done.ready, done.seen, found)
                watch.lap("train")
        finally:
            ready.costs.save()
        report = reported(done.ready, done.seen, found, goal, budget, watch, unmeasured)
        rules = (what for one in done.ready.bench.making.applied for _, what in one.changes.failed)
        failed = tuple(dict.fromkeys((*map(str, failures), *rules)))
        run = replace(report.run, left_out=tuple(left_out.items()), failures=failed)
        report = replace(report, run=run)
        check_fidelity(report, goal)
        if searched:
            check_speed(report, goal, keeps_up=found.chosen.keeps_up)
            check_gain(report, goal)
        for failure in failed:
            _LOG.warning("%s", failure)
        _LOG.info("%s", report.verdict)
        # A crash after this must not put a simpler model in the place of the verified one.
        forbid_another_try()
        return Quantized(published(done.ready), report)


def _first_that_keeps_up(
    wanted: Wanted, attempt: Callable[[], _Attempt], again: Callable[[Wanted], _Attempt]
) -> _Attempt:
    """Return the first attempt that is not slower than the float model, or else the last.

    What a search chose comes first, then weights that are only stored: on the prepared graph where the search fails,
    and on the graph as it was given where that is slower than float too. Where onnxruntime ended an earlier process,
    what it was at is not tried again.

    Args:
        wanted: what is to become of the model.
        attempt: searches for a plan.
        again: prepares the model anew, and searches or stores.
    """
    done: _Attempt | None = None
    crashes = earlier_crashes()
    if not crashes:
        with tolerate("the search"):
            done = attempt()
            if done.is_slowed_by_forms:
                done = again(replace(wanted, keeps_forms=True))
    if done is not None and done.found is None:
        # Its form was hopeless, and keeping the given form failed.
        done = None
    if done is None and len(crashes) < _MOST_CRASHES:
        with tolerate("storing the weights of the prepared model"):
            done = again(wanted.stored(_FAILED))
    if done is not None and done.keeps_up:
        return done
    try:
        last = again(wanted.stored(_FAILED if done is None else _SLOWER).as_given)
    except Exception as error:
        # A model that is slower than float is refused for that.
        if (
            done is None
            or isinstance(error, MemoryError)
            or not note_failure("storing the weights of the model as it was given", error)
        ):
            raise
        return done
    return last if done is None else last.with_search_of(done)


def sensitivity(
    model: Model,
    data: SamplesLike | Data,
    *,
    scheme: str | Scheme = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
    budget: str | Budget = "fast",
) -> Sensitivity:
    """Say what quantizing each tensor and weight alone adds in noise, and what each node takes in each way to run it.

    Codes are chosen as quantize() chooses them. Times are of the target's engine, and none where latency is not asked
    for, there is no engine that tells of its nodes, or the model has more than 1 GiB of weights, whose layers are
    measured in groups by kind.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        data: representative samples, as quantize() takes them; those count that it chooses by.
        scheme: a preset's name or a Scheme.
        target: a name of TARGETS.
        prepare: passes of your own, see quantize().
        budget: how long to measure: a minute or two, or with ``full`` until everything was measured alone, within an
            hour; and what measures time.

    Returns:
        Tensors and nodes in graph order.

    Raises:
        ModelError: the model cannot be read, is quantized already, or holds nothing to quantize.
        DataError: the samples do not fit the model, or the file of node times is none.
        SchemeError: the scheme, target or a pattern is wrong, the search is off, or an argument is of another type.
        EngineError: the engine that was asked for is not installed, or fails.
        PassError: one of your passes fails.
    """
    from onnxq.search.sensitivity_report import measure_sensitivity

    wanted, data, budget = Wanted.of(scheme, target, prepare), Data.of(data), Budget.of(budget)
    if budget.effort is None:
        raise SchemeError("the search is 'off', which measures nothing, expected fast or full; take one of them")
    deadline = Deadline.within(budget.seconds)
    engine, unmeasured = start_engine_for(target_named(wanted.target), budget.engine, budget.threads)
    if unmeasured:
        _LOG.warning("no node is timed: %s", unmeasured)
    with engine or nullcontext(), staging(None) as folder:
        ready = prepared(model, wanted, folder, None, budget, engine)
        seen = evidenced(ready, data, methods_tried(ready, budget), Goal(), budget)
        chooser = chooser_of(ready, seen, Goal(), budget, deadline)
        refined = chooser.refined(seen.plan, first_recipe(ready), tried(ready, budget).split[0])
        laboratory = chooser.with_evidence(refined.basis.evidence).profiler(refined.basis.recipe)
        try:
            timed = chooser.measurable and laboratory.timing.engine.profiles
            return measure_sensitivity(laboratory, timed=timed, seconds=min(budget.effort.seconds, deadline.left))
        finally:
            ready.costs.save()


def plan(
    model: Model,
    *,
    scheme: str | Scheme = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
) -> Plan:
    """Say what quantize() would try first, without calibrating or measuring anything.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        scheme: a preset's name or a Scheme.
        target: a name of TARGETS.
        prepare: passes of your own, see quantize().

    Returns:
        The plan before any node is left in float for its noise.
    """
    with _planned(model, Wanted.of(scheme, target, prepare)) as (bench, found):
        return replace(found, emit=bench.emit, preparation=bench.preparation)


def explain(
    model: Model,
    node: str,
    *,
    scheme: str | Scheme = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
) -> Explanation:
    """Say what quantize() would try first with one node, and why, without calibrating or measuring anything.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        node: its name in the plan, or in the model: then it is told what the node does that it became part of.
        scheme: a preset's name or a Scheme.
        target: a name of TARGETS.
        prepare: passes of your own, see quantize().

    Raises:
        ModelError: there is no such node; the message suggests the nearest one.
    """
    from onnxq.report.explanation import explain_plan

    with _planned(model, Wanted.of(scheme, target, prepare)) as (bench, found):
        became = (name for name, origins in bench.making.origins.items() if node in dict(origins))
        return explain_plan(bench.graph, found, node if node in found.by_node else next(became, node))


@contextmanager
def _planned(model: Model, wanted: Wanted) -> Iterator[tuple[PreparedModel, Plan]]:
    """Yield the workbench of a model and the plan that is tried first, which fits it."""
    graph = rewritten(model, wanted.prepare)
    with staging(None) as folder:
        bench = opened(graph, wanted, folder, measured=wanted.target == DEFAULT_TARGET)
        found = bench.plan({})
        check_plan(found, bench.graph)
        yield bench, found
