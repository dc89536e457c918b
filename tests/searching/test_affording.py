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
