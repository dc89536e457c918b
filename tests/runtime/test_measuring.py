"""The engine of a target, and what is told where there is none."""

from __future__ import annotations

import pytest

from onnxq.errors import EngineError
from onnxq.runtime import table
from onnxq.runtime.measuring import engine_of
from onnxq.runtime.targets import target_named


@pytest.mark.parametrize(
    ("target", "asked", "engine", "why"),
    [
        ("onnxruntime-cpu", "", None, ""),
        ("onnxruntime-cpu", "onnxruntime", None, ""),
        ("openvino", "onnxruntime", None, "onnxruntime in this process is not openvino; give --engine python:PATH"),
        ("tensorrt", "", None, "no engine runs tensorrt on this machine; give --engine"),
        ("openvino", "", None, "engine openvino is not installed"),
        ("onnxruntime-cpu", "onnx-reference", "onnx-reference", ""),
    ],
)
def test_the_engine_of_a_target_is_started_where_it_is_there(
    monkeypatch: pytest.MonkeyPatch, target: str, asked: str, engine: str | None, why: str
) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    found, told = engine_of(target_named(target), asked)
    assert (found.name if found else None) == engine
    assert told.startswith(why)
    assert bool(told) == bool(why)
    if found:
        found.close()


def test_an_engine_that_was_asked_for_must_be_there() -> None:
    with pytest.raises(EngineError, match="engine 'openvina' is not one of"):
        engine_of(target_named("openvino"), "openvina")
