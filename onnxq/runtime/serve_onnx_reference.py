"""Serve the reference evaluator of onnx: slow, and exactly what the standard says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx.reference import ReferenceEvaluator

from onnxq.runtime.protocol import Array, Backend, Loaded, serve


class Reference(Backend):
    """`onnx.reference.ReferenceEvaluator`."""

    version = f"onnx {onnx.__version__}"
    threads = 1

    def load(self, model: str, threads: int | None) -> Loaded:
        """Load a model file; it runs in one thread of Python."""
        return _Session(ReferenceEvaluator(model))


class _Session:
    def __init__(self, evaluator: ReferenceEvaluator) -> None:
        self.evaluator = evaluator
        self.outputs = list(evaluator.output_names)

    def run(self, sample: Mapping[str, Array]) -> Sequence[Array]:
        return list(self.evaluator.run(None, dict(sample)))


if __name__ == "onnxq.runtime.backend":
    serve(Reference())
