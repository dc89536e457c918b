"""Weights and biases to codes: as a Spec says, or for an integer kernel whose accumulator may not overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.errors import ModelError
from onnxq.numbers import burn, torch_observers
from onnxq.numbers.blocks import block_shape
from onnxq.numbers.formats import FORMATS, Format, format_named
from onnxq.numbers.numerics import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    Parameters,
    QTensor,
    parameters_from_range,
    quantize,
    weight_range,
)
from onnxq.numbers.scale_search import chosen_parameters
from onnxq.numbers.scales import block_range
from onnxq.numbers.spec import Method, Spec

# Half of an int32 accumulator is the bias's, the other half the products'.
_LARGEST_BIAS = 2**30


def encode(weight: npt.NDArray[Any], spec: Spec, *, channel_axis: int, reduction_axis: int) -> QTensor:
    """Quantize a weight as a Spec says.

    Scales are computed in float64 whatever the weight's type, brought to the scale's format, and only then divide.
    An all-zero block has scale 1. The methods of other frameworks do all as these do.

    Args:
        weight: finite values of a float type, of any rank.
        spec: format, granularity, scales and method.
        channel_axis: axis of the operator's output channels.
        reduction_axis: axis that the operator sums over.

    Returns:
        Codes of the weight's shape; scale and zero point have its rank, with one entry for each block along each axis.

    Raises:
        SchemeError: the block has more axes than the weight.
        ModelError: the weight holds NaN or infinity.

    >>> tensor = encode(np.array([[7.0, -5.0, 0.3]]), Spec("int4-narrow"), channel_axis=0, reduction_axis=1)
    >>> tensor.codes, tensor.parameters.scale
    (array([[ 7, -5,  0]], dtype=int8), array([[1.]], dtype=float32))
    """
    block = block_shape(spec.per, weight.shape, channel_axis=channel_axis, reduction_axis=reduction_axis)
    low, high = block_range(weight, block)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ModelError("the weight holds NaN or infinity, which have no code; leave its node in float")
    if spec.method is Method.BURN:
        return burn.encode(weight, spec)
    if spec.method is Method.TORCH:
        return _observed(weight, low, high, format_named(spec.format), symmetric=spec.symmetric)
    parameters = chosen_parameters(weight, low, high, spec, block)
    return quantize(weight, parameters, format_named(spec.format))


def _observed(
    weight: npt.NDArray[Any], low: npt.NDArray[Any], high: npt.NDArray[Any], format: Format, *, symmetric: bool
) -> QTensor:
    """Quantize as a MinMaxObserver and the kernel behind it do; channels may lie along any axis."""
    parameters = torch_observers.Observer(format.name, symmetric).parameters(low, high)
    return torch_observers.quantize(weight, parameters, format)


def quantize_weight(
    weight: npt.NDArray[np.floating], format: Format, axis: int | None, method: Method = Method.MINMAX
) -> QTensor:
    """Quantize a weight symmetrically by its largest magnitude.

    Args:
        weight: float array of any rank.
        format: the codes' format.
        axis: axis that keeps a scale of its own for each index; None for one scale.
        method: TORCH computes in PyTorch's arithmetic.

    Returns:
        Codes of the weight's shape; the scale has its rank, or is a scalar for ``axis`` None.

    >>> quantize_weight(np.array([[1.0, -2.0], [0.0, 0.5]]), FORMATS["int8-narrow"], axis=0).codes
    array([[  64, -127],
           [   0,  127]], dtype=int8)
    """
    reduced = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis % weight.ndim)
    low, high = weight_range(weight, reduced)
    if method is Method.TORCH:
        return _observed(weight, low, high, format, symmetric=True)
    return quantize(weight, parameters_from_range(low, high, format, symmetric=True), format)


def quantize_weight_with_bias(
    weight: npt.NDArray[np.floating],
    bias: npt.NDArray[np.floating],
    format: Format,
    axis: int,
    input_scale: float,
    *,
    per_channel: bool,
    method: Method = Method.MINMAX,
) -> tuple[QTensor, QTensor]:
    """Quantize a weight, and its bias to int32 with scale ``input_scale * weight scale`` and zero point 0.

    Where a bias would exceed half of the int32 range, or the product of the two scales would not be a normal number,
    the weight's scale of that channel (or the one scale) is raised until it fits: such a bias is so much larger than
    the products, or the products are so small, that their coarser codes do not matter.

    Args:
        weight: float array.
        bias: one value for each index along ``axis``.
        format: format of the weight's codes.
        axis: the weight's channel axis.
        input_scale: scale of the data that the weight multiplies.
        per_channel: whether each channel has its own scale.
        method: TORCH computes the weight in PyTorch's arithmetic, unless a scale has to be raised.

    Returns:
        The weight and the bias; the bias's scale is per channel when the weight's is, else a scalar.
    """
    flat = bias.reshape(-1).astype(np.float64)
    first = quantize_weight(weight, format, axis if per_channel else None, method)
    scale = first.parameters.scale.reshape(-1).astype(np.float64)
    wanted = np.abs(flat) / (input_scale * _LARGEST_BIAS)
    # The product of the two scales has to be a normal number as well.
    least = np.maximum(wanted if per_channel else wanted.max(initial=0.0), SMALLEST_SCALE / input_scale)
    raised = np.clip(scale, least, LARGEST_SCALE).astype(np.float32)
    if np.array_equal(raised, scale.astype(np.float32)):
        quantized = first
    else:
        parameters = Parameters(raised.reshape(first.parameters.scale.shape), None)
        quantized = quantize(weight, parameters, format)
    return quantized, quantize_bias(bias, quantized, input_scale)


def quantize_bias(bias: npt.NDArray[np.floating], weight: QTensor, input_scale: float) -> QTensor:
    """Quantize the bias of a quantized weight to int32 with scale ``input_scale * weight scale`` and zero point 0.

    Args:
        bias: one value for each channel of the weight, which are within half of the int32 range or clipped to it.
        weight: has one scale, or one for each channel.
        input_scale: scale of the data that the weight multiplies.

    Returns:
        Codes of shape (channels,); the scale is per channel when the weight's is, else a scalar.
    """
    # The kernel multiplies the two float32 scales in float32, so the bias's scale is made the same way.
    weight_scale = weight.parameters.scale.reshape(-1 if weight.parameters.scale.ndim else ())
    scale = np.maximum(np.float32(input_scale) * weight_scale, np.float32(SMALLEST_SCALE))
    flat = bias.reshape(-1).astype(np.float64)
    codes = FORMATS["int32"].round(np.clip(flat / scale.astype(np.float64), -_LARGEST_BIAS, _LARGEST_BIAS))
    return QTensor(codes, Parameters(np.asarray(scale), None), FORMATS["int32"])
