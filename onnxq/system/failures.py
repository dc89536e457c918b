"""Failures: optional parts of a run that fail and are left out; the report lists them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from onnxq.errors import CandidateError, EngineError, LoadError, OnnxqError, RunError

_LOG = logging.getLogger(__name__)
# These errors may concern a model that onnxq built. All other errors of onnxq concern the user's input.
_OF_CANDIDATES = (CandidateError, EngineError, LoadError, RunError)


@dataclass(frozen=True)
class Failure:
    """A part of a run, such as ``accuracy method 'equalization'``, that failed and was left out."""

    part: str
    reason: str

    def __str__(self) -> str:
        return f"{self.part} failed and was left out: {self.reason}"


_collected: ContextVar[list[Failure] | None] = ContextVar("failures", default=None)


@contextmanager
def collect_failures() -> Iterator[list[Failure]]:
    """Collect the failures of a run in a list, which grows while the run goes on."""
    found: list[Failure] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


@contextmanager
def tolerate(part: str) -> Iterator[None]:
    """Collect the error of a block and continue after it; ``part`` names what is left out.

    Fatal errors (`is_fatal`) are raised as usual. Outside of `collect_failures`, all errors are raised.

    >>> with collect_failures() as failures:
    ...     with tolerate("accuracy method 'equalization'"):
    ...         [].pop()
    >>> print(failures[0])
    accuracy method 'equalization' failed and was left out: IndexError: pop from empty list
    """
    try:
        yield
    except Exception as error:
        if is_fatal(error) or not note_failure(part, error):
            raise


def note_failure(part: str, error: Exception) -> bool:
    """Collect the error of a part that was left out; return False if `collect_failures` is not active."""
    failures = _collected.get()
    if failures is None:
        return False
    failure = Failure(part, f"{type(error).__name__}: {error}")
    _LOG.debug("%s", failure, exc_info=error)
    if failure not in failures:
        failures.append(failure)
    return True


def is_fatal(error: Exception) -> bool:
    """Whether an error ends the run: the user has to correct something, or memory ran out."""
    return isinstance(error, MemoryError) or (isinstance(error, OnnxqError) and not isinstance(error, _OF_CANDIDATES))
