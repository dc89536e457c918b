"""Factors of channels stay where they cost no time, or where fidelity needs them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from onnxq.accuracy.folds import Basis
from onnxq.accuracy.refining import Refined
from onnxq.candidates import Candidate
from onnxq.encoding.migration import Factors, Migration
from onnxq.encoding.recipe import Recipe
from onnxq.evidence.evidence import Evidence
from onnxq.planning.plan import Plan
from onnxq.searching import affording
from onnxq.searching.laboratory import Laboratory

ONE = {"a": Factors(1, np.array([0.5, 1.0]))}
EVERY, SOME, NONE = (Recipe(migration=Migration(one)) for one in (ONE | {"b": Factors(1, np.array([0.25]))}, ONE, {}))
NAMES = {recipe.key: name for recipe, name in ((EVERY, "every"), (SOME, "some"), (NONE, "none"))}


@pytest.mark.parametrize(
    ("speeds", "decibels", "taken"),
    [
        ((2.0, 2.0, 2.0), (10.0, 10.0, 10.0), EVERY),
        ((1.0, 2.0, 2.0), (30.0, 30.0, 25.0), SOME),
        ((1.0, 2.0, 2.0), (30.0, 10.0, 10.0), EVERY),
        ((1.0, 2.0, 2.0), (30.0, 10.0, 25.0), NONE),
        ((1.0, 1.0, 2.0), (30.0, 30.0, 25.0), NONE),
        ((1.0, 2.0, 2.0), (15.0, 12.0, 10.0), SOME),
        ((1.3, 2.0, 2.0), (15.0, 12.0, 10.0), EVERY),
        ((0.5, 0.9, 1.0), (10.0, 12.0, 15.0), NONE),
    ],
)
def test_the_first_that_costs_no_time_is_taken_where_it_is_faithful(
    speeds: tuple[float, ...], decibels: tuple[float, ...], taken: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(NAMES.values())
    monkeypatch.setattr(affording, "folded", lambda *_: SOME.migration)
    monkeypatch.setattr(affording, "costly", lambda *_: [frozenset({"b"})])
    trials = SimpleNamespace(
        bench=SimpleNamespace(graph=None),
        candidate=lambda _, recipe: Candidate(Path(NAMES[recipe.key]), {}),
        sqnr=lambda _, recipe: decibels[names.index(NAMES[recipe.key])],
        noise=lambda *_: np.array([[0.01]]),
    )
    timed = SimpleNamespace(trials=trials, speeds_of=lambda models: [speeds[names.index(one.name)] for one in models])
    laboratory: Any = cast(Laboratory, timed)
    refined = Refined(Basis(EVERY, Evidence()), (), NONE)
    found = affording.affordable(laboratory, Plan((), (), "s", "t"), refined, 20.0)
    assert found.basis.recipe.key == taken.key


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

    trials: Any = SimpleNamespace(sqnr=sqnr)
    found = affording._needed(trials, Plan((), (), "s", "t"), every, [frozenset({name}) for name in names], 20.0)
    assert "".join(sorted(found.migration.factors)) == kept
    assert len(tried) <= 13


def test_of_many_groups_a_few_models_tell_nothing() -> None:
    trials: Any = SimpleNamespace(sqnr=lambda *_: 30.0)
    groups = [frozenset({str(number)}) for number in range(13)]
    every = Recipe(migration=Migration({str(number): Factors(1, np.array([0.5, 1.0])) for number in range(13)}))
    assert affording._needed(trials, Plan((), (), "s", "t"), every, groups, 20.0) is every
    fewer = affording._needed(trials, Plan((), (), "s", "t"), every, groups[:12], 20.0)
    assert fewer.migration.factors.keys() == {"12"}
