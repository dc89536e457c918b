"""Makes the nodes that take the place of others, named after them and with types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.ir.elements import Constant, Node, Tensor, Variable
from onnxq.ir.model import Graph
from onnxq.ir.scopes import Names
from onnxq.ir.types import infer_types
from onnxq.rewrite.patterns import Match


class New:
    """Makes the nodes of a replacement: ``new.Add(x, 1.0)`` is a node's output, whose type is known where it can be.

    Numbers and arrays become constants of the type of the first tensor beside them, or where that is not known of the
    first constant of floats that was matched; None leaves an input out.
    """

    def __init__(self, graph: Graph, names: Names, found: Match) -> None:
        """Make nodes for a graph, named after the last of the nodes that they take the place of."""
        self._graph, self._names, self._found, self._root = graph, names, found, found.root
        self.nodes: list[Node] = []
        self.named_after: dict[Node, Node] = {}

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.call("", op_type, *inputs, **attributes)

    def call(self, domain: str, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Return the output of a node, or a tuple of several; attributes that are None are left out."""
        name = self._names.fresh(f"{self._root.name or self._root.op}.{op_type}")
        node = Node(op_type, name, {}, domain=domain)
        node.attrs.update({key: value for key, value in attributes.items() if value is not None})
        return self._added(node, inputs, outputs)

    def like(self, node: Node, *inputs: Any, **attributes: Any) -> Any:
        """Return the output or outputs of a node with the operator, name and attributes of another that it replaces."""
        twin = node.copy()
        twin.attrs.update(attributes)
        for name in [name for name, value in twin.attrs.items() if value is None]:
            del twin.attrs[name]
        self.named_after[twin] = node
        return self._added(twin, inputs, len(node.outputs))

    def named(self, node: Node, output: Any) -> Any:
        """Return the output of a new node that does the work of another, whose name it gets when that one goes."""
        self.named_after[output.inputs[0]] = node
        return output

    def constant(self, values: npt.ArrayLike, name: str = "constant") -> Constant:
        """Return a constant of these values; an empty list is one of axes or sizes."""
        array = np.asarray(values, np.int64) if isinstance(values, list) and not values else np.asarray(values)
        return Constant(self._names.fresh(f"{self._root.name or self._root.op}.{name}"), array)

    def _added(self, node: Node, inputs: Sequence[Any], outputs: int) -> Any:
        beside = next((tensor for tensor in inputs if isinstance(tensor, Variable | Constant)), None)
        dtype = self._dtype if beside is not None and beside.dtype is None else getattr(beside, "dtype", None)
        node.inputs = [self._tensor(value, dtype) for value in inputs]
        made = [Variable(self._names.fresh(f"{node.name}.{index or 'y'}")) for index in range(outputs)]
        node.outputs = made
        self.nodes.append(node)
        infer_types(node, self._graph.opset_imports)
        return made[0] if outputs == 1 else tuple(made)

    @property
    def _dtype(self) -> Any:
        """The type of the first constant of floats that was matched, which stood beside data of that type."""
        read = (tensor for node in self._found.nodes for tensor in node.inputs if isinstance(tensor, Constant))
        return next((tensor.dtype for tensor in read if tensor.dtype.kind == "f"), None)

    def _tensor(self, value: Any, dtype: Any) -> Tensor:
        if value is None:
            return Variable("")
        if isinstance(value, Variable | Constant):
            return value
        array = np.asarray(value)
        fits = isinstance(value, bool | int | float) or array.dtype.kind == "f"
        return self.constant(array.astype(dtype) if fits and dtype is not None else array)
