"""Build new nodes in execution order, with names that nothing in the model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from onnxq.ir.elements import Constant, Node, Tensor, Variable
from onnxq.ir.queries import Names
from onnxq.ir.tensor_data import PackedTensor, TensorData
from onnxq.numerics.affine import Array
from onnxq.numerics.formats import QuantDType
from onnxq.numerics.packing import pack


class NodeBuilder:
    """Nodes under construction, in execution order.

    Attributes:
        nodes: the nodes so far.
    """

    def __init__(self, base: str, names: Names) -> None:
        """Start without nodes. All names begin with ``base``, the tensor or node to replace; an empty one adds nothing.

        >>> from onnxq.ir import Graph
        >>> new = NodeBuilder("w", Names(Graph()))
        >>> new.cast("wide", new.store("codes", np.zeros(3, np.int8))).name, new.nodes[0].name
        ('w.wide', 'w.wide.cast')
        """
        self.nodes: list[Node] = []
        self._base = f"{base}." if base else ""
        self._names = names

    def named_after(self, base: str) -> NodeBuilder:
        """Return a builder that appends to the same nodes, with names that begin with another base."""
        builder = NodeBuilder(base, self._names)
        builder.nodes = self.nodes
        return builder

    def named(self, role: str) -> str:
        """Return a new unique name ``base.role``."""
        return self._names.unique(f"{self._base}{role}")

    def variable(
        self,
        role: str,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int | str | None] | None = None,
        *,
        like: Tensor | None = None,
    ) -> Variable:
        """Return a new variable ``base.role`` of a type and shape, or of those that another tensor has."""
        if like is not None:
            dtype, shape = like.dtype if dtype is None else dtype, None if like.shape is None else list(like.shape)
        return Variable(self.named(role), None if dtype is None else np.dtype(dtype), shape)

    def store(self, role: str, values: npt.ArrayLike | TensorData) -> Constant:
        """Return a new constant ``base.role``."""
        return self._names.store(f"{self._base}{role}", values)

    def store_quantized(self, role: str, quantized: Array, format: QuantDType) -> Constant:
        """Return a new constant of the format's ONNX type, packed if the type is."""
        return self.store(role, PackedTensor(format.onnx_type, quantized.shape, pack(quantized, format)))

    def node(
        self,
        op: str,
        name: str | Node,
        inputs: Sequence[Tensor],
        output: str | Variable,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int | str | None] | None = None,
        /,
        *,
        like: Tensor | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> Variable:
        """Append a node and return its output.

        Args:
            op: its operator.
            name: its role, or a node that it replaces and whose name it takes.
            inputs: what it reads.
            output: the role of a new variable, or the variable that it makes.
            dtype: type of a new variable.
            shape: shape of a new variable.
            like: a tensor of the type and shape of a new variable.
            domain: of the operator.
            attributes: of the operator.
        """
        variable = self.variable(output, dtype, shape, like=like) if isinstance(output, str) else output
        unique = name.name if isinstance(name, Node) else self.named(name)
        self.nodes.append(Node(op, unique, attributes, list(inputs), [variable], domain or None))
        return variable

    def then(self, op: str, role: str, inputs: Sequence[Tensor], *, domain: str = "", **attributes: Any) -> Variable:
        """Append a node and return its output ``base.role``."""
        return self.node(op, f"{role}.{op.lower()}", inputs, role, domain=domain, **attributes)

    def instead_of(self, node: Node) -> list[Node]:
        """Let the last node make the outputs of ``node``; return all nodes."""
        outputs = list(node.outputs)
        node.outputs.clear()
        self.nodes[-1].outputs = outputs
        return self.nodes

    def cast(self, role: str, source: Tensor, onnx_type: int = TensorProto.FLOAT) -> Variable:
        """Append a Cast."""
        return self.then("Cast", role, [source], to=int(onnx_type))

    def reshape(self, role: str, source: Tensor, shape: Sequence[int]) -> Variable:
        """Append a Reshape; an extent of 0 copies that of the source."""
        return self.then("Reshape", role, [source, self.store(f"{role}.shape", np.array(shape, np.int64))])

    def cut(self, role: str, source: Tensor, axis: int, extent: int) -> Variable:
        """Append a Slice that keeps the first ``extent`` elements along an axis."""
        bounds = {"start": 0, "end": extent, "axis": axis}
        stored = [self.store(f"{role}.{name}", np.array([bound])) for name, bound in bounds.items()]
        return self.then("Slice", role, [source, *stored])

    def pad(self, role: str, source: Tensor, missing: Sequence[int]) -> Variable:
        """Append a Pad that adds ``missing`` zeros at the end of each axis."""
        padding = np.array([0] * len(missing) + list(missing), np.int64)
        return self.then("Pad", role, [source, self.store(f"{role}.extents", padding)])
