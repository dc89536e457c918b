"""Errors that a user can act on, in one sentence each, and checks of arguments that raise them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from enum import StrEnum
from numbers import Integral, Real
from typing import TypeVar

Choice = TypeVar("Choice", bound=StrEnum)
_LONGEST_MESSAGE = 600


names_options: ContextVar[bool] = ContextVar("names_options", default=False)
"""Whether a command runs, so that messages name its options and not the arguments of Python."""


class OnnxqError(Exception):
    """An error that the user can fix: the message names what is wrong, what was expected and found, and what to do.

    The message is one printable line of bounded length, because names come from files that may be hostile.

    >>> OnnxqError("node a has 2 inputs, expected 3; export the model again")
    OnnxqError('node a has 2 inputs, expected 3; export the model again')
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_one_line(message))


class ModelError(OnnxqError):
    """The model file or graph cannot be read, written or quantized.

    >>> import onnxq
    >>> onnxq.load("missing.onnx")
    Traceback (most recent call last):
    onnxq.errors.ModelError: missing.onnx does not exist; give the path of an .onnx file
    """


class DataError(OnnxqError):
    """The calibration or evaluation samples do not fit the model or hold no usable values.

    >>> import onnxq
    >>> onnxq.load_statistics("missing.npz")
    Traceback (most recent call last):
    onnxq.errors.DataError: missing.npz cannot be read: No such file or directory; check its path
    """


class LoadError(ModelError):
    """A runtime refuses to load a model, given by the user or built by onnxq."""


class CandidateError(ModelError):
    """A model that onnxq made from the float model fails where the float model runs."""


class RunError(DataError):
    """A runtime fails while it runs a model on a sample."""


class SchemeError(OnnxqError):
    """A scheme, rule, spec or option is not valid or matches nothing in the model.

    >>> import onnxq
    >>> onnxq.Percentile(101)
    Traceback (most recent call last):
    onnxq.errors.SchemeError: Percentile is 101, expected above 0 and at most 100, such as 99.99
    """


class PassError(OnnxqError):
    """A pass or rule fails, is not a pass, or makes a model that is not valid or computes something else.

    >>> import onnxq
    >>> onnxq.Pipeline((3,)).apply(onnxq.load("models/gru.onnx"))
    Traceback (most recent call last):
    onnxq.errors.PassError: 3 is no pass, expected an instance of a subclass of onnxq.Pass
    """


class EngineError(OnnxqError):
    """A runtime is missing, refuses a model, exits, hangs or returns invalid results; the message names it.

    >>> from onnxq.runtime.engines import open_engine
    >>> open_engine("ssh")
    Traceback (most recent call last):
    onnxq.errors.EngineError: engine ssh lacks a host; write ssh:HOST, or ssh:HOST:/path/to/python
    """


class OutputError(OnnxqError):
    """The output cannot be written to the requested path.

    >>> import onnxq
    >>> onnxq.save(onnxq.load("models/gru.onnx"), "missing/model.onnx")
    Traceback (most recent call last):
    onnxq.errors.OutputError: cannot write missing/model.onnx: the folder missing does not exist; create it first
    """


def _one_line(message: str) -> str:
    line = "".join(letter if letter.isprintable() else " " for letter in message)
    half = _LONGEST_MESSAGE // 2
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:half]} ... {line[-half:]}"


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the candidate closest to ``name``, or an empty string.

    >>> did_you_mean("int9", ["int8", "uint8"])
    "; did you mean 'int8'?"
    """
    found = difflib.get_close_matches(str(name), candidates, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message that refuses an unknown name.

    >>> unknown_name("preset", "int9", ["int8", "mxfp4"])
    "preset 'int9' is not one of int8, mxfp4; did you mean 'int8'?"
    """
    names = list(known)
    return f"{what} {name!r} is not one of {', '.join(names)}{did_you_mean(name, names)}"


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Raise SchemeError for an unknown name; the message suggests the closest one."""
    if name not in known:
        raise SchemeError(unknown_name(what, name, known))


def parse_choice(kind: type[Choice], what: str, given: object) -> Choice:
    """Return a member of an enumeration from the member itself or its text.

    Raises:
        SchemeError: there is no such member; the message suggests the closest one.
    """
    check_name(what, str(given), [str(one) for one in kind])
    return kind(str(given))


def check_type(value: object, kinds: type | tuple[type, ...], what: str, expected: str) -> None:
    """Raise SchemeError for an argument of another type. True and False are not numbers here.

    >>> check_type("20", (int, float), "the target SQNR", "decibels such as 20")
    Traceback (most recent call last):
    ...
    onnxq.errors.SchemeError: the target SQNR is '20' of type str, expected decibels such as 20
    """
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise SchemeError(f"{what} is {value!r} of type {type(value).__name__}, expected {expected}")


def check_path(value: object, what: str) -> None:
    """Raise SchemeError for an argument that is neither str nor a path object."""
    check_type(value, (str, os.PathLike), what, "a path")


def convert_numpy_numbers(record: object, *names: str) -> None:
    """Convert numpy numbers in fields of a frozen dataclass under construction to Python numbers."""
    for name in names:
        value = getattr(record, name)
        if isinstance(value, Real) and not isinstance(value, (int, float)):
            object.__setattr__(record, name, int(value) if isinstance(value, Integral) else float(value))
