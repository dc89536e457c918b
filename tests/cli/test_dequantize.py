"""onnxq dequantize, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import ModelProto

from cli.commands import invoke
from onnxq.errors import ModelError
from onnxq.ops import ALREADY_QUANTIZED


@pytest.fixture
def quantized(perceptron: ModelProto, quantize_to: Callable[..., Any], tmp_path: Path) -> Path:
    path = tmp_path / "model.int8.onnx"
    quantize_to(perceptron, path)
    return path


def test_it_writes_one_file_and_names_it_on_stdout(quantized: Path, tmp_path: Path) -> None:
    output = tmp_path / "back.onnx"
    result = invoke("dequantize", quantized, "-o", output)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{output}\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.onnx", "model.int8.onnx"]
    assert not ALREADY_QUANTIZED & {node.op_type for node in onnx.load(output).graph.node}


def test_the_output_is_named_after_the_model_in_the_current_folder(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert invoke("dequantize", quantized).stdout == "model.int8.float.onnx\n"
    assert (tmp_path / "here" / "model.int8.float.onnx").is_file()


def test_an_existing_file_stays_when_there_is_nothing_to_dequantize(perceptron: ModelProto, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "float.onnx")
    (tmp_path / "back.onnx").write_bytes(b"precious")
    with pytest.raises(ModelError, match="nothing to dequantize"):
        invoke("dequantize", tmp_path / "float.onnx", "-o", tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == b"precious"


def test_help_says_what_it_does() -> None:
    text = " ".join(invoke("dequantize", "--help").stdout.split())
    assert "back into a plain float model" in text
    assert "MODEL.float.onnx" in text
