"""What was found in a file, remembered until the file changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")

# Models that are built and opened in one search.
_FILES = 256


def remembered(find: Callable[[Path], Found]) -> Callable[[Path], Found]:
    """Return a function of a file that reads it again only where its size or the time of its last change differ.

    Args:
        find: reads the file; what it returns is shared by all who ask. It is asked each time where there is no file.

    >>> lines = remembered(lambda path: path.read_text().splitlines())
    >>> lines(Path(__file__))[0].startswith('\"\"\"What'), lines(Path(__file__)) is lines(Path(__file__))
    (True, True)
    """

    @lru_cache(_FILES)
    def found(path: Path, _size: int, _changed: int) -> Found:
        return find(path)

    @wraps(find)
    def ask(path: Path) -> Found:
        try:
            state = path.stat()
        except OSError:
            return find(path)
        return found(path, state.st_size, state.st_mtime_ns)

    return ask
