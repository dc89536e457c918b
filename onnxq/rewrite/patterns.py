"""Patterns: small trees of operators, matched against a node and its producers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import EllipsisType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from onnx import defs, helper

from onnxq.errors import PassError, did_you_mean
from onnxq.ir.elements import Node, Tensor
from onnxq.ir.queries import is_constant
from onnxq.rewrite.soundness import Uses

COMMUTATIVE: Final = frozenset(
    {"Add", "And", "BitwiseAnd", "BitwiseOr", "Equal", "Max", "Min", "Mul", "Or", "Sum", "Xor"}
)
"""Operators whose two operands may be swapped."""

# Exporters write the constants of formulas with six digits or more. Values that float16 holds must match exactly.
_CLOSE = 4e-6

Operand: TypeAlias = "ValuePattern | NodePattern | Output | float | EllipsisType | None"


@dataclass(frozen=True)
class ValuePattern:
    """A tensor that a match captures under a name. If the name occurs twice, both must be the same tensor.

    Attributes:
        name: key of the tensor in the `Match`.
        constant: whether it must be a constant that no caller can override.
        scalar: whether the constant must have one element.
        optional: whether the input may be absent; the captured value is then None.
    """

    name: str
    constant: bool = False
    scalar: bool = False
    optional: bool = False


@dataclass(frozen=True, eq=False)
class NodePattern:
    """A node of one operator. If the pattern object occurs twice, both must be the same node.

    Attributes:
        op_type: the operator.
        inputs: patterns of the inputs. A number matches a constant of that value, None an absent input, and a final
            ``...`` any further inputs.
        attributes: required attribute values; defaults of the operator count.
        domain: the operator's domain.
        name: key of the node in the `Match`; empty for none.
        allow_other_consumers: whether nodes outside of the match may read its outputs. If they do, the node stays.

    >>> NodePattern("Mul", (ValuePattern("x"), 2.0)).op_type
    'Mul'
    """

    op_type: str
    inputs: tuple[Operand, ...]
    attributes: Mapping[str, object] = field(default_factory=dict)
    domain: str = ""
    name: str = ""
    allow_other_consumers: bool = False

    @property
    def size(self) -> int:
        """Number of operators in the pattern."""
        calls = (operand.call if isinstance(operand, Output) else operand for operand in self.inputs)
        return 1 + sum(call.size for call in calls if isinstance(call, NodePattern))

    @cached_property
    def fed_by(self) -> frozenset[str]:
        """Operators that must produce inputs of this node; a cheap test that rejects most nodes."""
        calls = (operand.call if isinstance(operand, Output) else operand for operand in self.inputs)
        return frozenset(call.op_type for call in calls if isinstance(call, NodePattern))

    def __getitem__(self, index: int) -> Output:
        """Return the pattern of one output, for nodes with several."""
        return Output(self, index)


@dataclass(frozen=True, eq=False)
class Output:
    """One output of a node with several."""

    call: NodePattern
    index: int


class OpsetPatternBuilder:
    """Build patterns: ``op.Mul(x, op.Sigmoid(x))``.

    Every ONNX operator is a method. `call` makes patterns of other domains.

    Args:
        owner: name of the rule, for messages.

    >>> op = OpsetPatternBuilder("Example")
    >>> op.Mul(op.any("x"), op.Sigmoid(op.any("x"))).op_type
    'Mul'
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __getattr__(self, op_type: str) -> Callable[..., NodePattern]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        if not defs.has(op_type):
            operators = {schema.name for schema in defs.get_all_schemas()}
            raise PassError(
                f"rule {self._owner} looks for the operator {op_type!r}, which ONNX does not have"
                f"{did_you_mean(op_type, operators)}"
            )
        return lambda *inputs, name="", allow_other_consumers=False, **attributes: NodePattern(
            op_type, inputs, attributes, name=name, allow_other_consumers=allow_other_consumers
        )

    def call(
        self, domain: str, op_type: str, *inputs: Operand, name: str = "", allow_other_consumers: bool = False
    ) -> NodePattern:
        """Return a pattern of an operator of another domain."""
        return NodePattern(op_type, inputs, domain=domain, name=name, allow_other_consumers=allow_other_consumers)

    def any(self, name: str) -> ValuePattern:
        """Return a pattern of any tensor."""
        return ValuePattern(name)

    def constant(self, name: str) -> ValuePattern:
        """Return a pattern of a constant that no caller can override."""
        return ValuePattern(name, constant=True)

    def scalar(self, name: str) -> ValuePattern:
        """Return a pattern of a constant of one element."""
        return ValuePattern(name, constant=True, scalar=True)

    def optional(self, name: str, *, constant: bool = False) -> ValuePattern:
        """Return a pattern of an input that may be absent; with ``constant`` it is a constant or absent."""
        return ValuePattern(name, constant=constant, optional=True)


@dataclass(frozen=True, eq=False)
class Match:
    """A pattern and the nodes that match it. Captured tensors and named nodes are attributes.

    Attributes:
        root: the last node, whose outputs the replacement makes.
        nodes: all nodes, the root first.
        opset: version of the default domain.
        values: captured tensors and named nodes by name; None for an absent input.
        kept: nodes whose outputs other nodes may read.
        uses: the tensors that discrete operators depend on; None outside of `RewriteRules`.

    >>> def check(self, match):
    ...     return "" if match.x.dtype == np.float32 else "its data is not float32"
    """

    root: Node
    nodes: tuple[Node, ...]
    opset: int
    values: Mapping[str, Any]
    kept: frozenset[Node] = frozenset()
    uses: Uses | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(f"the pattern names nothing {name!r}; it names {', '.join(self.values)}") from None


class _Bound(NamedTuple):
    """The bindings of a partial match."""

    opset: int
    values: Mapping[str, Any]
    calls: Mapping[NodePattern, Node]

    def with_value(self, name: str, value: Any) -> _Bound | None:
        if name in self.values:
            return self if self.values[name] is value else None
        return self._replace(values={**self.values, name: value})


def find(pattern: NodePattern, root: Node, opset: int, uses: Uses | None = None) -> Match | None:
    """Return the match of a pattern that ends in a node, or None.

    Other consumers of the inner values are not checked here.
    """
    for bound in _call(pattern, root, _Bound(opset, {}, {})):
        nodes = tuple(dict.fromkeys((root, *bound.calls.values())))
        kept = frozenset(node for call, node in bound.calls.items() if call.allow_other_consumers)
        named = {call.name: node for call, node in bound.calls.items() if call.name}
        return Match(root, nodes, opset, {**bound.values, **named}, kept, uses)
    return None


def _call(pattern: NodePattern, node: Node, bound: _Bound) -> Iterator[_Bound]:
    if pattern in bound.calls:
        if bound.calls[pattern] is node:
            yield bound
        return
    if (node.domain, node.op) != (pattern.domain, pattern.op_type) or not _has_attributes(pattern, node, bound.opset):
        return
    patterns, inputs = list(pattern.inputs), list(node.inputs)
    while inputs and not inputs[-1].name:
        inputs.pop()
    if patterns and patterns[-1] is ...:
        patterns.pop()
        inputs = inputs[: len(patterns)]
    if len(inputs) > len(patterns):
        return
    padded: list[Tensor | None] = [*inputs, *[None] * (len(patterns) - len(inputs))]
    extended = bound._replace(calls={**bound.calls, pattern: node})
    yield from _inputs(patterns, padded, extended)
    if node.op in COMMUTATIVE and not node.domain and len(inputs) == len(patterns) == 2:
        yield from _inputs(patterns, padded[::-1], extended)


def _inputs(patterns: Sequence[Operand], tensors: Sequence[Any], bound: _Bound) -> Iterator[_Bound]:
    if not patterns:
        yield bound
        return
    for extended in _operand(patterns[0], tensors[0], bound):
        yield from _inputs(patterns[1:], tensors[1:], extended)


def _operand(pattern: Operand, tensor: Any, bound: _Bound) -> Iterator[_Bound]:
    present = tensor is not None and bool(tensor.name)
    if isinstance(pattern, ValuePattern):
        if present and pattern.constant and not _is_fixed(tensor, scalar=pattern.scalar):
            return
        if (present or pattern.optional) and (extended := bound.with_value(pattern.name, tensor if present else None)):
            yield extended
    elif pattern is None:
        if not present:
            yield bound
    elif present and isinstance(pattern, NodePattern | Output):
        call, index = (pattern, 0) if isinstance(pattern, NodePattern) else (pattern.call, pattern.index)
        for producer in tensor.inputs[:1]:
            if index < len(producer.outputs) and producer.outputs[index] is tensor:
                yield from _call(call, producer, bound)
    elif present and isinstance(pattern, int | float) and _is_fixed(tensor, scalar=True):
        value = np.asarray(tensor.values)
        if value.dtype.kind in "fiub" and _is_number(float(value.item()), pattern):
            yield bound


def _is_number(value: float, wanted: float) -> bool:
    exact = float(np.float16(wanted)) == wanted
    return value == wanted if exact else bool(np.isclose(value, wanted, rtol=_CLOSE, atol=0))


def _is_fixed(tensor: Any, *, scalar: bool) -> bool:
    return is_constant(tensor) and (not scalar or all(extent == 1 for extent in tensor.shape))


def _has_attributes(pattern: NodePattern, node: Node, opset: int) -> bool:
    return all(
        (node.attrs[name] if name in node.attrs else _default(node.op, name, opset)) == value
        for name, value in pattern.attributes.items()
    )


@cache
def _default(op_type: str, name: str, opset: int) -> object:
    if not defs.has(op_type, opset):
        return None
    attribute = defs.get_schema(op_type, opset).attributes.get(name)
    if attribute is None or not attribute.default_value.name:
        return None
    value = helper.get_attribute_value(attribute.default_value)
    return value.decode() if isinstance(value, bytes) else value
