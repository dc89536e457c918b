"""onnxq portability, from the command line."""

from __future__ import annotations

import json
import sys

from cli.commands import CALIB, MODELS, invoke


def test_portability_prints_a_table_and_json() -> None:
    model = MODELS / "resnet.onnx"
    options = ("--data", CALIB, "--float", model, "--limit", 2, "--latency-seconds", 0.01)
    engines = ("--engine", "onnx-reference", "--engine", f"python:{sys.executable}")
    text = invoke("portability", model, *options, *engines).stdout
    assert text.count("agrees") == 2
    [port] = json.loads(invoke("portability", model, *options, *engines[:2], "--json").stdout)
    assert (port["engine"], port["agrees"], port["fault"]) == ("onnx-reference", True, "")
    assert 80 < port["float_sqnr"] < 200
    assert port["speed"] > 0


def test_engines_that_are_installed_are_found() -> None:
    found = json.loads(invoke("portability", MODELS / "resnet.onnx", "--latency-seconds", 0, "--json").stdout)
    assert {"onnxruntime", "onnx-reference"} <= {port["engine"] for port in found}
