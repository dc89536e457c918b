"""Queries on a graph: its subgraphs, nodes, producers and consumers, the names in it, and origins of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeAlias, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from onnxq.ir.elements import Constant, Node, Origins, Tensor, Variable, subgraphs_of
from onnxq.ir.spilling import spill_data
from onnxq.ir.tensor_data import TensorData, as_tensor_data

AnyGraph = TypeVar("AnyGraph")
"""Graph, which this module cannot import because `onnxq.ir.graph` imports this one."""
_HOLDERS = (gs.Graph, list)


def all_graphs(graph: AnyGraph) -> Iterator[AnyGraph]:
    """Yield a graph and every control-flow body inside it, a graph before its bodies, in node order.

    Args:
        graph: of onnxq or GraphSurgeon.

    >>> import onnxq
    >>> [len(one.nodes) for one in all_graphs(onnxq.load("models/gru.onnx"))]
    [34]
    """
    pending: list[Any] = [graph]
    while pending:
        scope = pending.pop()
        yield scope
        # Faster than `Node.subgraphs` on each node, and nodes of plain GraphSurgeon define it differently.
        held = [value for node in scope.nodes for value in node.attrs.values() if isinstance(value, _HOLDERS)]
        pending.extend(reversed(subgraphs_of(held)))


def owner_graphs(graph: AnyGraph) -> dict[Node, AnyGraph]:
    """Return, for every node of a graph and its bodies, the graph that lists it."""
    return {node: scope for scope, node in all_nodes(graph)}


def constants(graph: Any) -> list[Constant]:
    """Return each constant of a graph and its bodies once: declared, read by a node, or held by an attribute."""
    distinct: dict[Constant, None] = {}
    for scope in all_graphs(graph):
        distinct.update(dict.fromkeys(scope.initializers))
        for node in scope.nodes:
            distinct.update(dict.fromkeys(tensor for tensor in node.inputs if isinstance(tensor, Constant)))
            distinct.update(dict.fromkeys(value for value in node.attrs.values() if isinstance(value, Constant)))
    return list(distinct)


def inner_variables(graph: Any) -> Iterator[Variable]:
    """Yield the tensors that nodes of a graph and its bodies compute, except the outputs of graphs."""
    for scope in all_graphs(graph):
        outputs = set(scope.outputs)
        for node in scope.nodes:
            yield from (tensor for tensor in node.outputs if tensor.name and tensor not in outputs)


@dataclass(eq=False)
class Visible:
    """The tensors that nodes of a graph can name: its own, and those of the enclosing graphs in ``parent``."""

    parent: Visible | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def find(self, name: str) -> Tensor | None:
        """Return the tensor of this name in the innermost graph that has one, or None."""
        scope: Visible | None = self
        while scope is not None:
            if name in scope.tensors:
                return scope.tensors[name]
            scope = scope.parent
        return None


class Names:
    """The names of tensors and nodes in a whole model, and a source of new ones.

    The names of enclosing graphs count too. They are collected on first use, because many passes need none.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._next: dict[str, int] = {}

    @cached_property
    def _taken(self) -> set[str]:
        root = self._graph
        while root.parent is not None:
            root = root.parent
        taken: set[str] = set()
        for scope in all_graphs(root):
            nodes = scope.nodes
            taken.update([tensor.name for tensor in (*scope.inputs, *scope.outputs, *scope.initializers)])
            taken.update([tensor.name for tensor, _ in scope.sparse_initializers])
            taken.update([node.name for node in nodes])
            taken.update([tensor.name for node in nodes for tensor in node.inputs])
            taken.update([tensor.name for node in nodes for tensor in node.outputs])
            held = [value for node in nodes for value in node.attrs.values() if isinstance(value, Constant)]
            taken.update([value.name for value in held])
        return taken

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def unique(self, base: str) -> str:
        """Return ``base``, or if it is taken ``base.1``, ``base.2`` and so on, and reserve it.

        >>> from onnxq.ir import Graph
        >>> names = Names(Graph())
        >>> names.unique("w.codes"), names.unique("w.codes")
        ('w.codes', 'w.codes.1')
        """
        name, number = base, self._next.get(base, 0)
        while name in self._taken or not name:
            number += 1
            name = f"{base}.{number}"
        self._next[base] = number
        self._taken.add(name)
        return name

    def store(self, base: str, values: npt.ArrayLike | TensorData) -> Constant:
        """Return a new constant with a unique name; within `onnxq.ir.spilling`, large values are written to its file.

        >>> from onnxq.ir import Graph
        >>> Names(Graph()).store("scale", [0.5, 2.0]).shape
        (2,)
        """
        tensor_data = values if isinstance(values, TensorData) else as_tensor_data(np.asarray(values))
        return Constant(self.unique(base), spill_data(tensor_data))


# Producers, consumers and operators

OperatorKey: TypeAlias = "tuple[str, str]"
"""Domain and op type of an operator; the domain of ONNX is ``""``."""


def operator_key(node: Node) -> OperatorKey:
    """Return the domain and the op type of a node.

    >>> operator_key(Node("Relu")), operator_key(Node("Gelu", domain="com.microsoft"))
    (('', 'Relu'), ('com.microsoft', 'Gelu'))
    """
    return node.domain, node.op


def all_nodes(graph: AnyGraph) -> Iterator[tuple[AnyGraph, Node]]:
    """Yield every node of a graph and its bodies with the graph that lists it, a graph before its bodies."""
    scopes: Any = all_graphs(graph)
    return ((scope, node) for scope in scopes for node in scope.nodes)


def producer(tensor: Tensor) -> Node | None:
    """Return the node that computes a tensor; None for an input or a constant."""
    return tensor.inputs[0] if tensor.inputs else None


def sole_consumer(tensor: Tensor) -> Node | None:
    """Return the only consumer of a tensor; None if it is read more than once or is the output of a graph."""
    return tensor.outputs[0] if len(tensor.outputs) == 1 and not tensor.graph_output_of else None


def optional_input(node: Node, index: int) -> Tensor | None:
    """Return the input at an index; None if it is omitted.

    >>> from onnxq.ir import Variable
    >>> clip = Node("Clip", "c", {}, [Variable("x"), Variable(""), Variable("most")])
    >>> optional_input(clip, 1), optional_input(clip, 3), optional_input(clip, 2).name
    (None, None, 'most')
    """
    tensor = node.inputs[index] if index < len(node.inputs) else None
    return tensor if tensor is not None and tensor.name else None


def without_absent(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs of a node up to the last one that is not omitted.

    >>> from onnxq.ir import Variable
    >>> [tensor and tensor.name for tensor in without_absent([None, Variable("x"), Variable(""), None])]
    [None, 'x']
    """
    count = max((place for place, tensor in enumerate(inputs, 1) if tensor is not None and tensor.name), default=0)
    return list(inputs[:count])


def is_composite(tensor: Tensor) -> bool:
    """Return whether a tensor is declared as a sequence, an optional or a map, whose type its source holds."""
    source = tensor.source if isinstance(tensor, Variable) else None
    return source is not None and source.type.WhichOneof("value") not in ("tensor_type", None)


def is_constant(tensor: Any) -> TypeGuard[Constant]:
    """Whether a tensor is a constant that no caller of the model can override.

    >>> import numpy as np
    >>> from onnxq.ir import Variable, constant
    >>> is_constant(constant("w", np.ones(3))), is_constant(Variable("x"))
    (True, False)
    """
    return isinstance(tensor, Constant) and tensor.overridable_input is None


def constant_values(tensor: Tensor | None) -> list[Any] | None:
    """Return the values of a constant as a flat list of Python values; None for any other tensor.

    >>> import numpy as np
    >>> from onnxq.ir import Variable, constant
    >>> constant_values(constant("axes", np.array([0, 2]))), constant_values(Variable("x"))
    ([0, 2], None)
    """
    return list(tensor.values.reshape(-1).tolist()) if is_constant(tensor) else None


def numbers_of(node: Node, index: int, attribute: str, default: Iterable[Any] | None = None) -> list[Any] | None:
    """Return the numbers that an operator takes from an attribute at old opsets, and from an input at new ones.

    Returns:
        A flat list; the default if neither is given, and None if the input is computed at run time.

    >>> numbers_of(Node("Squeeze", attrs={"axes": [0]}), 1, "axes"), numbers_of(Node("Squeeze"), 1, "axes", [])
    ([0], [])
    """
    tensor = optional_input(node, index)
    if tensor is not None:
        return constant_values(tensor)
    numbers = node.attrs.get(attribute, default)
    return numbers if numbers is None else list(numbers) if isinstance(numbers, Iterable) else [numbers]


# Origins: the nodes of the given model that a rewritten node replaces

# A chain of any length may be fused into one node.
_MOST_ORIGINS: Final = 32


def join_origins(nodes: Iterable[Node]) -> Origins:
    """Return the origins of a node that replaces others; the first of them does its work.

    >>> join_origins([Node("MatMul", "product"), Node("Add", "sum")])
    (('product', 'MatMul'), ('sum', 'Add'))
    """
    origins = (origin for node in nodes for origin in node.origins or ((node.name, node.op),))
    return tuple(dict.fromkeys(origins))[:_MOST_ORIGINS]


def origins_by_name(graph: Any) -> dict[str, Origins]:
    """Return the origins of nodes in a graph and its bodies by node name; nodes without origins are left out."""
    return {node.name: node.origins for _, node in all_nodes(graph) if node.origins}


def restore_origins(graph: Any, origins: Mapping[str, Origins]) -> None:
    """Set the origins of nodes by name, after a conversion that created all nodes anew."""
    for _, node in all_nodes(graph):
        node.origins = origins.get(node.name, node.origins)
