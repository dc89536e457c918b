"""What ONNX says about operators: how many inputs and outputs a node may have, and the types of its attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from onnx import AttributeProto, NodeProto, defs

from onnxq.errors import ModelError

_Parameter = defs.OpSchema.FormalParameter
_REQUIRED = defs.OpSchema.FormalParameterOption.Single
_UNBOUNDED = 2**31 - 1


def check_node(node: NodeProto, opset: int) -> None:
    """Check that a node of the default domain has the inputs, outputs and attributes that its operator can have.

    Whatever reads a graph can then count on those that are required, on no others, and on their types.

    Raises:
        ModelError: there are too few or too many, one that is required is missing, or an attribute has another type.
    """
    signature = _signature(node.op_type, opset)
    if signature is None:
        return
    for names, side, what in ((node.input, signature.inputs, "input"), (node.output, signature.outputs, "output")):
        if not side.least <= len(names) <= side.most:
            raise _damaged(node, f"has {len(names)} {what}s, expected {side.expected}")
        for index in side.required:
            if index < len(names) and not names[index]:
                raise _damaged(node, f"lacks {what} {index}, which is required")
    _check_attributes(node, signature)


def _check_attributes(node: NodeProto, signature: _Signature) -> None:
    missing = set(signature.required_attributes)
    for attribute in node.attribute:
        missing.discard(attribute.name)
        expected = signature.attributes.get(attribute.name, attribute.type)
        # Files of the first version of the format say no type.
        if attribute.type not in (expected, AttributeProto.UNDEFINED):
            raise _damaged(
                node,
                f"has the attribute {attribute.name!r} of type {_type_name(attribute.type)}, "
                f"expected {_type_name(expected)}",
            )
    if missing:
        raise _damaged(node, f"lacks the attribute {min(missing)!r}, which is required")


class _Side(NamedTuple):
    """How many inputs or outputs an operator has, and the indices of those that cannot be omitted."""

    least: int
    most: int
    required: tuple[int, ...]

    @classmethod
    def of(cls, least: int, most: int, parameters: Sequence[_Parameter]) -> _Side:
        required = (index for index, parameter in enumerate(parameters) if parameter.option == _REQUIRED)
        return cls(least, most, tuple(required))

    @property
    def expected(self) -> str:
        if self.least == self.most:
            return str(self.least)
        return f"{self.least} or more" if self.most >= _UNBOUNDED else f"{self.least} to {self.most}"


class _Signature(NamedTuple):
    """What a node of an operator looks like; ``attributes`` maps names to values of AttributeProto.AttributeType."""

    inputs: _Side
    outputs: _Side
    attributes: Mapping[str, int]
    required_attributes: frozenset[str]


@cache
def _signature(op_type: str, opset: int) -> _Signature | None:
    """Return what an operator takes; None for one that onnx does not know."""
    if not defs.has(op_type, max_inclusive_version=opset):
        return None
    schema = defs.get_schema(op_type, max_inclusive_version=opset)
    return _Signature(
        _Side.of(schema.min_input, schema.max_input, schema.inputs),
        _Side.of(schema.min_output, schema.max_output, schema.outputs),
        {name: _number(attribute) for name, attribute in schema.attributes.items()},
        frozenset(name for name, attribute in schema.attributes.items() if attribute.required),
    )


def _number(attribute: Any) -> int:
    """Return the attribute's type as AttributeProto numbers it; the enumeration of schemas is another one."""
    return int(attribute.type.value)


def _type_name(type_: int) -> str:
    known = AttributeProto.AttributeType.values()
    return str(AttributeProto.AttributeType.Name(type_)).lower() if type_ in known else str(type_)


def _damaged(node: NodeProto, problem: str) -> ModelError:
    subject = f"{node.op_type} node {node.name!r}" if node.name else f"a node {node.op_type}"
    return ModelError(f"{subject} {problem}; the model is damaged")
