"""Replace a file of the user's as a whole: at any moment it holds the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from onnxq.errors import OutputError


@contextlib.contextmanager
def replacing(path: Path, what: str) -> Iterator[Path]:
    """Yield a file beside another for its new content, and let it take that one's place once all is written.

    Args:
        path: the file; where it is a link, what that names.
        what: what it holds, for the message.

    Raises:
        OutputError: it cannot be written; it is what it was, and nothing is left beside it.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise OutputError(f"{what} {path} cannot be written: it is no file; give another name")
    fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield fresh
        fresh.replace(target)
    except OSError as reason:
        raise OutputError(
            f"{what} {path} cannot be written: {reason.strerror}; make room there or give another name"
        ) from reason
    finally:
        # What is wrong with the folder has been told.
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def write_text(path: str | Path, text: str, what: str) -> None:
    """Write a text as UTF-8 with lines that end alike on all systems.

    Args:
        path: the file, replaced if it exists.
        text: its content.
        what: what it is, for the message.

    Raises:
        OutputError: it cannot be written; it is what it was.
    """
    with replacing(Path(path), what) as fresh:
        fresh.write_text(text, encoding="utf-8", newline="\n")
