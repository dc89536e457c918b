"""What installed packages add under an entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from onnxq.errors import SchemeError


def registered_names(group: str) -> list[str]:
    """Return the names that installed packages offer in a group of entry points."""
    return [entry.name for entry in entry_points(group=group)]


def registered(group: str, name: str, what: str) -> Callable[..., Any] | None:
    """Return what an installed package offers under a name; None where none does.

    Raises:
        SchemeError: It is there and cannot be loaded; `what` begins the sentence, as in "Range method".
    """
    for entry in entry_points(group=group, name=name):
        try:
            found: Callable[..., Any] = entry.load()
        except (ImportError, AttributeError) as error:
            raise SchemeError(
                f"{what} {name!r} of {entry.value} cannot be loaded: {error}; install its package again"
            ) from error
        return found
    return None
