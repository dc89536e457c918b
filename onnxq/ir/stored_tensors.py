"""The tensors that a model stores, wherever they stand in it, and the files of those that lie beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped,unused-ignore]

# Of what declares types there may be one for each tensor, and none holds values.
_VALUELESS = frozenset({"value_info", "input", "output", "quantization_annotation", "metadata_props", "external_data"})


def stored_tensors(part: Message) -> Iterator[onnx.TensorProto]:
    """Yield the tensors in a model or in any part of one: initializers, attributes, those of bodies and functions.

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
    """Return where the tensors of a model lie that are not in it, those of bodies too: names of files, in order."""
    locations = {
        entry.value
        for tensor in stored_tensors(model)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return tuple(sorted(locations))


def external_files(model: onnx.ModelProto, folder: Path) -> tuple[Path, ...]:
    """Return the files that hold the tensors of a model of this folder that are not in it."""
    return tuple(folder / location for location in external_locations(model))
