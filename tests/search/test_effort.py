"""Efforts by name, and methods by theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxq.errors import SchemeError
from onnxq.search.effort import ACCURACIES, FAST, METHODS, accuracy_named


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


def test_gram_matrices_are_given_their_part_of_the_memory() -> None:
    assert FAST.gram_bytes == 1 << 30
    assert replace(FAST, memory=9 * 10**6).gram_bytes == 10**6
    assert replace(FAST, memory=10**12).gram_bytes == 1 << 30
