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

from onnxq.graph.payload import KEEP

SMALLEST = 1 << 20
"""Arrays of fewer bytes stay in memory."""


@contextmanager
def spilling(folder: Path) -> Iterator[None]:
    """Inside this context, arrays of 1 MiB and more that become constants are moved to an unnamed file and mapped.

    The file is gone when the context has ended and the last of its arrays is.

    Args:
        folder: a folder on a disk with room for all of them.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        token = KEEP.set(partial(_spilled, file))
        try:
            yield
        finally:
            KEEP.reset(token)


def _spilled(file: IO[bytes], array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return a small array, or a read-only equal of it in the file."""
    if array.nbytes < SMALLEST or array.dtype.hasobject or isinstance(array, np.memmap):
        return array
    offset = file.seek(0, 2)
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.flush()
    mapped = np.memmap(file, np.uint8, "r", offset, (array.nbytes,))
    return mapped.view(array.dtype).reshape(array.shape)
