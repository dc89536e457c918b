"""How long work tells of its progress: one function, called with a stage, how much is done and how much there is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as ``progress("calibrate", done, total)``; a total of 0 means that it is not known."""


def silent(stage: str, done: int, total: int) -> None:
    """Tell nobody."""
