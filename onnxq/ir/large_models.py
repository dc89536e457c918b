"""Which models are so large that their weights had better stay in their files."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.ir.stored_tensors import stored_tensors
from onnxq.system.resources import cached_by_mtime

_LARGE = 1 << 30
# A model whose weights are external is no larger than this itself.
_LARGEST_GRAPH = 1 << 28


def is_large(model: onnx.ModelProto | bytes | Path) -> bool:
    """Return whether the external data of a model exceeds 1 GiB; False for what is no model."""
    return _is_large_file(model) if isinstance(model, Path) else _is_large(model)


def _is_large(model: onnx.ModelProto | bytes | Path) -> bool:
    lengths = (
        int(entry.value)
        for tensor in stored_tensors(_without_weights(model))
        for entry in tensor.external_data
        if entry.key == "length" and entry.value.isdecimal()
    )
    return sum(lengths) > _LARGE


_is_large_file = cached_by_mtime(_is_large)


def _without_weights(model: onnx.ModelProto | bytes | Path) -> onnx.ModelProto:
    """Return a model whose weights are external; an empty one for what is too large to be that, or is no model."""
    if isinstance(model, onnx.ModelProto):
        return model
    found = onnx.ModelProto()
    try:
        size = model.stat().st_size if isinstance(model, Path) else len(model)
        data = b"" if size > _LARGEST_GRAPH else model.read_bytes() if isinstance(model, Path) else model
        found.ParseFromString(data)
    except (OSError, DecodeError):
        return onnx.ModelProto()
    return found
