"""Plain attributes of nodes: numbers, texts and lists, read and written."""

from __future__ import annotations

from typing import Any, Final

from onnx import AttributeProto, helper

from onnxq.ir.elements import OpaqueAttribute

_LISTS: Final = (AttributeProto.FLOATS, AttributeProto.INTS, AttributeProto.STRINGS)
_PLAIN: Final = (AttributeProto.FLOAT, AttributeProto.INT, AttributeProto.STRING, *_LISTS)


def read_attribute(proto: AttributeProto) -> Any:
    """Return the value of an attribute that is not a tensor or graph: a number, text, list or OpaqueAttribute.

    Text that is not UTF-8 is returned as bytes.
    """
    if proto.ref_attr_name or proto.type not in _PLAIN:
        return OpaqueAttribute(proto)
    value = helper.get_attribute_value(proto)
    return list(map(_text, value)) if isinstance(value, list) else _text(value)


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
        target.name = name
        target.type = source.type if source is not None and source.type in _LISTS else AttributeProto.INTS
    else:
        target.CopyFrom(helper.make_attribute(name, value))
    if source is not None and source.doc_string:
        target.doc_string = source.doc_string


def _text(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _same(old: Any, new: Any) -> bool:
    # In Python 1 == 1.0 == True, but ONNX stores them as different types of attribute.
    if type(old) is not type(new):
        return False
    if isinstance(old, list):
        return len(old) == len(new) and all(_same(a, b) for a, b in zip(old, new, strict=True))
    return bool(old == new)
