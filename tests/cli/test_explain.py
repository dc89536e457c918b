"""onnxq explain, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from cli.commands import CALIB, MODELS, invoke
from onnxq.cli.main import cli
from onnxq.errors import ModelError

GRU = MODELS / "gru.onnx"
QUICK = ("--calib", CALIB, "--limit", 4, "--accuracy", "off", "--latency-seconds", 0)


def test_a_float_model_is_told_without_samples_and_with_them() -> None:
    assert "storage: " in invoke("explain", GRU, "/gru/GRU").stdout
    told = json.loads(invoke("explain", GRU, "/gru/GRU", *QUICK, "--json").stdout)
    assert (told["op_type"], told["mode"]) == ("GRU", "storage")
    assert [one["op_type"] for one in told["kernels"]] == ["GRU"]


def test_a_quantized_model_is_told_with_its_report(tmp_path: Path) -> None:
    output, report = tmp_path / "out.onnx", tmp_path / "report.json"
    invoke("quantize", MODELS / "resnet.onnx", *QUICK, "--search", "off", "-o", output, "--report", report)
    told = invoke("explain", output, "/3/Add", "--report", report).stdout
    for word in ("static: ", "QLinearAdd", "from /2/Relu", "uint8, range", "to /3/Relu_1"):
        assert word in told
    assert invoke("explain", output, "/3/Add").exit_code == 2


@pytest.mark.parametrize("options", [("--report", "report.json", *QUICK), ("--top", 3)])
def test_wrong_options_are_refused(options: tuple[object, ...]) -> None:
    told = invoke("explain", GRU, "/gru/GRU", *options)
    assert (told.exit_code, told.stdout) == (2, "")


def test_unknown_nodes_are_told_before_anything_is_measured() -> None:
    with pytest.raises(ModelError, match="did you mean '/gru/GRU'"):
        invoke("explain", GRU, "/gru/GRY", *QUICK)


def test_the_shell_completes_nodes() -> None:
    completed = ShellComplete(cli, {}, "onnxq", "_ONNXQ").get_completions(["explain", str(GRU)], "/gru/GR")
    assert [one.value for one in completed] == ["/gru/GRU", "/gru/GRU_1"]
    assert ShellComplete(cli, {}, "onnxq", "_ONNXQ").get_completions(["explain", "none.onnx"], "/") == []
