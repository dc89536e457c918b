"""Store once what a constant repeats along an axis."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from onnx import TensorProto

from onnxq.ir import (
    Constant,
    Graph,
    Names,
    insert_nodes,
    is_fixed,
    onnx_dtype,
    place_constants,
    replace_uses,
)
from onnxq.lowering import Chain
from onnxq.ops import ALREADY_QUANTIZED
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.constants import without_repeats

_EXPAND_SINCE: Final = 8
# Codes are small, and their kernels want them stored.
_TYPES: Final = frozenset(
    {TensorProto.BOOL, TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64}
)
_LEAST_SAVED: Final = 2


@dataclass(frozen=True)
class ExpandConstants(Pass):
    """Let large constants that repeat along an axis, such as zeros, come from an Expand, which a runtime folds.

    Exporters write them so, and folding made them large. Leaves constants that are inputs or outputs of a graph, those
    that are read by nodes on codes or take less than ``smallest`` bytes, and all of them below opset 8.

    Attributes:
        smallest: bytes below which the nodes cost more than they save.
    """

    smallest: int = 1 << 14

    def apply(self, graph: Graph) -> Changes:
        """Store; ``changed`` holds the names of the initializers that are no longer read."""
        changed: list[str] = []
        chains: dict[Graph, list[Chain]] = defaultdict(list)
        names = Names(graph)
        for scope, tensors in place_constants(graph).items() if graph.opset >= _EXPAND_SINCE else ():
            for tensor in tensors:
                if not self._is_candidate(tensor):
                    continue
                once = without_repeats(tensor.values)
                if _LEAST_SAVED * once.nbytes > tensor.nbytes:
                    continue
                chain = Chain(tensor.name, names)
                replace_uses(tensor, chain.expand("repeated", chain.store("once", once), tensor.shape))
                chains[scope].append(chain)
                changed.append(tensor.name)
        for scope, made in chains.items():
            insert_nodes(scope, first=[node for chain in made for node in chain.nodes])
        return Changes(tuple(changed))

    def _is_candidate(self, tensor: Constant) -> bool:
        stored = is_fixed(tensor) and bool(tensor.outputs) and not tensor.returned_by
        large = tensor.nbytes >= self.smallest and math.prod(tensor.shape) > 1 and onnx_dtype(tensor) in _TYPES
        return stored and large and not any(node.op in ALREADY_QUANTIZED for node in tensor.outputs)
