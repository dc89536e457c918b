"""EncodingConfig, and how a plan file records it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from observations import statistics

from onnxq.algorithms.encoding_config import DEFAULT_CONFIG, EncodingConfig, attach_encodings, config_from_plan
from onnxq.algorithms.equalization import ChannelScales, Equalization
from onnxq.algorithms.gptq import Gptq
from onnxq.calibration.methods import MinMax, Percentile
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.errors import SchemeError
from onnxq.planning.plan import Activation, AwqScales, Damping, Decision, Mean, Plan, Preparation

RECIPES = (
    DEFAULT_CONFIG,
    EncodingConfig(Percentile(99.0)),
    EncodingConfig(own_ranges={"a": Percentile(99.0)}),
    EncodingConfig(own_ranges={"b": Percentile(99.0)}),
)


def test_recipes_that_differ_have_different_keys() -> None:
    assert all(one.key != other.key for one, other in combinations(RECIPES, 2))


def test_the_usual_recipe_takes_the_extremes() -> None:
    assert EncodingConfig() == DEFAULT_CONFIG == EncodingConfig(MinMax())


def test_equal_recipes_have_equal_keys_whatever_the_order() -> None:
    assert EncodingConfig().key == DEFAULT_CONFIG.key
    methods = {"a": MinMax(), "b": Percentile(99.0)}
    assert EncodingConfig(own_ranges=methods).key == EncodingConfig(own_ranges=dict(reversed(methods.items()))).key


def test_compensation_is_a_part_of_the_key() -> None:
    keys = {EncodingConfig(gptq=one).key for one in (None, Gptq(9), Gptq(9, 0.1), Gptq(8))}
    assert len(keys) == 4


# Recipes in plans: noted, and found in them again.

ACTIVATIONS = (
    Activation("a", QuantSpec("int8"), "a"),
    Activation("b", QuantSpec("int8"), "b"),
    Activation("c", QuantSpec("int8"), "c", fixed_range=(0.0, 1.0)),
)
PLAN = Plan((Decision("n", "Conv", Mode.STATIC, "why", mean=Mean("a", 1)),), ACTIVATIONS, "int8", "onnxruntime-cpu")
VALUES = {"a": np.array([-1.0, 0.1, 3.0], np.float32), "b": np.array([-0.3, 7.0], np.float32)}
SEEN = statistics(VALUES, "range", "histogram")


def test_a_plan_says_by_which_recipe_and_from_which_ranges_it_is_carried_out() -> None:
    factors = Equalization(
        {"b": ChannelScales(1, np.array([0.3, 1.0])), "elsewhere": ChannelScales(1, np.array([0.5]))}
    )
    config = EncodingConfig(
        Percentile(99.9),
        {"b": MinMax()},
        Gptq.of_samples(9, 0.1, 4),
        factors,
        Equalization({"f": ChannelScales(1, np.array([2.0, 0.5]))}),
    )
    found = attach_encodings(PLAN, config, SEEN)
    assert (found.ranges, [one.ranges for one in found.activations]) == ("percentile:99.9", ["", "minmax", ""])
    assert found.by_tensor["b"].found_range == tuple(map(float, np.float32([-0.3, 7.0])))
    assert found.by_tensor["b"].factors == (0.3, 1.0)
    assert found.by_tensor["c"].found_range is None
    assert found.accuracy == ("equalization", "awq", "gptq")
    assert found.awq == (AwqScales("f", (2.0, 0.5)),)
    assert found.damping == Damping(0.1, 4)
    again = config_from_plan(found, 9)
    assert (again.gptq, again.equalization.key) == (config.gptq, factors.select(["b"]).key)
    carried_out = replace(found, preparation=Preparation("", "", 17))
    assert attach_encodings(carried_out, again, CalibrationStatistics()) == carried_out


def test_means_that_nobody_observed_correct_no_bias() -> None:
    assert attach_encodings(PLAN, DEFAULT_CONFIG, SEEN).decisions[0].mean is None


def test_a_known_range_needs_no_method_and_an_open_one_the_plans() -> None:
    found = replace(
        attach_encodings(PLAN, DEFAULT_CONFIG, SEEN), ranges="of_a_plugin", preparation=Preparation("", "", 17)
    )
    assert config_from_plan(found, 1).key == DEFAULT_CONFIG.key
    edited = replace(found, activations=tuple(replace(one, found_range=None) for one in found.activations))
    assert config_from_plan(replace(edited, ranges="minmax"), 1).key == DEFAULT_CONFIG.key
    with pytest.raises(SchemeError, match="Calibration method 'of_a_plugin' is unknown"):
        config_from_plan(edited, 1)
