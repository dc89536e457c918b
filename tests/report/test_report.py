"""What a report says as values and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from reports import FULL, REPORT, changed

from onnxq.errors import DataError, OutputError
from onnxq.report import Report, load_report


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
    assert plain["performance"]["kernels"] == {"integer": 1, "quantize": 2, "heavy_float": 0}


def test_infinities_are_words() -> None:
    plain = strict(REPORT.to_json())
    assert plain["fidelity"]["agreement"]["outputs"][0]["sqnr"] == "Infinity"
    assert [one["sqnr"] for one in plain["search"]["sensitivities"]] == ["-Infinity", "Infinity"]


def test_json_sums_up_size_fidelity_and_speed() -> None:
    plain = strict(REPORT.to_json())
    assert (plain["size_ratio"], plain["worst_sqnr"], plain["speed"]) == (0.25, "Infinity", 2.0)


def test_a_report_without_latency_says_null() -> None:
    assert strict(changed(REPORT, performance={"latency": None}).to_json())["performance"]["latency"] is None


def test_the_size_ratio_is_a_share_of_the_float_model() -> None:
    assert REPORT.size_ratio == 0.25


def test_a_saved_report_is_read_back(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert text.endswith("}\n")
    assert strict(text) == strict(REPORT.to_json())
    assert load_report(tmp_path / "report.json") == REPORT


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": None}, r"is of an older onnxq \(version None, expected 2\); quantize again$"),
        ({"version": 1}, r"is of an older onnxq \(version 1, expected 2\)"),
        ({"version": 3}, r"is of a newer onnxq \(version 3, expected 2\)"),
        ({"run": {"seconds": "long"}}, "report .*: the report: run: seconds is a number, found 'long'$"),
        ({"runs": {}}, "report .*: the report has no key 'runs'; did you mean 'run'"),
        ({"search": []}, r"the report: search is a table, found \[\]"),
    ],
)
def test_what_is_no_report_of_this_version_is_refused_in_a_sentence(
    change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_text(json.dumps({**strict(REPORT.to_json()), **change}))
    with pytest.raises(DataError, match=sentence):
        load_report(tmp_path / "report.json")


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "cannot be read"), ("[]", "is no report"), ("{}", "is no report")]
)
def test_another_file_is_no_report(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=sentence):
        load_report(tmp_path / "a.json")


@pytest.mark.parametrize("place", ["no/report.json", "."])
def test_a_report_that_cannot_be_written_is_told(place: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^report .* cannot be written: "):
        REPORT.save(tmp_path / place)


def test_a_report_is_few_words() -> None:
    assert repr(FULL) == (
        "Report(Verified: 2.00x as fast (1.90-2.10), 0.25 of the size, 31 dB on 3 samples it had not seen; "
        "2 nodes: 1 static, 1 float)"
    )


def test_notebooks_show_outputs_and_nodes() -> None:
    shown = FULL._repr_html_()
    assert "<td>y</td><td>31.2 dB</td><td>98.00%</td>" in shown
    assert "<td>b</td><td>Tanh</td><td>float</td><td>why</td>" in shown
