"""onnxq: graph-rewriting quantization for ONNX models.

The public names load when they are first used, so that ``import onnxq`` costs nothing. ``__init__.pyi`` lists them.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module

_REMOVED = {
    "Auto": "expected no ranges in the scheme, so that the search chooses among all methods",
    "Collection": "expected Budget(cluster=...) or Data(statistics=...)",
    "Processes": "expected threads, which run samples by themselves, or Budget(cluster=...)",
}
"""Removed names, and what to use instead."""

# Nothing is printed unless whoever uses the package asks for it.
logging.getLogger(__name__).addHandler(logging.NullHandler())


@cache
def _modules() -> dict[str, str]:
    """Return the module of each public name, as the stub for type checkers imports it."""
    import ast
    from pathlib import Path

    statements = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    imports = (statement for statement in statements if isinstance(statement, ast.ImportFrom))
    return {alias.name: statement.module or "" for statement in imports for alias in statement.names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("onnxq.version").VERSION
    if name == "__all__":
        return __dir__()
    if not name.startswith("_") and (module := _modules().get(name)):
        return globals().setdefault(name, getattr(import_module(module), name))
    instead = f" any more, {_REMOVED[name]}" if name in _REMOVED else ""
    raise AttributeError(f"module 'onnxq' has no attribute {name!r}{instead}")


def __dir__() -> list[str]:
    return sorted(_modules())
