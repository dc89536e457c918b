"""The kernels that onnxruntime runs for a model."""

from __future__ import annotations

from pathlib import Path

from onnxq.evaluation.verification import Kernels
from onnxq.runtime.kernels import loaded_kernels


def count_kernels(model: Path) -> Kernels:
    """Load a model with all optimizations and count the kernels of its optimized graph, subgraphs included."""
    return Kernels.of(kernel.op_type for kernel in loaded_kernels(model))
