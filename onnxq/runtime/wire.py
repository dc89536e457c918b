"""Messages between a process and one that runs models for it: a length, a header in JSON, and the bytes of arrays.

A process with neither onnxq nor onnx is sent this module too, so it imports numpy alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt

PROTOCOL = 2
"""What both sides must have in common."""
# A header names arrays and holds times; one that claims to be longer is none.
_LONGEST_HEADER = 1 << 28
_TEXT = "text"


def send(stream: IO[bytes], header: Mapping[str, Any], arrays: Sequence[npt.NDArray[Any]] = ()) -> None:
    """Write one message.

    Args:
        stream: a pipe.
        header: plain values.
        arrays: follow behind the header as they lie in memory; text travels in the header.
    """
    described: list[dict[str, Any]] = []
    for array in arrays:
        text = array.dtype.kind in "OSU"
        described.append({"dtype": _TEXT if text else array.dtype.name, "shape": array.shape})
        if text:
            described[-1]["values"] = [one.decode() if isinstance(one, bytes) else str(one) for one in array.flat]
    data = json.dumps({**header, "arrays": described}).encode()
    stream.write(len(data).to_bytes(4, "big") + data)
    for array, one in zip(arrays, described, strict=True):
        if "values" not in one:
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], list[npt.NDArray[Any]]]:
    """Read one message.

    Raises:
        EOFError: the stream ends.
        ValueError: what comes is no message.
    """
    length = int.from_bytes(_exactly(stream, 4), "big")
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(_exactly(stream, length))
    if not isinstance(header, dict):
        raise ValueError("a header that is no table")  # noqa: TRY004
    return header, [_array(stream, one) for one in header.pop("arrays", ())]


def _array(stream: IO[bytes], described: Mapping[str, Any]) -> npt.NDArray[Any]:
    shape = tuple(described["shape"])
    if "values" in described:
        return np.array(described["values"], dtype=object).reshape(shape)
    dtype = np.dtype(described["dtype"])
    return np.frombuffer(_exactly(stream, dtype.itemsize * int(np.prod(shape))), dtype).reshape(shape)


def _exactly(stream: IO[bytes], count: int) -> bytearray:
    # A writable buffer: a runtime may refuse arrays that are read-only.
    data = bytearray(count)
    view, filled = memoryview(data), 0
    while filled < count:
        # A pipe gives what it has.
        read = stream.readinto(view[filled:])  # type: ignore[attr-defined]
        if not read:
            raise EOFError
        filled += read
    return data
