"""Store floats that were 16 bits wide in 16 bits again, where they have stayed floats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Variable,
    constant,
    insert_nodes,
    onnx_dtype,
    place_constants,
    replace_uses,
)
from onnxq.ir.data_types import numpy_dtype
from onnxq.rewrite import Changes, Pass

_FLOAT = np.dtype(np.float32)
# A Cast and its names take about the bytes that so many values save.
_SMALLEST = 128
# They want constants as they are.
_KEPT = frozenset({"DequantizeLinear", "QuantizeLinear"})


@dataclass(frozen=True)
class NarrowConstants(Pass):
    """Store float32 constants in 16 bits, behind a Cast, where each value is one of that type.

    A runtime folds the Cast when it loads the model, so nothing changes but the size of the file. Leaves constants of
    fewer than 128 values, those that a caller may override or that a graph returns, scales, and what operators of
    other domains read.

    Attributes:
        type: ``TensorProto.DataType`` of 16-bit floats.
    """

    type: int = TensorProto.FLOAT16

    def apply(self, graph: Graph) -> Changes:
        """Narrow; new tensors are called ``w.narrow`` and ``w.wide``."""
        names = Names(graph)
        dtype = numpy_dtype(self.type)
        changed = []
        for scope, tensors in place_constants(graph).items():
            casts = []
            for tensor in tensors:
                if not _may_be_cast(tensor):
                    continue
                values = tensor.values
                with np.errstate(over="ignore"):
                    narrow = values.astype(dtype)
                if not np.array_equal(narrow.astype(_FLOAT), values, equal_nan=True):
                    continue
                wide = Variable(names.unique(f"{tensor.name}.wide"), _FLOAT, list(tensor.shape))
                replace_uses(tensor, wide)
                stored = constant(names.unique(f"{tensor.name}.narrow"), narrow)
                name = names.unique(f"{tensor.name}.widen")
                casts.append(Node("Cast", name, {"to": int(TensorProto.FLOAT)}, [stored], [wide]))
                changed.append(tensor.name)
            insert_nodes(scope, first=casts)
        return Changes(tuple(changed))


def _may_be_cast(tensor: Constant) -> bool:
    return (
        onnx_dtype(tensor) == TensorProto.FLOAT
        and tensor.nbytes >= _FLOAT.itemsize * _SMALLEST
        and bool(tensor.outputs)
        and tensor.overridable_input is None
        and not tensor.graph_output_of
        and not any(node.op in _KEPT or node.domain for node in tensor.outputs)
    )
