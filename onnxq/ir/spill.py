"""Arrays that wait to be written lie in a file meanwhile, so that memory does not grow with the model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from onnxq.ir.payload import KEEP
from onnxq.ir.sidecar import ALIGNMENT

SMALLEST = 1 << 20
"""Arrays of fewer bytes stay in memory."""


@contextmanager
def spilling(folder: Path, name: str = "") -> Iterator[None]:
    """Inside this context, arrays of 1 MiB and more that become constants are moved to a file and mapped.

    The file has no name, and is gone when the context has ended and the last of its arrays is. One that is given a name
    stays, and later contexts add to it, so that models beside it can refer to what it holds, see `place_of`.

    Args:
        folder: a folder on a disk with room for all of them.
        name: of the file.
    """
    with _opened(folder / name) if name else tempfile.TemporaryFile(dir=folder) as file:
        token = KEEP.set(partial(_spilled, file))
        try:
            yield
        finally:
            KEEP.reset(token)


def place_of(array: npt.NDArray[np.generic]) -> tuple[Path, int] | None:
    """Return the file in which an array lies all in order, and its first byte there; None where there is none."""
    whole = _whole(array)
    if not isinstance(whole, np.memmap) or whole.filename is None or not array.flags.c_contiguous:
        return None
    return Path(whole.filename), whole.offset + array.ctypes.data - whole.ctypes.data


def _whole(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the array that an array is a part of, or looks at otherwise."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _opened(path: Path) -> IO[bytes]:
    path.touch()
    return path.open("r+b")


def _spilled(file: IO[bytes], array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return a small array, or a read-only equal of it in the file."""
    if array.nbytes < SMALLEST or array.dtype.hasobject or _is_mapped(array):
        return array
    offset = file.seek(-(-file.seek(0, 2) // ALIGNMENT) * ALIGNMENT)
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.flush()
    mapped = np.memmap(file, np.uint8, "r", offset, (array.nbytes,))
    return mapped.view(array.dtype).reshape(array.shape)


def _is_mapped(array: npt.NDArray[np.generic]) -> bool:
    """Whether an array lies in a file, or is all in order a part of one that does."""
    return isinstance(array, np.memmap) or (array.flags.c_contiguous and isinstance(_whole(array), np.memmap))
