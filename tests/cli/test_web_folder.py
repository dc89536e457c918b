"""onnxq web-folder, from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from cli.commands import CALIB, MODELS, invoke
from onnxq.cli.web_folder import _NAMES
from onnxq.web_folder import DTYPES


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
