from __future__ import annotations

from dataclasses import replace

import pytest
from reports import FULL, REPORT, changed

from onnxq.cli import terminal
from onnxq.cli.terminal import measured
from onnxq.config.scheme import Mode
from onnxq.search.search import NodeSensitivity

LONG = "/model/encoder/layers.11/attention/self/query/MatMul"


@pytest.mark.parametrize("columns", [60, 80])
def test_all_figures_can_be_read_in_few_columns(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    plans = tuple(replace(point, static=123, dynamic=45) for point in FULL.search.frontier)
    noises = tuple(NodeSensitivity(f"{LONG}{index}", Mode.STATIC, 20.0 + index) for index in range(30))
    terminal.print_report(changed(FULL, search={"frontier": plans, "sensitivities": noises}), every=True)
    shown = capsys.readouterr().err
    assert max(map(len, shown.splitlines())) <= columns
    # No heading is cut or broken inside a word.
    for word in ("without", "seconds", "from node", "profiled", "expected", "worst", "speed", "alone, at the worst"):
        assert word in shown
    assert "…" not in shown
    assert shown.count("/MatMul") == 10


def test_what_was_not_measured_has_no_table() -> None:
    assert [table.title for table in measured(REPORT, 80)] == ["What hurts most"]
    assert measured(changed(REPORT, search={"sensitivities": ()}), 80) == []
