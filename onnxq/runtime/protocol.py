"""The messages between a process and an engine process, and the server side that runs the models.

A message is a length, a header in JSON, and the bytes of arrays. A process without onnxq and onnx receives this module
too, so it imports only numpy and `interleaved_timing`.
"""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from onnxq.runtime.interleaved_timing import time_interleaved

Array = npt.NDArray[Any]
PROTOCOL = 2
"""Version of the protocol; both sides must have the same."""
# Bytes; a header names arrays and holds times, so a longer one is invalid.
_LONGEST_HEADER = 1 << 28
_TEXT = "text"


def send(stream: IO[bytes], header: Mapping[str, Any], arrays: Sequence[Array] = ()) -> None:
    """Write one message.

    Args:
        stream: a pipe.
        header: JSON values.
        arrays: their bytes follow the header; strings are part of the header.
    """
    described: list[dict[str, Any]] = []
    for array in arrays:
        text = array.dtype.kind in "OSU"
        described.append({"dtype": _TEXT if text else array.dtype.name, "shape": array.shape})
        if text:
            described[-1]["values"] = [
                string.decode() if isinstance(string, bytes) else str(string) for string in array.flat
            ]
    data = json.dumps({**header, "arrays": described}).encode()
    stream.write(len(data).to_bytes(4, "big") + data)
    for array, entry in zip(arrays, described, strict=True):
        if "values" not in entry:
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], list[Array]]:
    """Read one message.

    Raises:
        EOFError: the stream ends.
        ValueError: the bytes are not a message.
    """
    length = int.from_bytes(_exactly(stream, 4), "big")
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(_exactly(stream, length))
    if not isinstance(header, dict):
        raise ValueError("a header that is no table")  # noqa: TRY004
    return header, [_array(stream, entry) for entry in header.pop("arrays", ())]


def _array(stream: IO[bytes], described: Mapping[str, Any]) -> Array:
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
        # A pipe may return fewer bytes than requested.
        read = stream.readinto(view[filled:])  # type: ignore[attr-defined]
        if not read:
            raise EOFError
        filled += read
    return data


# The server: it answers one message after the other until the pipe closes.


class Loaded(Protocol):
    """A model that a runtime has loaded."""

    @property
    def outputs(self) -> Sequence[str]:
        """Names of its outputs in order."""
        ...

    def run(self, sample: Mapping[str, Array]) -> Sequence[Array]:
        """Return the outputs in order."""
        ...


class Backend(Protocol):
    """A runtime in the process that serves it. The text of its exceptions is sent to the other side.

    Attributes:
        version: name and version, as in ``onnxruntime 1.31.1``.
        profiles: whether it reports the time of each node.
        threads: the number of threads if it is fixed, else None.
    """

    version: str
    profiles: bool = False
    threads: int | None = None

    def load(self, model: str, threads: int | None) -> Loaded:
        """Load a model file; several threads may call this at once."""
        ...

    def profile(
        self, model: str, samples: Sequence[Mapping[str, Array]], repeats: int, threads: int
    ) -> tuple[Mapping[str, Any], Sequence[Array]]:
        """Return the times of nodes in the form that the engine on the other side reads."""
        raise ValueError("it does not report the time of each node")


def serve(backend: Backend) -> None:
    """Answer messages from standard input on standard output; prints of libraries go to standard error."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    waiting: queue.SimpleQueue[tuple[dict[str, Any], list[Array]]] = queue.SimpleQueue()
    requests = os.fdopen(os.dup(0), "rb")
    threading.Thread(target=_read, args=(requests, waiting), daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        answering = _Answering(backend, Path(folder))
        while True:
            header, arrays = waiting.get()
            if not header:
                return
            try:
                reply, results = answering.answer(header, arrays)
            # Any exception of a runtime is reported on the other side.
            except Exception as error:  # noqa: BLE001
                reply, results = {"error": f"{type(error).__name__}: {error}"}, []
            send(replies, reply, results)


def _read(requests: BinaryIO, waiting: queue.SimpleQueue[tuple[dict[str, Any], list[Array]]]) -> None:
    while True:
        try:
            waiting.put(receive(requests))
        except (EOFError, OSError, TypeError, ValueError):
            waiting.put(({}, []))
            # The client has gone, so a run that has not ended by then is stopped.
            threading.Event().wait(5.0)
            os._exit(1)


class _Answering:
    """Loaded models, and the answers to messages."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self.backend, self.folder = backend, folder
        self.sessions: dict[int, Loaded] = {}
        self.loads = 0

    def answer(self, header: Mapping[str, Any], arrays: list[Array]) -> tuple[Mapping[str, Any], Sequence[Array]]:
        request = header["ask"]
        if request == "hello":
            facts = {name: getattr(self.backend, name) for name in ("version", "profiles", "threads")}
            return {"protocol": PROTOCOL, **facts}, ()
        if request == "keep":
            return {"path": str(self._kept(header["folder"], header["name"], arrays[0]))}, ()
        if request == "load":
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                models = list(pool.map(lambda model: self.backend.load(model, header["threads"]), header["models"]))
            return {"loaded": [self._opened(session) for session in models]}, ()
        if request == "close":
            del self.sessions[header["session"]]
            return {}, ()
        samples = list(_samples(header["samples"], arrays))
        if request == "run":
            return {}, self.sessions[header["session"]].run(samples[0])
        if request == "time":
            runs = [self.sessions[number].run for number in header["sessions"]]
            seconds, turn, enough = header["seconds"], header["turn"], header["enough"]
            return {"times": time_interleaved(runs, samples, seconds, turn, enough)}, ()
        if request == "profile":
            return self.backend.profile(header["model"], samples, header["repeats"], header["threads"])
        raise ValueError(f"{request!r} is not known")

    def _opened(self, session: Loaded) -> Mapping[str, Any]:
        self.loads += 1
        self.sessions[self.loads] = session
        return {"session": self.loads, "outputs": list(session.outputs)}

    def _kept(self, folder: str, name: str, data: Array) -> Path:
        path = self.folder / Path(folder).name / Path(name)
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"{name} lies outside of the model's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.data)
        return path


def _samples(names: Sequence[Sequence[str]], arrays: Sequence[Array]) -> Iterator[dict[str, Array]]:
    start = 0
    for sample_names in names:
        yield dict(zip(sample_names, arrays[start : start + len(sample_names)], strict=True))
        start += len(sample_names)
