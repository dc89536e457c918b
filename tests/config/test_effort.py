"""How much is tried for accuracy, and how much a search measures."""

from __future__ import annotations

import pytest

from onnxq.config.effort import ACCURACIES, EFFORTS, METHODS, RENAMED_METHODS, accuracy_named, effort_named
from onnxq.errors import SchemeError


@pytest.mark.parametrize("name", ACCURACIES)
def test_every_effort_has_a_name(name: str) -> None:
    assert accuracy_named(name) is ACCURACIES[name]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_tried_alone(name: str) -> None:
    assert accuracy_named(name).methods == (name,)


def test_methods_are_tried_in_one_order() -> None:
    assert accuracy_named("gptq,ranges").methods == ("ranges", "gptq")


def test_a_wrong_name_is_told_with_the_nearest_one() -> None:
    with pytest.raises(SchemeError, match=r"accuracy 'equalizations' is not one of .*did you mean 'equalization'"):
        accuracy_named("equalizations")
    with pytest.raises(SchemeError, match=r"accuracy 'fast' is not one of"):
        accuracy_named("gptq, fast")


def test_full_measures_more_than_fast_and_off_nothing() -> None:
    fast, full = EFFORTS["fast"], EFFORTS["full"]
    assert EFFORTS["off"] is None
    assert fast is not None
    assert full is not None
    for name in ("noise", "tried", "grown", "timed", "refinements", "seconds"):
        assert getattr(full, name) > getattr(fast, name)


@pytest.mark.parametrize("name", list(EFFORTS))
def test_each_is_found_by_its_name(name: str) -> None:
    assert effort_named(name) is EFFORTS[name]


def test_an_unknown_effort_suggests_the_nearest() -> None:
    with pytest.raises(SchemeError, match="search 'fats' is not one of off, fast, full; did you mean 'fast'"):
        effort_named("fats")


@pytest.mark.parametrize(("old", "new"), RENAMED_METHODS.items())
def test_a_method_of_earlier_versions_is_refused_with_its_new_name(old: str, new: str) -> None:
    with pytest.raises(SchemeError, match=f"accuracy '{old}' is called '{new}' now; write {new}"):
        accuracy_named(f"ranges,{old}")


@pytest.mark.parametrize("name", ["bias", "bias-correction"])
def test_a_method_that_is_no_choice_any_more_is_refused_with_what_took_its_place(name: str) -> None:
    with pytest.raises(SchemeError, match=f"accuracy '{name}' is not a choice any more: all biases make up for"):
        accuracy_named(f"ranges,{name}")
