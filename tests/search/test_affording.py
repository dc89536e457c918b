"""Factors of channels stay where they cost no time, or where fidelity needs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from onnxq.algorithms.encoding_config import Recipe
from onnxq.algorithms.equalization import Factors, Migration
from onnxq.calibration.methods import Percentile
from onnxq.calibration.statistics import Evidence
from onnxq.planning.plan import Plan
from onnxq.search import refinement
from onnxq.search.cross_validation import AlgorithmResult
from onnxq.search.evaluator import BuiltModel
from onnxq.search.profiling import PlanProfiler
from onnxq.search.refinement import RefinedEncoding

ONE = {"a": Factors(1, np.array([0.5, 1.0]))}
BOTH = ONE | {"b": Factors(1, np.array([0.25]))}
RECIPE, UNMIGRATED = Recipe(migration=Migration(BOTH)), Recipe(ranges=Percentile(99.9))
EVERY, FEWER = "every", "fewer"


def _name(recipe: Recipe) -> str:
    return EVERY if recipe.migration.factors.keys() == BOTH.keys() else FEWER


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
    free: Mapping[str, Factors],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {EVERY: 0, FEWER: 1}
    monkeypatch.setattr(refinement, "folded", lambda *_: Migration(free))
    monkeypatch.setattr(refinement, "costly", lambda *_: [frozenset({"b"})])
    evaluator = SimpleNamespace(
        bench=SimpleNamespace(graph=None),
        candidate=lambda _, recipe: BuiltModel(Path(_name(recipe)), {}),
        sqnr=lambda _, recipe: decibels[places[_name(recipe)]],
        noise=lambda *_: np.array([[0.01]]),
    )
    timed = SimpleNamespace(evaluator=evaluator, speeds_of=lambda models: [speeds[places[one.name]] for one in models])
    profiler: Any = cast(PlanProfiler, timed)
    refined = RefinedEncoding(AlgorithmResult(RECIPE, Evidence()), (), UNMIGRATED)
    found = refinement.drop_costly_scales(profiler, Plan((), (), "s", "t"), refined, 20.0).basis.recipe
    assert _name(found) == taken
    # Without factors ranges are those that were found best without.
    assert (found.ranges == UNMIGRATED.ranges) == (not found.migration.factors)


def test_factors_that_cost_no_node_are_kept_without_a_look_at_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "folded", lambda graph, plan, migration: migration)
    profiler: Any = SimpleNamespace(evaluator=SimpleNamespace(bench=SimpleNamespace(graph=None)))
    refined = RefinedEncoding(AlgorithmResult(RECIPE, Evidence()), (), UNMIGRATED)
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
    every = Recipe(migration=Migration({name: Factors(1, np.array([0.5, 1.0])) for name in names}))
    tried = set()

    def sqnr(_: Plan, recipe: Recipe) -> float:
        tried.add(recipe.key)
        return 5.0 + sum(buys.get(name, 0.0) for name in recipe.migration.factors)

    evaluator: Any = SimpleNamespace(sqnr=sqnr)
    found = refinement._needed(evaluator, Plan((), (), "s", "t"), every, [frozenset({name}) for name in names], 20.0)
    assert "".join(sorted(found.migration.factors)) == kept
    assert len(tried) <= 13


def test_of_many_groups_a_few_models_tell_nothing() -> None:
    evaluator: Any = SimpleNamespace(sqnr=lambda *_: 30.0)
    groups = [frozenset({str(number)}) for number in range(13)]
    every = Recipe(migration=Migration({str(number): Factors(1, np.array([0.5, 1.0])) for number in range(13)}))
    assert refinement._needed(evaluator, Plan((), (), "s", "t"), every, groups, 20.0) is every
    fewer = refinement._needed(evaluator, Plan((), (), "s", "t"), every, groups[:12], 20.0)
    assert fewer.migration.factors.keys() == {"12"}
