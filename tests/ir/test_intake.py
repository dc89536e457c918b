"""A model comes in, and nothing that is to be written takes its place."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from onnxq.errors import OutputError
from onnxq.ir import load
from onnxq.ir.reader import open_model, refuse_overwriting

MODELS = Path(__file__).parents[2] / "models"


def test_data_that_the_model_reads_is_not_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "in.onnx"
    onnx.save(onnx.load(MODELS / "gru.onnx"), source, save_as_external_data=True, location="out.onnx.data")
    graph = load(source)
    refuse_overwriting(graph, tmp_path / "other.data")
    with pytest.raises(OutputError, match="is the external data of the model itself"):
        refuse_overwriting(graph, tmp_path / "out.onnx.data")
    with pytest.raises(OutputError, match="is the external data of the model itself"):
        open_model(source, tmp_path / "out.onnx")


def test_a_file_is_not_overwritten_and_a_model_in_memory_has_none(tmp_path: Path) -> None:
    source, output = MODELS / "gru.onnx", tmp_path / "out.onnx"
    graph, file, wanted = open_model(str(source), str(output))
    assert (file, wanted, len(graph.nodes)) == (source, output, 34)
    assert open_model(graph, None)[1:] == (None, None)
    assert open_model(onnx.load(source), output)[1:] == (None, output)
    with pytest.raises(OutputError):
        open_model(source, source)
