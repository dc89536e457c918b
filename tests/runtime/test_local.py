"""The onnxruntime of this process as an engine."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.errors import DataError, ModelError
from onnxq.runtime.local import OnnxRuntime


def test_it_runs_times_and_profiles(perceptron: ModelProto, samples_for, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    samples = samples_for(perceptron, 2)
    with OnnxRuntime() as engine:
        assert engine.version.startswith("onnxruntime 1.")
        first, second = (engine.load(tmp_path / "model.onnx", 1) for _ in range(2))
        assert first.outputs == tuple(output.name for output in perceptron.graph.output)
        assert np.array_equal(first.run(samples[0])[0], second.run(samples[0])[0])
        assert sum(map(len, engine.time((first, second), samples, 0.0))) == 1
        assert engine.profile(tmp_path / "model.onnx", samples, tmp_path, 2)
        with pytest.raises(DataError, match="cannot be run by onnxruntime"):
            first.run({})
        first.close()
        with pytest.raises(ModelError, match="cannot be loaded by onnxruntime"):
            engine.load(tmp_path / "gone.onnx")


def test_a_model_that_is_loaded_again_is_what_optimisations_made_of_it_before(
    perceptron: ModelProto, samples_for, tmp_path: Path
) -> None:
    model, [sample] = tmp_path / "model.onnx", samples_for(perceptron, 1)
    onnx.save(perceptron, model)
    kept = tmp_path / "kept"
    kept.mkdir()
    engine = OnnxRuntime(kept)
    first, second = engine.load(model), engine.load(model)
    assert len(list(kept.rglob("*.onnx"))) == 1
    assert np.array_equal(first.run(sample)[0], second.run(sample)[0])
    other = copy.deepcopy(perceptron)
    other.graph.initializer[0].raw_data = bytes(len(other.graph.initializer[0].raw_data))
    onnx.save(other, model)
    assert not np.array_equal(engine.load(model).run(sample)[0], first.run(sample)[0])
    assert len(list(kept.rglob("*.onnx"))) == 2


def test_inputs_of_old_models_that_have_values_need_none_when_loaded_again(tmp_path: Path) -> None:
    head = '<ir_version: 3, opset_import: ["" : 9]> g (float[2] x, int64[1] n, int64[1] k) => (float[2] y)'
    values = "<int64[1] n = {2}, int64[1] k = {2}>"
    body = "{z = ConstantOfShape(n) w = ConstantOfShape(k) a = Mul(w, z) y = Add(x, a)}"
    model = onnx.parser.parse_model(head + values + body)
    onnx.save(model, tmp_path / "model.onnx")
    engine = OnnxRuntime(tmp_path)
    for _ in range(3):
        assert engine.load(tmp_path / "model.onnx").run({"x": np.ones(2, np.float32)})[0].tolist() == [1, 1]
