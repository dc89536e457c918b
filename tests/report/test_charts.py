"""Marks stand inside their chart, in the right order."""

from __future__ import annotations

import math

import pytest
from reports import FULL

from onnxq.report.charts import Depth, frontier_chart, sqnr_chart, ticks
from onnxq.search.search import Point


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 10.0, (0, 2, 4, 6, 8, 10)), (19.3, 22.6, (20, 21, 22)), (0.0, 0.012, (0, 0.005, 0.01)), (3.0, 3.0, (3,))],
)
def test_ticks_are_few_round_numbers(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert ticks(low, high) == expected


def test_the_chosen_plan_is_drawn_last_and_higher_where_it_is_more_faithful() -> None:
    chart = frontier_chart(FULL.search.frontier)
    assert chart is not None
    expected, chosen = chart.marks
    assert (expected.kind, chosen.kind) == ("expected", "chosen")
    assert expected.y < chosen.y
    assert chosen.x < expected.x
    left, top, right, bottom = chart.frame
    assert all(left <= mark.x <= right and top <= mark.y <= bottom for mark in chart.marks)


@pytest.mark.parametrize(("wanted", "lines"), [(20.0, ["float", "wanted"]), (None, ["float"]), (-math.inf, ["float"])])
def test_what_was_wanted_is_a_line_across(wanted: float | None, lines: list[str]) -> None:
    chart = frontier_chart(FULL.search.frontier, wanted)
    assert chart is not None
    assert [name for name, _ in chart.lines] == lines
    if wanted is not None and math.isfinite(wanted):
        left, _, right, bottom = chart.frame
        ends = [tuple(map(float, end.split(","))) for end in chart.lines[-1][1].split()]
        assert [x for x, _ in ends] == [left, right]
        # Every plan is more faithful.
        assert max(mark.y for mark in chart.marks) < ends[0][1] == ends[1][1] <= bottom


@pytest.mark.parametrize("points", [(), (Point(1, 0, 1.0),), (Point(1, 0, 1.0, math.inf),), FULL.search.frontier[2:]])
def test_without_figures_there_is_no_chart(points: tuple[Point, ...]) -> None:
    assert frontier_chart(points) is None


def test_noise_of_many_nodes_keeps_the_noisiest_and_the_end() -> None:
    depths = [Depth(index, f"n{index}", 10.0 if index == 777 else 50.0, 50 - index / 1e3) for index in range(5000)]
    chart = sqnr_chart(depths, 5000)
    assert chart is not None
    assert len(chart.marks) <= 240
    assert max(chart.marks, key=lambda mark: mark.y).told == "n777: 10.0 dB alone"
    assert sqnr_chart([], 10) is None


def test_a_single_node_has_a_chart() -> None:
    chart = sqnr_chart([Depth(0, "a", 30.0, 30.0)], 1)
    assert chart is not None
    assert math.isfinite(chart.marks[0].x)
