"""onnxq compare, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from cli.commands import CALIB, MODELS, invoke


def test_compare_prints_agreement_and_json(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    invoke("quantize", MODELS / "gru.onnx", "--calib", CALIB, "-o", output, "--limit", 4, "--seconds", 0)
    options = ("--data", CALIB, "--limit", 16)
    assert "logits" in invoke("compare", MODELS / "gru.onnx", output, *options).stdout
    figures = json.loads(invoke("compare", MODELS / "gru.onnx", output, *options, "--json").stdout)
    assert figures["samples"] == 16
    assert 20 < figures["outputs"][0]["sqnr"] < 100
    same = json.loads(invoke("compare", MODELS / "gru.onnx", MODELS / "gru.onnx", *options, "--json").stdout)
    assert same["outputs"][0] | {"sqnr": None, "agreement": 1.0, "largest_error": 0.0} == same["outputs"][0]


def test_compare_runs_the_candidate_on_another_engine() -> None:
    options = ("--data", CALIB, "--limit", 4, "--json", "--engine", "onnx-reference")
    figures = json.loads(invoke("compare", MODELS / "resnet.onnx", MODELS / "resnet.onnx", *options).stdout)
    assert 80 < figures["outputs"][0]["sqnr"] < 200
