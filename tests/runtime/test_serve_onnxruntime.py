"""onnxruntime of another environment: models and samples that it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.errors import EngineError
from onnxq.runtime.table import open_engine


def test_what_it_refuses_is_told_in_its_words(perceptron: ModelProto, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with open_engine(f"python:{sys.executable}") as engine:
        with pytest.raises(EngineError, match=r"engine python:.* cannot load .*broken.onnx: InvalidProtobuf"):
            engine.load(tmp_path / "broken.onnx")
        loaded = engine.load(tmp_path / "model.onnx")
        with pytest.raises(EngineError, match=r"engine python:.* cannot run the sample: "):
            loaded.run({"x": np.zeros((1, 1, 1), np.float32)})
