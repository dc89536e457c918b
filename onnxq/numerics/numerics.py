"""Affine quantization of arrays: ranges to parameters, values to codes and back. Knows no graph.

One invariant covers per-tensor, per-channel and per-block scales: along every axis a scale serves a block of equal
extent, of which the last may be partial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxq.numerics.blocks import PIECE, pieces
from onnxq.numerics.formats import Format

Array = npt.NDArray[Any]

# Dividing by a denormal scale overflows, so the smallest scale is the smallest normal number of its type.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Parameters:
    """Scale and zero point of a tensor.

    Attributes:
        scale: float32, positive, finite and normal, on the grid of its scale format; of the rank of the tensor, with
            one entry for each block along each axis, or a scalar.
        zero_point: codes of the format, same shape as ``scale``; None means symmetric.
        tensor_scale: float32 that every scale is multiplied by; None without a second level.
        block: extents of the values that share a scale, one for each axis, the last block of an axis may be partial;
            None when each axis of the tensor is a multiple of that axis of the scale.
    """

    scale: npt.NDArray[np.float32]
    zero_point: Array | None
    tensor_scale: np.float32 | None = None
    block: tuple[int, ...] | None = None

    @property
    def effective_scale(self) -> npt.NDArray[np.float32]:
        """The scale with the tensor's own multiplied in, in float32."""
        if self.tensor_scale is None:
            return self.scale
        return np.asarray(self.scale * self.tensor_scale)

    def block_in(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the extents of the values that share a scale in a tensor of this shape."""
        if self.block is not None:
            return self.block
        extents = self.scale.shape if self.scale.ndim else (1,) * len(shape)
        return tuple(max(full // extent, 1) for full, extent in zip(shape, extents, strict=True))


@dataclass(frozen=True, eq=False)
class QTensor:
    """Codes with the parameters that give them meaning: ``value = scale * (codes - zero_point)``."""

    codes: Array
    parameters: Parameters
    format: Format

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Return the float32 values the codes stand for."""
        return dequantize(self.codes, self.parameters, self.format)


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
        format: the codes' format; floating-point codes are symmetric.
        symmetric: whether zero must be code zero.

    Returns:
        Parameters of the shape of the arguments.

    >>> from onnxq.numerics.formats import FORMATS
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

    >>> from onnxq.numerics.formats import FORMATS
    >>> narrow = FORMATS["int8-narrow"]
    >>> quantize(np.array([-1.0, 0.5]), parameters_from_range(-1, 1, narrow, symmetric=True), narrow).codes
    array([-127,   64], dtype=int8)
    """
    codes = np.empty(values.shape, format.dtype)
    scale, zero_point = _arrays(parameters, values.ndim)
    scratch = np.empty(PIECE, np.float32)
    for piece in pieces(values.shape, parameters.block_in(values.shape)):
        scaled = scratch[: piece.size].reshape(piece.split)
        part = piece.part(values).astype(np.float32, copy=False)
        np.divide(part, piece.own(scale), out=scaled)
        if zero_point is not None:
            # Exact in float32 for every code of 16 bits; what is beyond saturates anyway.
            np.rint(scaled, out=scaled)
            scaled += piece.own(zero_point)
        format.round_into(scaled, piece.part(codes))
    return QTensor(codes, parameters, format)


def dequantize(codes: Array, parameters: Parameters, format: Format) -> npt.NDArray[np.float32]:
    """Return ``scale * (codes - zero_point)`` in float32, as ONNX DequantizeLinear does."""
    values = np.empty(codes.shape, np.float32)
    scale, zero_point = _arrays(parameters, codes.ndim)
    for piece in pieces(codes.shape, parameters.block_in(codes.shape)):
        decoded = format.numbers(piece.part(codes))
        if zero_point is not None:
            decoded -= piece.own(zero_point)
        part = piece.part(values)
        np.multiply(decoded, piece.own(scale), out=part)
    return values


def _arrays(parameters: Parameters, rank: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    """Return scale and zero point as float32 arrays of the tensor's rank."""
    scale, zero_point = parameters.effective_scale, parameters.zero_point
    shape = scale.shape or (1,) * rank
    return scale.reshape(shape), None if zero_point is None else zero_point.astype(np.float32).reshape(shape)


def signal_to_noise(signal: float, noise: float) -> float:
    """Signal-to-quantization-noise ratio in decibels from two energies; infinite without noise, -inf without signal.

    >>> round(signal_to_noise(100.0, 1.0), 3)
    20.0
    """
    if noise == 0:
        return float("inf")
    if signal == 0:
        return float("-inf")
    return 10.0 * (math.log10(signal) - math.log10(noise))
