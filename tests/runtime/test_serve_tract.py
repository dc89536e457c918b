"""tract as an engine; needs the package ``tract``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import MODELS
from small_models import small

from onnxq.errors import EngineError
from onnxq.runtime.engines import open_engine
from onnxq.runtime.sessions import open_session

tract = pytest.importorskip("tract")


def test_it_runs_and_says_what_it_cannot(tmp_path: Path) -> None:
    onnx.save(small(), tmp_path / "model.onnx")
    sample = {"x": np.zeros(4, np.float32)}
    with open_engine("tract") as engine:
        assert (engine.version, engine.threads_given) == (f"tract {tract.version()}", 1)
        loaded = engine.load(tmp_path / "model.onnx")
        assert (loaded.outputs, loaded.run(sample)[0].tolist()) == (("y",), [1, 2, 3, 4])
        with pytest.raises(EngineError, match="it does not report the time of each node"):
            engine.profile(tmp_path / "model.onnx", [sample], tmp_path, 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_it_computes_what_onnxruntime_does_in_each_shape(rows: int) -> None:
    sample = {"image": np.random.default_rng(0).uniform(0, 1, (rows, 1, 28, 28)).astype(np.float32)}
    [expected] = open_session(MODELS / "resnet.onnx").run(None, sample)
    with open_engine("tract") as engine:
        [found] = engine.load(MODELS / "resnet.onnx").run(sample)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_a_model_that_it_cannot_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with open_engine("tract") as engine, pytest.raises(EngineError, match="engine tract cannot load") as reported:
        engine.load(tmp_path / "m.onnx")
    assert "backtrace" not in str(reported.value)


def test_a_model_that_it_has_no_kernels_for_is_told(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) { y = Bernoulli(x) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with open_engine("tract") as engine, pytest.raises(EngineError, match="Bernoulli") as reported:
        engine.load(tmp_path / "m.onnx").run({"x": np.zeros(4, np.float32)})
    assert "backtrace" not in str(reported.value)
