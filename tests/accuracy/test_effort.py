"""Efforts by name, and methods by theirs."""

from __future__ import annotations

import pytest

from onnxq.accuracy.effort import ACCURACIES, METHODS, accuracy_named
from onnxq.errors import SchemeError


@pytest.mark.parametrize("name", ACCURACIES)
def test_every_effort_has_a_name(name: str) -> None:
    assert accuracy_named(name) is ACCURACIES[name]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_tried_alone(name: str) -> None:
    assert accuracy_named(name).methods == (name,)


def test_methods_are_tried_in_one_order() -> None:
    assert accuracy_named("bias,ranges").methods == ("ranges", "bias")


def test_what_makes_up_for_one_plan_is_found_for_it() -> None:
    every, one = accuracy_named("full").split
    assert (*every.methods, *one.methods) == METHODS
    assert one.methods == ("bias",)
    assert every.models == one.models


def test_a_wrong_name_is_told_with_the_nearest_one() -> None:
    with pytest.raises(SchemeError, match=r"accuracy 'migrations' is not one of .*did you mean 'migration'"):
        accuracy_named("migrations")
    with pytest.raises(SchemeError, match=r"accuracy 'fast' is not one of"):
        accuracy_named("bias, fast")
