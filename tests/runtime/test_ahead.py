"""Models that an engine loads ahead: what it refuses is told, at once or when it is asked for."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from small_models import small

from onnxq.errors import EngineError
from onnxq.runtime.ahead import Ahead
from onnxq.runtime.child import ChildEngine
from onnxq.runtime.programs import Program

from .fake_engine import fake_engine


@pytest.mark.parametrize("fault", ["", "refuse"])
def test_what_is_refused_is_told_when_it_is_waited_for(tmp_path: Path, fault: str) -> None:
    onnx.save(small(), tmp_path / "model.onnx")
    with fake_engine(fault) as engine:
        ahead = Ahead(engine)
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
        ahead = Ahead(engine)
        with pytest.raises(EngineError, match=r"engine odd has ended .* start: no such host"):
            ahead.check()


def test_nothing_is_loaded_where_none_is_wanted(tmp_path: Path) -> None:
    with fake_engine("refuse") as engine:
        for ahead in (Ahead(None), Ahead(engine, loads=False)):
            ahead.load(tmp_path / "missing.onnx")
            ahead.check()
        assert engine.version == "fake 1.0"


def test_an_engine_of_a_package_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_engine("") as engine:
        monkeypatch.setattr(engine, "load", lambda model: {}[model])
        ahead = Ahead(engine)
        ahead.load(tmp_path / "model.onnx")
        with pytest.raises(EngineError, match="engine 'fake' failed: KeyError"):
            ahead.check()
