"""onnxq: graph-rewriting quantization for ONNX models.

The public names load when they are first used, so that ``import onnxq`` costs nothing.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str

    from onnxq.calibration.data import Data
    from onnxq.calibration.methods import (
        Entropy,
        Fixed,
        HistogramSearch,
        MeanSquaredError,
        MinMax,
        MovingAverage,
        Percentile,
    )
    from onnxq.calibration.statistics import CalibrationStatistics, load_statistics, save_statistics
    from onnxq.certificate.making import certify
    from onnxq.certificate.verifying import verify
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.config.encodings_file import load_encodings
    from onnxq.config.presets import PRESETS
    from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme
    from onnxq.config.scheme_file import load_scheme
    from onnxq.data.images import ImageOptions
    from onnxq.data.sources import Audio, Source, Text
    from onnxq.errors import (
        DataError,
        EngineError,
        ModelError,
        OnnxqError,
        OutputError,
        PassError,
        SchemeError,
    )
    from onnxq.evaluation.agreement import compare_files
    from onnxq.evaluation.goal import Goal
    from onnxq.evaluation.latency import bench
    from onnxq.evaluation.layers import compare_layers
    from onnxq.evaluation.metrics import Metric, load_metric
    from onnxq.ir import Graph, all_graphs, load, remove_nodes, replace_uses, save
    from onnxq.passes.preparing.preparation import prepare
    from onnxq.passes.preparing.rewriting import Verify, run_passes
    from onnxq.pipeline.dequantization import dequantize
    from onnxq.pipeline.optimization import Optimized, optimize
    from onnxq.pipeline.quantization import Quantized, calibrate, plan, quantize, sensitivity
    from onnxq.pipeline.request import Budget
    from onnxq.planning.plan import Plan
    from onnxq.planning.plan_file import load_plan, save_plan
    from onnxq.report import AccuracyError, Report, load_report
    from onnxq.report.encodings import save_encodings
    from onnxq.rewrite import (
        Changes,
        Match,
        NodePattern,
        OpsetPatternBuilder,
        Pass,
        Pipeline,
        RewriteContext,
        RewriteRule,
        RewriteRules,
    )
    from onnxq.search.sensitivity_report import Sensitivity
    from onnxq.training.pipeline import train

__all__ = [
    "PRESETS",
    "AccuracyError",
    "Audio",
    "Budget",
    "CalibrationStatistics",
    "Changes",
    "Data",
    "DataError",
    "EngineError",
    "Entropy",
    "Fixed",
    "Goal",
    "Granularity",
    "Graph",
    "HistogramSearch",
    "ImageOptions",
    "Match",
    "MeanSquaredError",
    "Metric",
    "MinMax",
    "Mode",
    "ModelError",
    "MovingAverage",
    "NodePattern",
    "OnnxqError",
    "OpsetPatternBuilder",
    "Optimized",
    "OutputError",
    "Pass",
    "PassError",
    "Percentile",
    "Pipeline",
    "Plan",
    "QuantSpec",
    "Quantized",
    "Report",
    "RewriteContext",
    "RewriteRule",
    "RewriteRules",
    "Rule",
    "Scheme",
    "SchemeError",
    "Sensitivity",
    "Source",
    "Text",
    "Verify",
    "all_graphs",
    "bench",
    "calibrate",
    "certify",
    "compare_files",
    "compare_layers",
    "dequantize",
    "load",
    "load_encodings",
    "load_metric",
    "load_plan",
    "load_report",
    "load_scheme",
    "load_statistics",
    "optimize",
    "plan",
    "prepare",
    "progress_bars",
    "quantize",
    "remove_nodes",
    "replace_uses",
    "run_passes",
    "save",
    "save_encodings",
    "save_plan",
    "save_statistics",
    "sensitivity",
    "train",
    "verify",
]

_HOMES = {
    "onnxq.pipeline.request": ("Budget",),
    "onnxq.cli.progress_bars": ("progress_bars",),
    "onnxq.calibration.data": ("Data",),
    "onnxq.certificate.making": ("certify",),
    "onnxq.certificate.verifying": ("verify",),
    "onnxq.pipeline.dequantization": ("dequantize",),
    "onnxq.errors": (
        "DataError",
        "EngineError",
        "ModelError",
        "OnnxqError",
        "OutputError",
        "PassError",
        "SchemeError",
    ),
    "onnxq.calibration.methods": (
        "Entropy",
        "Fixed",
        "HistogramSearch",
        "MeanSquaredError",
        "MinMax",
        "MovingAverage",
        "Percentile",
    ),
    "onnxq.calibration.statistics": ("CalibrationStatistics", "load_statistics", "save_statistics"),
    "onnxq.rewrite": (
        "NodePattern",
        "Changes",
        "Match",
        "RewriteContext",
        "OpsetPatternBuilder",
        "Pass",
        "Pipeline",
        "RewriteRule",
        "RewriteRules",
    ),
    "onnxq.evaluation.agreement": ("compare_files",),
    "onnxq.evaluation.goal": ("Goal",),
    "onnxq.evaluation.latency": ("bench",),
    "onnxq.evaluation.layers": ("compare_layers",),
    "onnxq.evaluation.metrics": (
        "Metric",
        "load_metric",
    ),
    "onnxq.ir": (
        "Graph",
        "load",
        "remove_nodes",
        "replace_uses",
        "save",
        "all_graphs",
    ),
    "onnxq.pipeline.optimization": (
        "Optimized",
        "optimize",
    ),
    "onnxq.pipeline.quantization": (
        "Quantized",
        "calibrate",
        "plan",
        "quantize",
        "sensitivity",
    ),
    "onnxq.planning.plan": ("Plan",),
    "onnxq.planning.plan_file": (
        "load_plan",
        "save_plan",
    ),
    "onnxq.passes.preparing.preparation": ("prepare",),
    "onnxq.config.presets": ("PRESETS",),
    "onnxq.report.encodings": ("save_encodings",),
    "onnxq.report": (
        "AccuracyError",
        "Report",
        "load_report",
    ),
    "onnxq.passes.preparing.rewriting": (
        "Verify",
        "run_passes",
    ),
    "onnxq.data.images": ("ImageOptions",),
    "onnxq.data.sources": ("Audio", "Source", "Text"),
    "onnxq.config.scheme": (
        "Granularity",
        "Mode",
        "Rule",
        "Scheme",
        "QuantSpec",
    ),
    "onnxq.config.encodings_file": ("load_encodings",),
    "onnxq.config.scheme_file": ("load_scheme",),
    "onnxq.search.sensitivity_report": ("Sensitivity",),
    "onnxq.training.pipeline": ("train",),
}

_REMOVED = {
    "Auto": "expected no ranges in the scheme, so that the search chooses among all methods",
    "Collection": "expected Budget(cluster=...) or Data(statistics=...)",
    "Processes": "expected threads, which run samples by themselves, or Budget(cluster=...)",
}
"""Removed names, and what to use instead."""

# Nothing is printed unless whoever uses the package asks for it.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("onnxq.version").VERSION
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    instead = f" any more, {_REMOVED[name]}" if name in _REMOVED else ""
    raise AttributeError(f"module 'onnxq' has no attribute {name!r}{instead}")


def __dir__() -> list[str]:
    return __all__
