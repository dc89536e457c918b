"""Serve the reference evaluator of onnx: slow, and exactly what the standard says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx.reference import ReferenceEvaluator

from onnxq.runtime.protocol import Array, Loaded, serve


class Reference:
    """`onnx.reference.ReferenceEvaluator`."""

    version = f"onnx {onnx.__version__}"
    profiles = False
    threads = 1

    def load(self, model: str, threads: int | None) -> Loaded:
        """Load a model file; it runs in one thread of Python."""
        return _Session(ReferenceEvaluator(model))

    def profile(
        self, model: str, samples: Sequence[Mapping[str, Array]], repeats: int, threads: int
    ) -> tuple[Mapping[str, Any], Sequence[Array]]:
        """Raise ValueError: the evaluator does not report times."""
        raise ValueError("it does not report the time of each node")


class _Session:
    def __init__(self, evaluator: ReferenceEvaluator) -> None:
        self.evaluator = evaluator
        self.outputs = list(evaluator.output_names)

    def run(self, sample: Mapping[str, Array]) -> Sequence[Array]:
        return list(self.evaluator.run(None, dict(sample)))


if __name__ == "onnxq.runtime.backend":
    serve(Reference())
