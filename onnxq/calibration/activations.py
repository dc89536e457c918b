"""Activations: values of tensors for each sample, on disk where memory has no room for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np

from onnxq.errors import OutputError
from onnxq.runtime.sessions import Array
from onnxq.system.publish import staging

MEMORY = 1 << 28
"""Bytes that stay in memory; what is beyond goes to files."""


class Activations:
    """Arrays by sample and tensor, in memory up to a limit and in files of a temporary folder beyond it.

    The files are gone when it is closed, which ``with`` does too.

    >>> with Activations() as held:
    ...     held.put(0, {"x": np.ones(2), "y": np.zeros(3)})
    ...     held.keep({"y"})
    ...     {name: len(array) for name, array in held.of(0).items()}
    {'y': 3}
    """

    def __init__(self, memory: int = MEMORY, folder: Path | None = None) -> None:
        """Hold nothing yet.

        Args:
            memory: bytes that stay in memory.
            folder: where the temporary folder is made; None asks the system.
        """
        self._free = memory
        # A folder that is made when it is needed, and that the next run removes where this one is killed.
        self._parent = folder
        self._files = ExitStack()
        self._folder: Path | None = None
        self._held: dict[int, dict[str, Array | Path]] = {}
        self._written = 0

    def put(self, sample: int, arrays: Mapping[str, Array]) -> None:
        """Keep arrays of a sample, in the place of those that it has under these names.

        Raises:
            OutputError: the disk has no room for them.
        """
        own = self._held.setdefault(sample, {})
        for name, array in arrays.items():
            self._drop(own, name)
            own[name] = self._stored(np.asarray(array))

    def of(self, sample: int, tensors: Iterable[str] | None = None) -> dict[str, Array]:
        """Return the arrays of a sample by tensor: those asked for, of which it may lack some, or all."""
        own = self._held.get(sample, {})
        names = own if tensors is None else [name for name in tensors if name in own]
        return {name: _loaded(own[name]) for name in names}

    def keep(self, tensors: Collection[str]) -> None:
        """Forget all tensors of all samples but these."""
        for own in self._held.values():
            for name in [name for name in own if name not in tensors]:
                self._drop(own, name)

    def close(self) -> None:
        """Forget everything and remove the files."""
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
                f"activations cannot be kept in {path.parent}: {error.strerror}; make room there, or set TMPDIR"
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
