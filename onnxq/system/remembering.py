"""What was found in a file or an array, remembered until the file changes or the array is gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar
from weakref import ref

from numpy.typing import NDArray

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


def remembered_of_array(find: Callable[[NDArray[Any]], Found]) -> Callable[[NDArray[Any]], Found]:
    """Return a function of an array that works out but once what follows from its values, as long as it lives.

    Args:
        find: of an array, which nobody may change; what it returns is shared by all who ask, and must not be a view.

    >>> import numpy as np
    >>> total = remembered_of_array(lambda array: [array.sum()])
    >>> ones = np.ones(3)
    >>> total(ones) is total(ones), total(ones) is total(ones.copy())
    (True, False)
    """
    known: dict[int, tuple[ref[NDArray[Any]], Found]] = {}

    @wraps(find)
    def ask(array: NDArray[Any]) -> Found:
        place = id(array)
        held = known.get(place)
        if held is None or held[0]() is not array:
            held = known[place] = ref(array, lambda _: known.pop(place, None)), find(array)
        return held[1]

    return ask
