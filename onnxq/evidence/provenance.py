"""What evidence is of: the content of the model and of each sample, as digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.errors import DataError, ModelError

_BLOCK = 1 << 20
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Provenance:
    """The model that evidence was taken from, and what ran it; empty where nobody asked.

    Args:
        model: Digest of the float model, see `model_digest`; empty when not known.
        runtime: What ran the model, as `onnxq.runtime.runtime_version` gives it: others round otherwise.
    """

    model: str = ""
    runtime: str = ""

    def merge(self, other: Provenance) -> Provenance:
        """Return the provenance of what is of both.

        Raises:
            DataError: The models or runtimes differ.
        """
        if self == Provenance() or other == Provenance():
            return self if other == Provenance() else other
        if self.model != other.model:
            raise DataError(
                f"Statistics of model {self.model[:12]} and of model {other.model[:12]} cannot be merged, expected one "
                "model; calibrate both shards on the same file"
            )
        if self.runtime != other.runtime:
            raise DataError(
                f"Statistics of {self.runtime} and of {other.runtime} cannot be merged, expected one version; "
                "calibrate both shards with the same"
            )
        return self


def sample_digest(sample: Mapping[str, NDArray[Any]]) -> str:
    """Return a digest of the names, types, shapes and values of a sample.

    >>> sample_digest({"x": np.zeros(2)}) == sample_digest({"x": np.zeros((2, 1))})
    False
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(sample):
        value = np.asarray(sample[name])
        if value.dtype.hasobject:
            value = value.astype(str)
        digest.update(repr((name, value.dtype.str, value.dtype.name, value.shape)).encode())
        if value.size:
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def model_digest(model: onnx.ModelProto | Path) -> str:
    """Return a digest of the content of a model, its external data included, wherever it lies.

    Raises:
        ModelError: A file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if isinstance(model, onnx.ModelProto):
        digest.update(model.SerializeToString(deterministic=True))
        return digest.hexdigest()
    for path in (model, *external_files(onnx.load(model, load_external_data=False), model.parent)):
        for block in _blocks(path):
            digest.update(block)
    return digest.hexdigest()


def external_files(model: onnx.ModelProto, folder: Path) -> tuple[Path, ...]:
    """Return the files that hold the initializers of the main graph that are not in the model, in order of name."""
    locations = {
        entry.value
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return tuple(folder / location for location in sorted(locations))


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                yield block
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; expected a file of the model") from error
