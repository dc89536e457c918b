"""A recipe says how codes are chosen beyond what the plan says."""

from __future__ import annotations

from onnxq.encoding.recipe import USUAL, Recipe
from onnxq.evidence.ranges import MinMax, Percentile


def test_the_usual_recipe_takes_the_extremes() -> None:
    assert Recipe() == USUAL == Recipe(MinMax())


def test_recipes_that_give_other_codes_have_other_keys() -> None:
    assert Recipe().key == USUAL.key
    assert len({USUAL.key, Recipe(Percentile(99.9)).key, Recipe(Percentile(99.99)).key}) == 3
