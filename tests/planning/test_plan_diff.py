"""Two plans or reports beside each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.errors import DataError, SchemeError
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.planning.plan_file import Difference, Said, differences, read_said, save_plan


def test_a_plan_says_modes_formats_and_reasons(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.toml")
    said = read_said(tmp_path / "plan.toml")
    assert said.nodes["stem"] == "static int8-narrow"
    assert said.reasons["stem"] == "integer kernel"
    assert differences(said, said) == ()


def test_a_report_says_figures_too(tmp_path: Path) -> None:
    decision = {"node": "a", "mode": "float", "reason": "why", "weights": []}
    report = {"plan": {"decisions": [decision]}, "size_ratio": 0.25, "worst_sqnr": None, "speed": 2.0}
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert read_said(tmp_path / "r.json") == Said(
        {"a": "float"}, {"a": "why"}, {"size_ratio": 0.25, "worst_sqnr": None, "speed": 2.0}, {"a": ""}
    )


def test_figures_come_first_and_nodes_of_one_alone_are_told() -> None:
    first = Said({"a": "static int8", "gone": "float"}, {}, {"size_ratio": 0.3, "worst_sqnr": 25.0, "speed": 1.0})
    second = Said(
        {"a": "storage int8", "new": "float"}, {"a": "slow"}, {"size_ratio": 0.3, "worst_sqnr": None, "speed": 2.0}
    )
    assert differences(first, second) == (
        Difference("worst_sqnr", "25", "-"),
        Difference("speed", "1", "2"),
        Difference("a", "static int8", "storage int8", "slow"),
        Difference("gone", "float", ""),
        Difference("new", "", "float"),
    )


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"plan": {"decisions": 3}}'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(DataError, match=r"r.json is no report of onnxq \(.*\), expected what quantize --report writes"):
        read_said(tmp_path / "r.json")


def test_a_plan_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match="cannot be read"):
        read_said(tmp_path / "missing.toml")


def test_figures_of_reports_may_be_infinite(tmp_path: Path) -> None:
    figures = {"size_ratio": 0.25, "worst_sqnr": "Infinity", "speed": None}
    (tmp_path / "report.json").write_text(json.dumps({**figures, "plan": {"decisions": []}}))
    said = read_said(tmp_path / "report.json")
    assert said.figures == {"size_ratio": 0.25, "worst_sqnr": float("inf"), "speed": None}
    assert differences(said, Said({}, {}, {"worst_sqnr": 40.0})) == (Difference("worst_sqnr", "inf", "40"),)


def test_weights_of_another_granularity_are_told_apart() -> None:
    said = {"a": "static int8"}
    first, second = (Said(said, {}, {}, {"a": f"per {per}"}) for per in ("channel", "tensor"))
    assert differences(first, first) == ()
    (found,) = differences(first, second)
    assert (found.before, found.after) == ("static int8 per channel", "static int8 per tensor")


def test_files_tell_how_weights_are_quantized(tmp_path: Path) -> None:
    weight = Weight(1, "w", QuantSpec("int8", per=Granularity.CHANNEL), 1)
    other = replace(weight, spec=replace(weight.spec, per=Granularity.TENSOR))
    for name, one in (("a", weight), ("b", other)):
        decision = Decision("a", "MatMul", Mode.STORAGE, "", (one,))
        save_plan(Plan((decision,), (), "s", "onnxruntime-cpu"), tmp_path / f"{name}.toml")
    (found,) = differences(*(read_said(tmp_path / f"{name}.toml") for name in "ab"))
    assert "per channel" in found.before
    assert "per tensor" in found.after
