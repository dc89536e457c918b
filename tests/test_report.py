"""Reports: every decision and figure, as JSON that any reader accepts."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from onnxq.errors import OutputError
from onnxq.evaluate import Agreement, OutputAgreement
from onnxq.planning.plan import Activation, Decision, Plan, Weight
from onnxq.report import Report
from onnxq.scheme import Mode, Spec
from onnxq.searching.search import Sensitivity
from onnxq.verify import Kernels, Latency

WEIGHT = Weight(1, "w", Spec("int8-narrow"), 0)
REPORT = Report(
    model="model.onnx",
    output=None,
    float_bytes=400,
    bytes=100,
    plan=Plan(
        (Decision("a", "Conv", Mode.STATIC, "integer kernel", (WEIGHT,)), Decision("b", "Tanh", Mode.FLOAT, "why")),
        (Activation("x", Spec("uint8", symmetric=False), "x", (0.0, 1.0)),),
        "int8",
        "onnxruntime-cpu",
    ),
    ranges="MinMax()",
    agreement=Agreement(3, (OutputAgreement("y", math.inf, None, 0.0, same_shapes=True, finite=True),)),
    kernels=Kernels(integer=1, quantize=2, heavy_float=0),
    latency=Latency(reference=2.0, candidate=1.0, threads=1, runs=5),
    sensitivities=(Sensitivity("a", Mode.STATIC, -math.inf), Sensitivity("b", Mode.STORAGE, math.nan)),
    measured=4,
    samples=3,
    seconds=0.5,
)


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
