"""onnxq: graph-rewriting quantization for ONNX models.

The public names load when they are first used, so that ``import onnxq`` costs nothing.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str

    from onnxq.budget import Budget
    from onnxq.calibrating import calibrate
    from onnxq.cli.progress_bars import progress_bars
    from onnxq.data import Data
    from onnxq.dequantization import dequantize
    from onnxq.errors import DataError, EngineError, ModelError, OnnxqError, OutputError, PassError, SchemeError
    from onnxq.evidence.entropy import Entropy
    from onnxq.evidence.evidence import Evidence
    from onnxq.evidence.histogram_search import HistogramSearch
    from onnxq.evidence.range_table import Auto
    from onnxq.evidence.ranges import Fixed, MinMax, MovingAverage, Percentile
    from onnxq.evidence.squared_error import MeanSquaredError
    from onnxq.evidence.storage import load_statistics, save_statistics
    from onnxq.execution.resume import Collection
    from onnxq.execution.workers import Processes
    from onnxq.graph import (
        Call,
        Changes,
        Graph,
        Match,
        New,
        Operators,
        Pass,
        Pipeline,
        RewriteRule,
        RewriteRules,
        remove_nodes,
        replace_uses,
        scopes,
    )
    from onnxq.judging.agreement import compare_files
    from onnxq.judging.goal import Goal
    from onnxq.judging.latency_comparison import bench
    from onnxq.judging.layers import compare_layers
    from onnxq.judging.metrics import Metric, load_metric
    from onnxq.modelfile import load, save
    from onnxq.optimization import Optimized, optimize
    from onnxq.pipeline import Quantized, plan, quantize, sensitivity
    from onnxq.planning.plan import Plan
    from onnxq.planning.plan_file import load_plan, save_plan
    from onnxq.preparation import prepare
    from onnxq.presets import PRESETS
    from onnxq.report import FidelityError, Report, load_report
    from onnxq.rewriting import Verify, run_passes
    from onnxq.samples.images import ImageOptions
    from onnxq.samples.sources.audio import Audio
    from onnxq.samples.sources.source import Source
    from onnxq.samples.sources.text import Text
    from onnxq.scheme import Granularity, Mode, Rule, Scheme, Spec
    from onnxq.scheme_file import load_scheme
    from onnxq.searching.sensitivity import Sensitivity
    from onnxq.training.pipeline import train

__all__ = [
    "PRESETS",
    "Audio",
    "Auto",
    "Budget",
    "Call",
    "Changes",
    "Collection",
    "Data",
    "DataError",
    "EngineError",
    "Entropy",
    "Evidence",
    "FidelityError",
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
    "New",
    "OnnxqError",
    "Operators",
    "Optimized",
    "OutputError",
    "Pass",
    "PassError",
    "Percentile",
    "Pipeline",
    "Plan",
    "Processes",
    "Quantized",
    "Report",
    "RewriteRule",
    "RewriteRules",
    "Rule",
    "Scheme",
    "SchemeError",
    "Sensitivity",
    "Source",
    "Spec",
    "Text",
    "Verify",
    "bench",
    "calibrate",
    "compare_files",
    "compare_layers",
    "dequantize",
    "load",
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
    "save_plan",
    "save_statistics",
    "scopes",
    "sensitivity",
    "train",
]

_HOMES = {
    "onnxq.budget": ("Budget",),
    "onnxq.calibrating": ("calibrate",),
    "onnxq.cli.progress_bars": ("progress_bars",),
    "onnxq.data": ("Data",),
    "onnxq.dequantization": ("dequantize",),
    "onnxq.errors": (
        "DataError",
        "EngineError",
        "ModelError",
        "OnnxqError",
        "OutputError",
        "PassError",
        "SchemeError",
    ),
    "onnxq.evidence.entropy": ("Entropy",),
    "onnxq.evidence.evidence": ("Evidence",),
    "onnxq.evidence.histogram_search": ("HistogramSearch",),
    "onnxq.evidence.range_table": ("Auto",),
    "onnxq.evidence.ranges": (
        "Fixed",
        "MinMax",
        "MovingAverage",
        "Percentile",
    ),
    "onnxq.evidence.squared_error": ("MeanSquaredError",),
    "onnxq.evidence.storage": (
        "load_statistics",
        "save_statistics",
    ),
    "onnxq.execution.resume": ("Collection",),
    "onnxq.execution.workers": ("Processes",),
    "onnxq.graph": (
        "Call",
        "Changes",
        "Graph",
        "Match",
        "New",
        "Operators",
        "Pass",
        "Pipeline",
        "RewriteRule",
        "RewriteRules",
        "remove_nodes",
        "replace_uses",
        "scopes",
    ),
    "onnxq.judging.agreement": ("compare_files",),
    "onnxq.judging.goal": ("Goal",),
    "onnxq.judging.latency_comparison": ("bench",),
    "onnxq.judging.layers": ("compare_layers",),
    "onnxq.judging.metrics": (
        "Metric",
        "load_metric",
    ),
    "onnxq.modelfile": (
        "load",
        "save",
    ),
    "onnxq.optimization": (
        "Optimized",
        "optimize",
    ),
    "onnxq.pipeline": (
        "Quantized",
        "plan",
        "quantize",
        "sensitivity",
    ),
    "onnxq.planning.plan": ("Plan",),
    "onnxq.planning.plan_file": (
        "load_plan",
        "save_plan",
    ),
    "onnxq.preparation": ("prepare",),
    "onnxq.presets": ("PRESETS",),
    "onnxq.report": (
        "FidelityError",
        "Report",
        "load_report",
    ),
    "onnxq.rewriting": (
        "Verify",
        "run_passes",
    ),
    "onnxq.samples.images": ("ImageOptions",),
    "onnxq.samples.sources.audio": ("Audio",),
    "onnxq.samples.sources.source": ("Source",),
    "onnxq.samples.sources.text": ("Text",),
    "onnxq.scheme": (
        "Granularity",
        "Mode",
        "Rule",
        "Scheme",
        "Spec",
    ),
    "onnxq.scheme_file": ("load_scheme",),
    "onnxq.searching.sensitivity": ("Sensitivity",),
    "onnxq.training.pipeline": ("train",),
}

# Nothing is printed unless whoever uses the package asks for it.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("onnxq.version").VERSION
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'onnxq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
