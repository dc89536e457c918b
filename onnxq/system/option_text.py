"""Options as text: values of a declared type, and sizes."""

from __future__ import annotations

import re
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_PLAIN_TYPES = (bool, int, float, str, NoneType)
_COLLECTIONS = (tuple, frozenset)
_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?)?b?", re.IGNORECASE)


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
