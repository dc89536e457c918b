"""Locations of samples: local paths, and URLs of object stores and servers through fsspec."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self, TypeAlias, cast

from onnxq.errors import DataError, OnnxqError

_LOCAL = re.compile(r"file:/+(.*)", re.DOTALL)
# A single letter would be a drive. `Path` turns two slashes into one.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+(?:::[A-Za-z][A-Za-z0-9+.-]+)*):/{1,2}(?=[^/])(.*)", re.DOTALL)


@dataclass(frozen=True)
class StorePath:
    """A file or folder of a store, with the part of the `Path` interface that reading samples needs.

    Args:
        url: For example ``s3://bucket/calib``; fsspec's settings and environment hold the credentials.

    Raises:
        DataError: A method is called and fsspec or its protocol package is not installed, or the store fails.
        FileNotFoundError: A method is called and the file or folder does not exist.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return PurePosixPath(self.url).name

    @property
    def stem(self) -> str:
        """The last part without its suffix."""
        return PurePosixPath(self.url).stem

    @property
    def suffix(self) -> str:
        """The suffix of the last part, with its dot."""
        return PurePosixPath(self.url).suffix

    def exists(self) -> bool:
        """Return whether the file or folder exists."""
        with self._wrap_errors():
            try:
                # fsspec's own exists() hides errors: it returns False for any.
                return bool(self._files.exists(self._inside) or self._files.info(self._inside))
            except FileNotFoundError:
                return False

    def is_dir(self) -> bool:
        """Return whether it is a folder."""
        with self._wrap_errors():
            return bool(self._files.isdir(self._inside))

    def is_file(self) -> bool:
        """Return whether it is a file."""
        with self._wrap_errors():
            try:
                # fsspec's own isfile() hides errors: it returns False for any.
                return bool(self._files.info(self._inside)["type"] == "file")
            except FileNotFoundError:
                return False

    def resolve(self) -> Path:
        """Return a unique key of the location; stores have no links."""
        return Path(self.url)

    def iterdir(self) -> Iterator[StorePath]:
        """Yield the entries of the folder."""
        with self._wrap_errors():
            listed = list(self._files.ls(self._inside, detail=False))
        for entry in listed:
            yield self / PurePosixPath(str(entry)).name

    def rglob(self, pattern: str) -> Iterator[StorePath]:
        """Yield all files below; the pattern is always ``*``."""
        with self._wrap_errors():
            listed = list(self._files.find(self._inside))
        for entry in listed:
            yield StorePath(str(self._files.unstrip_protocol(entry)))

    def size(self) -> int:
        """Return the size of the file in bytes."""
        with self._wrap_errors():
            return int(self._files.size(self._inside) or 0)

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open the file for reading bytes, with seeking."""
        with self._wrap_errors():
            stream: Any = _Stream(self._files.open(self._inside, mode), self._wrap_errors)
        return cast("IO[bytes]", stream)

    def read_bytes(self) -> bytes:
        """Return the whole content."""
        with self._wrap_errors():
            return bytes(self._files.cat_file(self._inside))

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except (OnnxqError, FileNotFoundError):
            raise
        # Each store has its own exceptions.
        except Exception as error:
            raise DataError(
                f"{self.url} cannot be opened: {_reason(error)}; expected a file or folder that the store gives, check "
                "its address and your credentials"
            ) from error

    @cached_property
    def _found(self) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise DataError(
                f"{self.url} is not a path on this machine, expected fsspec to read it; run pip install 'onnxq[stores]'"
            ) from error
        try:
            files, inside = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise DataError(f"{self.url} cannot be opened: {error}; check its protocol") from error
        return files, inside

    @property
    def _files(self) -> Any:
        return self._found[0]

    @property
    def _inside(self) -> str:
        return self._found[1]


class _Stream:
    """A file of a store that is being read; errors name the file."""

    def __init__(self, stream: Any, wrap_errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._stream, self._wrap_errors = stream, wrap_errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[bytes]:
        while line := self.readline():
            yield line

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._stream, name)
        if not callable(attribute):
            return attribute

        @wraps(attribute)
        def wrapped(*arguments: Any, **more: Any) -> Any:
            with self._wrap_errors():
                return attribute(*arguments, **more)

        return wrapped


Location: TypeAlias = Path | StorePath


def location(source: str | Path) -> Location:
    """Return the location of a user's path or URL; an existing local file of this exact name comes first.

    >>> location("calib"), location("memory://calib/0.npz").name
    (PosixPath('calib'), '0.npz')
    """
    path = Path(source)
    if (local := _LOCAL.fullmatch(str(source))) and not path.exists():
        return Path("/", local[1])
    if (match := _URL.fullmatch(str(source))) and not path.exists():
        return StorePath(f"{match[1]}://{match[2]}")
    return path


def size_of(path: Location) -> int:
    """Return the size of a file in bytes."""
    return path.size() if isinstance(path, StorePath) else path.stat().st_size


def check_there(path: Location) -> None:
    """Check that a file or folder exists.

    Raises:
        DataError: Nothing exists there, or the store fails.
    """
    try:
        there = bool(path.stat()) if isinstance(path, Path) else path.exists()
    except FileNotFoundError:
        there = False
    # A name may be an invalid path.
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be opened: {_reason(error)}; expected a file or folder of samples") from error
    if not there:
        raise DataError(f"{path} does not exist; give a file or folder of samples")


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
