"""An engine as somebody else would write it: one class, one model, and everything else is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from small_models import small

from onnxq.errors import EngineError
from onnxq.runtime import table
from onnxq.runtime.engine import Engine, LoadedModel
from onnxq.runtime.sessions import Array
from onnxq.runtime.table import open_engine


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
