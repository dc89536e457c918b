from __future__ import annotations

import json
from dataclasses import replace

import pytest
from reports import FULL, REPORT, changed

from onnxq.config.scheme import Mode
from onnxq.planning.plan import Decision
from onnxq.report.refusal import suggestions, why_not_faster
from onnxq.report.report import summary_rows
from onnxq.search.kernel_times import NodeTime
from onnxq.search.results import Point

DECISIONS = (
    Decision("c", "Conv", Mode.STATIC, "runs as integers"),
    Decision("d", "Conv", Mode.FLOAT, "its error is too high"),
    Decision("i", "Gemm", Mode.DYNAMIC, "it is faster so"),
    Decision("e", "MatMul", Mode.STORAGE, "it is not faster"),
    Decision("f", "MatMul", Mode.STORAGE, "it is not faster"),
    Decision("s", "Softmax", Mode.FLOAT, "it has no integer kernel"),
)
TIMES = tuple(NodeTime(one.node, 1.0, {"d": 7.5}.get(one.node, 1.0)) for one in DECISIONS)


def test_the_summary_has_at_most_twelve_rows_accuracy_first() -> None:
    output = FULL.agreement.outputs[0]
    many = tuple(replace(output, name=f"y{index}") for index in range(20))
    agreement = replace(FULL.agreement, outputs=many)
    rows = summary_rows(replace(FULL, accuracy=replace(FULL.accuracy, agreement=agreement)))
    assert len(rows) <= 12
    accuracy = [row.text for row in rows if row.name == "accuracy"]
    assert len(accuracy) == 4
    assert accuracy[-1].startswith("17 more outputs, ")
    assert [row.name for row in rows].index("size") > 3


def test_the_json_has_the_rows_of_the_summary() -> None:
    assert json.loads(FULL.to_json())["summary"] == [{"name": row.name, "text": row.text} for row in summary_rows(FULL)]


def test_the_reason_of_the_slowest_heavy_nodes_says_why_it_is_not_faster() -> None:
    report = replace(changed(REPORT, performance={"times": TIMES}), plan=replace(REPORT.plan, decisions=DECISIONS))
    assert why_not_faster(report) == "1 Conv, with 60% of the time, does not run as integers (its error is too high)"
    untimed = changed(report, performance={"times": ()})
    assert why_not_faster(untimed) == "2 MatMul do not run as integers (it is not faster)"
    computed = [replace(one, reason="its weight is computed at run time") for one in DECISIONS]
    several = why_not_faster(replace(untimed, plan=replace(untimed.plan, decisions=computed)))
    assert several.endswith(" do not run as integers (their weight is computed at run time)")
    assert why_not_faster(replace(REPORT, plan=replace(REPORT.plan, decisions=DECISIONS[:1]))) == ""


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ((Point(3, 0, 2.0, 17.6), Point(2, 0, 4.0, 22.0, chosen=True)), "--min-sqnr 17"),
        ((Point(3, 0, 3.9, 17.6), Point(2, 0, 4.0, 22.0, chosen=True)), ""),
        ((Point(3, 0, 2.0, 7.6), Point(2, 0, 4.0, 22.0, chosen=True)), ""),
    ],
    ids=["faster", "hardly faster", "far too inaccurate"],
)
def test_a_lower_goal_is_suggested_where_a_measured_plan_is_faster(points: tuple[Point, ...], expected: str) -> None:
    report = changed(REPORT, search={"frontier": points, "sensitivities": ()}, accuracy={"wanted": 20.0})
    assert next((one.options for one in suggestions(report)), "") == expected


@pytest.mark.parametrize(
    ("scheme", "target", "expected"),
    [
        ("int8-int16-data", "onnxruntime-cpu", "--target qnn"),
        ("int4-int8-data", "openvino", "--target qnn"),
        ("int8-int16-data", "qnn", ""),
        ("int8", "onnxruntime-cpu", ""),
    ],
)
def test_formats_of_npus_are_suggested_for_one(scheme: str, target: str, expected: str) -> None:
    report = changed(REPORT, search={"frontier": (), "sensitivities": ()})
    report = replace(report, plan=replace(report.plan, scheme=scheme, target=target))
    assert next((one.options for one in suggestions(report)), "") == expected
