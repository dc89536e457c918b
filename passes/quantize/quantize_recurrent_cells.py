"""Turn recurrent cells into onnxruntime's own, which multiply integers whose scale each run computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from onnxq.algorithms.encodings import Codes
from onnxq.config.scheme import Granularity, Mode
from onnxq.ir import Constant, Graph, Names, Tensor, Variable, constant, is_constant
from onnxq.lowering.kernels import DOMAIN
from onnxq.numerics.affine import QTensor
from onnxq.passes.quantize.planned import planned_nodes
from onnxq.planning.plan import Plan, Weight
from onnxq.rewrite import Changes, Pass

_CELL: Final = "LSTM"
_INPUTS: Final = 8
# The operator does not have it, and with another value than 0 a node is not planned.
_LAYOUT: Final = "layout"


@dataclass(frozen=True, eq=False)
class QuantizeRecurrentCells(Pass):
    """Replace each dynamic LSTM by DynamicQuantizeLSTM of onnxruntime, which reads its weights transposed.

    In each direction every row of a weight has a scale of its own where the plan says per channel. All data has one
    scale, and so have the hidden states of a step that one thread computes. A weight that several cells share is
    quantized once. Leaves cells with a weight that is not constant. Works in bodies as well.

    Attributes:
        plan: names the cells and their weights.
        codes: what was chosen for their weights.
    """

    plan: Plan
    codes: Codes

    def apply(self, graph: Graph) -> Changes:
        """Replace; new tensors are called ``w.codes``, ``w.scale`` and ``w.zero_point``."""
        names = Names(graph)
        made: dict[tuple[Constant, Weight], tuple[Constant, Constant, Constant]] = {}
        changed, left = [], []
        for _, node, decision in planned_nodes(graph, self.plan, Mode.DYNAMIC):
            if node.op != _CELL:
                continue
            # The parameters stand behind one another in the order of the weights among the inputs.
            weights = sorted(decision.weights, key=lambda weight: weight.index)
            sources = {weight: node.inputs[weight.index] for weight in weights}
            if not all(is_constant(source) for source in sources.values()):
                left.append((node.name, "its weight is computed at run time"))
                continue
            inputs: list[Tensor] = [*node.inputs, *(Variable("") for _ in range(_INPUTS - len(node.inputs)))]
            for weight, source in sources.items():
                key = source, weight.of_rank(len(source.shape))
                if key not in made:
                    made[key] = _stored(source, weight, self.codes.weights[node.name, weight.index], names)
                inputs[weight.index], *parameters = made[key]
                inputs += parameters
            node.inputs = inputs
            node.op, node.domain = f"DynamicQuantize{_CELL}", DOMAIN
            node.attrs.pop(_LAYOUT, None)
            changed.append(node.name)
        return Changes(tuple(changed), tuple(left))


def _stored(source: Constant, weight: Weight, quantized: QTensor, names: Names) -> tuple[Constant, Constant, Constant]:
    """Return codes of shape [directions, size, gates], and scale and zero point for each direction or its gates."""
    directions, gates, _ = source.shape
    codes, scale = quantized.codes.transpose(0, 2, 1), quantized.parameters.scale
    if weight.spec.per is Granularity.CHANNEL:
        scale = scale.reshape(directions, gates)
    else:
        scale = np.full(directions, scale.reshape(()))
    return (
        constant(names.unique(f"{source.name}.codes"), np.ascontiguousarray(codes)),
        constant(names.unique(f"{source.name}.scale"), scale),
        constant(names.unique(f"{source.name}.zero_point"), np.zeros(scale.shape, codes.dtype)),
    )
