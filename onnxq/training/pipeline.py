"""train() and quantize_and_train(): the steps of quantize() with training before the report."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

from onnxq.algorithms.equalization import Equalization
from onnxq.calibration.data import Data, SamplesLike
from onnxq.config.scheme import Scheme
from onnxq.data.arrays import npy_array
from onnxq.data.samples import evenly
from onnxq.errors import SchemeError
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.goal import MINIMUM_SQNR, Goal
from onnxq.evaluation.reference import ReferenceModel, run_beside
from onnxq.evaluation.sqnr import nsr_by_sample
from onnxq.evaluation.verification import COMPARED_SAMPLES, Verifier
from onnxq.numerics.affine import decibels
from onnxq.pipeline.prepare import Model, check_output_path
from onnxq.pipeline.quantization import Quantized, run_steps
from onnxq.pipeline.request import Budget, QuantizationRequest
from onnxq.pipeline.search import SearchedModel, search_for_plan, verifier_for
from onnxq.planning.plan import Plan
from onnxq.runtime.targets import DEFAULT_TARGET
from onnxq.search.results import MethodGain, SearchResult
from onnxq.training import require_torch
from onnxq.training.settings import Training


def train(
    model: Model,
    data: SamplesLike | Data,
    output: str | Path | None = None,
    *,
    scheme: str | Scheme | Plan | QuantizationRequest = "int8",
    goal: float | Goal = MINIMUM_SQNR,
    budget: Budget | None = None,
    training: Training | None = None,
) -> Quantized:
    """Quantize a float model as quantize() does, and train the quantized parts before the result is verified.

    The plan is that of the scheme, or the given one, and stays. Trained parameters are kept only if they are better on
    the holdout.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        data: samples, as quantize() takes them.
        output: file to write; None writes nothing.
        scheme: a preset's name, a Scheme, a Plan, or a QuantizationRequest with one of these, the target and passes.
        goal: the least SQNR of the worst output in dB, or a Goal.
        budget: only accuracy, latency, engine, collection and progress are used; None takes the defaults.
        training: the settings; None trains towards the outputs of the float model.

    Returns:
        The quantized graph, and the report with the gain of training.

    Raises:
        SchemeError: torch is not installed, or as in quantize().
        ModelError: no parameter of the model can be trained, or as in quantize().
        AccuracyError: the result misses the goal; nothing was written.
        DataError, OutputError, PassError: as in quantize().

    >>> train("model.onnx", "data/", "model.int4.onnx", scheme="int4-block32")  # doctest: +SKIP
    """
    require_torch()
    from onnxq.training.losses import load_loss

    data, budget = Data.of(data), replace(budget or Budget(), search="off", time_limit=math.inf)
    goal, training = Goal.of(goal), training or Training()
    # Files are checked before anything takes time.
    if training.labels is not None:
        # There is a label for each row.
        data = replace(data, batch=data.batch or 1)
        npy_array(Path(training.labels))
    if training.loss:
        load_loss(training.loss)
    output = check_output_path(output, model, budget, data)

    trainer = partial(train_chosen, goal=goal, budget=budget, training=training)
    return run_steps(model, data, output, _wanted(scheme), goal, budget, trainer)


def quantize_and_train(
    model: Model,
    data: SamplesLike | Data,
    output: str | Path | None = None,
    *,
    scheme: str | Scheme | QuantizationRequest = "int8",
    goal: float | Goal = MINIMUM_SQNR,
    budget: str | Budget = "fast",
    training: Training | None = None,
) -> Quantized:
    """Quantize a float model as quantize() does, and keep a faster plan if it meets the goal after training.

    A faster plan that misses the goal a little is trained. It is written if it then meets the goal and is still faster.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        data: samples, as quantize() takes them.
        output: file to write; None writes nothing.
        scheme: a preset's name, a Scheme, or a QuantizationRequest with one of these, the target and passes.
        goal: the least SQNR of the worst output in dB, or a Goal.
        budget: ``fast``, ``full`` or a Budget with a search that measures latency.
        training: the settings.

    Returns:
        The quantized graph, and the report. If no faster plan was kept, a warning says why.

    Raises:
        SchemeError: torch is not installed, there is a plan or no search, or as in quantize().
        AccuracyError: the result misses the goal; nothing was written.
        ModelError, DataError, OutputError, PassError: as in quantize().
    """
    require_torch()

    wanted, data, budget = _wanted(scheme), Data.of(data), Budget.of(budget)
    _check_search(wanted, budget)
    goal, training = Goal.of(goal), training or Training()

    output = check_output_path(output, model, budget, data)
    trainer = partial(search_and_train, goal=goal, budget=budget, training=training)
    return run_steps(model, data, output, wanted, goal, budget, trainer)


def _wanted(scheme: str | Scheme | Plan | QuantizationRequest) -> QuantizationRequest:
    return scheme if isinstance(scheme, QuantizationRequest) else QuantizationRequest.of(scheme, DEFAULT_TARGET, ())


def _check_search(wanted: QuantizationRequest, budget: Budget) -> None:
    """Refuse requests in which no faster plan can be found."""
    if wanted.replay is not None:
        raise SchemeError("a given plan is applied as it is, so none is faster; train it with onnxq train --plan")
    if not budget.measures:
        raise SchemeError(
            "training for a faster plan needs a search and time for latency; leave out --search off and "
            "--latency-seconds 0, or use onnxq train"
        )
    if budget.time_limit < math.inf:
        raise SchemeError("training has its own limit, --train MINUTES; leave out --time-limit")


# The model without training was evaluated on the holdout before: this is the second look.
_SECOND_LOOK = 2


def train_chosen(settled: SearchedModel, goal: Goal, budget: Budget, training: Training) -> SearchedModel:
    """Train the encodings of the chosen plan, and take the trained model unless it is worse on the holdout.

    Args:
        settled: the chosen plan, which stays, with its encodings; the samples for training, and the holdout.
        goal: the goal that both models are evaluated for.
        budget: the time for latency, and the progress function.
        training: the settings.

    Returns:
        The result with the gain of training, and warnings about parts that were not trained.
    """
    from onnxq.training.fitting import train_encodings

    before, seen = settled.result, settled.seen
    bench, candidate, reference = seen.bench, before.candidate, seen.model.reference
    plan, recipe = candidate.plan, candidate.recipe
    encodings = bench.encodings_of(plan, recipe.statistics, recipe.config)
    done = train_encodings(
        bench.graph_for(plan), plan, encodings, reference, seen.samples.fit, training, budget.progress
    )
    if done.encodings is encodings:
        return _with_gain(settled, before, done.gain, done.warnings)
    verifier = verifier_for(seen, goal, budget)
    nsr = _nsr(verifier, candidate.path)
    trained = candidate.path.with_name("trained") / candidate.path.name
    trained.parent.mkdir(exist_ok=True)
    bench.write(plan, done.encodings, trained, external_data=seen.model.external_data)
    budget.progress("verify", 0, 0)
    verification, scores = verifier.verified(trained, _SECOND_LOOK), verifier.scores(trained, _SECOND_LOOK)
    factors = recipe.config.equalization.factors
    learned = Equalization({name: done.encodings.factors.get(name, scales) for name, scales in factors.items()})
    recipe = replace(recipe, config=replace(recipe.config, equalization=learned))
    after = replace(
        before,
        candidate=replace(candidate, path=trained, recipe=recipe),
        verification=verification,
        scores=scores,
    )
    if _is_worse(after, before, goal, higher_error=not _nsr(verifier, trained) <= nsr):
        gain = replace(done.gain, after=done.gain.before, kept="", left="worse on the holdout")
        return _with_gain(settled, before, gain, done.warnings)
    return _with_gain(settled, after, done.gain, done.warnings)


def _with_gain(
    settled: SearchedModel, result: SearchResult, gain: MethodGain, warnings: tuple[str, ...]
) -> SearchedModel:
    return replace(settled, result=result.with_gain(gain), warnings=(*settled.warnings, *warnings))


def _nsr(verifier: Verifier, candidate: Path) -> float:
    """Return the error of the worst output on the holdout, which a few flipped decisions hardly change."""
    views = ComparisonSpec.of(verifier.reference, candidate)
    reference, session = ReferenceModel(verifier.reference, views), views.open(candidate)
    pairs = list(run_beside(reference, session, evenly(verifier.samples, COMPARED_SAMPLES)))
    return float(nsr_by_sample(pairs).sum(0).max(initial=0.0))


def _is_worse(after: SearchResult, before: SearchResult, goal: Goal, *, higher_error: bool) -> bool:
    """True if training lowered the metric or raised the error, or misses a goal that was met."""
    if after.scores is not None and before.scores is not None:
        return after.scores.candidate < before.scores.candidate
    return higher_error or after.lacks(goal) > before.lacks(goal) == 0


# A faster plan that meets the goal after training.

# A usual gain of training. The gain of a model is known once one of its plans was trained.
_USUAL_GAIN_DB = 2.0
_ATTEMPTS = 2
# A smaller gain is within the variation between samples.
_MIN_GAIN_DB = 0.5


def search_and_train(first: SearchedModel, goal: Goal, budget: Budget, training: Training) -> SearchedModel:
    """Search for a faster plan that misses the goal a little, train it, and keep it if it then meets the goal.

    The first plan may miss the goal by the usual gain, the next one by the gain that training had on the first. If a
    plan is not faster, the next may miss the goal by twice as much.

    Args:
        first: the fastest plan that meets the goal without training; the samples for training, and the holdout.
        goal: the goal.
        budget: time and effort of each search.
        training: the settings; each attempt gets an equal part of the minutes.
    """
    worst, below = _decibels(first.result), _USUAL_GAIN_DB
    reached = worst if goal.metric is not None else min(goal.min_sqnr, worst)
    minutes = None if training.minutes is None else training.minutes / _ATTEMPTS
    best = first
    gained = 0.0
    warning = "no faster plan is close enough to the goal for training"
    for _ in range(_ATTEMPTS):
        less = search_for_plan(first.seen, Goal(reached - below, force=True), budget)
        same = less.result.candidate.plan.effect == best.result.candidate.plan.effect
        if same or not _is_faster(less.result, best.result):
            if gained:
                break
            below *= 2
            continue
        after = train_chosen(less, goal, budget, replace(training, minutes=minutes))
        gained = _decibels(after.result) - _decibels(less.result)
        if not _meets_goal(after.result, goal):
            sqnr = _decibels(after.result)
            warning = f"a faster plan had {decibels(sqnr)} after training, which misses the goal, so it was not taken"
            if not _MIN_GAIN_DB < gained < below:
                break
        elif not _is_faster(after.result, best.result):
            warning = "a trained plan measured no faster, so it was not taken"
            break
        else:
            best = after
            if gained < below + _MIN_GAIN_DB:
                break
        below = gained
    return best if best is not first else replace(first, warnings=(*first.warnings, warning))


def _decibels(result: SearchResult) -> float:
    return result.verification.agreement.worst_sqnr


def _is_faster(result: SearchResult, reference: SearchResult) -> bool:
    latency, before = result.verification.latency, reference.verification.latency
    return latency is not None and before is not None and latency.speed > before.speed


def _meets_goal(result: SearchResult, goal: Goal) -> bool:
    if goal.metric is None:
        return result.lacks(goal) == 0
    return result.scores is not None and result.scores.is_trusted(goal.max_drop)
