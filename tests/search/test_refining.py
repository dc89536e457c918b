"""Methods one after the other, each kept where it pays."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxq import quantize
from onnxq.algorithms.encoding_config import Recipe
from onnxq.algorithms.equalization import NOTHING, Factors, Migration
from onnxq.calibration.statistics import Evidence
from onnxq.config.effort import FAST, Accuracy
from onnxq.evaluation.goal import Goal
from onnxq.report import Report
from onnxq.search import refinement
from onnxq.search.cross_validation import AlgorithmResult
from onnxq.search.refinement import CHOOSERS, MethodGain, RefinedEncoding, refine
from onnxq.steps.request import Budget
from onnxq.system.resources import Deadline, silent

SOME = Migration({"x": Factors(1, np.array([0.5, 1.0]))})
MODELS = Path(__file__).parents[2] / "models"
SAMPLES = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:64]]


def report(accuracy: str, samples: int = 64, **further: Any) -> Report:
    budget = Budget(search="off", latency=0, accuracy=accuracy)
    return quantize(MODELS / "mobilenet.onnx", SAMPLES[:samples], budget=budget, **further).report


@pytest.fixture(scope="module")
def fast() -> Report:
    # More than is reached, so that nothing is spared.
    return report("fast", goal=Goal(45.0, force=True))


def test_what_each_method_bought_is_told_in_order(fast: Report) -> None:
    assert tuple(gain.method for gain in fast.encoding.gains) == tuple(CHOOSERS)
    for before, after in zip(fast.encoding.gains, fast.encoding.gains[1:], strict=False):
        assert after.before == before.after
    for gain in fast.encoding.gains:
        assert gain.kept or gain.after == gain.before
        assert gain.kept or not gain.where
    wheres = {gain.method: gain.where for gain in fast.encoding.gains if gain.kept}
    assert set(wheres["migration"]) == {one.tensor for one in fast.plan.activations if one.factors}
    lefts = {gain.method: gain.left for gain in fast.encoding.gains}
    assert lefts["scaling"].startswith("it does not apply: no float data")
    assert lefts["compensation"] == (
        "it does not apply: no weights of 4 bits or fewer are multiplied by data that can be seen"
    )
    assert lefts["bias"] in ("", "no less noise")


def test_methods_that_are_kept_make_the_model_more_faithful(fast: Report) -> None:
    assert fast.encoding.gains[-1].after > fast.encoding.gains[0].before + 1
    assert fast.agreement.worst_sqnr > report("off").agreement.worst_sqnr + 1


def test_the_plan_says_what_was_kept_and_can_be_carried_out_again(fast: Report) -> None:
    again = report("off", scheme=fast.plan)
    assert fast.plan.accuracy
    assert again.plan == fast.plan
    assert again.agreement == fast.agreement


@pytest.mark.parametrize(("accuracy", "samples"), [("off", 4), ("fast", 1)])
def test_nothing_is_tried_without_effort_or_with_a_single_sample(accuracy: str, samples: int) -> None:
    assert report(accuracy, samples, goal=Goal(force=True)).encoding.gains == ()


def test_what_costs_time_can_be_left_after_all() -> None:
    basis, before = (AlgorithmResult(Recipe(migration=migration), Evidence()) for migration in (SOME, NOTHING))
    gains = (MethodGain("ranges", 20.0, 21.0, "MinMax()", 1.0), MethodGain("migration", 21.0, 25.0, "1 tensors", 1.0))
    refined = RefinedEncoding(basis, gains, before.recipe)
    found = refined.with_factors_of(before.recipe, 21.0, "it is slow")
    assert found.basis.recipe.key == before.recipe.key
    assert found.gains == (gains[0], MethodGain("migration", 21.0, 21.0, "", 1.0, "it is slow"))
    fewer = refined.with_factors_of(basis.recipe, 23.0, "others are slow")
    left = MethodGain("migration", 21.0, 23.0, "1 tensors", 1.0, "others are slow", tuple(SOME.factors))
    assert fewer.gains == (gains[0], left)


@pytest.mark.parametrize(
    ("seconds", "trial", "models"),
    [(math.inf, 1.0, [4]), (60.0, 1.0, [4]), (8.0, 1.0, [3]), (6.5, 1.0, []), (1.0, 1.0, []), (60.0, 20.0, [])],
    ids=["no end", "enough time", "less time", "hardly any time", "no time", "a slow machine"],
)
def test_as_many_models_are_built_as_the_first_says_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch, seconds: float, trial: float, models: list[int]
) -> None:
    now, asked = [0.0], []

    def tried(*_: object) -> float:
        now[0] += trial
        return 20.0

    def choosing(validator: object, plan: object, basis: AlgorithmResult, accuracy: Accuracy) -> AlgorithmResult:
        asked.append(accuracy.models)
        return basis

    monkeypatch.setattr(refinement.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(refinement, "_decibels", tried)
    monkeypatch.setattr(refinement, "_is_free", lambda plan: True)
    monkeypatch.setattr(refinement, "CHOOSERS", {"ranges": choosing})
    validator: Any = SimpleNamespace(
        samples=[0, 1], evaluator=SimpleNamespace(answered=SimpleNamespace(seconds=0.1, samples=[0, 1]))
    )
    until = Deadline.within(seconds)
    plan: Any = None
    accuracy = replace(FAST, methods=("ranges",), thorough=True)
    refine(validator, plan, AlgorithmResult(Recipe(), Evidence()), accuracy, silent, until)
    assert asked == models


def test_without_all_effort_no_method_begins_where_a_trial_takes_as_long_as_many_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refinement, "_MOST_PROCESSES", 1e-3)
    assert report("fast", samples=16, goal=Goal(45.0, force=True)).encoding.gains == ()
