"""The steps of quantize(), each from values to a value: prepared, evidenced, settled, reported, published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp

import onnx

from onnxq.algorithms.encoding_config import Recipe, recipe_of
from onnxq.calibration.calibrate import Collection
from onnxq.calibration.data import Data
from onnxq.calibration.methods import FIRST_RANGES, Extremes, MinMax, RangeMethod
from onnxq.calibration.statistics import Evidence
from onnxq.config.effort import METHODS, OFF, Accuracy
from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.samples import evenly
from onnxq.errors import OutputError, SchemeError, note_failure, tolerate
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.goal import Goal, plenty_of
from onnxq.evaluation.verification import Verifier
from onnxq.evaluation.warnings import (
    INSPECTED_SAMPLES,
    RUN_SAMPLES,
    find_sample_warnings,
    reject_constant_samples,
    warn_input_units,
    warn_mask_values,
    warn_unmeasured_nodes,
)
from onnxq.ir import Graph, as_graph, load, read_model, save
from onnxq.ir.protos import is_large
from onnxq.ir.reader import refuse_overwriting
from onnxq.lowering import AllowedOps
from onnxq.planning.obstacles import refuse_idle_bodies
from onnxq.planning.plan import Plan
from onnxq.preparing.equivalence import find_culprits
from onnxq.preparing.named_passes import as_passes
from onnxq.preparing.preparation import (
    canonical_steps,
    check_float_model,
    check_plan,
    counts_of,
    external_bytes,
    prepare_in_place,
    reference_file,
)
from onnxq.preparing.rewriting import apply_to_float
from onnxq.rewrite import Applied
from onnxq.runtime.engine import Engine, OnnxRuntime, Preloader
from onnxq.runtime.engines import measures_target
from onnxq.runtime.targets import target_named
from onnxq.search.attempts import apply_scheme
from onnxq.search.context import ModelPaths, SearchContext, SearchResult
from onnxq.search.cost_cache import CostCache
from onnxq.search.cross_validation import CrossValidator, observe_groups
from onnxq.search.evaluator import EvaluationSplit
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.refinement import RefinedEncoding
from onnxq.steps.budget import Budget
from onnxq.steps.opening import Model, Opened, opened, opened_samples, parted, rewritten
from onnxq.steps.preparation_check import PreparationCheck, harmful_steps
from onnxq.steps.wanted import Wanted
from onnxq.system.publish import data_file, publish
from onnxq.system.resources import NEVER, Deadline

# Seconds of a look at the speed of the prepared float model, the part of the time left that it may take, and samples.
_LOOK_AT_PREPARATION, _PART_FOR_PREPARATION, _RUN_PREPARED = 1.0, 0.02, 2
# Errors of the user's and of the machine, which leaving out steps may hide and does not mend.
_NOT_OF_STEPS = (MemoryError, OutputError, SchemeError)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A float model that plans are made for.

    Attributes:
        name: where it came from.
        files: the model as it was given, and where the quantized one is built.
        bench: the model as it was prepared, with what is wanted of it.
        replay: a plan to carry out.
        external: bytes of the values that lie outside the model file.
        applied: the user's passes.
        output: the file to write; None writes nothing.
        engine: what runs and times models, where that is not onnxruntime in this process.
        costs: node times that were measured before, to which new ones are added.
        ahead: has the engine load the float model while samples are run.
        is_stored: whether weights are only stored.
        left_out: steps of the canonical form that failed, each with the reason.
    """

    name: str
    files: ModelPaths
    bench: PreparedModel
    replay: Plan | None
    external: int
    applied: tuple[Applied, ...]
    output: Path | None
    engine: Engine | None
    costs: CostCache
    ahead: Preloader
    is_stored: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Evidenced:
    """What samples have shown of a prepared model.

    Attributes:
        bench: plans no integers where no sample came by.
        plan: what the scheme asks for, or the plan to carry out.
        evidence: of what the plan needs.
        samples: those by which it is chosen.
        judged: those by which the result is judged.
        doubts: why they may not be representative, in sentences.
        is_spared: whether those that judge were only kept from those to calibrate by, so that these may be all.
        opened: the samples as they were given, which may be read but once, and those given to judge by.
    """

    bench: PreparedModel
    plan: Plan
    evidence: Evidence
    samples: SampleSource
    judged: SampleSource
    doubts: tuple[str, ...] = ()
    is_spared: bool = False
    opened: Opened | None = None

    @property
    def runnable(self) -> PreparedModel:
        """What builds models that onnxruntime loads, where those of strict types, which are written last, may not."""
        return replace(self.bench, emit=AllowedOps.QDQ) if self.bench.emit is AllowedOps.STRICT else self.bench


@dataclass(frozen=True, eq=False)
class Settled:
    """What is to be written, whose model stands where it is staged.

    Attributes:
        refined: what codes rest on.
        chosen: the plan, and what its model does.
        doubts: sentences about what could not be done.
    """

    refined: RefinedEncoding
    chosen: SearchResult
    doubts: tuple[str, ...] = ()


def prepared(
    model: Model,
    wanted: Wanted,
    folder: Path,
    output: Path | None,
    budget: Budget,
    engine: Engine | None = None,
    costs: CostCache | None = None,
) -> Prepared:
    """Prepare a model in a working folder of its own, and keep it as it was given beside that.

    An attempt that fails overwrites nothing of the attempts before.

    Args:
        model: a float model.
        wanted: what is to become of it.
        folder: holds the working folders of all attempts.
        output: the file to write; None writes nothing.
        budget: the file of node times, and whether time is measured.
        engine: what runs and times models, where that is not onnxruntime in this process.
        costs: node times that were measured before; None reads them from the file of the budget.
    """
    costs = costs or CostCache.opened(Path(budget.costs) if budget.costs is not None else None)
    source = Path(model) if isinstance(model, str | Path) else None
    passes, graph = as_passes(wanted.prepare), as_graph(model)
    if output is not None:
        refuse_overwriting(graph, data_file(output))
    reference, external = reference_file(graph, source, folder), external_bytes(graph)
    # What it refuses is told of the file that users know.
    ahead = Preloader(engine, loads=budget.measures and not is_large(reference))
    ahead.load(reference)
    applied = apply_to_float(graph, passes)
    check_float_model(graph)
    measured = budget.measures and measures_target(target_named(wanted.target), engine)
    folder = Path(mkdtemp(prefix="attempt", dir=folder))
    staged = folder / (output.name if output is not None else "model.onnx")
    bench, left_out = _opened(graph, model, wanted, folder, measured=measured)
    name = str(source) if source else type(model).__name__
    files = ModelPaths(reference, staged, external > 0)
    ahead.expect(bench.prepared)
    given = name, files, bench, wanted.replay, external, applied, output, engine, costs, ahead
    return Prepared(*given, is_stored=bool(wanted.stored_because), left_out=left_out)


def _opened(
    graph: Graph, model: Model, wanted: Wanted, folder: Path, *, measured: bool
) -> tuple[PreparedModel, Mapping[str, str]]:
    """Open the workbench, without the steps of the canonical form that fail, which are returned with their errors."""
    try:
        return opened(graph, wanted, folder, measured=measured), {}
    except Exception as error:
        if isinstance(error, _NOT_OF_STEPS):
            raise
        left_out = _failing_steps(model, wanted, folder, measured=measured) if wanted.replay is None else {}
        # What fails without any of these steps is no fault of theirs.
        if not left_out or not note_failure(f"preparing with {', '.join(left_out)}", error):
            raise
    fewer = replace(wanted, without=wanted.without | left_out.keys())
    return opened(rewritten(model, wanted.prepare), fewer, folder, measured=measured), left_out


def _failing_steps(model: Model, wanted: Wanted, folder: Path, *, measured: bool) -> Mapping[str, str]:
    def fault_without(without: frozenset[str]) -> str:
        fewer = replace(wanted, without=wanted.without | without)
        try:
            opened(rewritten(model, wanted.prepare), fewer, folder, measured=measured)
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            return f"it fails with {type(error).__name__}: {error}"
        return ""

    return find_culprits(canonical_steps(), fault_without)


def samples_of(model: Prepared, data: Data, goal: Goal, budget: Budget) -> Opened:
    """Open the samples to calibrate by, and those to judge by where others were given."""
    return opened_samples(model.bench, data, goal, (budget.collection or Collection()).notice)


def steps_to_leave_out(
    model: Prepared, given: Model, wanted: Wanted, samples: Opened, budget: Budget, deadline: Deadline = NEVER
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
    """
    bench = model.bench
    names = tuple(counts_of(bench.making.applied))
    if bench.is_large or model.replay is not None or not names:
        return {}
    timed = budget.measures and measures_target(bench.target, model.engine)
    seconds = min(_LOOK_AT_PREPARATION, deadline.left * _PART_FOR_PREPARATION) if timed else 0.0
    folder = bench.prepared.parent
    timer = model.engine or OnnxRuntime(folder, budget.threads)
    looked = tuple(evenly(samples[0], _RUN_PREPARED))
    check = PreparationCheck(model.files.reference, looked, seconds, timer, model.costs, compares=not wanted.prepare)

    def prepare(without: frozenset[str]) -> Path:
        if not without and not bench.making.steps:
            return bench.prepared
        graph = rewritten(given, wanted.prepare)
        prepare_in_place(graph, without=without | wanted.without)
        path = folder / "preparation.onnx"
        save(graph, path, external_data=True)
        return path

    return harmful_steps(check, names, prepare)


def evidenced(
    model: Prepared,
    data: Data,
    methods: Sequence[RangeMethod],
    goal: Goal,
    budget: Budget,
    known: Opened | None = None,
) -> Evidenced:
    """Calibrate what the plan needs for any of these range methods, or take the statistics that were given.

    Samples that are known were opened before.

    Raises:
        EngineError: the engine does not start, or does not load the float model, which others are timed beside.
    """
    bench = model.bench
    plan = model.replay or bench.plan({})
    check_plan(plan, bench.graph)
    whole, _ = known = known or samples_of(model, data, goal, budget)
    looked = reject_constant_samples(list(evenly(whole, INSPECTED_SAMPLES)))
    samples, judged = parted(known, looked, goal)
    found = _doubts(model, looked, len(whole), goal)
    if (given := data.evidence) is not None:
        bench.check(given, plan, methods)
    elif budget.collection is None:
        observe_groups(bench, plan, samples, tried(model, budget), methods, budget.progress)
    evidence = given or bench.calibrate(plan, samples, budget.progress, budget.collection, methods)
    model.ahead.check(wait=False)
    if model.replay is not None:
        refuse_idle_bodies(bench.graph, model.replay, evidence)
        return Evidenced(bench, plan, evidence, samples, judged, found, opened=known)
    bench = bench.without_idle_bodies(plan, evidence)
    if bench.scheme.range_method != Extremes():
        with tolerate("the look at mask values"):
            found += tuple(warn_mask_values(evidence, plan.calibrated))
    is_spared = data.validation is None and data.statistics is None and samples is not judged
    return Evidenced(bench, bench.plan({}), evidence, samples, judged, found, is_spared, known)


def _doubts(model: Prepared, looked: Sequence[Sample], count: int, goal: Goal) -> tuple[str, ...]:
    """Return what keeps the samples from being representative, and what judges the model from seeing its noise."""
    reference, bench = model.files.reference, model.bench
    found = find_sample_warnings(reference, looked, count)
    if not bench.is_large:
        with tolerate("the look at unused units"):
            found += tuple(warn_input_units(bench.prepared, bench.graph, list(evenly(looked, RUN_SAMPLES))))
    if goal.metric is None:
        with tolerate("the look at what is not compared"):
            found += tuple(warn_unmeasured_nodes(ComparisonSpec.of(reference, bench.prepared)))
    return found


def settled(
    model: Prepared, seen: Evidenced, goal: Goal, budget: Budget, deadline: Deadline = NEVER, *, is_last: bool = True
) -> Settled:
    """Choose how codes are made and which plan is carried out, and build and verify its model.

    Where nothing follows that the same samples judge, all effort includes ranges of these too.
    """
    chooser = chooser_of(model, seen, goal, budget, deadline)
    if model.replay is not None:
        from onnxq.search.weight_methods import replay

        basis = replay(CrossValidator(chooser.evaluator, seen.samples), seen.plan, seen.evidence)
        model.ahead.check()
        chooser = chooser.with_evidence(basis.evidence)
        return Settled(RefinedEncoding(basis), chooser.follow(seen.plan, basis.recipe))
    first, last = tried(model, budget).split
    refined = chooser.refined(seen.plan, first_recipe(model), first, plenty_of(goal))
    model.ahead.check()
    chooser = chooser.with_evidence(refined.basis.evidence)
    if budget.effort is None:
        found = apply_scheme(chooser, seen.plan, refined.basis.recipe, goal, last, tables="tables" in first.methods)
    else:
        from onnxq.search.attempts import search_plan

        with tolerate("the search for factors of channels that cost no time"):
            refined = chooser.drop_costly_scales(seen.plan, refined, goal)
        given = chooser, seen.plan, refined.basis.recipe, budget.effort, goal, last
        found = search_plan(*given, is_stored=model.is_stored)
    if is_last and seen.is_spared and first.thorough and (first.methods or last.methods):
        from onnxq.search.attempts import refit_on_all_samples

        return Settled(*refit_on_all_samples(chooser, seen.plan, refined, found))
    return Settled(refined, found)


def chooser_of(
    model: Prepared, seen: Evidenced, goal: Goal, budget: Budget, deadline: Deadline = NEVER
) -> SearchContext:
    """Return what chooses codes and plans by measuring; node times are added to those that are known."""
    bench, samples, judge = seen.runnable, seen.samples, judge_of(model, seen, goal, budget, deadline)
    panel = EvaluationSplit(model.files.reference, bench.prepared, samples, tried(model, budget).judges(len(samples)))
    return SearchContext(bench, model.files, samples, judge, seen.evidence, budget.progress, panel, model.costs)


def judge_of(model: Prepared, seen: Evidenced, goal: Goal, budget: Budget, deadline: Deadline = NEVER) -> Verifier:
    """Return what judges the models that are built."""
    # The time of another runtime tells nothing of the target's.
    timed = budget.latency if measures_target(seen.bench.target, model.engine) else 0.0
    judge = Verifier.of(model.files.reference, seen.judged, timed, goal.judged_by)
    timer = model.engine or OnnxRuntime(seen.runnable.prepared.parent, budget.threads)
    return replace(judge, deadline=deadline, engine=model.engine, timer=timer, prepared=seen.bench.prepared)


def methods_tried(model: Prepared, budget: Budget) -> tuple[RangeMethod, ...]:
    """Return the range methods that may be used, for any of which evidence is kept."""
    return FIRST_RANGES if "ranges" in tried(model, budget).methods else first_recipe(model).methods


def first_recipe(model: Prepared) -> Recipe:
    """Return how codes are chosen to begin with."""
    if model.replay is not None:
        return recipe_of(model.replay, 1)
    return Recipe(model.bench.scheme.range_method or MinMax())


def tried(model: Prepared, budget: Budget) -> Accuracy:
    """Return what is tried for accuracy: no other ranges than given ones, and nothing of a plan to carry out."""
    if model.replay is not None:
        return replace(OFF, thorough=model.replay.thorough)
    large, wanted = model.bench.is_large, budget.tried
    # The others build a model of many bytes too often.
    affordable = ("ranges",) if large else METHODS
    given = {"ranges"} if model.bench.scheme.range_method is not None else set[str]()
    methods = tuple(name for name in wanted.methods if name in affordable and name not in given)
    memory = budget.collection.most_bytes if budget.collection is not None else None
    return replace(wanted, methods=methods, memory=wanted.memory if memory is None else memory)


def published(model: Prepared) -> Graph:
    """Put the verified model in its place, and return it."""
    if model.output is None:
        return read_model(onnx.load(model.files.staged))
    publish(model.files.staged, model.output)
    return load(model.output)
