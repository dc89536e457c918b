"""onnxq sensitivity, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.commands import CALIB, MODELS, invoke

OPTIONS = ("--calib", CALIB, "--limit", 4, "--accuracy", "off", "--latency-seconds", 0.1)


def test_tables_and_json_hold_every_tensor_and_node(tmp_path: Path) -> None:
    told = invoke("sensitivity", MODELS / "gru.onnx", *OPTIONS, "-o", tmp_path / "costs.json")
    for word in ("/gru/GRU", "storage int8-narrow", "dB at the worst output", "4 samples"):
        assert word in told.stdout
    figures = json.loads((tmp_path / "costs.json").read_text())
    assert (figures["scheme"], figures["target"], figures["samples"]) == ("int8", "onnxruntime-cpu", 4)
    assert {one["node"] for one in figures["nodes"]} >= {"/gru/GRU", "/Gather"}


def test_rows_are_sorted_and_cut() -> None:
    shown = invoke("sensitivity", MODELS / "gru.onnx", *OPTIONS, "--sort", "time", "--top", 1, "--json").stdout
    (slowest,) = json.loads(shown)["nodes"]
    assert slowest["op_type"] == "GRU"


@pytest.mark.parametrize("options", [(), ("--calib", CALIB, "--top", 0), ("--calib", CALIB, "--sort", "noisy")])
def test_wrong_options_are_refused(options: tuple[object, ...]) -> None:
    told = invoke("sensitivity", MODELS / "gru.onnx", *options)
    assert (told.exit_code, told.stdout) == (2, "")
