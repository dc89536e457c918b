"""Parts of a run that fail and are left out: the run goes on, and what failed is reported at its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from onnxq.errors import CandidateError, EngineError, LoadError, OnnxqError, RunError

_LOG = logging.getLogger(__name__)
# These may be about a model that onnxq built; all other errors of its own are about what the user gave.
_OF_CANDIDATES = (CandidateError, EngineError, LoadError, RunError)


@dataclass(frozen=True)
class Failure:
    """A part of a run that failed and was left out.

    Attributes:
        part: what failed, such as ``accuracy method 'bias'``.
        reason: the class and the text of the error.
    """

    part: str
    reason: str

    def __str__(self) -> str:
        return f"{self.part} failed and was left out: {self.reason}"


_collected: ContextVar[list[Failure] | None] = ContextVar("failures", default=None)


@contextmanager
def collected_failures() -> Iterator[list[Failure]]:
    """Collect the failures of a run.

    Yields:
        The list that `tolerated` adds to. It grows while the run goes on.
    """
    found: list[Failure] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


@contextmanager
def tolerated(part: str) -> Iterator[None]:
    """Leave out a part that fails: its error is collected, and the code behind the block runs.

    Outside of `collected_failures` an error is raised as usual, and so is everything that `is_fatal`.

    Args:
        part: what is left out, for the report.

    >>> with collected_failures() as failures:
    ...     with tolerated("accuracy method 'bias'"):
    ...         [].pop()
    >>> print(failures[0])
    accuracy method 'bias' failed and was left out: IndexError: pop from empty list
    """
    try:
        yield
    except Exception as error:
        if is_fatal(error) or not note_failure(part, error):
            raise


def note_failure(part: str, error: Exception) -> bool:
    """Add the error of a part that is left out to those that are collected.

    Returns:
        False outside of `collected_failures`, where nothing is collected.
    """
    failures = _collected.get()
    if failures is None:
        return False
    failure = Failure(part, f"{type(error).__name__}: {error}")
    _LOG.debug("%s", failure, exc_info=error)
    if failure not in failures:
        failures.append(failure)
    return True


def is_fatal(error: Exception) -> bool:
    """Whether the user has to mend what an error is about, or memory ran out, so that the run has to end."""
    return isinstance(error, MemoryError) or (isinstance(error, OnnxqError) and not isinstance(error, _OF_CANDIDATES))
