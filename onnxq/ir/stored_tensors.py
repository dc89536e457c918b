"""The tensors that a model stores, where they lie, and whether they make it large; without loading them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

from onnxq.system.resources import cached_by_mtime

# These fields hold no values, but may have an entry for each tensor, so they are skipped.
_VALUELESS = frozenset({"value_info", "input", "output", "quantization_annotation", "metadata_props", "external_data"})


def stored_tensors(part: Message) -> Iterator[onnx.TensorProto]:
    """Yield the stored tensors of a model or a part of it: initializers and attributes, also in bodies and functions.

    >>> node = onnx.helper.make_node("Constant", [], ["c"], value=onnx.TensorProto(name="one"))
    >>> [tensor.name for tensor in stored_tensors(onnx.GraphProto(node=[node]))]
    ['one']
    """
    if isinstance(part, onnx.TensorProto):
        yield part
        return
    for field, value in part.ListFields():
        if field.message_type is not None and field.name not in _VALUELESS:
            for inner in (value,) if isinstance(value, Message) else value:
                yield from stored_tensors(inner)


def external_locations(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the sorted names of the files that hold external tensors of a model."""
    locations = {
        entry.value
        for tensor in stored_tensors(model)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return tuple(sorted(locations))


def external_files(model: onnx.ModelProto, folder: Path) -> tuple[Path, ...]:
    """Return the paths of the files in a folder that hold external tensors of a model."""
    return tuple(folder / location for location in external_locations(model))


_LARGE_BYTES = 1 << 30
# A larger model file is assumed to hold its weights itself, so it is not parsed.
_LARGEST_GRAPH_BYTES = 1 << 28


def is_large(model: onnx.ModelProto | bytes | Path, most: int | None = None) -> bool:
    """Return whether the external data of a model exceeds `most` bytes, 1 GiB by default; False for a damaged model."""
    length = _external_length_of_file(model) if isinstance(model, Path) else _external_length(model)
    return length > (_LARGE_BYTES if most is None else most)


def _external_length(model: onnx.ModelProto | bytes | Path) -> int:
    lengths = (
        int(entry.value)
        for tensor in stored_tensors(_without_weights(model))
        for entry in tensor.external_data
        if entry.key == "length" and entry.value.isdecimal()
    )
    return sum(lengths)


_external_length_of_file = cached_by_mtime(_external_length)


def _without_weights(model: onnx.ModelProto | bytes | Path) -> onnx.ModelProto:
    """Return the parsed model; an empty one if the file is over 256 MiB or damaged."""
    if isinstance(model, onnx.ModelProto):
        return model
    parsed = onnx.ModelProto()
    try:
        size = model.stat().st_size if isinstance(model, Path) else len(model)
        data = b"" if size > _LARGEST_GRAPH_BYTES else model.read_bytes() if isinstance(model, Path) else model
        parsed.ParseFromString(data)
    except (OSError, DecodeError):
        return onnx.ModelProto()
    return parsed
