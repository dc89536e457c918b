"""A chain of new nodes that belong to one weight and are named after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from onnxq.graph import Constant, Names, Node, PackedPayload, Payload, Tensor, Variable, constant
from onnxq.numbers.formats import Format
from onnxq.numbers.numerics import Array
from onnxq.numbers.packing import pack


class Chain:
    """Nodes under construction, in an order in which each reads what stands before it.

    Attributes:
        nodes: the nodes made so far.
    """

    def __init__(self, base: str, names: Names) -> None:
        """Name everything after ``base``, which is the float weight."""
        self.nodes: list[Node] = []
        self._base = base
        self._names = names

    def store(self, role: str, values: npt.ArrayLike | Payload) -> Constant:
        """Return a new constant ``base.role``."""
        name = self._names.fresh(f"{self._base}.{role}")
        return Constant(name, values) if isinstance(values, Payload) else constant(name, values)

    def store_codes(self, role: str, codes: Array, format: Format) -> Constant:
        """Return a new constant of the format's ONNX type, several codes in a byte where that type has them."""
        return self.store(role, PackedPayload(format.onnx_type, codes.shape, pack(codes, format)))

    def then(self, op: str, role: str, inputs: Sequence[Tensor], *, domain: str = "", **attributes: object) -> Variable:
        """Append a node and return its output ``base.role``."""
        made = Variable(self._names.fresh(f"{self._base}.{role}"))
        name = self._names.fresh(f"{self._base}.{role}.{op.lower()}")
        self.nodes.append(Node(op, name, dict(attributes), list(inputs), [made], domain or None))
        return made

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
        """Append a Pad that adds so many zeros behind each axis."""
        padding = np.array([0] * len(missing) + list(missing), np.int64)
        return self.then("Pad", role, [source, self.store(f"{role}.extents", padding)])
