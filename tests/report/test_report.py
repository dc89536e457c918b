"""What a report says as values and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from reports import REPORT

from onnxq.errors import OutputError
from onnxq.report import Report


def strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_holds_every_decision_with_its_reason() -> None:
    plain = strict(REPORT.to_json())
    decisions = plain["plan"]["decisions"]
    assert [(one["node"], one["mode"], one["reason"]) for one in decisions] == [
        ("a", "static", "integer kernel"),
        ("b", "float", "why"),
    ]
    spec = decisions[0]["weights"][0]["spec"]
    assert (spec["format"], spec["per"], spec["symmetric"]) == ("int8-narrow", "tensor", True)
    assert plain["plan"]["activations"][0]["fixed_range"] == [0.0, 1.0]


def test_json_holds_every_field() -> None:
    plain = strict(REPORT.to_json())
    assert {field.name for field in dataclasses.fields(Report)} <= set(plain)
    assert plain["kernels"] == {"integer": 1, "quantize": 2, "heavy_float": 0}


def test_infinities_and_nan_become_null() -> None:
    plain = strict(REPORT.to_json())
    assert plain["agreement"]["outputs"][0]["sqnr"] is None
    assert [one["sqnr"] for one in plain["sensitivities"]] == [None, None]


def test_json_sums_up_size_fidelity_and_speed() -> None:
    plain = strict(REPORT.to_json())
    assert (plain["size_ratio"], plain["worst_sqnr"], plain["speed"]) == (0.25, None, 2.0)


def test_a_report_without_latency_says_null() -> None:
    assert strict(dataclasses.replace(REPORT, latency=None).to_json())["latency"] is None


def test_the_size_ratio_is_a_share_of_the_float_model() -> None:
    assert REPORT.size_ratio == 0.25


def test_a_saved_report_is_read_back(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert text.endswith("}\n")
    assert strict(text) == strict(REPORT.to_json())


@pytest.mark.parametrize("place", ["no/report.json", "."])
def test_a_report_that_cannot_be_written_is_told(place: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^report .* cannot be written: "):
        REPORT.save(tmp_path / place)
