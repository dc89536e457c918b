"""How figures are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from onnxq.report.formatting import decibels, duration, milliseconds, size, threads, visible


@pytest.mark.parametrize(
    ("render", "value", "text"),
    [
        (decibels, math.inf, "equal"),
        (decibels, -math.inf, "-inf dB"),
        (decibels, 21.26, "21.3 dB"),
        (decibels, None, "-"),
        (size, 12_345, "12.3 kB"),
        (size, 1_234_567, "1.23 MB"),
        (threads, 1, "1 thread"),
        (threads, 2, "2 threads"),
        (duration, 0.00123, "1.23 ms"),
        (milliseconds, 0.00123, "0.001 ms"),
        (milliseconds, None, "-"),
    ],
)
def test_figures_are_written_for_people(render: Callable[[Any], str], value: float | None, text: str) -> None:
    assert render(value) == text


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\u202eb", "a\tb", "a\0b"])
def test_what_a_terminal_obeys_is_spelt_out(name: str) -> None:
    assert visible(name).isprintable()
    assert visible(name)[0] + visible(name)[-1] == "ab"
    assert visible("/ä/日本 [x]") == "/ä/日本 [x]"
