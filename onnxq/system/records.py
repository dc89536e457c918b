"""Convert typed values to plain values (TOML, JSON), to text (options) and to tables (notebooks), and back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from onnxq.errors import OnnxqError, did_you_mean

Record = TypeVar("Record")
Named = Mapping[type, Mapping[str, Any]]
"""For each type, the values that a file refers to by name."""

_NOTHING: Named = MappingProxyType({})
_KINDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
# JSON has no such numbers. The JSON mapping of protocol buffers uses the same words.
_NO_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_PLAIN_TYPES = (bool, int, float, str, NoneType)
_COLLECTIONS = (tuple, frozenset)
_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?)?b?", re.IGNORECASE)
_MOST_TABLE_ROWS = 50


class RecordError(OnnxqError):
    """A table does not fit a dataclass; the message names the key, the expected type and the value."""


# Dataclasses


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


# Options


def is_option_type(kind: Any) -> bool:
    """Return whether `parse_option` can read values of a type.

    >>> is_option_type(int | None), is_option_type(tuple[str, ...]), is_option_type(dict[str, int])
    (True, True, False)
    """
    inner = get_args(kind)
    if _is_union(kind):
        return any(is_option_type(member) for member in inner)
    if get_origin(kind) in _COLLECTIONS:
        return is_option_type(inner[0])
    return kind in _PLAIN_TYPES or _is_enum(kind) or get_origin(kind) is Literal


def parse_option(text: str, kind: Any) -> Any:
    """Parse the text of an option as a type that `is_option_type` accepts.

    Commas separate the values of a tuple or frozenset. ``none`` is None if the type allows None.

    Raises:
        ValueError: the text is not of the type; the message names what is expected.

    >>> parse_option("1e-3", float), parse_option("none", int | None), parse_option("Add,Mul", tuple[str, ...])
    (0.001, None, ('Add', 'Mul'))
    """
    inner = get_args(kind)
    if _is_union(kind):
        return _first_that_fits(text, kind)
    if get_origin(kind) in _COLLECTIONS:
        return get_origin(kind)(parse_option(part.strip(), inner[0]) for part in text.split(",") if part.strip())
    if kind is NoneType:
        return _among(text.lower(), {"none": None})
    if kind is bool:
        return _among(text.lower(), _TRUTHS)
    if _is_enum(kind):
        return _among(text, {str(member.value): member for member in kind} | {member.name: member for member in kind})
    if get_origin(kind) is Literal:
        return _among(text, {str(member): member for member in inner})
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"expected {kind.__name__}") from None


def parse_size(text: str) -> int:
    """Parse a size, and return it in bytes.

    Raises:
        ValueError: the text is not a size.

    >>> parse_size("4GB"), parse_size("1.5 MiB")
    (4000000000, 1572864)
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"expected a size such as 4GB or 512MiB, found {text!r}")
    return int(float(match[1]) * _SIZE_UNITS[(match[2] or "").lower()])


def format_option(value: object) -> str:
    """Return a value as text that `parse_option` reads; other types as Python prints them.

    >>> format_option(("Add", "Mul")), format_option(None), format_option(True), format_option(0.5)
    ('Add,Mul', 'none', 'true', '0.5')
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, _COLLECTIONS):
        return ",".join(format_option(item) for item in value)
    return str(value.value if isinstance(value, Enum) else value)


def _first_that_fits(text: str, kind: Any) -> Any:
    # Any text is a str, so try other types first.
    for member in sorted(get_args(kind), key=lambda kind: (kind is str, kind is not NoneType)):
        try:
            return parse_option(text, member)
        except (TypeError, ValueError):
            continue
    raise ValueError(f"expected {kind}")


def _among(text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}")
    return choices[text]


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


# Tables in notebooks


def html_table(caption: str, titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an HTML table of at most 50 rows. A last row counts the rows left out.

    >>> html_table("a < b", ["name"], [["<x>"]])
    '<table><caption>a &lt; b</caption><tr><th>name</th></tr><tr><td>&lt;x&gt;</td></tr></table>'
    """
    from html import escape

    left = len(rows) - _MOST_TABLE_ROWS
    shown = [*rows[:_MOST_TABLE_ROWS], *([[f"and {left} more"]] if left > 0 else [])]
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in shown)
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{lines}</table>"
