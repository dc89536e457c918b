"""Graph-rewriting passes, one a file, in folders by what they are for.

A module of one of the folders holds one pass or rule, and is all that a new one needs beside its test: `PASSES` finds
it, and its class is an attribute here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any

from onnxq.rewrite import Pass

FOLDERS = ("canonical", "prepare", "quantize", "dequantize")
"""Where passes stand."""


@cache
def passes_of(folder: str) -> Mapping[str, type[Pass]]:
    """Return the passes of one folder by name, in the order of their modules' names."""
    found: dict[str, type[Pass]] = {}
    for module in iter_modules([str(Path(__file__).parent / folder)]):
        loaded = import_module(f"onnxq.passes.{folder}.{module.name}")
        found.update(
            (name, value)
            for name, value in vars(loaded).items()
            if inspect.isclass(value)
            and issubclass(value, Pass)
            and value.__module__ == loaded.__name__
            and not inspect.isabstract(value)
            and not name.startswith("_")
        )
    return MappingProxyType(found)


@cache
def _every() -> Mapping[str, type[Pass]]:
    return MappingProxyType({name: step for folder in FOLDERS for name, step in passes_of(folder).items()})


def __getattr__(name: str) -> Any:
    """Return `PASSES`, every pass by name, or one of them."""
    if name == "PASSES":
        return _every()
    if not name.startswith("_") and name in _every():
        return _every()[name]
    raise AttributeError(f"module 'onnxq.passes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["FOLDERS", "PASSES", "passes_of", *_every()]
