"""onnxruntime under another name, which remembers what it was asked to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import onnx
import pytest

from onnxq.runtime import engines as table
from onnxq.runtime.engine import LoadedModel, OnnxRuntime
from onnxq.runtime.interleaved_timing import Turn
from onnxq.runtime.kernels import Kernel
from onnxq.runtime.sessions import Array


class Elsewhere(OnnxRuntime):
    """A runtime that remembers what it was asked to time."""

    name = "elsewhere"
    requested: ClassVar[list[str]] = []

    def __init__(self, place: str) -> None:
        self.version = "elsewhere 1"

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        self.requested.append("load")
        return super().load(model, threads)

    def profile(self, *given: Any) -> tuple[Kernel, ...]:
        self.requested.append("profile")
        return super().profile(*given)


def offer_elsewhere(monkeypatch: pytest.MonkeyPatch, *, profiles: bool = True) -> None:
    """Let the engine be found by its name, with nothing asked of it yet."""
    offered = {"elsewhere": Elsewhere}
    monkeypatch.setattr(table, "load_registered", lambda group, name, what: offered.get(name))
    monkeypatch.setattr(Elsewhere, "profiles", profiles)
    monkeypatch.setattr(Elsewhere, "requested", [])


def offer_known_times(monkeypatch: pytest.MonkeyPatch, speed: float) -> None:
    """Let the engine run what decodes so many times as fast as what does not, give or take 2 % in each round."""
    integers: set[LoadedModel] = set()
    rounds = count()

    def load(engine: Elsewhere, model: Path, threads: int | None = None) -> LoadedModel:
        loaded = OnnxRuntime.load(engine, model, threads)
        if any(node.op_type == "DequantizeLinear" for node in onnx.load(model).graph.node):
            integers.add(loaded)
        return loaded

    def times(
        engine: Elsewhere, models: Sequence[LoadedModel], samples: Sequence[Mapping[str, Array]], *given: Any
    ) -> list[list[Turn]]:
        mood = (0.98, 1.0, 1.02)[next(rounds) % 3]
        return [[tuple(1 / (speed * mood) if one in integers else 1.0 for one in models)] for _ in samples]

    offer_elsewhere(monkeypatch, profiles=False)
    monkeypatch.setattr(Elsewhere, "load", load)
    monkeypatch.setattr(Elsewhere, "time", times)
