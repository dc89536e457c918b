"""The step of training, between what was chosen and what is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onnxq.algorithms.migration import Migration
from onnxq.data.samples import evenly
from onnxq.evaluation.comparison import Views
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.reference import Reference, run_beside
from onnxq.evaluation.sqnr import noise_by_sample
from onnxq.evaluation.verification import COMPARED_SAMPLES, Judge
from onnxq.search.context import Chosen
from onnxq.search.refinement import Gain
from onnxq.steps.budget import Budget
from onnxq.steps.steps import Evidenced, Prepared, Settled, judge_of
from onnxq.training.fitting import fitted
from onnxq.training.settings import Training

# The samples that judge have judged the model without training already.
_SECOND = 2


def trained(
    model: Prepared,
    seen: Evidenced,
    settled: Settled,
    goal: Goal,
    budget: Budget,
    training: Training,
    state: Path | None,
) -> Settled:
    """Train the codes of what was chosen, and build and judge its model, which is taken unless it is worse.

    Args:
        model: the float model.
        seen: the samples to learn from, and those by which both models are judged.
        settled: the plan, which stays, and what its codes rest on.
        goal: what the models are judged by.
        budget: the time for latency, and who is told of progress.
        training: how.
        state: a folder that keeps where training stands; None keeps nothing.

    Returns:
        What was settled, with the gain of training, and sentences about what could not be learned.
    """
    found, bench, files = settled.chosen, seen.runnable, model.files
    plan = found.outcome.plan
    before = bench.codes_of(plan, settled.refined.basis.evidence, found.recipe)
    done = fitted(bench.graph_for(plan), plan, before, files.reference, seen.samples, training, state, budget.progress)
    if done.codes is before:
        return _with_gain(settled, found, done.gain, done.doubts)
    judge = judge_of(model, seen, goal, budget)
    noise = _noise(judge, files.staged)
    bench.write(plan, done.codes, files.staged, external_data=files.external_data)
    budget.progress("verify", 0, 0)
    verification, scores = judge.verified(files.staged, _SECOND), judge.scores(files.staged, _SECOND)
    learned = Migration(
        {name: done.codes.factors.get(name, one) for name, one in found.recipe.migration.factors.items()}
    )
    recipe = replace(found.recipe, migration=learned)
    after = replace(found, recipe=recipe, verification=verification, scores=scores, codes=done.codes)
    if _is_worse(after, found, goal, louder=not _noise(judge, files.staged) <= noise):
        bench.write(plan, before, files.staged, external_data=files.external_data)
        left = "worse on the samples that judge"
        return _with_gain(settled, found, replace(done.gain, after=done.gain.before, kept="", left=left), done.doubts)
    return _with_gain(settled, after, done.gain, done.doubts)


def _with_gain(settled: Settled, taken: Chosen, gain: Gain, doubts: tuple[str, ...]) -> Settled:
    chosen = replace(taken, gains=(*taken.gains, gain))
    return replace(settled, chosen=chosen, doubts=(*settled.doubts, *doubts))


def _noise(judge: Judge, candidate: Path) -> float:
    """Return the noise of the worst output on the samples that judge, where few answers that turn over say little."""
    views = Views.of(judge.reference, candidate)
    one, other = Reference(judge.reference, views), views.open(candidate)
    pairs = list(run_beside(one, other, evenly(judge.samples, COMPARED_SAMPLES)))
    return float(noise_by_sample(pairs).sum(0).max(initial=0.0))


def _is_worse(after: Chosen, before: Chosen, goal: Goal, *, louder: bool) -> bool:
    """Whether training cost what the goal counts, or the goal itself."""
    if after.scores is not None and before.scores is not None:
        return after.scores.candidate < before.scores.candidate
    return louder or after.lacks(goal) > before.lacks(goal) == 0
