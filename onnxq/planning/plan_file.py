"""Plans as TOML files: a plan that was searched for on one machine is replayed, or edited by hand, on another."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from onnxq.errors import OutputError, SchemeError, nearest
from onnxq.lowering import Emit
from onnxq.planning.plan import Activation, Damping, Decision, Plan, Preparation
from onnxq.scheme import Granularity, Spec
from onnxq.targets import target_named

Record = TypeVar("Record")

_COMMENT = """\
# A plan of onnxq: what happens to every node of a model, and which tensors get a scale.
#
# Replay it with: onnxq quantize MODEL --calib SAMPLES --plan THIS_FILE
# Edit a node's mode, or what its weights become, as long as every node of the model keeps an entry:
#   static       data and weights are codes with fixed scales; the data needs an entry under activations
#   dynamic      weights are codes, and data codes whose scale is computed in each run
#   weight-only  weights are codes that the runtime multiplies or looks up; data stays float
#   storage      weights are stored as codes and decoded when the model is loaded
#   float        nothing changes; the node has no weights here
# An activation without found_range is calibrated anew; all others have the scales that follow from what stands here.
# Keys that are left out have their usual value. Specs are written once and meant by name.

"""
_SECTIONS = ("specs", "activations", "nodes")
_KINDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as TOML; equal plans are equal bytes.

    Args:
        plan: any plan.
        path: the file, which is replaced when it exists.

    Raises:
        OutputError: the file cannot be written.
    """
    # Only writing needs it; reading is in the standard library.
    import tomli_w

    names = _spec_names(plan)
    document = {
        "scheme": plan.scheme,
        "target": plan.target,
        "ranges": plan.ranges,
        "emit": plan.emit,
        **({"accuracy": list(plan.accuracy)} if plan.accuracy else {}),
        **({"observed": list(plan.observed)} if plan.observed else {}),
        **({"thorough": True} if plan.thorough else {}),
        **({"damping": _table(plan.damping, names, every=True)} if plan.damping is not None else {}),
        **({"preparation": _table(plan.preparation, names, every=True)} if plan.preparation is not None else {}),
        "specs": {name: _table(spec, names, every=True) for spec, name in names.items()},
        "activations": {one.tensor: _table(one, names, besides="tensor") for one in plan.activations},
        "nodes": {one.node: _table(one, names, besides="node") for one in plan.decisions},
    }
    try:
        Path(path).write_text(_COMMENT + tomli_w.dumps(document), encoding="utf-8", newline="\n")
    except OSError as reason:
        raise OutputError(f"plan {path} cannot be written: {reason.strerror}") from reason


def load_plan(path: str | Path) -> Plan:
    """Read what save_plan wrote, or what was made of it by hand.

    Args:
        path: the file.

    Returns:
        The plan, equal to the one that was saved.

    Raises:
        SchemeError: the file cannot be read, is not TOML, or has a key, value or name that does not exist.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as reason:
        raise SchemeError(f"plan {path} cannot be read: {reason}") from reason
    try:
        return _parse_plan(document)
    except SchemeError as reason:
        raise SchemeError(f"plan {path}: {reason}") from reason


# --- values to tables ---------------------------------------------------------------------------------------------


def _spec_names(plan: Plan) -> dict[Spec, str]:
    """Name every spec after its format and granularity, numbered where that is not enough."""
    weights = (weight.spec for decision in plan.decisions for weight in decision.weights)
    specs = dict.fromkeys((*weights, *(activation.spec for activation in plan.activations)))
    names: dict[Spec, str] = {}
    for spec in specs:
        per = str(spec.per) if isinstance(spec.per, Granularity) else "block-" + "x".join(map(str, spec.per))
        stem, number = f"{spec.format}-{per}", 2
        name = stem
        while name in names.values():
            name, number = f"{stem}-{number}", number + 1
        names[spec] = name
    return names


def _table(record: Any, names: Mapping[Spec, str], *, besides: str = "", every: bool = False) -> dict[str, object]:
    """Return the fields of a dataclass, those of their usual value only where ``every`` one is wanted."""
    values = {field.name: getattr(record, field.name) for field in fields(record) if field.name != besides}
    usual = {field.name: field.default for field in fields(record)}
    return {name: _plain(value, names) for name, value in values.items() if every or value != usual[name]}


def _plain(value: object, names: Mapping[Spec, str]) -> object:
    if isinstance(value, Spec):
        return names[value]
    if is_dataclass(value):
        return _table(value, names)
    if isinstance(value, tuple):
        return [_plain(item, names) for item in value]
    return value


# --- tables to values ---------------------------------------------------------------------------------------------


def _parse_plan(document: Mapping[str, Any]) -> Plan:
    known = tuple(field.name for field in fields(Plan) if field.name not in ("decisions", "activations"))
    known += _SECTIONS
    for key in document:
        if key not in known:
            raise SchemeError(f"a plan has no key {key!r}{nearest(key, known)}")
    tables = {section: _section(document, section) for section in _SECTIONS}
    specs = {name: _record(Spec, f"spec {name!r}", table, {}) for name, table in tables["specs"].items()}
    return Plan(
        tuple(
            _record(Decision, f"node {name!r}", {**table, "node": name}, specs)
            for name, table in tables["nodes"].items()
        ),
        tuple(
            _checked_range(_record(Activation, f"activation {name!r}", {**table, "tensor": name}, specs))
            for name, table in tables["activations"].items()
        ),
        _value(str, "scheme", document.get("scheme", ""), specs),
        target_named(_value(str, "target", document.get("target", ""), specs)).name,
        _value(str, "ranges", document.get("ranges", ""), specs),
        _value(tuple[str, ...], "accuracy", document.get("accuracy", []), specs),
        _value(Emit, "emit", document.get("emit", Emit.QDQ), specs),
        _value(Damping, "damping", document["damping"], specs) if "damping" in document else None,
        _value(bool, "thorough", document.get("thorough", False), specs),
        _value(Preparation, "preparation", document["preparation"], specs) if "preparation" in document else None,
        _value(tuple[str, ...], "observed", document.get("observed", []), specs),
    )


def _section(document: Mapping[str, Any], section: str) -> dict[str, dict[str, Any]]:
    tables = document.get(section, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise SchemeError(f"{section} are written as tables such as [{section}.NAME]")
    return tables


def _checked_range(activation: Activation) -> Activation:
    for key in ("fixed_range", "found_range"):
        low, high = getattr(activation, key) or (0.0, 0.0)
        if not -math.inf < low <= high < math.inf:
            raise SchemeError(
                f"activation {activation.tensor!r}: {key} is the smallest and largest value, found [{low}, {high}]"
            )
    if not all(0 < factor <= 1 for factor in activation.factors):
        raise SchemeError(f"activation {activation.tensor!r}: factors are above 0 and at most 1")
    return activation


def _record(kind: type[Record], what: str, table: Mapping[str, Any], specs: Mapping[str, Spec]) -> Record:
    """Return the dataclass whose fields a table holds, each of the type that the class declares."""
    hints = get_type_hints(kind)
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise SchemeError(f"{what} has no key {key!r}{nearest(key, known)}")
    for name, field in known.items():
        if name not in table and field.default is MISSING:
            raise SchemeError(f"{what} has no {name}")
    try:
        return kind(**{name: _value(hints[name], name, found, specs) for name, found in table.items()})
    except SchemeError as reason:
        raise SchemeError(f"{what}: {reason}") from reason


def _value(hint: Any, key: str, found: Any, specs: Mapping[str, Spec]) -> Any:
    """Return what TOML gave for ``key`` as the type of a field: plain, a choice, a spec's name, a record or several."""
    if get_origin(hint) in (Union, UnionType):
        return _value(_member(hint, found), key, found, specs)
    if get_origin(hint) is tuple:
        return _several(get_args(hint), key, found, specs)
    if hint is Spec:
        return specs[_choice(key, found, specs)]
    if is_dataclass(hint):
        if not isinstance(found, dict):
            raise SchemeError(f"{key} is a table, found {found!r}")
        return _record(hint, key, found, specs)  # type: ignore[arg-type]
    if issubclass(hint, Enum):
        return hint(_choice(key, found, [choice.value for choice in hint]))
    # In Python true is a whole number and a whole number is a number; in a file only the latter is meant.
    if not isinstance(found, (int, float) if hint is float else hint) or isinstance(found, bool) is not (hint is bool):
        raise SchemeError(f"{key} is {_KINDS[hint]}, found {found!r}")
    return hint(found)


def _member(union: Any, found: object) -> Any:
    """Return the member of a union that a value is meant as: TOML has no None, and only tuples are lists."""
    members = [member for member in get_args(union) if member is not type(None)]
    return next((m for m in members if (get_origin(m) is tuple) is isinstance(found, list)), members[0])


def _several(items: tuple[Any, ...], key: str, found: Any, specs: Mapping[str, Spec]) -> tuple[Any, ...]:
    if not isinstance(found, list) or (items[-1] is not Ellipsis and len(found) != len(items)):
        count = "" if items[-1] is Ellipsis else f"{len(items)} "
        raise SchemeError(f"{key} is a list of {count}values, found {found!r}")
    hints = items if items[-1] is not Ellipsis else items[:1] * len(found)
    return tuple(_value(hint, key, item, specs) for hint, item in zip(hints, found, strict=True))


def _choice(key: str, found: object, choices: Any) -> str:
    names = list(choices)
    if found not in names:
        raise SchemeError(f"{key} is one of {', '.join(names)}, found {found!r}{nearest(str(found), names)}")
    return str(found)
