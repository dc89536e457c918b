"""Schemes: what the user wants, as rules from operators and names to specs. Frozen; loads from TOML."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path

from onnxq.errors import SchemeError, nearest
from onnxq.numbers.formats import format_named
from onnxq.numbers.spec import Granularity, Method, Rounding, Spec, Storage

__all__ = [
    "Granularity",
    "Method",
    "Mode",
    "Rounding",
    "Rule",
    "Scheme",
    "Spec",
    "Storage",
    "load_scheme",
    "matches",
]

# A pattern that starts so is a regular expression that must match the whole name; anything else is a glob.
_REGEX = "re:"


class Mode(StrEnum):
    """What happens to a node."""

    STATIC = "static"
    """Data and weights become codes with fixed scales; the node runs as an integer kernel."""
    DYNAMIC = "dynamic"
    """Weights become codes, and data codes whose scale is computed anew in each run; the node multiplies integers."""
    WEIGHT_ONLY = "weight-only"
    """Weights are codes that the runtime multiplies or looks up as they are; data stays float."""
    STORAGE = "storage"
    """Weights are stored as codes and decoded when the model is loaded; the node computes in float."""
    FLOAT = "float"
    """Nothing changes."""


@dataclass(frozen=True)
class Rule:
    """A selection of nodes and what to do with them. A rule without selection takes every node.

    Attributes:
        mode: what happens to the nodes.
        op_types: patterns of op types, written like those of names; empty takes all.
        nodes: glob patterns, or ``re:`` and a regular expression, of node names; empty takes all.
        tensors: patterns of the names of the node's inputs and outputs; empty takes all.
        weight: spec of weights; None takes the target's format, symmetric per channel.
        activation: spec of activations; None takes the target's format, affine per tensor.
    """

    mode: Mode
    op_types: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    weight: Spec | None = None
    activation: Spec | None = None

    def __post_init__(self) -> None:
        """Check that regular expressions are valid."""
        for pattern in (*self.op_types, *self.nodes, *self.tensors):
            if pattern.startswith(_REGEX):
                _compiled(pattern)

    def selects(self, op_type: str, node: str, tensors: Iterable[str]) -> bool:
        """Whether the rule takes a node of this op type and name that touches these tensors."""
        return (
            (not self.op_types or any(matches(pattern, op_type) for pattern in self.op_types))
            and (not self.nodes or any(matches(pattern, node) for pattern in self.nodes))
            and (not self.tensors or any(matches(pattern, name) for pattern in self.tensors for name in tensors))
        )


@dataclass(frozen=True)
class Scheme:
    """An ordered list of rules; the first that selects a node decides.

    Attributes:
        rules: the rules, most specific first.
        name: how reports call the scheme.
        ranges: the range method for activations, as parse_range takes it, where the user names none; empty leaves the
            choice to measuring.
        correct_biases: whether biases make up for the mean error of rounded weights.
    """

    rules: tuple[Rule, ...]
    name: str = "custom"
    ranges: str = ""
    correct_biases: bool = True

    def excluding(self, *patterns: str) -> Scheme:
        """Return this scheme with the nodes that match ``patterns`` left in float."""
        if not patterns:
            return self
        return replace(self, rules=(Rule(Mode.FLOAT, nodes=patterns), *self.rules))

    def rule_for(self, op_type: str, node: str, tensors: Iterable[str]) -> Rule:
        """Return the first rule that selects the node; a node that no rule selects stays in float."""
        names = tuple(tensors)
        return next((rule for rule in self.rules if rule.selects(op_type, node, names)), Rule(Mode.FLOAT))

    def check_used(self, op_types: set[str], nodes: set[str], tensors: set[str]) -> None:
        """Check that every pattern of every rule matches something in a model.

        Raises:
            SchemeError: a pattern matches nothing; the message suggests the nearest name.
        """
        for rule in self.rules:
            for kind, patterns, names in (
                ("op type", rule.op_types, op_types),
                ("node", rule.nodes, nodes),
                ("tensor", rule.tensors, tensors),
            ):
                for pattern in patterns:
                    if not any(matches(pattern, name) for name in names):
                        raise SchemeError(
                            f"{kind} pattern {pattern!r} matches nothing in the model{nearest(pattern, names)}"
                        )


def matches(pattern: str, name: str) -> bool:
    """Whether a glob, or ``re:`` and a regular expression, matches the whole name.

    >>> matches("/head/*", "/head/Conv_1"), matches("re:.*_[0-9]+", "/head/Conv_1")
    (True, True)
    """
    if pattern.startswith(_REGEX):
        return _compiled(pattern).fullmatch(name) is not None
    # Names may hold brackets, which a glob reads as a character set, so equality counts first.
    return pattern == name or fnmatch.fnmatchcase(name, pattern)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix(_REGEX))
    except re.error as reason:
        raise SchemeError(f"pattern {pattern!r} is not a valid regular expression: {reason}") from reason


def load_scheme(path: str | Path) -> Scheme:
    """Read a scheme from a TOML file.

    The file holds ``[[rule]]`` tables with the fields of Rule; ``weight`` and ``activation`` are tables with the
    fields of Spec. ``base = "int8"`` adds the rules of a preset behind the file's own, ``ranges = "mse"`` names the
    range method for activations, by default that of the base, and ``correct_biases = false`` leaves biases as they are.

    Args:
        path: the file.

    Returns:
        The scheme, named after the file.

    Raises:
        SchemeError: the file cannot be read, is not TOML, or has a key or value that does not exist.
    """
    path = Path(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as reason:
        raise SchemeError(f"scheme {path} cannot be read: {reason}") from reason
    try:
        return replace(_parse_scheme(document), name=path.stem)
    except SchemeError as reason:
        raise SchemeError(f"scheme {path}: {reason}") from reason


def _parse_scheme(document: Mapping[str, object]) -> Scheme:
    _check_keys("scheme", document, {"base", "correct_biases", "ranges", "rule"})
    entries = document.get("rule", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SchemeError("rules are written as [[rule]] tables")
    rules = tuple(_parse_rule(entry) for entry in entries)
    base = Scheme(())
    if "base" in document:
        from onnxq.presets import preset_named

        base = preset_named(str(document["base"]))
        rules += base.rules
    if not rules:
        raise SchemeError('it has no rules; add [[rule]] tables or base = "int8"')
    return Scheme(
        rules,
        ranges=str(document.get("ranges", base.ranges)),
        correct_biases=_switch("correct_biases", document.get("correct_biases", base.correct_biases)),
    )


def _parse_rule(entry: Mapping[str, object]) -> Rule:
    _check_keys("rule", entry, {field.name for field in fields(Rule)})
    if "mode" not in entry:
        raise SchemeError(f"a rule has no mode; expected one of {', '.join(Mode)}")
    return Rule(
        mode=Mode(_choice("mode", entry["mode"], Mode)),
        op_types=_names("op_types", entry),
        nodes=_names("nodes", entry),
        tensors=_names("tensors", entry),
        weight=_parse_spec("weight", entry.get("weight")),
        activation=_parse_spec("activation", entry.get("activation")),
    )


def _parse_spec(key: str, entry: object) -> Spec | None:
    if entry is None:
        return None
    if not isinstance(entry, dict) or "format" not in entry:
        raise SchemeError(f'{key} is a table such as {{ format = "int8" }}, found {entry!r}')
    _check_keys(key, entry, {field.name for field in fields(Spec)})
    format = format_named(str(entry["format"]))
    return Spec(
        format.name,
        _parse_per(entry.get("per", Granularity.TENSOR)),
        # Weights and floating-point codes seldom have a zero point, activations mostly do.
        symmetric=_switch("symmetric", entry.get("symmetric", key == "weight" or format.is_float)),
        scale=str(entry.get("scale", "float32")),
        scale_rounding=Rounding(_choice("scale_rounding", entry.get("scale_rounding", Rounding.UP), Rounding)),
        two_level=_switch("two_level", entry.get("two_level", False)),
        method=Method(_choice("method", entry.get("method", Method.MINMAX), Method)),
        storage=Storage(_choice("storage", entry.get("storage", Storage.NATIVE), Storage)),
    )


def _parse_per(found: object) -> Granularity | tuple[int, ...]:
    if not isinstance(found, list):
        return Granularity(_choice("per", found, Granularity))
    if not all(type(extent) is int for extent in found):
        raise SchemeError(f"per is a list of whole numbers such as [32], found {found!r}")
    return tuple(found)


def _switch(key: str, found: object) -> bool:
    if not isinstance(found, bool):
        raise SchemeError(f"{key} is true or false, found {found!r}")
    return found


def _names(key: str, entry: Mapping[str, object]) -> tuple[str, ...]:
    found = entry.get(key, [])
    if isinstance(found, str):
        return (found,)
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise SchemeError(f"{key} is a string or a list of strings, found {found!r}")
    return tuple(found)


def _choice(key: str, found: object, choices: Iterable[str]) -> str:
    names = [str(choice) for choice in choices]
    if str(found) not in names:
        raise SchemeError(f"{key} is one of {', '.join(names)}, found {found!r}{nearest(str(found), names)}")
    return str(found)


def _check_keys(what: str, entry: Mapping[str, object], known: set[str]) -> None:
    for key in entry:
        if key not in known:
            raise SchemeError(f"a {what} has no key {key!r}{nearest(key, known)}")
