"""An engine as somebody else would write it: one class, one model, and everything else is there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator
from small_models import small

from onnxq.errors import DataError, EngineError, ModelError
from onnxq.runtime import engines as table
from onnxq.runtime.child import ChildEngine, Program
from onnxq.runtime.engine import Engine, LoadedModel, OnnxRuntime, Preloader
from onnxq.runtime.engines import open_engine
from onnxq.runtime.sessions import Array

from .fake_engine import fake_engine


class Evaluated(LoadedModel):
    """A model in onnx's evaluator."""

    def __init__(self, model: Path) -> None:
        self.evaluator = ReferenceEvaluator(str(model))
        self.outputs = tuple(self.evaluator.output_names)

    def run(self, sample: Mapping[str, Array]) -> list[Any]:
        return self.evaluator.run(None, dict(sample))


class Evaluator(Engine):
    """onnx's evaluator in this process."""

    name = "evaluator"

    def __init__(self, place: str) -> None:
        self.version = f"onnx {onnx.__version__}{place}"

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        return Evaluated(model)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(small(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_stranger_writes_an_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {"evaluator": Evaluator}
    monkeypatch.setattr(table, "load_registered", lambda group, name, what: offered.get(name))
    sample = {"x": np.zeros(4, np.float32)}
    with open_engine("evaluator:!") as engine:
        assert engine.version.endswith("!")
        loaded = engine.load(model)
        assert loaded.outputs == ("y",)
        assert loaded.run(sample)[0].tolist() == [1, 2, 3, 4]
        [times] = engine.time((loaded, engine.load(model)), [sample], 0.0)
        assert all(second > 0 for pair in times for second in pair)
        assert not engine.profiles
        with pytest.raises(EngineError, match="engine evaluator does not tell what each node takes"):
            engine.profile(model, [sample], model.parent, 1)
        loaded.close()


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


@pytest.mark.parametrize("fault", ["", "refuse"])
def test_what_is_refused_is_told_when_it_is_waited_for(tmp_path: Path, fault: str) -> None:
    onnx.save(small(), tmp_path / "model.onnx")
    with fake_engine(fault) as engine:
        ahead = Preloader(engine)
        ahead.check()
        assert engine.version == "fake 1.0"
        ahead.expect(tmp_path / "missing.onnx")
        ahead.load(tmp_path / "model.onnx")
        if fault:
            with pytest.raises(EngineError, match="engine fake cannot load"):
                ahead.check()
            with pytest.raises(EngineError, match="engine fake cannot load"):
                ahead.check(wait=False)
        else:
            ahead.check()


def test_an_engine_that_does_not_start_is_told() -> None:
    with ChildEngine("odd", Program(("sh", "-c", "echo no such host >&2; exit 255")), 20.0) as engine:
        ahead = Preloader(engine)
        with pytest.raises(EngineError, match=r"engine odd has ended .* start: no such host"):
            ahead.check()


def test_nothing_is_loaded_where_none_is_wanted(tmp_path: Path) -> None:
    with fake_engine("refuse") as engine:
        for ahead in (Preloader(None), Preloader(engine, loads=False)):
            ahead.load(tmp_path / "missing.onnx")
            ahead.check()
        assert engine.version == "fake 1.0"


def test_an_engine_of_a_package_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_engine("") as engine:
        monkeypatch.setattr(engine, "load", lambda model: {}[model])
        ahead = Preloader(engine)
        ahead.load(tmp_path / "model.onnx")
        with pytest.raises(EngineError, match="engine 'fake' failed: KeyError"):
            ahead.check()
