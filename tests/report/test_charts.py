"""Marks stand inside their chart, in the right order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from reports import FULL, changed

from onnxq.config.scheme import Mode
from onnxq.planning.plan import Decision, Plan
from onnxq.report.charts import (
    Depth,
    causes,
    chain,
    frontier_chart,
    node_rows,
    node_views,
    shared_words,
    sqnr_along,
    sqnr_by_node,
    sqnr_chart,
    ticks,
)
from onnxq.search.search import NodeSensitivity, Point


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


# What a page shows follows from the report.


def of_modes(modes: str) -> tuple:
    """Views of nodes whose modes the letters tell."""
    known = {"s": Mode.STATIC, "d": Mode.DYNAMIC, "f": Mode.FLOAT}
    decisions = tuple(Decision(f"n{index}", "Add", known[letter], "why") for index, letter in enumerate(modes))
    return node_views(replace(FULL, plan=Plan(decisions, (), "int8", "onnxruntime-cpu")))


def test_a_node_has_its_times_noise_and_formats() -> None:
    first, second = node_views(FULL)
    assert (first.name, first.formats, first.float_milliseconds, first.milliseconds, first.sqnr) == (
        "a",
        "int8-narrow per tensor",
        2.0,
        1.0,
        33.5,
    )
    assert second.formats == ""


def test_the_noise_of_a_node_is_that_of_its_own_mode() -> None:
    measured = (
        NodeSensitivity("a", Mode.DYNAMIC, 20.0),
        NodeSensitivity("a", Mode.STATIC, 30.0),
        NodeSensitivity("b", Mode.STATIC, 40),
    )
    assert sqnr_by_node(changed(FULL, search={"sensitivities": measured})) == {"a": 30.0, "b": 40}


@pytest.mark.parametrize(
    ("modes", "expected"),
    [("sssffd", [("static", 0, 3), ("float", 3, 2), ("dynamic", 5, 1)]), ("", []), ("s", [("static", 0, 1)])],
)
def test_neighbours_of_one_mode_are_a_link(modes: str, expected: list[tuple[str, int, int]]) -> None:
    assert [(str(link.mode), link.first, link.nodes) for link in chain(of_modes(modes))] == expected


def test_a_chain_of_very_many_regions_takes_neighbours_together() -> None:
    links = chain(of_modes("sf" * 5000))
    assert len(links) <= 120
    assert sum(link.nodes for link in links) == 10_000
    assert [link.first for link in links[:2]] == [0, links[0].nodes]


def test_causes_are_told_with_what_is_at_stake() -> None:
    found = causes(node_views(FULL), FULL)
    assert [(one.reason, one.count, one.examples) for one in found] == [("why", 1, ("b",))]
    assert found[0].stake == (
        "as codes the lowest SQNR alone leaves 40.0 dB; in float they take 0.500 ms, 20.0% of the model"
    )


def test_noise_adds_in_energy_and_floats_add_none() -> None:
    nodes = of_modes("ssf")
    noisy = tuple(replace(node, sqnr=30.0) for node in nodes)
    found = sqnr_along(noisy)
    assert [(one.index, one.alone) for one in found] == [(0, 30.0), (1, 30.0)]
    assert found[1].together == pytest.approx(30 - 10 * math.log10(2))
    assert sqnr_along(tuple(replace(node, sqnr=math.inf) for node in nodes)) == ()


def test_rows_hold_words_once() -> None:
    nodes = node_views(FULL)
    words = shared_words(nodes)
    first = next(iter(node_rows(nodes)))
    assert first[0] == "a"
    assert [words[index] for index in first[1:4]] == ["Conv", "static", "integer kernel"]
    assert first[7:] == [2.0, 1.0, 33.5]
