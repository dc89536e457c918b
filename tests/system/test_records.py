"""Typed values become plain values, text and tables, and are read back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Literal

import numpy as np
import pytest

from onnxq import Plan
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode
from onnxq.errors import SchemeError
from onnxq.planning.plan import Decision
from onnxq.system.html_table import html_table
from onnxq.system.option_text import format_option, is_option_type, parse_option
from onnxq.system.records import RecordError, read_record, to_plain


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
    assert read_record(Tree, "tree", to_plain(tree)) == tree


def test_no_number_is_a_word() -> None:
    assert to_plain(Leaf(weight=math.nan)) == {"colour": "red", "weight": "NaN"}
    assert math.isnan(read_record(Leaf, "leaf", {"weight": "NaN"}).weight or 0.0)


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
    with pytest.raises(RecordError) as reported:
        read_record(Tree, "tree", table)
    assert str(reported.value).startswith(sentence)


def test_values_may_be_meant_by_name() -> None:
    named = {Leaf: {"blue": Leaf(Colour.BLUE)}}
    assert read_record(Tree, "tree", {"name": "a", "leaves": ["blue"]}, named).leaves == (Leaf(Colour.BLUE),)
    with pytest.raises(RecordError, match="leaves is one of blue, found 'red'"):
        read_record(Tree, "tree", {"name": "a", "leaves": ["red"]}, named)


# Options as text


class Shade(Enum):
    RED = 1
    BLUE = 2


class Speed(StrEnum):
    FAST = "fast"
    SLOW = "slow"


VALUES: tuple[tuple[Any, str, object], ...] = (
    (int, "-3", -3),
    (float, "0.001", 0.001),
    (str, "a:b=c", "a:b=c"),
    (bool, "true", True),
    (bool, "false", False),
    (int | None, "none", None),
    (int | None, "4", 4),
    (str | None, "none", None),
    (str | int, "12", 12),
    (str | int, "x", "x"),
    (Shade, "2", Shade.BLUE),
    (Speed, "fast", Speed.FAST),
    (Literal["one", 2], "2", 2),
    (tuple[int, ...], "1,2,3", (1, 2, 3)),
    (tuple[str, ...], "", ()),
    (frozenset[str], "Add", frozenset({"Add"})),
    (tuple[float, float] | None, "0.5,1.0", (0.5, 1.0)),
)


@pytest.mark.parametrize(("kind", "text", "value"), VALUES)
def test_a_value_is_read_from_the_text_that_it_is_written_as(kind: Any, text: str, value: object) -> None:
    assert is_option_type(kind)
    assert parse_option(text, kind) == value
    assert type(parse_option(text, kind)) is type(value)
    assert format_option(value) == text


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (int, "x", "expected int"),
        (float, "", "expected float"),
        (bool, "maybe", "expected one of true, yes"),
        (Speed, "quick", "expected one of fast, slow"),
        (Literal["one", 2], "3", "expected one of one, 2"),
        (int | None, "x", r"expected int \| None"),
        (tuple[int, ...], "1,x", "expected int"),
    ],
)
def test_what_is_no_value_says_what_is_expected(kind: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_option(text, kind)


@pytest.mark.parametrize("kind", [dict, Mapping[str, int], np.ndarray, tuple[dict[str, int], ...], "Plan", object])
def test_other_types_cannot_be_written(kind: Any) -> None:
    assert not is_option_type(kind)


# Tables in notebooks

NAME = "<script>alert(1)</script>"


def test_of_many_rows_the_first_are_shown() -> None:
    table = html_table("many", ["number"], [[number] for number in range(60)])
    assert table.count("<tr>") == 1 + 50 + 1
    assert "and 10 more" in table


def test_a_plan_shows_its_modes_and_reasons() -> None:
    plan = Plan((Decision(NAME, "Conv", Mode.STATIC, "why"), Decision("b", "Add", Mode.FLOAT, "")), (), "int8", "cpu")
    assert "2 nodes: 1 static, 1 float" in plan._repr_html_()
    assert "<td>&lt;script&gt;" in plan._repr_html_()
    assert "<script>" not in plan._repr_html_()
    assert str(Plan((), (), "int8", "cpu")) == "no nodes"


def test_evidence_shows_its_tensors() -> None:
    assert "0 samples, 0 tensors" in CalibrationStatistics()._repr_html_()
