"""A recipe says how codes are chosen beyond what the plan says."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from onnxq.algorithms.gptq import Compensation
from onnxq.algorithms.range_choice import RangeChoice
from onnxq.algorithms.recipe import USUAL, Recipe
from onnxq.calibration.methods import MinMax, Percentile

RECIPES = (
    USUAL,
    Recipe(Percentile(99.0)),
    USUAL.with_choice(RangeChoice(MinMax(), {"a": Percentile(99.0)})),
    Recipe(own_ranges={"b": Percentile(99.0)}),
    Recipe(biases={"a": np.ones(2, np.float32)}),
    Recipe(biases={"a": np.zeros(2, np.float32)}),
    Recipe(biases={"b": np.ones(2, np.float32)}),
)


def test_recipes_that_differ_have_different_keys() -> None:
    assert all(one.key != other.key for one, other in combinations(RECIPES, 2))


def test_the_usual_recipe_takes_the_extremes() -> None:
    assert Recipe() == USUAL == Recipe(MinMax())


def test_equal_recipes_have_equal_keys_whatever_the_order() -> None:
    assert Recipe().key == USUAL.key
    methods = {"a": MinMax(), "b": Percentile(99.0)}
    assert Recipe(own_ranges=methods).key == Recipe(own_ranges=dict(reversed(methods.items()))).key
    biases = {"a": np.ones(2), "b": np.zeros(2)}
    assert Recipe(biases=biases).key == Recipe(biases=dict(reversed(biases.items()))).key


def test_compensation_is_a_part_of_the_key() -> None:
    keys = {Recipe(compensation=one).key for one in (None, Compensation(9), Compensation(9, 0.1), Compensation(8))}
    assert len(keys) == 4
