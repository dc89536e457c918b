"""Read arrays from .npy, .npz and .pb files: without pickles, row by row, and never beyond a declared size."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np
import onnx
from numpy.lib import format as npy
from numpy.typing import NDArray

from onnxq.data.stores import Location, size_of
from onnxq.errors import DataError, OnnxqError

ARRAY_LIMIT = 2 * 1024**3
"""Maximum bytes of one array in memory, and of one compressed array after unpacking."""
PACKED_LIMIT = 64 * 1024**2
"""A compressed array may always unpack to this many bytes: constant data of this size is plausible."""
HIGHEST_RATIO = 1000
"""Maximum compression ratio above `PACKED_LIMIT`; deflate reaches a higher one only on constant data."""


@dataclass(frozen=True)
class StoredArray:
    """An array on disk of which only the header has been read."""

    where: str
    stored: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int
    open: Callable[[], AbstractContextManager[IO[bytes]]]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in native byte order."""
        return self.stored.newbyteorder("=")

    def read(self) -> NDArray[Any]:
        """Return the whole array in native byte order.

        Raises:
            DataError: The array is larger than `ARRAY_LIMIT` or its bytes cannot be read.
        """
        if self.fortran:
            return next(self._blocks(self.shape[::-1], [0])).T
        return next(self._blocks(self.shape, [0]))

    def rows(self, indices: Iterable[int]) -> Iterator[NDArray[Any]]:
        """Yield ``array[index]`` for ascending indices, with one row in memory (in Fortran order: the whole array).

        Rows in between are skipped; in a compressed file they are unpacked first.

        Raises:
            DataError: A row is larger than `ARRAY_LIMIT` or its bytes cannot be read.
        """
        if self.fortran:
            whole = self.read()
            yield from (whole[index] for index in indices)
        else:
            yield from self._blocks(self.shape[1:], indices)

    def _blocks(self, shape: tuple[int, ...], indices: Iterable[int]) -> Iterator[NDArray[Any]]:
        size = math.prod(shape) * self.stored.itemsize
        if size > ARRAY_LIMIT:
            raise DataError(
                f"{self.where} declares {size} bytes, expected at most {ARRAY_LIMIT} at once; split it into samples"
            )
        with _readable(self.where), self.open() as stream:
            for index in indices:
                stream.seek(self.offset + index * size)
                yield np.frombuffer(_take(stream, size), self.stored).reshape(shape).astype(self.dtype, copy=False)


def npy_array(path: Location) -> StoredArray:
    """Read the header of a ``.npy`` file.

    Raises:
        DataError: The file is not a ``.npy`` file, is truncated or holds pickled objects.
    """
    with _readable(str(path)), path.open("rb") as stream:
        return _stored(stream, size_of(path), str(path), partial(_open_file, path))


def npz_arrays(path: Location) -> dict[str, StoredArray]:
    """Read the headers of all arrays in an ``.npz`` archive, by member name; names never become paths.

    Raises:
        DataError: The archive is damaged, or it holds pickled objects or members other than ``.npy``. Or a compressed
            array unpacks to more than `ARRAY_LIMIT` bytes, or to more than both `PACKED_LIMIT` bytes and
            `HIGHEST_RATIO` times its size.
    """
    with _readable(str(path)), path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
        return {
            info.filename.removesuffix(".npy"): _member(archive, info, path)
            for info in archive.infolist()
            if not info.is_dir()
        }


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Location) -> StoredArray:
    where = f"{path}: {info.filename.removesuffix('.npy')!r}"
    if not info.filename.endswith(".npy"):
        raise DataError(f"{where} is not a .npy array, expected an archive as numpy.savez writes it")
    if info.compress_type != zipfile.ZIP_STORED and info.file_size > ARRAY_LIMIT:
        raise DataError(
            f"{where} unpacks to {info.file_size} bytes, expected at most {ARRAY_LIMIT}; split it or save uncompressed"
        )
    # The compressed size in the archive's header may be wrong.
    packed = min(info.compress_size, size_of(path))
    if info.compress_type != zipfile.ZIP_STORED and info.file_size > max(PACKED_LIMIT, HIGHEST_RATIO * packed):
        raise DataError(
            f"{where} unpacks from {packed} to {info.file_size} bytes, expected at most {HIGHEST_RATIO} times as many; "
            "if the data is meant so, save it uncompressed with numpy.savez"
        )
    with _readable(where), archive.open(info) as stream:
        return _stored(stream, info.file_size, where, partial(_open_member, path, info.filename))


def _open_file(path: Location) -> AbstractContextManager[IO[bytes]]:
    return path.open("rb")


@contextmanager
def _open_member(path: Location, name: str) -> Iterator[IO[bytes]]:
    with path.open("rb") as whole, zipfile.ZipFile(whole) as archive, archive.open(name) as stream:
        yield stream


def _stored(
    stream: IO[bytes], size: int, where: str, reopen: Callable[[], AbstractContextManager[IO[bytes]]]
) -> StoredArray:
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise DataError(f"{where} is .npy version {version}, expected 1.0 or 2.0; save a plain array with numpy.save")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read_header(stream)
    if dtype.hasobject:
        raise DataError(f"{where} holds pickled Python objects, which are never loaded; save plain numeric arrays")
    offset, declared = stream.tell(), math.prod(shape) * dtype.itemsize
    if any(dim < 0 for dim in shape) or offset + declared > size:
        raise DataError(
            f"{where} declares shape {list(shape)} of {declared} bytes, found {size - offset} bytes; "
            "the file is damaged, write it again"
        )
    return StoredArray(where, dtype, shape, fortran, offset, reopen)


def read_tensor(path: Location) -> tuple[str, NDArray[Any]]:
    """Read the name (which may be empty) and the values of a serialized ``onnx.TensorProto``.

    Raises:
        DataError: The file is larger than `ARRAY_LIMIT`, is not a tensor, or refers to other files.
    """
    with _readable(str(path)):
        size = size_of(path)
        if size > ARRAY_LIMIT:
            raise DataError(f"{path} has {size} bytes, expected at most {ARRAY_LIMIT}; split it into samples")
        tensor = onnx.TensorProto.FromString(path.read_bytes())
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise DataError(f"{path} refers to external data, expected a tensor with its values inside; save it whole")
        return tensor.name, onnx.numpy_helper.to_array(tensor)


def _take(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError(f"expected {size} more bytes, found {len(data)}")
    return data


@contextmanager
def _readable(where: str) -> Iterator[None]:
    try:
        yield
    except OnnxqError:
        raise
    except (FileNotFoundError, PermissionError) as error:
        advice = "check its path" if isinstance(error, FileNotFoundError) else "check its permissions"
        raise DataError(f"{where} cannot be read: {error.strerror or error}; {advice}") from error
    # Hostile bytes make the parsers raise almost any exception.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise DataError(f"{where} cannot be read: {reason}; write the file again") from error
