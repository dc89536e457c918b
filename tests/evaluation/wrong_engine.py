"""An engine that takes one operator for another."""

from __future__ import annotations

from itertools import count
from pathlib import Path

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
