"""Options as text: what is written is read back, and what no text can be is known."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Any, Literal

import numpy as np
import pytest

from onnxq.system.option_values import is_writable, text_of, value_of


class Colour(Enum):
    RED = 1
    BLUE = 2


class Mode(StrEnum):
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
    (Colour, "2", Colour.BLUE),
    (Mode, "fast", Mode.FAST),
    (Literal["one", 2], "2", 2),
    (tuple[int, ...], "1,2,3", (1, 2, 3)),
    (tuple[str, ...], "", ()),
    (frozenset[str], "Add", frozenset({"Add"})),
    (tuple[float, float] | None, "0.5,1.0", (0.5, 1.0)),
)


@pytest.mark.parametrize(("kind", "text", "value"), VALUES)
def test_a_value_is_read_from_the_text_that_it_is_written_as(kind: Any, text: str, value: object) -> None:
    assert is_writable(kind)
    assert value_of(text, kind) == value
    assert type(value_of(text, kind)) is type(value)
    assert text_of(value) == text


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (int, "x", "expected int"),
        (float, "", "expected float"),
        (bool, "maybe", "expected one of true, yes"),
        (Mode, "quick", "expected one of fast, slow"),
        (Literal["one", 2], "3", "expected one of one, 2"),
        (int | None, "x", r"expected int \| None"),
        (tuple[int, ...], "1,x", "expected int"),
    ],
)
def test_what_is_no_value_says_what_is_expected(kind: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        value_of(text, kind)


@pytest.mark.parametrize("kind", [dict, Mapping[str, int], np.ndarray, tuple[dict[str, int], ...], "Plan", object])
def test_other_types_cannot_be_written(kind: Any) -> None:
    assert not is_writable(kind)
