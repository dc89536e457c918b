"""Affine quantization of arrays: ranges to parameters, values to codes and back. Knows no graph.

One invariant covers per-tensor, per-channel and per-block scales: along every axis the extent of the codes is a
multiple of the extent of the scale (after leading axes of the scale were padded with 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.formats import Format

Array = npt.NDArray[Any]

# Dividing by a denormal scale overflows, so the smallest scale is the smallest normal number of its type.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Parameters:
    """Scale and zero point of a tensor.

    Attributes:
        scale: float32, positive, finite and normal; of the rank of the tensor (extent 1 on shared axes) or a scalar.
        zero_point: codes of the format, same shape as ``scale``; None means symmetric.
    """

    scale: npt.NDArray[np.float32]
    zero_point: Array | None


@dataclass(frozen=True, eq=False)
class QTensor:
    """Codes with the parameters that give them meaning: ``value = scale * (codes - zero_point)``."""

    codes: Array
    parameters: Parameters
    format: Format

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Return the float32 values the codes stand for."""
        return dequantize(self.codes, self.parameters)


def parameters_from_range(
    minimum: npt.ArrayLike, maximum: npt.ArrayLike, format: Format, *, symmetric: bool
) -> Parameters:
    """Choose scale and zero point so that ``[minimum, maximum]`` and zero are representable.

    The range is extended to zero first. Symmetric: ``scale = max(|minimum|, |maximum|) / ((high - low) / 2)`` without
    a zero point; affine: ``scale = (maximum - minimum) / (high - low)`` and
    ``zero_point = low - round(minimum / scale)``, after onnxruntime's and PyTorch's min-max observers. Computed in
    float64 and stored in float32. A range of width zero gives scale 1.

    Args:
        minimum: lowest value, scalar or array.
        maximum: highest value, same shape.
        format: the codes' format.
        symmetric: whether zero must be code zero.

    Returns:
        Parameters of the shape of the arguments.

    >>> from onnxq.formats import FORMATS
    >>> parameters_from_range(-1.0, 2.0, FORMATS["uint8"], symmetric=False).zero_point
    array(85, dtype=uint8)
    """
    low = np.minimum(np.asarray(minimum, np.float64), 0.0)
    high = np.maximum(np.asarray(maximum, np.float64), 0.0)
    steps = float(format.maximum - format.minimum)
    width = 2.0 * np.maximum(-low, high) if symmetric else high - low
    scale = np.where(width > 0, np.clip(width / steps, SMALLEST_SCALE, LARGEST_SCALE), 1.0).astype(np.float32)
    if symmetric:
        return Parameters(scale, None)
    zero_point = format.round(format.minimum - low / scale.astype(np.float64))
    return Parameters(scale, np.asarray(zero_point))


def weight_range(
    weight: npt.NDArray[np.floating], axes: tuple[int, ...] | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Minimum and maximum over ``axes``, which stay as extent 1; None reduces everything to a scalar."""
    keep = axes is not None
    low = np.min(weight, axis=axes, keepdims=keep, initial=np.inf)
    high = np.max(weight, axis=axes, keepdims=keep, initial=-np.inf)
    return np.asarray(low, np.float64), np.asarray(high, np.float64)


def quantize(values: npt.NDArray[np.floating], parameters: Parameters, format: Format) -> QTensor:
    """Quantize as ONNX QuantizeLinear does: ``saturate(round_half_even(values / scale) + zero_point)`` in float32.

    Args:
        values: float array.
        parameters: scale and zero point; a scale of the rank of ``values`` may be smaller by a whole factor per axis.
        format: the codes' format.

    Returns:
        Codes of the shape of ``values`` with the parameters given.

    >>> from onnxq.formats import FORMATS
    >>> narrow = FORMATS["int8-narrow"]
    >>> quantize(np.array([-1.0, 0.5]), parameters_from_range(-1, 1, narrow, symmetric=True), narrow).codes
    array([-127,   64], dtype=int8)
    """
    scaled = np.rint(values.astype(np.float32, copy=False) / _spread(parameters.scale, values.shape))
    if parameters.zero_point is not None:
        # Exact in float32 for every code of 16 bits; what is beyond saturates anyway.
        scaled = scaled + _spread(parameters.zero_point, values.shape)
    return QTensor(format.round(scaled), parameters, format)


def dequantize(codes: Array, parameters: Parameters) -> npt.NDArray[np.float32]:
    """Return ``scale * (codes - zero_point)`` in float32, as ONNX DequantizeLinear does."""
    shifted = codes.astype(np.int64)
    if parameters.zero_point is not None:
        shifted = shifted - _spread(parameters.zero_point, codes.shape).astype(np.int64)
    values: npt.NDArray[np.float32] = shifted.astype(np.float32) * _spread(parameters.scale, codes.shape)
    return values


def signal_to_noise(signal: float, noise: float) -> float:
    """Signal-to-quantization-noise ratio in decibels from two energies; infinite without noise, -inf without signal.

    >>> round(signal_to_noise(100.0, 1.0), 3)
    20.0
    """
    if noise == 0:
        return float("inf")
    if signal == 0:
        return float("-inf")
    return float(10.0 * np.log10(signal / noise))


def _spread(parameter: Array, shape: tuple[int, ...]) -> Array:
    """Repeat each entry of a blocked parameter over its block; extents 1 are left to broadcasting."""
    if parameter.ndim == 0:
        return parameter
    for axis, (extent, full) in enumerate(zip(parameter.shape, shape, strict=True)):
        if extent not in (1, full):
            parameter = np.repeat(parameter, full // extent, axis=axis)
    return parameter
