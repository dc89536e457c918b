"""Text to a value of the type that the option of a dataclass has, and back."""

from __future__ import annotations

import enum
import re
import types
import typing
from typing import Any

_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_PLAIN = (bool, int, float, str, types.NoneType)
_SEVERAL = (tuple, frozenset)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?)?b?", re.IGNORECASE)


def is_writable(kind: Any) -> bool:
    """Return whether some text is a value of a type.

    >>> is_writable(int | None), is_writable(tuple[str, ...]), is_writable(dict[str, int])
    (True, True, False)
    """
    inner = typing.get_args(kind)
    if _is_union(kind):
        return any(is_writable(one) for one in inner)
    if typing.get_origin(kind) in _SEVERAL:
        return is_writable(inner[0])
    return kind in _PLAIN or _is_enum(kind) or typing.get_origin(kind) is typing.Literal


def value_of(text: str, kind: Any) -> Any:
    """Return the value that a text is.

    Args:
        text: several values of a tuple or frozenset are separated by commas; ``none`` is None where that is allowed.
        kind: a type of which `is_writable` is true.

    Raises:
        ValueError: it is none; the message says what is expected.

    >>> value_of("1e-3", float), value_of("none", int | None), value_of("Add,Mul", tuple[str, ...])
    (0.001, None, ('Add', 'Mul'))
    """
    inner = typing.get_args(kind)
    if _is_union(kind):
        return _first_that_fits(text, kind)
    if typing.get_origin(kind) in _SEVERAL:
        return typing.get_origin(kind)(value_of(part.strip(), inner[0]) for part in text.split(",") if part.strip())
    if kind is types.NoneType:
        return _among(text.lower(), {"none": None})
    if kind is bool:
        return _among(text.lower(), _TRUTHS)
    if _is_enum(kind):
        return _among(text, {str(one.value): one for one in kind} | {one.name: one for one in kind})
    if typing.get_origin(kind) is typing.Literal:
        return _among(text, {str(one): one for one in inner})
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"expected {kind.__name__}") from None


def size_of(text: str) -> int:
    """Return the number of bytes that a text is.

    Raises:
        ValueError: it is none; the message says what is expected.

    >>> size_of("4GB"), size_of("1.5 MiB")
    (4000000000, 1572864)
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"expected a size such as 4GB or 512MiB, found {text!r}")
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()])


def text_of(value: object) -> str:
    """Return a value as `value_of` reads it, or as Python shows it where no text is that value.

    >>> text_of(("Add", "Mul")), text_of(None), text_of(True), text_of(0.5)
    ('Add,Mul', 'none', 'true', '0.5')
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, _SEVERAL):
        return ",".join(text_of(one) for one in value)
    return str(value.value if isinstance(value, enum.Enum) else value)


def _first_that_fits(text: str, kind: Any) -> Any:
    # Any text is a str, so the others come first.
    for one in sorted(typing.get_args(kind), key=lambda one: (one is str, one is not types.NoneType)):
        try:
            return value_of(text, one)
        except (TypeError, ValueError):
            continue
    raise ValueError(f"expected {kind}")


def _among(text: str, known: dict[str, Any]) -> Any:
    if text not in known:
        raise ValueError(f"expected one of {', '.join(known)}")
    return known[text]


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)
