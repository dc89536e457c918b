"""Bias correction: biases that cancel the mean rounding error of each output channel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.ir import Node
from onnxq.numerics.affine import QTensor
from onnxq.ops import facts_of


def mean_error(node: Node, values: NDArray[Any], weight: QTensor, means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean error of each output channel due to the rounding of a weight.

    The error grows with the mean of the activations, which is far from zero behind most activation functions (Nagel et
    al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019, section 4.2, with measured
    means).

    Args:
        node: the compute node.
        values: its float weight.
        weight: its quantized weight.
        means: mean of each channel of its activations.

    Returns:
        Float output minus quantized output for each output channel, to be added to the bias.
    """
    error = values.astype(np.float32) - weight.dequantize()
    if not facts_of(node).convolves:
        return np.asarray(means @ (error.T if node.attrs.get("transB", 0) else error))
    groups = int(node.attrs.get("group", 1))
    # Padding is ignored, as if every kernel lay inside the input.
    kernels = error.sum(tuple(range(2, error.ndim))).reshape(groups, -1, error.shape[1])
    if node.op == "Conv":
        return np.asarray(np.einsum("goi,gi->go", kernels, means.reshape(groups, -1)).reshape(-1))
    # Each input position gives one product for each tap, and the output has `spread` times as many positions.
    spread = math.prod(node.attrs.get("strides", ()))
    return np.asarray(np.einsum("gio,gi->go", kernels, means.reshape(groups, -1)).reshape(-1) / spread)
