"""Convert typed values to the plain values of TOML and JSON, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from onnxq.errors import OnnxqError, did_you_mean

Record = TypeVar("Record")
Named = Mapping[type, Mapping[str, Any]]
"""For each type, the values that a file refers to by name."""

_NOTHING: Named = MappingProxyType({})
_KINDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
# JSON has no such numbers. The JSON mapping of protocol buffers uses the same words.
_NO_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class RecordError(OnnxqError):
    """A table does not fit a dataclass; the message names the key, the expected type and the value."""


def to_plain(value: object) -> Any:
    """Convert a value to JSON's types: dataclasses become tables, infinities and NaN become words.

    >>> to_plain((1.5, math.inf))
    [1.5, 'Infinity']
    """
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value.value if isinstance(value, Enum) else value


def read_record(kind: type[Record], what: str, table: Mapping[str, Any], named: Named = _NOTHING) -> Record:
    """Return a dataclass from a table of its fields, checked against the declared types.

    Args:
        kind: the class.
        what: the table's name in errors.
        table: plain values by field; missing fields have their default.
        named: for each type, the values that the table refers to by name.

    Raises:
        RecordError: a key is unknown or missing, or a value has another type or is refused by the class.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    fields_by_name: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields_by_name:
            raise RecordError(f"{what} has no key {key!r}{did_you_mean(key, fields_by_name)}")
    for name, field in fields_by_name.items():
        if name not in table and field.default is field.default_factory is MISSING:
            raise RecordError(f"{what} has no {name}")
    try:
        return kind(**{name: read_value(hints[name], name, value, named) for name, value in table.items()})
    except OnnxqError as reason:
        raise RecordError(f"{what}: {reason}") from reason


def read_value(hint: Any, key: str, value: Any, named: Named = _NOTHING) -> Any:
    """Return a plain value of a file as the declared type: a number, text, choice, record, tuple or mapping.

    Raises:
        RecordError: the value does not have that type.

    >>> read_value(tuple[float, float], "interval", [1, "Infinity"])
    (1.0, inf)
    """
    if get_origin(hint) in (Union, UnionType):
        if value is None and NoneType in get_args(hint):
            return None
        return read_value(_member(hint, value), key, value, named)
    if get_origin(hint) is tuple:
        return _several(get_args(hint), key, value, named)
    if get_origin(hint) is Mapping:
        items = _table(key, value).items()
        return {name: read_value(get_args(hint)[1], f"{key} {name!r}", item, named) for name, item in items}
    if hint in named:
        return named[hint][_choice(key, value, named[hint])]
    if is_dataclass(hint):
        return read_record(hint, key, _table(key, value), named)  # type: ignore[arg-type]
    if issubclass(hint, Enum):
        return hint(_choice(key, value, [choice.value for choice in hint]))
    if hint is float and isinstance(value, str):
        value = _NO_NUMBERS.get(value, value)
    # In Python True is an int, and an int may stand for a float. In a file an int may stand for a float, but not True.
    if not isinstance(value, (int, float) if hint is float else hint) or isinstance(value, bool) is not (hint is bool):
        raise RecordError(f"{key} is {_KINDS[hint]}, found {value!r}")
    return hint(value)


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _member(union: Any, value: object) -> Any:
    # A list fits only a tuple type.
    members = [member for member in get_args(union) if member is not NoneType]
    return next((m for m in members if (get_origin(m) is tuple) is isinstance(value, list)), members[0])


def _several(items: tuple[Any, ...], key: str, values: Any, named: Named) -> tuple[Any, ...]:
    if not isinstance(values, list) or (items[-1] is not Ellipsis and len(values) != len(items)):
        count = "" if items[-1] is Ellipsis else f"{len(items)} "
        raise RecordError(f"{key} is a list of {count}values, found {values!r}")
    hints = items if items[-1] is not Ellipsis else items[:1] * len(values)
    return tuple(read_value(hint, key, item, named) for hint, item in zip(hints, values, strict=True))


def _table(key: str, table: object) -> Mapping[str, Any]:
    if not isinstance(table, dict):
        raise RecordError(f"{key} is a table, found {table!r}")
    return table


def _choice(key: str, value: object, choices: Any) -> str:
    names = list(choices)
    if value not in names:
        raise RecordError(f"{key} is one of {', '.join(names)}, found {value!r}{did_you_mean(str(value), names)}")
    return str(value)
