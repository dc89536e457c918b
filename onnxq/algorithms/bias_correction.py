"""Biases that make up for what rounding a weight adds to the mean of each output channel."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxq.ir import Node
from onnxq.numerics.affine import QTensor

_CONVOLUTIONS: Final = frozenset({"Conv", "ConvTranspose"})


def lacking(node: Node, values: NDArray[Any], weight: QTensor, means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what the outputs of a product lack in the mean since its weight was rounded.

    Rounded weights make the outputs of a channel wrong by an amount whose mean is known before anything runs; it grows
    with the mean of the data, which is far from zero behind most activation functions (Nagel et al., "Data-Free
    Quantization Through Weight Equalization and Bias Correction", 2019, section 4.2, with measured means).

    Args:
        node: the product.
        values: its float weight.
        weight: the codes that are written for that, in its shape.
        means: of each channel of its data.

    Returns:
        One number for each output channel, to be added to the bias.
    """
    error = values.astype(np.float32) - weight.dequantize()
    if node.op not in _CONVOLUTIONS:
        return np.asarray(means @ (error.T if node.attrs.get("transB", 0) else error))
    groups = int(node.attrs.get("group", 1))
    # Zeros of the padding are left out of account, as if every kernel lay inside.
    kernels = error.sum(tuple(range(2, error.ndim))).reshape(groups, -1, error.shape[1])
    if node.op == "Conv":
        return np.asarray(np.einsum("goi,gi->go", kernels, means.reshape(groups, -1)).reshape(-1))
    # Each place of the data gives one product for each tap, and there are as many more places in what comes out.
    spread = math.prod(node.attrs.get("strides", ()))
    return np.asarray(np.einsum("gio,gi->go", kernels, means.reshape(groups, -1)).reshape(-1) / spread)
