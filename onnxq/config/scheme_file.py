"""Schemes in TOML files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxq.config.documents import read_document
from onnxq.config.presets import preset_named
from onnxq.config.scheme import InputsOutputs, Rule, Scheme
from onnxq.errors import SchemeError
from onnxq.lowering import AllowedOps
from onnxq.numerics.formats import format_named
from onnxq.system.records import read_record

# Keys of a rule that take a list of names, or one name.
_NAMES = ("op_types", "nodes", "tensors")


def load_scheme(path: str | Path) -> Scheme:
    """Read a scheme from a TOML file.

    The file holds ``[[rule]]`` tables with the fields of Rule; ``weight`` and ``activation`` are tables with the
    fields of Spec. ``base = "int8"`` adds the rules of a preset behind the file's own, ``ranges = "mse"`` names the
    calibration method for activations, by default that of the base, ``correct_biases = false`` leaves biases as they
    are, ``emit`` is one of the values of AllowedOps, and ``io`` one of InputsOutputs.

    Args:
        path: the file.

    Returns:
        The scheme, named after the file.

    Raises:
        SchemeError: the file cannot be read, is not TOML, or has a key or value that does not exist.

    >>> load_scheme("scheme.toml").name  # doctest: +SKIP
    'scheme'
    """
    return replace(read_document(path, "scheme", tomllib.loads, _parse_scheme), name=Path(path).stem)


def scheme_named(text: str) -> Scheme:
    """Return the scheme of a preset's name, or of a file that ends in ``.toml``.

    Raises:
        SchemeError: there is no such preset, or the file is wrong.
    """
    return load_scheme(text) if text.endswith(".toml") else preset_named(text)


@dataclass(frozen=True)
class _Document:
    """The keys of a file; the base has the value of a key that is left out."""

    rule: tuple[Rule, ...] = ()
    base: str = ""
    ranges: str | None = None
    correct_biases: bool | None = None
    emit: AllowedOps | None = None
    io: InputsOutputs | None = None


def _parse_scheme(document: Mapping[str, Any]) -> Scheme:
    tables = document.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SchemeError("rules are written as [[rule]] tables")
    parsed = read_record(_Document, "a scheme", {**document, "rule": [_written_out(table) for table in tables]})
    base = preset_named(parsed.base) if parsed.base else Scheme(())
    rules = (*parsed.rule, *base.rules)
    if not rules:
        raise SchemeError('it has no rules; add [[rule]] tables or base = "int8"')
    settings = {name: getattr(parsed, name) for name in ("ranges", "correct_biases", "emit", "io")}
    return replace(base, rules=rules, **{name: value for name, value in settings.items() if value is not None})


def _written_out(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a rule with lists for single names, and whether its activations are symmetric."""
    rule = {key: [value] if key in _NAMES and isinstance(value, str) else value for key, value in table.items()}
    spec = rule.get("activation")
    # Weights and floating-point values seldom have a zero point, activations mostly do.
    if isinstance(spec, dict) and "format" in spec and not format_named(str(spec["format"])).is_float:
        rule["activation"] = {"symmetric": False, **spec}
    return rule
