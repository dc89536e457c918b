"""Words for reading a graph: who makes a tensor, who reads it, and which operator a node calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias, TypeGuard

from onnxq.ir.elements import Constant, Node, Tensor
from onnxq.ir.scopes import AnyGraph, scopes

OperatorKey: TypeAlias = "tuple[str, str]"
"""Domain and op type, which only together say what an operator does; ONNX's own domain is ``""``."""


def operator_key(node: Node) -> OperatorKey:
    """Return the domain and the op type of a node.

    >>> operator_key(Node("Relu")), operator_key(Node("Gelu", domain="com.microsoft"))
    (('', 'Relu'), ('com.microsoft', 'Gelu'))
    """
    return node.domain, node.op


def nodes(graph: AnyGraph) -> Iterator[tuple[AnyGraph, Node]]:
    """Yield every node of a graph and its bodies with the graph that lists it, a graph before its bodies."""
    found: Any = scopes(graph)
    return ((scope, node) for scope in found for node in scope.nodes)


def producer(tensor: Tensor) -> Node | None:
    """Return the node that makes a tensor, or None for what is fed or stored."""
    return tensor.inputs[0] if tensor.inputs else None


def only_reader(tensor: Tensor) -> Node | None:
    """Return the node that alone reads a tensor, and once; None where others do, or a graph returns it."""
    return tensor.outputs[0] if len(tensor.outputs) == 1 and not tensor.returned_by else None


def optional(node: Node, index: int) -> Tensor | None:
    """Return the input at an index, or None where it is left out.

    >>> from onnxq.ir import Variable
    >>> clip = Node("Clip", "c", {}, [Variable("x"), Variable(""), Variable("most")])
    >>> optional(clip, 1), optional(clip, 3), optional(clip, 2).name
    (None, None, 'most')
    """
    found = node.inputs[index] if index < len(node.inputs) else None
    return found if found is not None and found.name else None


def is_fixed(tensor: Any) -> TypeGuard[Constant]:
    """Whether a tensor is a constant whose values no caller of the model can replace by others.

    >>> import numpy as np
    >>> from onnxq.ir import Variable, constant
    >>> is_fixed(constant("w", np.ones(3))), is_fixed(Variable("x"))
    (True, False)
    """
    return isinstance(tensor, Constant) and tensor.input_source is None
