"""A saved report is shown again."""

from __future__ import annotations

from pathlib import Path

import pytest
from reports import FULL

from cli.commands import invoke
from onnxq.report.page import to_html


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    FULL.save(tmp_path / "report.json")
    return tmp_path / "report.json"


def test_a_report_becomes_a_page(saved: Path) -> None:
    page = saved.with_suffix(".html")
    assert invoke("report", saved).stdout == f"{page}\n"
    assert page.read_text(encoding="utf-8") == to_html(FULL)


def test_figures_and_colours_are_written_where_asked_for(saved: Path, tmp_path: Path) -> None:
    told = invoke("report", saved, "--svg", tmp_path / "figures", "--overlay", tmp_path / "overlay.json").stdout
    names = [Path(line).name for line in told.splitlines()]
    assert names == ["frontier.svg", "sqnr.svg", "overlay.mode.json", "overlay.time.json", "overlay.sqnr.json"]
    assert not saved.with_suffix(".html").exists()


def test_the_report_itself_is_not_written_over(saved: Path) -> None:
    before = saved.read_bytes()
    result = invoke("report", saved, "-o", saved)
    assert result.exit_code == 2
    assert "is the report itself" in result.stderr
    assert saved.read_bytes() == before
