"""Dataclasses become plain values and are read back by the types of their fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest

from onnxq.errors import SchemeError
from onnxq.system.records import RecordError, plain, record


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Leaf:
    colour: Colour = Colour.RED
    weight: float | None = None

    def __post_init__(self) -> None:
        if self.weight == 13:
            raise SchemeError("the weight is 13")


@dataclass(frozen=True)
class Tree:
    name: str
    leaves: tuple[Leaf, ...] = ()
    span: tuple[float, float] = (0.0, math.inf)
    ages: Mapping[str, int] = field(default_factory=dict)
    best: Leaf | tuple[int, ...] = ()


@pytest.mark.parametrize(
    "tree",
    [
        Tree("a"),
        Tree("b", (Leaf(), Leaf(Colour.BLUE, -math.inf)), (1.0, 2.0), {"x": 1}, (1, 2)),
        Tree("c", best=Leaf(Colour.BLUE, 0.5)),
    ],
)
def test_what_is_written_is_read_back(tree: Tree) -> None:
    assert record(Tree, "tree", plain(tree)) == tree


def test_no_number_is_a_word() -> None:
    assert plain(Leaf(weight=math.nan)) == {"colour": "red", "weight": "NaN"}
    assert math.isnan(record(Leaf, "leaf", {"weight": "NaN"}).weight or 0.0)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({}, "tree has no name"),
        ({"nme": "a"}, "tree has no key 'nme'; did you mean 'name'?"),
        ({"name": 1}, "tree: name is a string, found 1"),
        ({"name": "a", "leaves": 1}, "tree: leaves is a list of values, found 1"),
        ({"name": "a", "leaves": [{"colour": "bleu"}]}, "tree: leaves: colour is one of red, blue, found 'bleu'; did"),
        ({"name": "a", "leaves": [{"weight": 13}]}, "tree: leaves: the weight is 13"),
        ({"name": "a", "span": [1]}, "tree: span is a list of 2 values, found [1]"),
        ({"name": "a", "span": [1, "wide"]}, "tree: span is a number, found 'wide'"),
        ({"name": "a", "ages": {"x": True}}, "tree: ages 'x' is a whole number, found True"),
        ({"name": "a", "ages": []}, "tree: ages is a table, found []"),
    ],
)
def test_what_does_not_fit_is_named(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecordError) as told:
        record(Tree, "tree", table)
    assert str(told.value).startswith(sentence)


def test_values_may_be_meant_by_name() -> None:
    named = {Leaf: {"blue": Leaf(Colour.BLUE)}}
    assert record(Tree, "tree", {"name": "a", "leaves": ["blue"]}, named).leaves == (Leaf(Colour.BLUE),)
    with pytest.raises(RecordError, match="leaves is one of blue, found 'red'"):
        record(Tree, "tree", {"name": "a", "leaves": ["red"]}, named)
