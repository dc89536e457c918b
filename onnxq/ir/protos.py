"""Small translations between protos and values, used both to read and to tell on writing what was left as read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from google.protobuf.message import DecodeError, EncodeError, Message  # type: ignore[import-untyped]
from onnx import AttributeProto, helper

from onnxq.ir.elements import OpaqueAttribute

__all__ = [
    "DecodeError",
    "EncodeError",
    "copy_other_fields",
    "read_attribute",
    "write_attribute",
]

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
    """Return the value of an attribute that is no tensor and no graph: number, text, list, or OpaqueAttribute.

    Text that is not UTF-8 becomes bytes.
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
    """Write a plain attribute; one that still has the value it was read with is copied as it was.

    Raises:
        TypeError, ValueError: ONNX has no attribute of that kind.
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


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _same(old: Any, new: Any) -> bool:
    # 1 == 1.0 == True in Python, yet they are attributes of different kinds.
    if type(old) is not type(new):
        return False
    if isinstance(old, list):
        return len(old) == len(new) and all(_same(a, b) for a, b in zip(old, new, strict=True))
    return bool(old == new)
