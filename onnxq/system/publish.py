"""Write outputs safely: stage them beside the target, and rename them when complete.

A staging folder is locked while its process lives, so that a later run recognizes folders of killed processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from onnxq.errors import OutputError

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, and folders of killed processes stay.
    fcntl = None  # type: ignore[assignment]


_PREFIX = ".onnxq-"
_LOCK = "lock"
_PREVIOUS = "previous"

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Error numbers that mean that nothing more can be written there."""


class NoRoomError(OutputError):
    """There is no space for a staged file; an outer `staging` raises the error again with its own output."""


on_staging: ContextVar[Callable[[Path], None] | None] = ContextVar("on_staging", default=None)
"""Called with the parent of each new staging folder, so that the parent process can clean up after a crash."""


def check_output(output: Path, source: Path | None, read: Iterable[object] = ()) -> None:
    """Refuse an output that cannot be written, or that is the model itself or another input file.

    ``read`` has other arguments of the user: str and Path count as paths of input files.

    Raises:
        OutputError: the folder is missing or not writable, or the output is not a regular file or is an input.
    """
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            output.stat()
    except OSError as reason:
        raise OutputError(f"output {output} cannot be written: {reason.strerror}") from reason
    if output.is_dir():
        raise OutputError(f"output {output} is a folder; give a file such as {output / 'model.onnx'}")
    if output.exists() and not output.is_file():
        raise OutputError(f"output {output} is a device or pipe, expected a file or a name that is free")
    if not output.parent.is_dir():
        raise OutputError(f"folder {output.parent} of the output does not exist; create it first")
    if source is not None and source.exists() and output.exists() and output.samefile(source):
        raise OutputError(f"output {output} is the model itself; give another name, the float model is worth keeping")
    if not os.access(output.parent, os.W_OK):
        raise OutputError(f"folder {output.parent} of the output is not writable; choose another")
    files = (Path(path) for path in read if isinstance(path, str | Path))
    with contextlib.suppress(OSError):
        if any(file.is_file() and output.exists() and output.samefile(file) for file in files):
            raise OutputError(f"output {output} is read as well; give another name")


@contextlib.contextmanager
def staging(output: Path | None) -> Iterator[Path]:
    """Yield a temporary folder on the output's file system, or in the system's temporary folder; remove it afterwards.

    Folders that killed processes left at the same place are removed first.

    Raises:
        OutputError: the folder cannot be made, or the disk is full while it is in use.
    """
    parent = output.parent if output is not None else Path(tempfile.gettempdir())
    remove_abandoned(parent)
    with contextlib.ExitStack() as held:
        try:
            folder = _locked_folder(parent, held)
        except OSError as error:
            raise OutputError(f"a temporary folder in {parent} cannot be made: {error.strerror}") from error
        try:
            yield folder
        except (OSError, NoRoomError) as error:
            reason = error.__cause__ if isinstance(error, NoRoomError) else error
            if not isinstance(reason, OSError) or reason.errno not in NO_ROOM:
                raise
            # The user knows the output, but not the files of the staging folder.
            place = output or reason.filename or parent
            raise NoRoomError(
                f"{place} cannot be written: {reason.strerror}; free disk space or choose another place"
            ) from reason
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the staging folders that killed processes left in a folder, and restore a model that one had set aside."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for folder in [Path(entry) for entry in entries if entry.name.startswith(_PREFIX) and _is_own_folder(entry)]:
            with locked(folder / _LOCK, wait=False) as held:
                if held:
                    with locked(parent):
                        _put_back(folder)
                    shutil.rmtree(folder, ignore_errors=True)


def publish(staged: Path, output: Path) -> None:
    """Rename a staged model and its external data to the output, so that a model is never read with other data.

    If a model with data is replaced, it is set aside meanwhile. If the process is killed between the renames, the
    output is missing until the next run restores the old one.

    Raises:
        OutputError: the file system refuses; the old output stays.
    """
    data = data_file(staged)
    try:
        with locked(output.parent):
            if not data.exists():
                staged.replace(output)
            elif not (output.exists() and data_file(output).exists()):
                data.replace(data_file(output))
                staged.replace(output)
            else:
                _replace_both(staged, output)
    except OSError as reason:
        raise OutputError(f"output {output} cannot be written: {reason.strerror}") from reason


def data_file(model: Path) -> Path:
    """Return the path of the external data of a model that onnxq writes."""
    return model.with_name(model.name + ".data")


def stored_bytes(model: Path, data: Iterator[Path] | tuple[Path, ...] = ()) -> int:
    """Return the size of a model file and of those external data files that exist."""
    return model.stat().st_size + sum(path.stat().st_size for path in data if path.exists())


def _locked_folder(parent: Path, held: contextlib.ExitStack) -> Path:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        if report := on_staging.get():
            report(parent)
        held.enter_context(locked(folder / _LOCK))
        # Another run may have removed the folder before it was locked.
        if folder.exists():
            return folder


def _replace_both(staged: Path, output: Path) -> None:
    previous = staged.parent / _PREVIOUS
    previous.mkdir()
    try:
        output.replace(previous / output.name)
        data_file(output).replace(data_file(previous / output.name))
        data_file(staged).replace(data_file(output))
        staged.replace(output)
    except BaseException:
        _put_back(staged.parent)
        raise


def _put_back(folder: Path) -> None:
    """Put back the files that `_replace_both` set aside, the model last, unless there is a new model."""
    with contextlib.suppress(FileNotFoundError):
        kept = sorted((folder / _PREVIOUS).iterdir(), key=lambda path: len(path.name), reverse=True)
        if kept and not (folder.parent / kept[-1].name).exists():
            for path in kept:
                path.replace(folder.parent / path.name)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a folder, or of a file that is created, and yield whether it is held.

    It is not held if the system has no locks. Without ``wait`` it is not held either if another process holds it. The
    lock ends with the process.
    """
    held, descriptor = False, None
    if fcntl is not None:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
    try:
        yield held
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    owned = not hasattr(os, "getuid") or entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return owned and entry.is_dir(follow_symlinks=False)


# Single files: at any moment they hold the old content or the new content, never a part.


@contextlib.contextmanager
def replace_file(path: Path, what: str) -> Iterator[Path]:
    """Yield a temporary file for the new content of a file, and rename it when complete. A link is followed.

    Raises:
        OutputError: the file cannot be written, and ``what`` names it. The old content stays, and nothing beside it.
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
            f"{what} {path} cannot be written: {reason.strerror}; free disk space there, or give another name"
        ) from reason
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def write_text(path: str | Path, text: str, what: str) -> None:
    """Write a text file in UTF-8, with the same line ends on all systems; ``what`` names it in messages.

    Raises:
        OutputError: the file cannot be written; the old content stays.
    """
    with replace_file(Path(path), what) as fresh:
        fresh.write_text(text, encoding="utf-8", newline="\n")
