"""Tables of notebooks are short and escaped."""

from __future__ import annotations

from onnxq import Plan
from onnxq.calibration.evidence import Evidence
from onnxq.config.scheme import Mode
from onnxq.planning.plan import Decision
from onnxq.system.html_tables import html_table

NAME = "<script>alert(1)</script>"


def test_of_many_rows_the_first_are_shown() -> None:
    table = html_table("many", ["number"], [[number] for number in range(60)])
    assert table.count("<tr>") == 1 + 50 + 1
    assert "and 10 more" in table


def test_a_plan_shows_its_modes_and_reasons() -> None:
    plan = Plan((Decision(NAME, "Conv", Mode.STATIC, "why"), Decision("b", "Add", Mode.FLOAT, "")), (), "int8", "cpu")
    assert "2 nodes: 1 static, 1 float" in plan._repr_html_()
    assert "<td>&lt;script&gt;" in plan._repr_html_()
    assert "<script>" not in plan._repr_html_()
    assert str(Plan((), (), "int8", "cpu")) == "no nodes"


def test_evidence_shows_its_tensors() -> None:
    assert "0 samples, 0 tensors" in Evidence()._repr_html_()
