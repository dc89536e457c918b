"""What a page shows follows from the report."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from reports import FULL, changed

from onnxq.config.scheme import Mode
from onnxq.planning.plan import Decision, Plan
from onnxq.report.charts import causes, chain, node_rows, node_views, shared_words, sqnr_along, sqnr_by_node
from onnxq.search.search import NodeSensitivity


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
