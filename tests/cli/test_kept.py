"""What is kept of a quantization is there of a refused one too."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from cli.commands import invoke
from onnxq.report import FidelityError, load_report
from onnxq.report.page import to_html

MODELS = Path(__file__).parents[2] / "models"


@pytest.mark.parametrize(("decibels", "word"), [(5, "Verified"), (200, "Refused")])
def test_pages_reports_and_colours_are_kept(
    decibels: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    samples = ("--calib", MODELS / "data" / "calib.npz", "--limit", "8")
    effort = ("--search", "off", "--accuracy", "off", "--latency-seconds", "0", "--min-sqnr", decibels)
    files = ("--report", "r.json", "--html", "r.html", "--overlay", "o.json", "-o", "q.onnx")
    with contextlib.suppress(FidelityError):
        invoke("quantize", MODELS / "gru.onnx", *samples, *effort, *files)
    report = load_report("r.json")
    assert Path("r.html").read_text(encoding="utf-8") == to_html(report)
    assert f">{word}: " in to_html(report)
    assert json.loads(Path("o.mode.json").read_text())["results"]
    assert report.run.command[0] == "onnxq"
    assert report.fidelity.layers is not None
    assert Path("q.onnx").exists() == (word == "Verified")


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    model, data = MODELS / "gru.onnx", MODELS / "data" / "calib.npz"
    result = invoke("quantize", model, "--calib", data, "--report", tmp_path / "a", "--html", tmp_path / "a")
    assert "give one of them another name" in result.stderr
