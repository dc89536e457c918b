"""Where training stands, on disk after every epoch, so that a killed run goes on to the same weights."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onnxq.errors import OutputError


@dataclass(frozen=True)
class Checkpoint:
    """A file with the state of one training, or of a part of it.

    Attributes:
        path: the file; None keeps nothing.
        key: what tells this training apart from others, whose states are not taken up.
    """

    path: Path | None
    key: str = ""

    @classmethod
    def of(cls, part: str, folder: Path | None, key: str) -> Checkpoint:
        """Return what keeps a part of a training in a folder; no folder keeps nothing."""
        return cls(None if folder is None else folder / part, key)

    def load(self) -> dict[str, Any] | None:
        """Return the state that was kept of this training, or None where there is none that can be read."""
        if self.path is None or not self.path.exists():
            return None
        try:
            found: dict[str, Any] = torch.load(self.path, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
            return None
        return found["state"] if isinstance(found, dict) and found.get("key") == self.key else None

    def save(self, state: dict[str, Any]) -> None:
        """Keep a state in the place of the one before, at once or not at all.

        Raises:
            OutputError: the file cannot be written.
        """
        if self.path is None:
            return
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            self.path.parent.mkdir(exist_ok=True)
            torch.save({"key": self.key, "state": state}, new)
            new.replace(self.path)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                new.unlink()
            raise OutputError(
                f"the state of training {self.path} cannot be written: {error}; make room there"
            ) from error


def key_of(parts: Iterable[object]) -> str:
    """Return a digest of what decides a training: tensors by their bytes, all else by its representation."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.detach().cpu().numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
    return digest.hexdigest()
