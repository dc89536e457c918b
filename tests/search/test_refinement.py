"""Methods one after the other, each kept where it pays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from conftest import MODELS

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.equalization import NOTHING, ChannelScales, Equalization
from onnxq.calibration.methods import Percentile
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.effort import FAST, METHODS, AccuracyEffort
from onnxq.evaluation.goal import Goal
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.plan import Plan
from onnxq.report import Report
from onnxq.search import refinement
from onnxq.search.cross_validation import AlgorithmResult
from onnxq.search.evaluator import BuiltModel
from onnxq.search.profiling import PlanProfiler
from onnxq.search.refinement import CHOOSERS, MethodGain, RefinedEncoding, refine
from onnxq.system.resources import Deadline, silent

SOME = Equalization({"x": ChannelScales(1, np.array([0.5, 1.0]))})
SAMPLES = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:64]]


def report(accuracy: str, samples: int = 64, **further: Any) -> Report:
    budget = Budget(search="off", latency_seconds=0, accuracy=accuracy)
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
    assert set(wheres["equalization"]) == {one.tensor for one in fast.plan.activations if one.factors}
    lefts = {gain.method: gain.left for gain in fast.encoding.gains}
    assert lefts["awq"].startswith("it does not apply: no float data")
    assert lefts["gptq"] == ("it does not apply: no weights of 4 bits or fewer are multiplied by data that can be seen")


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
    basis, before = (
        AlgorithmResult(EncodingConfig(equalization=equalization), CalibrationStatistics())
        for equalization in (SOME, NOTHING)
    )
    gains = (
        MethodGain("ranges", 20.0, 21.0, "MinMax()", 1.0),
        MethodGain("equalization", 21.0, 25.0, "1 tensors", 1.0),
    )
    refined = RefinedEncoding(basis, gains, before.config)
    found = refined.with_factors_of(before.config, 21.0, "it is slow")
    assert found.basis.config.key == before.config.key
    assert found.gains == (gains[0], MethodGain("equalization", 21.0, 21.0, "", 1.0, "it is slow"))
    fewer = refined.with_factors_of(basis.config, 23.0, "others are slow")
    left = MethodGain("equalization", 21.0, 23.0, "1 tensors", 1.0, "others are slow", tuple(SOME.factors))
    assert fewer.gains == (gains[0], left)


@pytest.mark.parametrize(
    ("seconds", "trial", "models"),
    [(math.inf, 1.0, [4]), (60.0, 1.0, [4]), (8.0, 1.0, [3]), (6.5, 1.0, []), (1.0, 1.0, []), (60.0, 20.0, [])],
    ids=["no end", "enough time", "less time", "hardly any time", "no time", "a slow machine"],
)
def test_as_many_models_are_built_as_the_first_says_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch, seconds: float, trial: float, models: list[int]
) -> None:
    now, requested = [0.0], []

    def tried(*_: object) -> float:
        now[0] += trial
        return 20.0

    def choosing(validator: object, plan: object, basis: AlgorithmResult, accuracy: AccuracyEffort) -> AlgorithmResult:
        requested.append(accuracy.models)
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
    refine(validator, plan, AlgorithmResult(EncodingConfig(), CalibrationStatistics()), accuracy, silent, until)
    assert requested == models


def test_without_all_effort_no_method_begins_where_a_trial_takes_as_long_as_many_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refinement, "_MOST_PROCESSES", 1e-3)
    assert report("fast", samples=16, goal=Goal(45.0, force=True)).encoding.gains == ()


def test_all_methods_are_carried_out() -> None:
    # Tables are a matter of plans.
    assert (*CHOOSERS,) == tuple(name for name in METHODS if name != "embeddings")


# Factors of channels stay where they cost no time, or where fidelity needs them.

ONE = {"a": ChannelScales(1, np.array([0.5, 1.0]))}
BOTH = ONE | {"b": ChannelScales(1, np.array([0.25]))}
RECIPE, UNMIGRATED = EncodingConfig(equalization=Equalization(BOTH)), EncodingConfig(ranges=Percentile(99.9))
EVERY, FEWER = "every", "fewer"


def _name(config: EncodingConfig) -> str:
    return EVERY if config.equalization.factors.keys() == BOTH.keys() else FEWER


@pytest.mark.parametrize(
    ("speeds", "decibels", "taken"),
    [
        ((2.0, 2.0), (19.0, 19.0), EVERY),
        ((1.0, 2.0), (30.0, 30.0), FEWER),
        ((1.0, 2.0), (30.0, 10.0), EVERY),
        ((1.0, 2.0), (18.0, 16.0), FEWER),
        ((1.3, 2.0), (18.0, 16.0), EVERY),
        ((0.5, 0.9), (18.0, 16.0), FEWER),
        ((2.0, 2.0), (18.0, 18.5), FEWER),
        ((1.0, 2.0), (15.0, 12.0), EVERY),
        ((math.nan, 2.0), (30.0, 30.0), EVERY),
        ((1.0, math.nan), (30.0, 30.0), EVERY),
    ],
)
@pytest.mark.parametrize("free", [ONE, {}])
def test_factors_that_cost_time_are_taken_where_fidelity_needs_them(
    speeds: tuple[float, ...],
    decibels: tuple[float, ...],
    taken: str,
    free: Mapping[str, ChannelScales],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {EVERY: 0, FEWER: 1}
    monkeypatch.setattr(refinement, "select_free_scales", lambda *_: Equalization(free))
    monkeypatch.setattr(refinement, "costly_scales", lambda *_: [frozenset({"b"})])
    evaluator = SimpleNamespace(
        bench=SimpleNamespace(graph=None),
        candidate=lambda _, config: BuiltModel(Path(_name(config)), {}),
        sqnr=lambda _, config: decibels[places[_name(config)]],
        nsr=lambda *_: np.array([[0.01]]),
    )
    timed = SimpleNamespace(evaluator=evaluator, speeds_of=lambda models: [speeds[places[one.name]] for one in models])
    profiler: Any = cast(PlanProfiler, timed)
    refined = RefinedEncoding(AlgorithmResult(RECIPE, CalibrationStatistics()), (), UNMIGRATED)
    found = refinement.drop_costly_scales(profiler, Plan((), (), "s", "t"), refined, 20.0).basis.config
    assert _name(found) == taken
    # Without factors ranges are those that were found best without.
    assert (found.ranges == UNMIGRATED.ranges) == (not found.equalization.factors)


def test_factors_that_cost_no_node_are_kept_without_a_look_at_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "select_free_scales", lambda graph, plan, equalization: equalization)
    profiler: Any = SimpleNamespace(evaluator=SimpleNamespace(bench=SimpleNamespace(graph=None)))
    refined = RefinedEncoding(AlgorithmResult(RECIPE, CalibrationStatistics()), (), UNMIGRATED)
    assert refinement.drop_costly_scales(profiler, Plan((), (), "s", "t"), refined, 20.0) is refined


@pytest.mark.parametrize(
    ("buys", "kept"),
    [
        ({"b": 3.0, "g": 10.0}, "bg"),
        ({"b": 30.0}, "b"),
        ({"b": 30.0, "g": 30.0}, "g"),
        ({}, ""),
        ({"a": 1.0, "b": 4.0, "c": -5.0, "d": 1.0, "e": 2.0}, "abe"),
        (dict.fromkeys("abcdefgh", 1.0), "abcdefgh"),
    ],
)
def test_factors_that_fidelity_does_not_need_are_left_out(buys: dict[str, float], kept: str) -> None:
    names = "abcdefgh"
    every = EncodingConfig(equalization=Equalization({name: ChannelScales(1, np.array([0.5, 1.0])) for name in names}))
    tried = set()

    def sqnr(_: Plan, config: EncodingConfig) -> float:
        tried.add(config.key)
        return 5.0 + sum(buys.get(name, 0.0) for name in config.equalization.factors)

    evaluator: Any = SimpleNamespace(sqnr=sqnr)
    found = refinement._needed(evaluator, Plan((), (), "s", "t"), every, [frozenset({name}) for name in names], 20.0)
    assert "".join(sorted(found.equalization.factors)) == kept
    assert len(tried) <= 13


def test_of_many_groups_a_few_models_tell_nothing() -> None:
    evaluator: Any = SimpleNamespace(sqnr=lambda *_: 30.0)
    groups = [frozenset({str(number)}) for number in range(13)]
    every = EncodingConfig(
        equalization=Equalization({str(number): ChannelScales(1, np.array([0.5, 1.0])) for number in range(13)})
    )
    assert refinement._needed(evaluator, Plan((), (), "s", "t"), every, groups, 20.0) is every
    fewer = refinement._needed(evaluator, Plan((), (), "s", "t"), every, groups[:12], 20.0)
    assert fewer.equalization.factors.keys() == {"12"}
