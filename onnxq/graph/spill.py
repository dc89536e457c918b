"""Arrays that wait to be written lie in a file meanwhile, so that memory does not grow with the model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

SMALLEST = 1 << 20
"""Arrays of fewer bytes stay in memory."""

_file: ContextVar[IO[bytes] | None] = ContextVar("spill_file", default=None)


@contextmanager
def spilling(folder: Path) -> Iterator[None]:
    """Inside this context, arrays of 1 MiB and more that become constants are moved to an unnamed file and mapped.

    The file is gone when the context has ended and the last of its arrays is.

    Args:
        folder: a folder on a disk with room for all of them.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        token = _file.set(file)
        try:
            yield
        finally:
            _file.reset(token)


def spilled(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return an array, or a read-only equal in the file of the context around; see `spilling`."""
    file = _file.get()
    if file is None or array.nbytes < SMALLEST or array.dtype.hasobject or isinstance(array, np.memmap):
        return array
    offset = file.seek(0, 2)
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.flush()
    mapped = np.memmap(file, np.uint8, "r", offset, (array.nbytes,))
    return mapped.view(array.dtype).reshape(array.shape)
