"""Presets: what each name stands for."""

from __future__ import annotations

import pytest

from onnxq.errors import SchemeError
from onnxq.presets import PRESETS, preset_named
from onnxq.scheme import Granularity, Mode


@pytest.mark.parametrize(
    ("name", "mode", "per"),
    [
        ("int8", Mode.STATIC, Granularity.CHANNEL),
        ("int8-per-tensor", Mode.STATIC, Granularity.TENSOR),
        ("int8-storage", Mode.STORAGE, Granularity.CHANNEL),
    ],
)
def test_a_preset_is_one_rule_for_all_nodes(name: str, mode: Mode, per: Granularity) -> None:
    rule = preset_named(name).rule_for("Conv", "any", ())
    assert rule.mode is mode
    assert rule.weight is not None
    assert (rule.weight.format, rule.weight.per, rule.weight.symmetric) == ("int8-narrow", per, True)


def test_presets_are_listed_by_their_names() -> None:
    assert [scheme.name for scheme in PRESETS.values()] == list(PRESETS)


def test_the_per_tensor_preset_has_one_scale_for_each_weight(perceptron, plan_of) -> None:
    pers = {
        weight.spec.per for one in plan_of(perceptron, scheme="int8-per-tensor").decisions for weight in one.weights
    }
    assert pers == {Granularity.TENSOR}


def test_an_unknown_preset_is_told_with_the_nearest() -> None:
    with pytest.raises(SchemeError, match=r"^preset 'int8_storage' is not one of .*; did you mean 'int8-storage'\?$"):
        preset_named("int8_storage")
