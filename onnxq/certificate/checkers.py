"""The checkers that applications ship, which need no onnxq."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from onnxq.errors import OutputError
from onnxq.system.publish import write_text

CHECKERS = ("onnxq_verify.py", "onnxq-verify.mjs")
"""The checkers without onnxq."""


def write_checkers(folder: Path) -> tuple[Path, ...]:
    """Write the checkers to a folder, which is made if it is missing, and return the files.

    Raises:
        OutputError: the folder or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"folder {folder} cannot be made: {error.strerror}; give another") from error
    for name in CHECKERS:
        write_text(folder / name, files("onnxq.certificate").joinpath(name).read_text(encoding="utf-8"), "checker")
    return tuple(folder / name for name in CHECKERS)
