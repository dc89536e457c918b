"""Spilling: new constants wait in a file until the model is written, so that memory does not grow with the model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from onnxq.ir.external_data import ALIGNMENT
from onnxq.ir.tensor_data import ArrayData, Bytes, PackedTensor, TensorData

SMALLEST_SPILLED_BYTES = 1 << 20
"""Smaller arrays stay in memory."""

_FILE: ContextVar[IO[bytes] | None] = ContextVar("spill_file", default=None)


@contextmanager
def spilling(folder: Path, name: str = "") -> Iterator[None]:
    """Open the file of a folder that `spill` writes to: constants of `Names.store` go there, and what is given to it.

    A file without a name disappears with the context and the last of its arrays. A file with a name stays, and later
    contexts append to it, so that models beside it can refer to its contents (`place_of`).
    """
    with _opened(folder / name) if name else tempfile.TemporaryFile(dir=folder) as file:
        token = _FILE.set(file)
        try:
            yield
        finally:
            _FILE.reset(token)


def spill(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Write an array of 1 MiB or more to the file of `spilling`, and return it mapped from there.

    Arrays of text, arrays that are mapped already, and all arrays outside of the context are returned as they are.
    """
    file = _FILE.get()
    if file is None or array.nbytes < SMALLEST_SPILLED_BYTES or array.dtype.hasobject or _is_mapped(array):
        return array
    offset = file.seek(-(-file.seek(0, 2) // ALIGNMENT) * ALIGNMENT)
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.flush()
    mapped = np.memmap(file, np.uint8, "r", offset, (array.nbytes,))
    return mapped.view(array.dtype).reshape(array.shape)


def spill_data(tensor_data: TensorData) -> TensorData:
    """Return the same values, in the file of `spilling` if they are a large array or large packed data; see `spill`."""
    if isinstance(tensor_data, ArrayData):
        spilled = spill(tensor_data.array)
        return tensor_data if spilled is tensor_data.array else ArrayData(spilled)
    if isinstance(tensor_data, PackedTensor):
        data = _bytes(tensor_data.data)
        spilled = spill(data)
        return tensor_data if spilled is data else PackedTensor(tensor_data.onnx_dtype, tensor_data.shape, spilled)
    return tensor_data


def place_of(array: npt.NDArray[np.generic]) -> tuple[Path, int] | None:
    """Return the file that an array is mapped from, and the offset in bytes.

    None unless the array is contiguous and mapped from a file that it cannot change.
    """
    whole = _whole(array)
    if not isinstance(whole, np.memmap) or whole.filename is None or whole.mode != "r" or not array.flags.c_contiguous:
        return None
    return Path(whole.filename), whole.offset + array.ctypes.data - whole.ctypes.data


def _whole(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _bytes(data: Bytes) -> npt.NDArray[np.uint8]:
    if isinstance(data, np.ndarray) and data.flags.c_contiguous:
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def _opened(path: Path) -> IO[bytes]:
    path.touch()
    return path.open("r+b")


def _is_mapped(array: npt.NDArray[np.generic]) -> bool:
    """Whether an array is mapped from a file, or is a contiguous part of a mapped array."""
    return isinstance(array, np.memmap) or (array.flags.c_contiguous and isinstance(_whole(array), np.memmap))
