"""onnxruntime under another name, which remembers what it was asked to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from onnxq.engines import table
from onnxq.engines.engine import LoadedModel
from onnxq.engines.kernels import Kernel
from onnxq.engines.local import OnnxRuntime


class Elsewhere(OnnxRuntime):
    """A runtime that remembers what it was asked to time."""

    name = "elsewhere"
    asked: ClassVar[list[str]] = []

    def __init__(self, place: str) -> None:
        self.version = "elsewhere 1"

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        self.asked.append("load")
        return super().load(model, threads)

    def profile(self, *given: Any) -> tuple[Kernel, ...]:
        self.asked.append("profile")
        return super().profile(*given)


def offer_elsewhere(monkeypatch: pytest.MonkeyPatch, *, profiles: bool = True) -> None:
    """Let the engine be found by its name, with nothing asked of it yet."""
    offered = {"elsewhere": Elsewhere}
    monkeypatch.setattr(table, "registered", lambda group, name, what: offered.get(name))
    monkeypatch.setattr(Elsewhere, "profiles", profiles)
    monkeypatch.setattr(Elsewhere, "asked", [])
