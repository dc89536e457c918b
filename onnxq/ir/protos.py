"""Helpers for protobuf messages of onnx: attributes, subgraphs, stored tensors, and versions of the file format."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, NodeProto, helper

from onnxq.ir.elements import OpaqueAttribute
from onnxq.system.resources import cached_by_mtime

_SCALARS: Final = {AttributeProto.FLOAT: "f", AttributeProto.INT: "i"}
_LISTS: Final = {AttributeProto.FLOATS: "floats", AttributeProto.INTS: "ints"}


def copy_other_fields(source: Message, target: Message, handled: Collection[str]) -> None:
    """Copy every field that is set in ``source`` and not named in ``handled``."""
    for field, value in source.ListFields():
        if field.name in handled:
            continue
        if field.message_type is None and isinstance(value, str | bytes | int | float):
            setattr(target, field.name, value)
        elif isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        else:
            getattr(target, field.name).extend(value)


def read_attribute(proto: AttributeProto) -> Any:
    """Return the value of an attribute that is not a tensor or graph: a number, text, list or OpaqueAttribute.

    Text that is not UTF-8 is returned as bytes.
    """
    if proto.ref_attr_name:
        return OpaqueAttribute(proto)
    kind = proto.type
    if kind in _SCALARS:
        return getattr(proto, _SCALARS[kind])
    if kind in _LISTS:
        return list(getattr(proto, _LISTS[kind]))
    if kind == AttributeProto.STRING:
        return _text(proto.s)
    if kind == AttributeProto.STRINGS:
        return [_text(value) for value in proto.strings]
    return OpaqueAttribute(proto)


def write_attribute(target: AttributeProto, name: str, value: Any, source: AttributeProto | None) -> None:
    """Write a plain attribute. If it still has the value that was read, the source is copied.

    Raises:
        TypeError, ValueError: ONNX has no attribute for this value.
    """
    if isinstance(value, OpaqueAttribute):
        target.CopyFrom(value.proto)
        target.name = name
        return
    if source is not None and _same(read_attribute(source), value):
        target.CopyFrom(source)
        return
    if isinstance(value, list | tuple) and not value:
        lists = (AttributeProto.FLOATS, AttributeProto.INTS, AttributeProto.STRINGS)
        target.name = name
        target.type = source.type if source is not None and source.type in lists else AttributeProto.INTS
    else:
        target.CopyFrom(helper.make_attribute(name, value))
    if source is not None and source.doc_string:
        target.doc_string = source.doc_string


def subgraph_protos(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and its bodies in the order of `onnxq.ir.all_graphs`."""
    pending = [graph]
    while pending:
        scope = pending.pop()
        yield scope
        bodies: list[GraphProto] = []
        for node in scope.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    bodies.append(attribute.g)
                elif attribute.type == AttributeProto.GRAPHS:
                    bodies.extend(attribute.graphs)
        pending.extend(reversed(bodies))


def node_protos(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield nodes and the nodes of their bodies."""
    pending = [nodes]
    while pending:
        for node in pending.pop():
            yield node
            for attribute in node.attribute:
                pending.extend(body.node for body in (attribute.g, *attribute.graphs) if body.node)


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _same(old: Any, new: Any) -> bool:
    # In Python 1 == 1.0 == True, but ONNX stores them as different types of attribute.
    if type(old) is not type(new):
        return False
    if isinstance(old, list):
        return len(old) == len(new) and all(_same(a, b) for a, b in zip(old, new, strict=True))
    return bool(old == new)


# Stored tensors

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


# Large models

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
    found = onnx.ModelProto()
    try:
        size = model.stat().st_size if isinstance(model, Path) else len(model)
        data = b"" if size > _LARGEST_GRAPH_BYTES else model.read_bytes() if isinstance(model, Path) else model
        found.ParseFromString(data)
    except (OSError, DecodeError):
        return onnx.ModelProto()
    return found


# Versions of the file format

NEWEST_IR_VERSION: Final = 13
"""The newest IR version that onnxruntime loads. A model with a higher one keeps it; onnxq never sets one."""
NEWEST_OPSET: Final = 26
"""The newest ONNX opset that onnxruntime loads."""

_FIRST_IR: Final = 3
_IR_WITH_INITIALIZERS_BESIDE_INPUTS: Final = 4
_IR_BY_OPSET: Final = ((25, 13), (24, 12), (23, 11), (21, 10), (19, 9), (13, 7))


def minimum_ir_version(opset: int, *, all_initializers_are_inputs: bool = True) -> int:
    """Return the lowest IR version for an ONNX opset, at most 13. Initializers beside graph inputs need version 4.

    >>> minimum_ir_version(21)
    10
    """
    needed = next((version for first, version in _IR_BY_OPSET if opset >= first), _FIRST_IR)
    return needed if all_initializers_are_inputs else max(needed, _IR_WITH_INITIALIZERS_BESIDE_INPUTS)
