"""Activations of each sample by tensor, on disk beyond a memory limit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np

from onnxq.errors import OutputError
from onnxq.runtime.sessions import Array
from onnxq.system.publish import staging
from onnxq.training.settings import MEMORY


class Activations:
    """Arrays by sample and tensor, in memory up to a limit and in files of a temporary folder beyond it.

    `close`, or the end of a ``with`` block, removes the files.

    >>> with Activations() as held:
    ...     held.put(0, {"x": np.ones(2), "y": np.zeros(3)})
    ...     held.keep({"y"})
    ...     {name: len(array) for name, array in held.of(0).items()}
    {'y': 3}
    """

    def __init__(self, memory: int = MEMORY, folder: Path | None = None) -> None:
        """Start empty.

        Args:
            memory: Bytes that stay in memory.
            folder: Parent of the temporary folder; None takes the system's.
        """
        self._free = memory
        # The folder is created on demand. If this run is killed, the next run removes it.
        self._parent = folder
        self._files = ExitStack()
        self._folder: Path | None = None
        self._held: dict[int, dict[str, Array | Path]] = {}
        self._written = 0

    def put(self, sample: int, arrays: Mapping[str, Array]) -> None:
        """Store arrays of a sample, replacing those of the same names.

        Raises:
            OutputError: The disk is full.
        """
        own = self._held.setdefault(sample, {})
        for name, array in arrays.items():
            self._drop(own, name)
            own[name] = self._stored(np.asarray(array))

    def of(self, sample: int, tensors: Iterable[str] | None = None) -> dict[str, Array]:
        """Return the stored arrays of a sample by tensor: some of `tensors`, or all for None."""
        own = self._held.get(sample, {})
        names = own if tensors is None else [name for name in tensors if name in own]
        return {name: _loaded(own[name]) for name in names}

    def keep(self, tensors: Collection[str]) -> None:
        """Drop all tensors of all samples but these."""
        for own in self._held.values():
            for name in [name for name in own if name not in tensors]:
                self._drop(own, name)

    def close(self) -> None:
        """Drop all arrays and remove the files."""
        self._held.clear()
        self._files.close()
        self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored(self, array: Array) -> Array | Path:
        if array.nbytes <= self._free:
            self._free -= array.nbytes
            return array
        if self._folder is None:
            beside = None if self._parent is None else self._parent / "activations"
            self._folder = self._files.enter_context(staging(beside))
        path = self._folder / f"{self._written}.npy"
        self._written += 1
        try:
            np.save(path, array)
        except OSError as error:
            raise OutputError(
                f"activations cannot be stored in {path.parent}: {error.strerror}; free disk space there, or set "
                "TMPDIR to another folder"
            ) from error
        return path

    def _drop(self, own: dict[str, Array | Path], name: str) -> None:
        held = own.pop(name, None)
        if isinstance(held, Path):
            held.unlink(missing_ok=True)
        elif held is not None:
            self._free += held.nbytes


def _loaded(held: Array | Path) -> Array:
    if isinstance(held, Path):
        loaded: Array = np.load(held)
        return loaded
    return held
