"""onnxq compare, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.commands import CALIB, MODELS, invoke
from onnxq.cli.main import cli
from onnxq.errors import OutputError


def test_compare_prints_agreement_and_json(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    invoke("quantize", MODELS / "gru.onnx", "--calib", CALIB, "-o", output, "--limit", 4, "--latency-seconds", 0)
    options = ("--data", CALIB, "--limit", 16)
    assert "logits" in invoke("compare", MODELS / "gru.onnx", output, *options).stdout
    figures = json.loads(invoke("compare", MODELS / "gru.onnx", output, *options, "--json").stdout)
    assert figures["samples"] == 16
    assert 20 < figures["outputs"][0]["sqnr"] < 100
    same = json.loads(invoke("compare", MODELS / "gru.onnx", MODELS / "gru.onnx", *options, "--json").stdout)
    assert same["outputs"][0] | {"sqnr": None, "agreement": 1.0, "largest_error": 0.0} == same["outputs"][0]


@pytest.mark.parametrize(("wanted", "code"), [(20, 0), (90, 3)])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_wanted_fidelity_makes_it_a_check(wanted: int, code: int, form: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    options = ("--limit", 4, "--latency-seconds", 0, "--search", "off", "--accuracy", "off")
    invoke("quantize", MODELS / "gru.onnx", "--calib", CALIB, "-o", output, *options)
    asked = ("compare", MODELS / "gru.onnx", output, "--data", CALIB, "--limit", 4, *form)
    done = CliRunner().invoke(cli, [str(one) for one in (*asked, "--min-sqnr", wanted)])
    assert done.exit_code == code
    assert "logits" in done.stdout
    assert ("output logits has" in done.stderr and "expected 90 dB or more" in done.stderr) is bool(code)


def test_compare_runs_the_candidate_on_another_engine() -> None:
    options = ("--data", CALIB, "--limit", 4, "--json", "--engine", "onnx-reference")
    figures = json.loads(invoke("compare", MODELS / "resnet.onnx", MODELS / "resnet.onnx", *options).stdout)
    assert 80 < figures["outputs"][0]["sqnr"] < 200


def test_layers_are_told_in_a_table_and_as_json(tmp_path: Path) -> None:
    output, report = tmp_path / "out.onnx", tmp_path / "report.json"
    options = ("--limit", 4, "--latency-seconds", 0, "--accuracy", "off", "--report", report)
    invoke("quantize", MODELS / "gru.onnx", "--calib", CALIB, "-o", output, *options)
    asked = ("compare", MODELS / "gru.onnx", output, "--data", CALIB, "--limit", 4, "--layers")
    table = invoke(*asked, "--report", report).stdout
    for word in ("isolated", "accumulated", "/gru/GRU_output_0", "storage", "Layers, on 4 samples"):
        assert word in table
    figures = json.loads(invoke(*asked, "--json").stdout)
    assert [one["name"] for one in figures["outputs"]] == ["logits"]
    last = figures["layers"][-1]
    assert (last["tensor"], len(last["worst"])) == ("logits", 3)
    assert abs(last["accumulated"] - figures["outputs"][0]["sqnr"]) < 0.1


def test_a_report_without_layers_is_refused() -> None:
    both = (MODELS / "gru.onnx", MODELS / "gru.onnx")
    told = invoke("compare", *both, "--data", CALIB, "--report", "report.json")
    assert (told.exit_code, told.stdout) == (2, "")


def test_a_comparison_is_a_page(tmp_path: Path) -> None:
    model, page = MODELS / "gru.onnx", tmp_path / "page.html"
    invoke("compare", model, model, "--data", CALIB, "--limit", 4, "--html", page)
    assert "All outputs are equal, on 4 samples" in page.read_text(encoding="utf-8")
    with pytest.raises(OutputError, match="gru"):
        invoke("compare", model, model, "--data", CALIB, "--html", model)
