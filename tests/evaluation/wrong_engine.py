"""Engines that compute something else than onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import onnx

from onnxq.errors import EngineError
from onnxq.runtime.engine import LoadedModel, OnnxRuntime

_NUMBERS = count()


class Wrong(OnnxRuntime):
    """onnxruntime, were it to compute cosines for sines; it refuses tangents."""

    name, version = "wrong", "wrong 1"

    def __init__(self) -> None:
        self.closed = False

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        proto = onnx.load(model)
        for node in proto.graph.node:
            if node.op_type == "Tan":
                raise EngineError("engine wrong cannot load Tan")
            node.op_type = "Cos" if node.op_type == "Sin" else node.op_type
        # Several are loaded at once.
        wrong = model.with_name(f"wrong {next(_NUMBERS)}.onnx")
        onnx.save(proto, wrong)
        return super().load(wrong, threads)

    def close(self) -> None:
        self.closed = True


class Faulty(OnnxRuntime):
    """onnxruntime, were something to happen to its outputs."""

    name = "faulty"

    def __init__(self, fault: Callable[[list[Any]], list[Any]]) -> None:
        super().__init__()
        self.fault = fault

    def load(self, model: Path, threads: int | None = None) -> LoadedModel:
        loaded = super().load(model, threads)
        right = loaded.run
        loaded.run = lambda sample: self.fault(right(sample))
        return loaded
