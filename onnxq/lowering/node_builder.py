"""Build a chain of new nodes, named after the weight or node that they replace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from onnxq.ir import (
    Constant,
    Names,
    Node,
    Origins,
    PackedTensor,
    Tensor,
    TensorData,
    Variable,
    constant,
)
from onnxq.numerics.affine import Array
from onnxq.numerics.formats import QuantDType
from onnxq.numerics.packing import pack


class NodeBuilder:
    """Nodes under construction, in execution order."""

    def __init__(self, base: str, names: Names, origins: Origins = ()) -> None:
        """Start without nodes. All names begin with ``base``: the float weight or the node that the nodes replace."""
        self.nodes: list[Node] = []
        self._base = base
        self._names = names
        self._origins = origins

    def named(self, role: str) -> str:
        """Return a new unique name ``base.role``."""
        return self._names.unique(f"{self._base}.{role}")

    def variable(self, role: str, dtype: npt.DTypeLike | None = None) -> Variable:
        """Return a new variable ``base.role``."""
        return Variable(self.named(role), None if dtype is None else np.dtype(dtype))

    def store(self, role: str, values: npt.ArrayLike | TensorData) -> Constant:
        """Return a new constant ``base.role``."""
        name = self.named(role)
        return Constant(name, values) if isinstance(values, TensorData) else constant(name, values)

    def store_quantized(self, role: str, quantized: Array, format: QuantDType) -> Constant:
        """Return a new constant of the format's ONNX type, packed if the type is."""
        return self.store(role, PackedTensor(format.onnx_type, quantized.shape, pack(quantized, format)))

    def append(self, node: Node) -> None:
        """Append a node and set its origins."""
        node.origins = self._origins
        self.nodes.append(node)

    def then(self, op: str, role: str, inputs: Sequence[Tensor], *, domain: str = "", **attributes: object) -> Variable:
        """Append a node and return its output ``base.role``."""
        made = self.variable(role)
        self.append(Node(op, self.named(f"{role}.{op.lower()}"), attributes, list(inputs), [made], domain or None))
        return made

    def cast(self, role: str, source: Tensor, onnx_type: int = TensorProto.FLOAT) -> Variable:
        """Append a Cast."""
        return self.then("Cast", role, [source], to=int(onnx_type))

    def reshape(self, role: str, source: Tensor, shape: Sequence[int]) -> Variable:
        """Append a Reshape; an extent of 0 copies that of the source."""
        return self.then("Reshape", role, [source, self.store(f"{role}.shape", np.array(shape, np.int64))])

    def expand(self, role: str, source: Constant, shape: Sequence[int]) -> Variable:
        """Append an Expand of a constant, which keeps its type."""
        made = self.then("Expand", role, [source, self.store(f"{role}.shape", np.array(shape, np.int64))])
        made.dtype, made.shape = source.dtype, list(shape)
        return made

    def cut(self, role: str, source: Tensor, axis: int, extent: int) -> Variable:
        """Append a Slice that keeps the first ``extent`` elements along an axis."""
        bounds = {"start": 0, "end": extent, "axis": axis}
        stored = [self.store(f"{role}.{name}", np.array([bound])) for name, bound in bounds.items()]
        return self.then("Slice", role, [source, *stored])

    def pad(self, role: str, source: Tensor, missing: Sequence[int]) -> Variable:
        """Append a Pad that adds ``missing`` zeros at the end of each axis."""
        padding = np.array([0] * len(missing) + list(missing), np.int64)
        return self.then("Pad", role, [source, self.store(f"{role}.extents", padding)])
