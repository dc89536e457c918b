"""onnxq: graph-rewriting quantization for ONNX models.

The public names load when they are first used, so that ``import onnxq`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxq.dequantization import dequantize
    from onnxq.errors import OnnxqError
    from onnxq.evidence.ranges import MinMax, Percentile
    from onnxq.evidence.squared_error import MeanSquaredError
    from onnxq.evidence.storage import load_statistics, save_statistics
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
    from onnxq.modelfile import load, save
    from onnxq.optimization import Optimized, optimize
    from onnxq.pipeline import calibrate, plan, quantize
    from onnxq.preparation import prepare
    from onnxq.presets import PRESETS
    from onnxq.rewriting import Verify, run_passes
    from onnxq.scheme import Mode, Rule, Scheme, Spec
    from onnxq.scheme_file import load_scheme

__all__ = [
    "PRESETS",
    "Call",
    "Changes",
    "Graph",
    "Match",
    "MeanSquaredError",
    "MinMax",
    "Mode",
    "New",
    "OnnxqError",
    "Operators",
    "Optimized",
    "Pass",
    "Percentile",
    "Pipeline",
    "RewriteRule",
    "RewriteRules",
    "Rule",
    "Scheme",
    "Spec",
    "Verify",
    "calibrate",
    "compare_files",
    "dequantize",
    "load",
    "load_scheme",
    "load_statistics",
    "optimize",
    "plan",
    "prepare",
    "quantize",
    "remove_nodes",
    "replace_uses",
    "run_passes",
    "save",
    "save_statistics",
    "scopes",
]

_HOMES = {
    "onnxq.evidence.ranges": ("MinMax", "Percentile"),
    "onnxq.evidence.squared_error": ("MeanSquaredError",),
    "onnxq.evidence.storage": ("load_statistics", "save_statistics"),
    "onnxq.dequantization": ("dequantize",),
    "onnxq.errors": ("OnnxqError",),
    "onnxq.judging.agreement": ("compare_files",),
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
    "onnxq.modelfile": ("load", "save"),
    "onnxq.optimization": ("Optimized", "optimize"),
    "onnxq.pipeline": ("calibrate", "plan", "quantize"),
    "onnxq.preparation": ("prepare",),
    "onnxq.presets": ("PRESETS",),
    "onnxq.rewriting": ("Verify", "run_passes"),
    "onnxq.scheme": ("Mode", "Rule", "Scheme", "Spec"),
    "onnxq.scheme_file": ("load_scheme",),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'onnxq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
