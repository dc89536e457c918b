"""Put a verified model in its place: staged beside the target, renamed when complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onnxq.errors import OutputError


def check_output(output: Path, source: Path | None) -> None:
    """Refuse an output that cannot be written or that is the model itself.

    Raises:
        OutputError: the folder is missing or not writable, the output is a folder, or is the source.
    """
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            output.stat()
    except OSError as reason:
        raise OutputError(f"output {output} cannot be written: {reason.strerror}") from reason
    if output.is_dir():
        raise OutputError(f"output {output} is a folder; give a file such as {output / 'model.onnx'}")
    if not output.parent.is_dir():
        raise OutputError(f"folder {output.parent} of the output does not exist; create it first")
    if source is not None and source.exists() and output.exists() and output.samefile(source):
        raise OutputError(f"output {output} is the model itself; give another name, the float model is worth keeping")
    if not os.access(output.parent, os.W_OK):
        raise OutputError(f"folder {output.parent} of the output is not writable; choose another")


@contextlib.contextmanager
def staging(output: Path | None) -> Iterator[Path]:
    """Yield a folder on the output's file system, or in the temporary folder, that is gone afterwards.

    Raises:
        OutputError: the folder cannot be made.
    """
    parent = output.parent if output is not None else None
    prefix = f".{output.name}.onnxq-" if output is not None else "onnxq-"
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as reason:
        raise OutputError(f"a temporary folder beside {output} cannot be made: {reason.strerror}") from reason
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(staged: Path, output: Path) -> None:
    """Rename a staged model and its external data to the output, data first.

    Raises:
        OutputError: the file system refuses.
    """
    try:
        data = data_file(staged)
        if data.exists():
            data.replace(data_file(output))
        staged.replace(output)
    except OSError as reason:
        raise OutputError(f"output {output} cannot be written: {reason.strerror}") from reason


def data_file(model: Path) -> Path:
    """Return where the external data of a model that onnxq writes lies."""
    return model.with_name(model.name + ".data")


def stored_bytes(model: Path, data: Iterator[Path] | tuple[Path, ...] = ()) -> int:
    """Return the size of a model file and of the external data files given."""
    return model.stat().st_size + sum(path.stat().st_size for path in data if path.exists())
