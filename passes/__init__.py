"""Graph-rewriting passes and rules, by topic.

The modules of this folder rewrite floats to floats. `quantize` applies a plan to a graph, and `dequantize` reverts it.
`PASSES` finds every public class. A rule of floats belongs to the canonical form unless `NOT_CANONICAL` names it.
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

from onnxq.rewrite import Pass, RewriteRule

NOT_CANONICAL: Final = frozenset(
    {
        "ConvolvePooled",
        "ConvolveTransposed",
        "DropInitialStates",
        "DropNoOps",
        "FuseBatchNorm",
        "JoinHardSwishes",
        "SplitPRelus",
        "UnfuseProducts",
    }
)
"""Rules that run as passes of their own, and those that only some targets want."""

GONE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "DropDefaults": "attributes with default values stay; leave it out",
        "ExpandConstants": "constants that repeat along an axis stay as they are; leave it out",
        "ScanCells": "a GRU stays one node and stores its weights; quantize the model anew",
        "SplitHardSwishes": "UseHardSigmoid splits HardSwish; quantize the model anew",
        "UseHardSwish": "UseHardSigmoid and JoinHardSwishes do its work; leave it out, or quantize the model anew",
    }
)
"""Passes of earlier versions, and what to do instead."""

GROUPS: Final = ("canonical", "prepare", "quantize", "dequantize")
"""Groups of passes by purpose."""


@cache
def passes_of(group: str) -> Mapping[str, type[Pass]]:
    """Return the passes of one of `GROUPS` by name.

    The canonical rules are sorted by name: among equally large patterns of one root operator, earlier ones are tried
    first.
    """
    if group in ("quantize", "dequantize"):
        return MappingProxyType(dict(_public(f"onnxq.passes.{group}", Path(__file__).parent / group)))
    floats = dict(_public("onnxq.passes", Path(__file__).parent))
    rules = sorted(name for name, step in floats.items() if issubclass(step, RewriteRule) and name not in NOT_CANONICAL)
    names = rules if group == "canonical" else [name for name in floats if name not in rules]
    return MappingProxyType({name: floats[name] for name in names})


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
    return ["GROUPS", "NOT_CANONICAL", "PASSES", "passes_of", *_every()]
