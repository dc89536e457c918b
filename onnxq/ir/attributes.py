"""Plain attributes of nodes: numbers, texts and lists, read and written."""

from __future__ import annotations

from typing import Any, Final

from onnx import AttributeProto, helper

from onnxq.ir.elements import OpaqueAttribute

_SCALARS: Final = {AttributeProto.FLOAT: "f", AttributeProto.INT: "i"}
_LISTS: Final = {AttributeProto.FLOATS: "floats", AttributeProto.INTS: "ints"}


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
