"""onnx's own evaluator as an engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from small_models import small

from onnxq.errors import EngineError
from onnxq.runtime.table import open_engine


def test_it_runs_and_says_what_it_cannot(tmp_path: Path) -> None:
    onnx.save(small(), tmp_path / "model.onnx")
    sample = {"x": np.zeros(4, np.float32)}
    with open_engine("onnx-reference") as engine:
        assert (engine.version, engine.threads_given) == (f"onnx {onnx.__version__}", 1)
        loaded = engine.load(tmp_path / "model.onnx")
        assert (loaded.outputs, loaded.run(sample)[0].tolist()) == (("y",), [1, 2, 3, 4])
        with pytest.raises(EngineError, match="it does not tell what each node takes"):
            engine.profile(tmp_path / "model.onnx", [sample], tmp_path, 1)
