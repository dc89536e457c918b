"""onnxq: graph-rewriting quantization for ONNX models.

The public names load when they are first used, so that ``import onnxq`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxq.calibration.data import open_samples
    from onnxq.calibration.ranges import MeanSquaredError, MinMax, Percentile
    from onnxq.calibration.statistics import Statistics
    from onnxq.errors import OnnxqError
    from onnxq.graph import Graph, load, save
    from onnxq.passes import Changes, Pass, Pipeline
    from onnxq.pipeline import Quantized, calibrate, plan, prepare, quantize
    from onnxq.plan import Plan
    from onnxq.presets import PRESETS
    from onnxq.scheme import Mode, Rule, Scheme, Spec, load_scheme

_HOMES = {
    "Changes": "onnxq.passes",
    "Graph": "onnxq.graph",
    "MeanSquaredError": "onnxq.calibration.ranges",
    "MinMax": "onnxq.calibration.ranges",
    "Mode": "onnxq.scheme",
    "OnnxqError": "onnxq.errors",
    "PRESETS": "onnxq.presets",
    "Pass": "onnxq.passes",
    "Percentile": "onnxq.calibration.ranges",
    "Pipeline": "onnxq.passes",
    "Plan": "onnxq.plan",
    "Quantized": "onnxq.pipeline",
    "Rule": "onnxq.scheme",
    "Scheme": "onnxq.scheme",
    "Spec": "onnxq.scheme",
    "Statistics": "onnxq.calibration.statistics",
    "calibrate": "onnxq.pipeline",
    "load": "onnxq.graph",
    "load_scheme": "onnxq.scheme",
    "open_samples": "onnxq.calibration.data",
    "plan": "onnxq.pipeline",
    "prepare": "onnxq.pipeline",
    "quantize": "onnxq.pipeline",
    "save": "onnxq.graph",
}

__all__ = [*_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'onnxq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
