"""Choosing by measuring: one plan after the other is searched, built and judged, until one is faithful enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnxq.algorithms.recipe import Recipe
from onnxq.errors import tolerate
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.latency import NOT_SLOWER
from onnxq.evaluation.verification import Verification
from onnxq.planning.plan import Plan
from onnxq.search.choosing import SEARCH_RUNS, Chooser, Chosen
from onnxq.search.effort import OFF, Accuracy
from onnxq.search.efforts import Effort
from onnxq.search.refining import Refined
from onnxq.search.search import Outcome, as_stored, slower, without_integers
from onnxq.search.trials import Hard, Trials

# How often a plan is searched again where the one before is not faithful enough to samples that it was not chosen by.
_MORE_SEARCHES = 2
# Models of the shortest search.
_SHORTEST = 3
# So many of those samples then join the ones that candidates are tried on.
_JOINING = 4
_UNFAITHFUL = "with integers the model is not faithful enough to samples that it was not chosen by"
# A metric falls as the noise rises, so the noisiest aim is tried first.
_METRIC_AIMS = (8.0, 11.0, 14.0, 17.0, 20.0, 23.0, 26.0, 30.0, 35.0, 40.0)

# Weights that are only stored aim at so many decibels more than the last of these, and than what it was tried for.
_FINER_AIM = 20.0


def choose(
    chooser: Chooser,
    plan: Plan,
    recipe: Recipe,
    effort: Effort,
    goal: Goal,
    last: Accuracy,
    *,
    is_stored: bool = False,
) -> Chosen:
    """Choose by measuring, and step back when the model turns out slower than float, or not faithful enough.

    Args:
        chooser: searches, builds and judges.
        plan: what the scheme wants.
        recipe: how codes are chosen.
        effort: how much to measure.
        goal: how faithful the model has to be. Of a metric's plans the first that loses little enough is taken.
        last: what is tried for the accuracy of the plan that is chosen.
        is_stored: whether weights are only stored.
    """
    # Models that were built to choose codes are none of the search.
    effort = replace(effort, measurements=effort.measurements + chooser.trials.count)
    choice = _Choice(chooser, plan, recipe, effort, goal, last, is_stored)
    return choice.faithful() if goal.metric is None else choice.by_metric()


@dataclass(frozen=True, eq=False)
class _Choice:
    """One choice by measuring: what a chooser is asked for, see `choose`."""

    chooser: Chooser
    plan: Plan
    recipe: Recipe
    effort: Effort
    goal: Goal
    last: Accuracy
    is_stored: bool = False

    def by_metric(self) -> Chosen:
        """Return the first of ever more faithful plans that a metric can be trusted to lose little enough by.

        A plan that reaches the next aims too is not searched for again. In the end weights are only stored, as finely
        as can be; the last one is returned where none will do.
        """
        trials = self.chooser.trials
        reached, number = -math.inf, 0
        for aim in _METRIC_AIMS:
            if aim <= reached:
                continue
            number += 1
            found = self._attempted(trials, aim, number)
            if found.scores is None or found.scores.is_trusted(self.goal.max_drop):
                return found
            if self._is_spent(trials):
                break
            reached = trials.sqnr(found.outcome.plan, self.recipe)
        if not any(one.weights for one in found.outcome.plan.decisions):
            return found
        return self._attempted(trials, max(reached, _METRIC_AIMS[-1]) + _FINER_AIM, number + 1, stored=True)

    def faithful(self) -> Chosen:
        """Return a plan that is faithful to the samples that judge it, or the last that was tried.

        Where it is not, those of them join the trials that it is least faithful to, on which the next plan is to have
        as many decibels more as this one lacked of all; in the end weights are only stored.
        """
        trials, aim = self.chooser.trials, self.chooser.aim(self.goal)
        found = self._attempted(trials, aim)
        for number in range(_MORE_SEARCHES + 1):
            lacking = found.lacks(self.goal) or self._unpromised(trials, found)
            if not lacking or not any(one.weights for one in found.outcome.plan.decisions):
                break
            spent = self._is_spent(trials)
            # Plans are tried on onnxruntime, so another search would not know what is wrong elsewhere.
            last = number == _MORE_SEARCHES or spent or found.verification.disputed
            if last and found.verification.floats_miss(self.goal.min_sqnr):
                # What only stores weights computes in the engine's floats.
                break
            trials = self._with_hardest(trials, found, aim, lacking)
            found = self._attempted(trials, aim, number + 2, stored=last)
            found = replace(found, rounds=number + 2)
            if last:
                break
        return found

    def _is_spent(self, trials: Trials) -> bool:
        """Whether nothing is left to search with again."""
        return trials.count + _SHORTEST > self.effort.measurements or not self.chooser.has_time(SEARCH_RUNS)

    def _unpromised(self, trials: Trials, found: Chosen) -> float:
        """Return by how many decibels neither the samples of the trials nor those that judge can promise the goal.

        The best of plans that all fell short on the former may pass the few that judge by luck.
        """
        wanted, outputs = self.goal.min_sqnr, found.verification.agreement.outputs
        if trials.sqnr(found.outcome.plan, self.recipe) >= wanted:
            return 0.0
        # What labels stand for is a bound itself.
        by_judging = min((one.decibels if one.bound is None else one.bound for one in outputs), default=-math.inf)
        return max(wanted - max(trials.sqnr(found.outcome.plan, found.recipe), by_judging), 0.0)

    def _with_hardest(self, trials: Trials, found: Chosen, aim: float, lacking: float) -> Trials:
        """Return trials on the samples too that a model is least faithful to, in which plans have what it lacked."""
        chooser = self.chooser
        hardest = chooser.judge.hardest(chooser.files.staged, _JOINING)
        easy = len(trials.answered.samples) - (trials.hard.count if trials.hard is not None else 0)
        trials = trials.joined(hardest)
        # Where outputs are large, not all of them join.
        count = len(trials.answered.samples) - easy
        if not count or trials.count >= self.effort.measurements:
            return trials
        enough = trials.sqnr_of_last(found.outcome.plan, found.recipe, count) + lacking
        shift = aim - enough if math.isfinite(enough) else 0.0
        hard = Hard(tuple(trials.answered.views.names), count, shift, trials.answered.files)
        return replace(trials, hard=hard, measured={}, earlier=trials.count)

    def _attempted(self, trials: Trials, aim: float, number: int = 1, *, stored: bool = False) -> Chosen:
        """Search for a plan, build it and judge it; one that is slower than float steps back to stored weights."""
        chooser = self.chooser
        if stored or self.is_stored:
            planner = without_integers(chooser.bench.plan, self.plan, _UNFAITHFUL)
            outcome = chooser.quietest(trials, self.recipe, planner, aim, self.effort.measurements)
        else:
            outcome = self._searched(trials, aim)
        # What is built and judged from here on has its time reserved.
        spent = trials.count >= self.effort.measurements or not chooser.has_time(0)
        refined = self._refined(trials, outcome, aim)
        verification = chooser.built(outcome, refined.basis.recipe, number)
        speed = self._speed(verification)
        if outcome.plan.decodes and (speed < 1 or not self._keeps_up(verification)):
            weighed = tuple(replace(point, chosen=False) for point in outcome.frontier)
            outcome = replace(self._stored(trials, outcome, speed, aim), frontier=weighed)
            refined = self._refined(trials, outcome, aim)
            verification = chooser.built(outcome, refined.basis.recipe, number)
        scores = chooser.judge.scores(chooser.files.staged, number)
        outcome = replace(outcome, spent=spent)
        given = refined.basis.recipe, outcome, verification, scores, refined.gains, trials.answered.samples
        return Chosen(*given, keeps_up=self._keeps_up(verification))

    def _searched(self, trials: Trials, aim: float) -> Outcome:
        """Search for a plan; where the search fails, leave out what hurts most of all that the scheme wants."""
        chooser = self.chooser
        with tolerate("the search for the fastest plan"):
            preferred = chooser.smaller(trials, self.recipe, self.effort, aim) if self.goal.prefers_size else chooser
            return preferred.search(replace(trials, bench=preferred.bench), self.recipe, self.effort, aim)
        return chooser.quietest(trials, self.recipe, chooser.bench.plan, aim, self.effort.measurements)

    def _refined(self, trials: Trials, outcome: Outcome, aim: float) -> Refined:
        """Return how the codes of a plan are chosen best; of a faithful one only with all effort."""
        spared = not self.last.methods or (not self.last.thorough and trials.sqnr(outcome.plan, self.recipe) >= aim)
        return self.chooser.refined(outcome.plan, self.recipe, OFF if spared else self.last)

    def _stored(self, trials: Trials, outcome: Outcome, speed: float, aim: float) -> Outcome:
        """Return a plan that computes in float: with the same codes where these are faithful, else searched."""
        reason = slower(speed)
        same = self.chooser.bench.plan(as_stored(outcome.plan, self.plan, reason))
        if trials.sqnr(same, self.recipe) >= aim:
            return replace(outcome, plan=same, regions=(), times=())
        if self.goal.prefers_size:
            return outcome
        planner = without_integers(self.chooser.bench.plan, self.plan, reason)
        return self.chooser.quietest(trials, self.recipe, planner, aim, self.effort.measurements)

    def _keeps_up(self, verification: Verification) -> bool:
        """Whether the model that is staged is not slower than float, as this look at it and no earlier one has it."""
        return not self.chooser.measurable or verification.keeps_up

    def _speed(self, verification: Verification) -> float:
        """Return how many times as fast as float the model that is staged is, by what was found of it first.

        Plans are chosen by it, so that the same one is chosen the next time. It is 1 where nothing tells, and
        `NOT_SLOWER` at most where the model is not shown to keep up.
        """
        if verification.latency is None or not self.chooser.measurable:
            # Another runtime's time tells nothing of the target's.
            return 1.0
        speed = verification.latency.speed
        if not verification.keeps_up:
            speed = min(speed, NOT_SLOWER)
        elif verification.kernels.computes_in_float:
            # It is as fast as float, whatever chance made of that.
            speed = max(speed, 1.0)
        return self.chooser.laboratory(self.recipe).found_speed(self.chooser.files.staged, speed)
