"""The command `onnxq optimize`."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from cli.commands import CALIB, MODELS, invoke
from onnxq.errors import SchemeError


def test_it_writes_the_model_and_tells_what_every_rule_did(tmp_path: Path) -> None:
    output, report = tmp_path / "out.onnx", tmp_path / "report.json"
    done = invoke(
        "optimize", MODELS / "resnet.onnx", "-o", output, "--data", CALIB, "--latency-seconds", "0", "--report", report
    )
    assert done.exit_code == 0
    assert done.stdout.strip() == str(output)
    assert "nodes before" in done.stderr
    onnx.checker.check_model(output)
    found = json.loads(report.read_text())
    assert found["nodes"][1] <= found["nodes"][0]
    assert found["left_out"] == []


def test_an_unknown_rule_is_told(tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match="did you mean 'FoldConstants'"):
        invoke("optimize", MODELS / "resnet.onnx", "-o", tmp_path / "o.onnx", "--without", "FoldConstant")
    assert not (tmp_path / "o.onnx").exists()


def test_the_report_is_not_the_output(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    done = invoke("optimize", MODELS / "resnet.onnx", "-o", output, "--report", output)
    assert done.exit_code == 2
    assert not output.exists()
