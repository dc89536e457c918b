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
    Node,
    insert_nodes,
    is_constant,
    onnx_dtype,
    place_constants,
    replace_uses,
)
from onnxq.lowering import NodeBuilder
from onnxq.ops import ALREADY_QUANTIZED, operator_of
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.constant_folding import without_repeats

_EXPAND_SINCE: Final = 8
# Codes are small, and their kernels want them stored.
_TYPES: Final = frozenset(
    {TensorProto.BOOL, TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64}
)
_LEAST_SAVED: Final = 2
# The input of GRU, LSTM and RNN that holds their biases.
_CELL_BIAS: Final = 3


@dataclass(frozen=True)
class ExpandConstants(Pass):
    """Let large constants that repeat along an axis, such as zeros, come from an Expand, which a runtime folds.

    Exporters write them so, and folding made them large. Weights and biases stay, since several engines accept them
    only as initializers. So do inputs and outputs of a graph, constants that nodes on quantized values read, constants
    of less than ``smallest`` bytes, and everything below opset 8.

    Attributes:
        smallest: bytes below which the nodes cost more than they save.
    """

    smallest: int = 1 << 14

    def apply(self, graph: Graph) -> Changes:
        """Store; ``changed`` holds the names of the initializers that are no longer read."""
        changed: list[str] = []
        chains: dict[Graph, list[NodeBuilder]] = defaultdict(list)
        names = Names(graph)
        for scope, tensors in place_constants(graph).items() if graph.opset >= _EXPAND_SINCE else ():
            for tensor in tensors:
                if not self._is_candidate(tensor):
                    continue
                once = without_repeats(tensor.values)
                if _LEAST_SAVED * once.nbytes > tensor.nbytes:
                    continue
                chain = NodeBuilder(tensor.name, names)
                replace_uses(tensor, chain.expand("repeated", chain.store("once", once), tensor.shape))
                chains[scope].append(chain)
                changed.append(tensor.name)
        for scope, made in chains.items():
            insert_nodes(scope, first=[node for chain in made for node in chain.nodes])
        return Changes(tuple(changed))

    def _is_candidate(self, tensor: Constant) -> bool:
        stored = is_constant(tensor) and bool(tensor.outputs) and not tensor.graph_output_of
        large = tensor.nbytes >= self.smallest and math.prod(tensor.shape) > 1 and onnx_dtype(tensor) in _TYPES
        return stored and large and not any(_wants_initializer(node, tensor) for node in tensor.outputs)


def _wants_initializer(node: Node, tensor: Constant) -> bool:
    """Whether a node works on quantized values, or reads the tensor as a weight or bias."""
    if node.op in ALREADY_QUANTIZED:
        return True
    operator = operator_of(node)
    if operator is None or operator.looks_up:
        return False
    places = {*operator.weights, operator.bias, *((_CELL_BIAS,) if operator.recurrent else ())}
    return any(node.inputs[index] is tensor for index in places if index is not None and index < len(node.inputs))
