"""onnxq: graph-rewriting quantization for ONNX models.

The public names load when they are first used, so that ``import onnxq`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxq.calibration.ranges import MeanSquaredError, MinMax, Percentile
    from onnxq.dequantizing.dequantization import dequantize
    from onnxq.errors import OnnxqError
    from onnxq.evaluate import compare_files
    from onnxq.graph import Graph, load, save
    from onnxq.passes import Changes, Pass, Pipeline
    from onnxq.pipeline import calibrate, plan, quantize
    from onnxq.preparation import prepare
    from onnxq.presets import PRESETS
    from onnxq.scheme import Mode, Rule, Scheme, Spec, load_scheme

__all__ = [
    "PRESETS",
    "Changes",
    "Graph",
    "MeanSquaredError",
    "MinMax",
    "Mode",
    "OnnxqError",
    "Pass",
    "Percentile",
    "Pipeline",
    "Rule",
    "Scheme",
    "Spec",
    "calibrate",
    "compare_files",
    "dequantize",
    "load",
    "load_scheme",
    "plan",
    "prepare",
    "quantize",
    "save",
]

_HOMES = {
    "onnxq.calibration.ranges": ("MeanSquaredError", "MinMax", "Percentile"),
    "onnxq.dequantizing.dequantization": ("dequantize",),
    "onnxq.errors": ("OnnxqError",),
    "onnxq.evaluate": ("compare_files",),
    "onnxq.graph": ("Graph", "load", "save"),
    "onnxq.passes": ("Changes", "Pass", "Pipeline"),
    "onnxq.pipeline": ("calibrate", "plan", "quantize"),
    "onnxq.preparation": ("prepare",),
    "onnxq.presets": ("PRESETS",),
    "onnxq.scheme": ("Mode", "Rule", "Scheme", "Spec", "load_scheme"),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'onnxq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
