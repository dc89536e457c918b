"""The few errors that onnxq raises on purpose; each message is one sentence a user can act on."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable
from enum import StrEnum
from numbers import Integral, Real
from typing import TypeVar

Choice = TypeVar("Choice", bound=StrEnum)
_LONGEST = 600


class OnnxqError(Exception):
    """Anything the user can fix: the message says what, expected, found and what to do.

    Names come from files that may be hostile, so the message is kept to one printable line of bounded length.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_one_line(message))


class ModelError(OnnxqError):
    """The model file or graph cannot be read, written or quantized."""


class DataError(OnnxqError):
    """The calibration or evaluation samples do not fit the model or hold no usable values."""


class LoadError(ModelError):
    """A runtime refuses to load a model, which may be one that was given or one that onnxq built."""


class CandidateError(ModelError):
    """A model that onnxq made from the float model fails where the float model runs."""


class RunError(DataError):
    """A runtime fails while it runs a model on a sample."""


class SchemeError(OnnxqError):
    """A scheme, rule, spec or option is not valid or matches nothing in the model."""


class PassError(OnnxqError):
    """A pass or rule fails, is none, or makes a model that is not valid or computes something else."""


class EngineError(OnnxqError):
    """A runtime is missing, refuses a model, ends, hangs or answers nonsense; the message names it."""


class OutputError(OnnxqError):
    """The output cannot be written where the user asked for it."""


def _one_line(message: str) -> str:
    line = "".join(letter if letter.isprintable() else " " for letter in message)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the candidate closest to ``name``, or an empty string.

    >>> nearest("int9", ["int8", "uint8"])
    "; did you mean 'int8'?"
    """
    # What is no text at all is told by its sentence.
    found = difflib.get_close_matches(str(name), list(candidates), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence that tells of a name that is none of those there are.

    >>> unknown("preset", "int9", ["int8", "mxfp4"])
    "preset 'int9' is not one of int8, mxfp4; did you mean 'int8'?"
    """
    names = list(known)
    return f"{what} {name!r} is not one of {', '.join(names)}{nearest(name, names)}"


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is none of those there are.

    Raises:
        SchemeError: it is none; the message suggests the nearest one.
    """
    if name not in known:
        raise SchemeError(unknown(what, name, known))


def choice_of(kind: type[Choice], what: str, given: object) -> Choice:
    """Return the choice that is given, or that a text names.

    Raises:
        SchemeError: it is none; the message suggests the nearest one.
    """
    check_name(what, str(given), [str(one) for one in kind])
    return kind(str(given))


def check_type(value: object, kinds: type | tuple[type, ...], what: str, expected: str) -> None:
    """Refuse an argument of another type; True and False are no numbers here.

    Raises:
        SchemeError: it is of another type.

    >>> check_type("20", (int, float), "the wanted fidelity", "decibels such as 20")
    Traceback (most recent call last):
    ...
    onnxq.errors.SchemeError: the wanted fidelity is '20' of type str, expected decibels such as 20
    """
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise SchemeError(f"{what} is {value!r} of type {type(value).__name__}, expected {expected}")


def check_path(value: object, what: str) -> None:
    """Refuse an argument that names no file.

    Raises:
        SchemeError: it is no text or path.
    """
    check_type(value, (str, os.PathLike), what, "a path")


def take_plain_numbers(record: object, *names: str) -> None:
    """Put Python's own numbers in place of numpy's in the fields of a record that is being made."""
    for name in names:
        value = getattr(record, name)
        if isinstance(value, Real) and not isinstance(value, (int, float)):
            object.__setattr__(record, name, int(value) if isinstance(value, Integral) else float(value))
