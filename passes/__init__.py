"""Graph-rewriting passes and rules, by topic.

The modules of this folder rewrite floats to floats. `quantize` applies a plan to a graph, and `dequantize` reverts it.
`PASSES` finds every public class. A new rule of the canonical form also needs a place in `CANONICAL`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, Final

from onnxq.rewrite import Pass

CANONICAL: Final = (
    "DivideBySquareRoot",
    "DropExpands",
    "DropWheres",
    "FlattenBatchedWeight",
    "FoldAffineIntoNormalization",
    "FoldGemmFactors",
    "FoldIntoBatchNorm",
    "FoldIntoNextProduct",
    "FoldPads",
    "FoldTransposeIntoWeight",
    "FuseGelu",
    "FuseLayerNormalization",
    "FuseRmsNormalization",
    "LiftChannelFactors",
    "MergeCasts",
    "MergeClamps",
    "MergeConcats",
    "MergeReshapes",
    "MergeScalars",
    "MergeScalesOfProduct",
    "MergeSlices",
    "MergeTransposeBetweenReshapes",
    "MergeTransposes",
    "ReplaceCastLike",
    "ReplaceEinsum",
    "ReplaceGemmBetweenReshapes",
    "ReplaceMatMulBetweenReshapes",
    "ReplaceMatMulOfMatrices",
    "ResolveAutomaticPadding",
    "SimplifySplits",
    "SplitSwishes",
    "UnifyGeluArgument",
    "UseAddAndMul",
    "UseGlobalAveragePool",
    "UseHardSwish",
    "UseLeakyRelu",
)
"""Rules of the canonical form. Among equally large patterns of one root operator, earlier rules are tried first."""

GROUPS: Final = ("canonical", "prepare", "quantize", "dequantize")
"""Groups of passes by purpose."""


@cache
def passes_of(group: str) -> Mapping[str, type[Pass]]:
    """Return the passes of one of `GROUPS` by name; the canonical ones in the order of `CANONICAL`."""
    if group in ("quantize", "dequantize"):
        return MappingProxyType(dict(_public(f"onnxq.passes.{group}", Path(__file__).parent / group)))
    floats = dict(_public("onnxq.passes", Path(__file__).parent))
    if group == "canonical":
        return MappingProxyType({name: floats[name] for name in CANONICAL})
    return MappingProxyType({name: step for name, step in floats.items() if name not in CANONICAL})


def _public(package: str, folder: Path) -> Iterator[tuple[str, type[Pass]]]:
    for module in iter_modules([str(folder)]):
        loaded = import_module(f"{package}.{module.name}")
        for name, value in vars(loaded).items():
            defined = inspect.isclass(value) and issubclass(value, Pass) and value.__module__ == loaded.__name__
            if defined and not inspect.isabstract(value) and not name.startswith("_"):
                yield name, value


@cache
def _every() -> Mapping[str, type[Pass]]:
    return MappingProxyType({name: step for group in GROUPS for name, step in passes_of(group).items()})


def __getattr__(name: str) -> Any:
    """Resolve `PASSES` (every pass by name) and each pass lazily."""
    if name == "PASSES":
        return _every()
    if not name.startswith("_") and name in _every():
        return _every()[name]
    raise AttributeError(f"module 'onnxq.passes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["CANONICAL", "GROUPS", "PASSES", "passes_of", *_every()]
