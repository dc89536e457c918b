"""The kernels that onnxruntime runs for a model."""

from __future__ import annotations

from pathlib import Path

from onnxq.evaluation.verification import Kernels, _kernel_types


def count_kernels(model: Path) -> Kernels:
    """Load a model with all optimizations and count the kernels of its optimized graph, subgraphs included."""
    return Kernels.of(_kernel_types(model))
