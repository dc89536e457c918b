"""onnxq web-folder, from the command line."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from cli.commands import CALIB, MODELS, invoke
from onnxq.cli.quantize import _NAMES
from onnxq.commands.web_folder import DTYPES, Written


def test_dtypes_are_written_and_told(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    shutil.copy(MODELS / "resnet.onnx", tmp_path / "onnx" / "model.onnx")
    options = ("--calib", CALIB, "--search", "off", "--dtype", "int8", "--dtype", "fp16")
    text = invoke("web-folder", tmp_path, *options).stdout
    assert "model_int8.onnx" in text
    assert "model_fp16.onnx" in text
    refused = invoke("web-folder", tmp_path, *options, "--min-sqnr", 55, "--json")
    assert refused.exit_code == 3
    int8, fp16 = json.loads(refused.stdout)
    assert int8["files"] == []
    assert "55" in int8["refused"]
    assert fp16["refused"] == ""
    assert fp16["sqnr"] > 55


def test_the_help_names_every_dtype() -> None:
    assert tuple(DTYPES) == _NAMES


def test_equal_outputs_are_told_as_a_word_that_json_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written("fp16", (tmp_path / "model_fp16.onnx",), 8, math.inf)
    monkeypatch.setattr("onnxq.commands.web_folder.write_web_folder", lambda *_, **__: [written])
    told = invoke("web-folder", tmp_path, "--calib", CALIB, "--json").stdout
    (found,) = json.loads(told, parse_constant=pytest.fail)
    assert (found["sqnr"], found["files"]) == ("Infinity", [str(tmp_path / "model_fp16.onnx")])
