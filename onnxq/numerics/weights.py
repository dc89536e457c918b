"""Weights whose products an int32 accumulator sums: the scales that leave room for a bias, and the bias's codes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnxq.numerics.formats import FORMATS
from onnxq.numerics.numerics import LARGEST_SCALE, SMALLEST_SCALE, Parameters, QTensor

# Half of an int32 accumulator is the bias's, the other half the products'.
_LARGEST_BIAS = 2**30


def scale_with_room(
    scale: npt.NDArray[np.float32], bias: npt.NDArray[np.floating], input_scale: float
) -> npt.NDArray[np.float32]:
    """Raise the scales of a weight until the accumulator of its products has room for the bias.

    Where a bias would exceed half of the int32 range, or the product of the two scales would not be a normal number,
    the weight's scale of that channel (or the one scale) is raised until it fits: such a bias is so much larger than
    the products, or the products are so small, that their coarser codes do not matter.

    Args:
        scale: of the weight, one or one for each channel, in any shape.
        bias: one value for each channel, or for each of every group in turn, which share a weight's scales.
        input_scale: scale of the data that the weight multiplies.

    Returns:
        The scales in their shape; the same where there is room.

    >>> scale_with_room(np.array([0.5, 0.5], np.float32), np.array([1.0, 2.0**31]), input_scale=1.0)
    array([0.5, 2. ], dtype=float32)
    """
    flat = scale.reshape(-1).astype(np.float64)
    wanted = np.abs(bias.reshape(-1, flat.size).astype(np.float64)).max(0, initial=0.0) / (input_scale * _LARGEST_BIAS)
    # The product of the two scales has to be a normal number as well.
    least = np.maximum(wanted, SMALLEST_SCALE / input_scale)
    return np.clip(flat, least, LARGEST_SCALE).astype(np.float32).reshape(scale.shape)


def quantize_bias(bias: npt.NDArray[np.floating], weight: QTensor, input_scale: float) -> QTensor:
    """Quantize the bias of a quantized weight to int32 with scale ``input_scale * weight scale`` and zero point 0.

    Args:
        bias: one value for each channel of the weight, or for each of every group in turn, which are within half of the
            int32 range or clipped to it.
        weight: has one scale, or one for each channel of a group.
        input_scale: scale of the data that the weight multiplies.

    Returns:
        Codes of shape (channels,) of all groups; so is the scale when the weight has several, else it is a scalar.
    """
    # The kernel multiplies the two float32 scales in float32, so the bias's scale is made the same way.
    weight_scale = weight.parameters.scale
    weight_scale = weight_scale.reshape(-1 if weight_scale.size > 1 else ())
    scale = np.maximum(np.float32(input_scale) * weight_scale, np.float32(SMALLEST_SCALE))
    flat = bias.reshape(-1).astype(np.float64)
    if scale.ndim:
        scale = np.tile(scale, flat.size // scale.size)
    codes = FORMATS["int32"].round(np.clip(flat / scale.astype(np.float64), -_LARGEST_BIAS, _LARGEST_BIAS))
    return QTensor(codes, Parameters(np.asarray(scale), None), FORMATS["int32"])
