"""Read text files of schemes, plans and encodings, with errors that name the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from onnxq.errors import SchemeError, check_path
from onnxq.system.records import RecordError

Parsed = TypeVar("Parsed")


def read_document(path: str | Path, what: str, decode: Callable[[str], Any], parse: Callable[[Any], Parsed]) -> Parsed:
    """Return what a file holds.

    Args:
        path: the file.
        what: what it holds, for errors, such as ``plan``.
        decode: makes a document of its text, such as ``tomllib.loads``.
        parse: makes a value of the document.

    Raises:
        SchemeError: the file cannot be read or decoded, or `parse` refuses the document.
    """
    check_path(path, f"the {what} file")
    try:
        document = decode(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise SchemeError(f"{what} {path} cannot be read: {reason}") from reason
    try:
        return parse(document)
    except (SchemeError, RecordError) as reason:
        raise SchemeError(f"{what} {path}: {reason}") from reason
