"""Copies of graphs: new nodes and tensors that share the values of constants."""

from __future__ import annotations

from typing import Any, TypeVar

from onnx import ModelProto

from onnxq.ir.elements import Constant, Node, Tensor
from onnxq.ir.scopes import scopes

AnyGraph = TypeVar("AnyGraph")

_SHARED = ("name", "doc_string", "ir_version", "producer_name", "producer_version", "source", "folder", "unattached")


def copy_graph(graph: AnyGraph) -> AnyGraph:
    """Return a graph with nodes and tensors of its own, in bodies too.

    Payloads of constants and the protos that nodes were read from are shared, since nobody changes them. What a body
    reads from graphs around it, where those are not copied with it, is read by the copy as well.

    Args:
        graph: a Graph in which `restore_classes` has nothing to do.
    """
    root: Any = graph
    around: list[Any] = list(scopes(root))
    twins: dict[Any, Any] = {scope: type(scope)() for scope in around}
    twins[root].opset_imports.update(root.opset_imports)
    tensors = _Twins(around)
    for scope, twin in twins.items():
        for name in _SHARED:
            setattr(twin, name, getattr(scope, name))
        twin.parent = twins.get(scope.parent, scope.parent)
        twin.opset_imports = twins[root].opset_imports
        twin.functions = list(scope.functions)
        twin.model_source = without_graph(scope.model_source) if scope.model_source is not None else None
        twin.inputs = [tensors.of(tensor) for tensor in scope.inputs]
        twin.initializers = [tensors.of(tensor) for tensor in scope.initializers]
        twin.input_order = [tensors.of(tensor) for tensor in scope.input_order]
        twin.sparse_initializers = [(tensors.of(tensor), proto) for tensor, proto in scope.sparse_initializers]
        for node in scope.nodes:
            made = Node(node.op, node.name, {}, domain=node.domain)
            made.source, made.origins = node.source, node.origins
            made.attrs.update({name: _attribute(value, twins, tensors) for name, value in node.attrs.items()})
            made.inputs = [tensors.of(tensor) for tensor in node.inputs]
            made.outputs = [tensors.of(tensor) for tensor in node.outputs]
            twin.nodes.append(made)
        twin.outputs = [tensors.of(tensor) for tensor in scope.outputs]
    twin_root: AnyGraph = twins[root]
    return twin_root


class _Twins:
    """The copy of each tensor that one of some graphs owns."""

    def __init__(self, around: list[Any]) -> None:
        self._twins: dict[Tensor, Tensor] = {}
        self._own: set[Tensor] = set()
        self._whole = around[0].parent is None
        for scope in () if self._whole else around:
            self._own.update((*scope.inputs, *scope.initializers, *(tensor for tensor, _ in scope.sparse_initializers)))
            self._own.update(tensor for node in scope.nodes for tensor in node.outputs)

    def of(self, tensor: Tensor) -> Tensor:
        if not self._whole and tensor not in self._own:
            return tensor
        if tensor not in self._twins:
            self._twins[tensor] = _copy_tensor(tensor)
        return self._twins[tensor]


def _copy_tensor(tensor: Tensor) -> Tensor:
    twin = tensor.copy()
    if isinstance(tensor, Constant) and isinstance(twin, Constant):
        twin.input_source, twin.kept = tensor.input_source, tensor.kept
    return twin


def _attribute(value: Any, twins: dict[Any, Any], tensors: _Twins) -> Any:
    if isinstance(value, list):
        return [twins.get(entry, entry) if entry.__hash__ else entry for entry in value]
    if isinstance(value, Constant):
        return value.copy()
    return twins.get(value, value)


def without_graph(source: ModelProto) -> ModelProto:
    """Return the model's own fields, which `Graph.set_metadata` changes; the graph is what takes memory."""
    twin = ModelProto()
    for field, value in source.ListFields():
        if field.name in ("graph", "functions"):
            continue
        if isinstance(value, str | int):
            setattr(twin, field.name, value)
        else:
            getattr(twin, field.name).extend(value)
    return twin
