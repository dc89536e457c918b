"""Where plain GraphSurgeon comes in: objects that code written against it puts into our graphs."""

from __future__ import annotations

from typing import Any, TypeVar

import onnx_graphsurgeon as gs

from onnxq.errors import ModelError
from onnxq.ir.elements import Constant, Identity, Node, Variable, bodies_of
from onnxq.ir.stored import as_payload

AnyGraph = TypeVar("AnyGraph")
# Attributes that are neither tensors nor bodies.
_SIMPLE = (bool, int, float, str, bytes)


def restore_classes(graph: AnyGraph) -> AnyGraph:
    """Give stock GraphSurgeon objects inside a graph our classes, in place, and set every body's parent.

    Code written against plain GraphSurgeon puts such objects into our graphs; readers of the graph need not care.

    Raises:
        ModelError: a stock constant holds sparse values, or something that is no node or tensor stands in place of one.
    """
    root: Any = graph
    pending = [(root, getattr(root, "parent", None))]
    seen: set[int] = set()
    while pending:
        scope, parent = pending.pop()
        if isinstance(scope, gs.Graph) and not isinstance(scope, Identity):
            raise ModelError(f"graph {scope.name!r} is a plain GraphSurgeon graph; convert it with from_graphsurgeon")
        scope.parent = parent
        if parent is not None:
            scope.opset_imports = parent.opset_imports
        for node in scope.nodes:
            if type(node) is gs.Node:
                node.__class__ = Node
            _check_node(node, scope)
            for tensor in (*node.inputs, *node.outputs):
                if id(tensor) not in seen:
                    _restore_tensor(tensor, seen)
            for name, value in node.attrs.items():
                if isinstance(value, _SIMPLE):
                    continue
                _restore_tensor(value, seen)
                if isinstance(value, gs.Graph) and not isinstance(value, Identity):
                    raise ModelError(
                        f"attribute {name!r} of node {node.name!r} is a plain GraphSurgeon graph; "
                        "make it from onnxq.ir.Graph"
                    )
                pending.extend((body, scope) for body in bodies_of((value,)))
        for tensor in (*scope.inputs, *scope.outputs):
            _restore_tensor(tensor, seen)
    return graph


def _check_node(node: Any, scope: Any) -> None:
    if not isinstance(node, Node):
        raise ModelError(f"graph {scope.name!r} lists {node!r} of type {type(node).__name__}, expected a node")
    if not isinstance(node.op, str) or not node.op or not isinstance(node.name, str):
        raise ModelError(f"node {node.name!r} has the operator {node.op!r}, expected the names of both as text")
    if strangers := [one for one in (*node.inputs, *node.outputs) if not isinstance(one, gs.Tensor)]:
        stranger = strangers[0]
        raise ModelError(
            f"{node.op} node {node.name!r} reads or makes {stranger!r} of type {type(stranger).__name__}, "
            "expected a tensor"
        )


def _restore_tensor(tensor: Any, seen: set[int]) -> None:
    kind = type(tensor)
    if not isinstance(tensor, gs.Tensor) or id(tensor) in seen:
        return
    seen.add(id(tensor))
    for node in (*tensor.inputs, *tensor.outputs):
        if type(node) is gs.Node:
            node.__class__ = Node
    if kind is gs.Variable:
        tensor.__class__ = Variable
    elif kind is gs.Constant:
        payload = as_payload(tensor._values, tensor._export_dtype)
        tensor.__class__ = Constant
        tensor._values = payload
