"""What a source is: it knows a kind of samples when it sees it, and gives their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input
from onnxq.data.stores import Location
from onnxq.errors import DataError


@runtime_checkable
class Source(Protocol):
    """A kind of samples: files of some suffixes, or objects of a library. Fields of a dataclass are its options."""

    def takes(self, given: object) -> bool:
        """Return whether it reads this, a file or an object; files are told by their names and not opened."""
        ...

    def rows(self, given: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return what it holds, row by row, see `onnxq.data.rows.samples_of`.

        Args:
            given: a file, as a path with ``open``, or an object, that it takes.
            inputs: what the model wants.
            images: how pixels become an input.

        Returns:
            Rows in their order, none of which is held. With a length, some of them can be chosen from all over.

        Raises:
            DataError: it cannot be read, or its library is not installed.
        """
        ...


def has_suffix(given: object, *suffixes: str) -> bool:
    """Return whether something is a file with one of these suffixes.

    >>> from pathlib import Path
    >>> has_suffix(Path("a/B.WAV"), ".wav"), has_suffix("text", ".wav")
    (True, False)
    """
    return isinstance(given, Location) and given.suffix.lower() in suffixes


def library(name: str, extra: str, where: object) -> Any:
    """Return a library that reads samples.

    Args:
        name: of its module.
        extra: what pip is told to install.
        where: what is read with it.

    Raises:
        DataError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(
            f"{where} needs {name.partition('.')[0]}, expected it to be installed; run pip install {extra!r}"
        ) from error
