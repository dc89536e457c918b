"""Biases that make up for what rounding a weight adds to the mean of each output channel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from onnxq.graph import Constant, Names, Node, constant
from onnxq.numbers.numerics import QTensor
from onnxq.planning.corrections import bias_of
from onnxq.planning.plan import Plan


def correct_bias(
    node: Node, weight: QTensor, plan: Plan, means: Mapping[str, NDArray[np.float64]], names: Names
) -> bool:
    """Add to the bias of a planned product what its rounded weight lacks, times the mean of its data.

    Rounded weights make the outputs of a channel wrong by an amount whose mean is known before anything runs; it grows
    with the mean of the data, which is far from zero behind most activation functions (Nagel et al., "Data-Free
    Quantization Through Weight Equalization and Bias Correction", 2019, section 4.2, with measured means). A bias that
    several nodes share becomes one for each, called ``b.corrected``.

    Args:
        node: the product, which still reads its float weight.
        weight: the codes that are written for that weight, in its shape.
        plan: says which nodes have a bias to correct.
        means: of each channel by tensor name; nodes whose data is not there keep their biases.
        names: of the graph.

    Returns:
        Whether the bias was corrected.
    """
    decision = plan.by_node[node.name]
    found = means.get(decision.mean.tensor) if decision.mean is not None else None
    place = bias_of(node) if found is not None else None
    if found is None or place is None:
        return False
    owner, index = place
    source: Constant = node.inputs[1]
    bias: Constant = owner.inputs[index]
    lacking = _lacking(node, source.values.astype(np.float32) - weight.dequantize(), found).reshape(bias.shape)
    values = (bias.values.astype(np.float64) + lacking).astype(bias.values.dtype)
    owner.inputs[index] = constant(names.fresh(f"{bias.name}.corrected"), values)
    return True


def _lacking(node: Node, error: NDArray[np.float32], means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what the product of the mean data and the rounding errors of a weight is in each output channel."""
    if node.op != "Conv":
        return np.asarray(means @ (error.T if node.attrs.get("transB", 0) else error))
    groups = int(node.attrs.get("group", 1))
    # Zeros of the padding are left out of account, as if every kernel lay inside.
    kernels = error.sum(tuple(range(2, error.ndim))).reshape(groups, -1, error.shape[1])
    return np.asarray(np.einsum("goi,gi->go", kernels, means.reshape(groups, -1)).reshape(-1))
