"""onnxruntime elsewhere and onnx's evaluator as processes that serve them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto
from small_models import small

from onnxq.errors import EngineError
from onnxq.runtime.engines import open_engine


def test_what_it_refuses_is_told_in_its_words(perceptron: ModelProto, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with open_engine(f"python:{sys.executable}") as engine:
        with pytest.raises(EngineError, match=r"engine python:.* cannot load .*broken.onnx: InvalidProtobuf"):
            engine.load(tmp_path / "broken.onnx")
        loaded = engine.load(tmp_path / "model.onnx")
        with pytest.raises(EngineError, match=r"engine python:.* cannot run the sample: "):
            loaded.run({"x": np.zeros((1, 1, 1), np.float32)})


def test_the_evaluator_of_onnx_runs_and_says_what_it_cannot(tmp_path: Path) -> None:
    onnx.save(small(), tmp_path / "model.onnx")
    sample = {"x": np.zeros(4, np.float32)}
    with open_engine("onnx-reference") as engine:
        assert (engine.version, engine.threads_given) == (f"onnx {onnx.__version__}", 1)
        loaded = engine.load(tmp_path / "model.onnx")
        assert (loaded.outputs, loaded.run(sample)[0].tolist()) == (("y",), [1, 2, 3, 4])
        with pytest.raises(EngineError, match="it does not tell what each node takes"):
            engine.profile(tmp_path / "model.onnx", [sample], tmp_path, 1)
