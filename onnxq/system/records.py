"""Frozen dataclasses to plain values of TOML and JSON and back, by the types that their fields declare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from onnxq.errors import OnnxqError, nearest

Record = TypeVar("Record")
Named = Mapping[type, Mapping[str, Any]]
"""Values that a file writes once and means by name, by their type."""

_NOTHING: Named = MappingProxyType({})
_KINDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
# JSON has no word for these; the JSON mapping of protocol buffers writes them so too.
_NO_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class RecordError(OnnxqError):
    """A table is not what a dataclass is made of; the message names the key, what was expected and what was found."""


def plain(value: object) -> Any:
    """Return a value as JSON can hold it: dataclasses as tables, infinities and NaN as words.

    >>> plain((1.5, math.inf))
    [1.5, 'Infinity']
    """
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value.value if isinstance(value, Enum) else value


def record(kind: type[Record], what: str, table: Mapping[str, Any], named: Named = _NOTHING) -> Record:
    """Return the dataclass whose fields a table holds, each of the type that the class declares.

    Args:
        kind: the class.
        what: how errors call the table; empty where they need not say.
        table: plain values by field; fields that are left out have their usual value.
        named: values of some types, which the table means by name.

    Raises:
        RecordError: a key is unknown or lacks, or a value is of another type or refused by the class.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise RecordError(f"{what} has no key {key!r}{nearest(key, known)}")
    for name, field in known.items():
        if name not in table and field.default is field.default_factory is MISSING:
            raise RecordError(f"{what} has no {name}")
    try:
        return kind(**{name: value(hints[name], name, found, named) for name, found in table.items()})
    except OnnxqError as reason:
        raise RecordError(f"{what}: {reason}") from reason


def value(hint: Any, key: str, found: Any, named: Named = _NOTHING) -> Any:
    """Return what a file holds for ``key`` as the type of a field: plain, a choice, a name, a record or several.

    Raises:
        RecordError: it is of another type.

    >>> value(tuple[float, float], "interval", [1, "Infinity"])
    (1.0, inf)
    """
    if get_origin(hint) in (Union, UnionType):
        return None if found is None and NoneType in get_args(hint) else value(_member(hint, found), key, found, named)
    if get_origin(hint) is tuple:
        return _several(get_args(hint), key, found, named)
    if get_origin(hint) is Mapping:
        items = _table(key, found).items()
        return {name: value(get_args(hint)[1], f"{key} {name!r}", item, named) for name, item in items}
    if hint in named:
        return named[hint][_choice(key, found, named[hint])]
    if is_dataclass(hint):
        return record(hint, key, _table(key, found), named)  # type: ignore[arg-type]
    if issubclass(hint, Enum):
        return hint(_choice(key, found, [choice.value for choice in hint]))
    if hint is float and isinstance(found, str):
        found = _NO_NUMBERS.get(found, found)
    # In Python true is a whole number and a whole number is a number; in a file only the latter is meant.
    if not isinstance(found, (int, float) if hint is float else hint) or isinstance(found, bool) is not (hint is bool):
        raise RecordError(f"{key} is {_KINDS[hint]}, found {found!r}")
    return hint(found)


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _member(union: Any, found: object) -> Any:
    """Return the member of a union that a value is meant as: only tuples are lists."""
    members = [member for member in get_args(union) if member is not NoneType]
    return next((m for m in members if (get_origin(m) is tuple) is isinstance(found, list)), members[0])


def _several(items: tuple[Any, ...], key: str, found: Any, named: Named) -> tuple[Any, ...]:
    if not isinstance(found, list) or (items[-1] is not Ellipsis and len(found) != len(items)):
        count = "" if items[-1] is Ellipsis else f"{len(items)} "
        raise RecordError(f"{key} is a list of {count}values, found {found!r}")
    hints = items if items[-1] is not Ellipsis else items[:1] * len(found)
    return tuple(value(hint, key, item, named) for hint, item in zip(hints, found, strict=True))


def _table(key: str, found: object) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise RecordError(f"{key} is a table, found {found!r}")
    return found


def _choice(key: str, found: object, choices: Any) -> str:
    names = list(choices)
    if found not in names:
        raise RecordError(f"{key} is one of {', '.join(names)}, found {found!r}{nearest(str(found), names)}")
    return str(found)
