"""onnxq inspect, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from cli.commands import CALIB, MODELS, invoke


def test_inspect_tells_what_is_quantized_and_how(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    invoke("quantize", MODELS / "resnet.onnx", "--calib", CALIB, "-o", output, "--limit", 4, "--latency-seconds", 0)
    before = json.loads(invoke("inspect", MODELS / "resnet.onnx", "--json").stdout)
    after = json.loads(invoke("inspect", output, "--json").stdout)
    assert (before["quantized"], after["quantized"]) == (False, True)
    assert {weight["weight"] for weight in before["weights"]} == {"float"}
    assert {weight["weight"] for weight in after["weights"]} == {"int8"}
    assert all(weight["scales"] == weight["shape"][0] for weight in after["weights"] if weight["op_type"] == "Conv")
    assert after["scheme"] == "int8"
    assert "Weights" in invoke("inspect", output).stdout
