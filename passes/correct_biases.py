"""Let biases make up for what rounding weights adds to the mean of each output channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.graph import Constant, Graph, Names, Node, constant
from onnxq.numbers.numerics import dequantize
from onnxq.passes.base import Changes, Pass, encoded
from onnxq.planning.corrections import bias_of
from onnxq.planning.plan import Plan

# Biases that were corrected are told by their names, so that no mean is added twice.
_SUFFIX = ".corrected"


@dataclass(frozen=True, eq=False)
class CorrectBiases(Pass):
    """Add to each bias of a planned product what its rounded weight lacks, times the mean of its data.

    Rounded weights make the outputs of a channel wrong by an amount whose mean is known before anything runs; it grows
    with the mean of the data, which is far from zero behind most activation functions (Nagel et al., "Data-Free
    Quantization Through Weight Equalization and Bias Correction", 2019, section 4.2, with measured means). Works before
    the weights become codes; a bias that several nodes share becomes one for each.

    Attributes:
        plan: names the nodes and their weights.
        means: of each channel by tensor name; nodes whose data is not there are left.
    """

    plan: Plan
    means: Mapping[str, NDArray[np.float64]]

    def apply(self, graph: Graph) -> Changes:
        """Correct; a new bias is called ``b.corrected``."""
        names = Names(graph)
        changed, left = [], []
        for node in graph.nodes:
            decision = self.plan.by_node.get(node.name)
            if decision is None or decision.mean is None:
                continue
            weight = next(weight for weight in decision.weights if weight.index == 1)
            place, means = bias_of(node), self.means.get(decision.mean.tensor)
            if place is None:
                left.append((node.name, "its weight is codes already"))
                continue
            owner, index = place
            bias: Constant = owner.inputs[index]
            if means is None or bias.name.endswith(_SUFFIX):
                left.append((node.name, "its bias was corrected" if means is not None else "no mean is known"))
                continue
            source: Constant = node.inputs[weight.index]
            codes = encoded(source, weight)
            error = source.values.astype(np.float32) - dequantize(codes.codes, codes.parameters)
            lacking = _lacking(node, error, means).reshape(bias.shape)
            values = (bias.values.astype(np.float64) + lacking).astype(bias.values.dtype)
            owner.inputs[index] = constant(names.fresh(f"{bias.name}{_SUFFIX}"), values)
            changed.append(node.name)
        return Changes(tuple(changed), tuple(left))


def _lacking(node: Node, error: NDArray[np.float32], means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what the product of the mean data and the rounding errors of a weight is in each output channel."""
    if node.op != "Conv":
        return np.asarray(means @ (error.T if node.attrs.get("transB", 0) else error))
    groups = int(node.attrs.get("group", 1))
    # Zeros of the padding are left out of account, as if every kernel lay inside.
    kernels = error.sum(tuple(range(2, error.ndim))).reshape(groups, -1, error.shape[1])
    return np.asarray(np.einsum("goi,gi->go", kernels, means.reshape(groups, -1)).reshape(-1))
