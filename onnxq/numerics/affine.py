"""Affine quantization of arrays: ranges to scales and zero points, values to quantized values and back.

One invariant covers per-tensor, per-channel and per-block scales: along every axis a scale covers a block of equal
extent. The last block of an axis may be partial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from onnxq.numerics.blocks import PIECE, along, grid_shape, pieces
from onnxq.numerics.formats import (
    FORMATS,
    SCALE_FORMATS,
    QuantDType,
    ScaleFormat,
    format_named,
    scale_format_named,
)
from onnxq.numerics.packing import pack, unpack
from onnxq.numerics.spec import QuantSpec, Rounding

Array = npt.NDArray[Any]

# Division by a denormal scale overflows, so the smallest scale is the smallest normal number of its type.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class QuantParams:
    """Scale and zero point of a tensor.

    Attributes:
        scale: float32, finite and normal, rounded to its scale format. It is positive, but see
            `QuantSpec.has_signed_scales`. It is a scalar, or has the rank of the tensor and one entry for each block.
        zero_point: in the tensor's format and the shape of `scale`; None means symmetric.
        tensor_scale: float32 factor of every scale; None without a second level.
        block: extents of the values that share a scale, one for each axis; the last block of an axis may be partial.
            None means that each extent of the tensor is a multiple of that of the scale.
    """

    scale: npt.NDArray[np.float32]
    zero_point: Array | None
    tensor_scale: np.float32 | None = None
    block: tuple[int, ...] | None = None

    @property
    def effective_scale(self) -> npt.NDArray[np.float32]:
        """`scale` times `tensor_scale`, in float32."""
        if self.tensor_scale is None:
            return self.scale
        return np.asarray(self.scale * self.tensor_scale)

    def block_in(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the extents of the values that share a scale in a tensor of this shape."""
        if self.block is not None:
            return self.block
        return even_blocks(self.scale.shape, shape)


def even_blocks(scales: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the extents of the values that share a scale, by the shape of the scales and of the tensor.

    >>> even_blocks((4, 1), (4, 6)), even_blocks((), (4, 6))
    ((1, 6), (4, 6))
    """
    extents = scales or (1,) * len(shape)
    return tuple(max(full // extent, 1) for full, extent in zip(shape, extents, strict=True))


@dataclass(frozen=True, eq=False)
class QTensor:
    """Quantized values with their parameters: `value = scale * (quantized - zero_point)`.

    Attributes:
        stored: the values, or their raw data.
        unpacked: shape of the values if `stored` is raw data, as `pack` returns it; None if it is the values.
    """

    stored: Array
    parameters: QuantParams
    format: QuantDType
    unpacked: tuple[int, ...] | None = None

    @property
    def values(self) -> Array:
        """The quantized values, unpacked each time if raw data is stored."""
        return self.stored if self.unpacked is None else unpack(self.stored, self.format, self.unpacked)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.stored.shape if self.unpacked is None else self.unpacked

    @property
    def packed(self) -> npt.NDArray[np.uint8]:
        """The values as raw data of an ONNX tensor, see `pack`."""
        return pack(self.stored, self.format) if self.unpacked is None else self.stored

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Return the float32 values."""
        return dequantize(self.values, self.parameters, self.format)


def params_from_range(
    minimum: npt.ArrayLike, maximum: npt.ArrayLike, format: QuantDType, *, symmetric: bool
) -> QuantParams:
    """Choose scale and zero point so that `minimum`, `maximum` and zero are representable.

    The range is extended to zero first. Symmetric: `scale = max(|minimum|, |maximum|) / ((high - low) / 2)`, no zero
    point. Affine: `scale = (maximum - minimum) / (high - low)` and `zero_point = low - round(minimum / scale)`. Both
    follow the min-max observers of onnxruntime and PyTorch. The arithmetic is float64, the result float32. An empty
    range gives scale 1.

    Args:
        minimum: lowest value, scalar or array.
        maximum: highest value, same shape.
        format: format of the quantized values; floating-point formats are symmetric.
        symmetric: whether the zero point must be zero.

    Returns:
        Parameters of the shape of the arguments.

    >>> from onnxq.numerics.formats import FORMATS
    >>> params_from_range(-1.0, 2.0, FORMATS["uint8"], symmetric=False).zero_point
    array(85, dtype=uint8)
    """
    low = np.minimum(np.asarray(minimum, np.float64), 0.0)
    high = np.maximum(np.asarray(maximum, np.float64), 0.0)
    steps = float(format.maximum - format.minimum)
    width = 2.0 * np.maximum(-low, high) if symmetric else high - low
    scale = np.where(width > 0, np.clip(width / steps, SMALLEST_SCALE, LARGEST_SCALE), 1.0).astype(np.float32)
    if symmetric:
        return QuantParams(scale, None)
    zero_point = format.round(format.minimum - low / scale.astype(np.float64))
    return QuantParams(scale, np.asarray(zero_point))


def quantize(values: npt.NDArray[np.floating], parameters: QuantParams, format: QuantDType) -> QTensor:
    """Quantize as ONNX QuantizeLinear does: `saturate(round_half_even(values / scale) + zero_point)` in float32.

    Args:
        values: float array.
        parameters: scale and zero point. A scale of the rank of `values` may be smaller by a whole factor per axis.
        format: format of the result.

    >>> from onnxq.numerics.formats import FORMATS
    >>> narrow = FORMATS["int8-narrow"]
    >>> quantize(np.array([-1.0, 0.5]), params_from_range(-1, 1, narrow, symmetric=True), narrow).values
    array([-127,   64], dtype=int8)
    """
    quantized = np.empty(values.shape, format.dtype)
    scale, zero_point = _arrays(parameters, values.ndim)
    scratch = np.empty(min(PIECE, values.size), np.float32)
    for piece in pieces(values.shape, parameters.block_in(values.shape)):
        scaled = scratch[: piece.size].reshape(piece.split)
        part = piece.part(values).astype(np.float32, copy=False)
        np.divide(part, piece.own(scale), out=scaled)
        if zero_point is not None:
            # Exact in float32 for every 16-bit integer; larger values saturate anyway.
            np.rint(scaled, out=scaled)
            scaled += piece.own(zero_point)
        format.round_into(scaled, piece.part(quantized))
    return QTensor(quantized, parameters, format)


def dequantize(quantized: Array, parameters: QuantParams, format: QuantDType) -> npt.NDArray[np.float32]:
    """Return `scale * (quantized - zero_point)` in float32, as ONNX DequantizeLinear does."""
    values = np.empty(quantized.shape, np.float32)
    scale, zero_point = _arrays(parameters, quantized.ndim)
    for piece in pieces(quantized.shape, parameters.block_in(quantized.shape)):
        decoded = format.numbers(piece.part(quantized))
        if zero_point is not None:
            decoded -= piece.own(zero_point)
        part = piece.part(values)
        np.multiply(decoded, piece.own(scale), out=part)
    return values


def dequantize_linear(
    quantized: Array,
    scale: Array,
    zero_point: Array | None = None,
    axis: int = 1,
    block_size: int = 0,
    dtype: npt.DTypeLike | None = None,
) -> Array:
    """Return what ONNX's DequantizeLinear gives, computed in float32 and rounded last, as onnxruntime does.

    Args:
        quantized: quantized values of any integer or small float type.
        scale: a number, a vector along ``axis``, blocks along it, or a shape that broadcasts against ``quantized``.
        zero_point: of the scale's shape or one number; None for zero.
        axis: axis of a vector or of blocks of scales.
        block_size: entries along ``axis`` that share a scale; 0 if each index has its own.
        dtype: type of the result; None for the scale's.

    >>> dequantize_linear(np.array([[1, 3], [5, 7]], np.uint8), np.float32([0.5, 2]), np.uint8([1, 3]))
    array([[0., 0.],
           [2., 8.]], dtype=float32)
    """
    wanted = np.dtype(scale.dtype if dtype is None else dtype)

    def spread(parameter: Array) -> Array:
        if parameter.size == 1:
            return parameter.reshape(())
        if block_size:
            place = axis % quantized.ndim
            whole = np.repeat(parameter, block_size, axis=place)
            return whole[(slice(None),) * place + (slice(quantized.shape[place]),)]
        return along(parameter, axis, quantized.ndim) if parameter.ndim == 1 else parameter

    if zero_point is not None and quantized.dtype.kind in "iu" and quantized.dtype.itemsize > 2:
        # float32 cannot represent every difference of 32-bit integers.
        quantized, zero_point = np.subtract(quantized, spread(zero_point), dtype=np.int64), None
    # A copy as an array: numpy returns scalars for differences of 0-d arrays.
    values = np.array(quantized, np.float32)
    if zero_point is not None:
        np.subtract(values, spread(zero_point.astype(np.float32)), out=values)
    with np.errstate(all="ignore"):
        np.multiply(values, spread(scale.astype(np.float32)), out=values)
        return values.astype(wanted, copy=False)


def _arrays(parameters: QuantParams, rank: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    scale, zero_point = parameters.effective_scale, parameters.zero_point
    shape = scale.shape or (1,) * rank
    return scale.reshape(shape), None if zero_point is None else zero_point.astype(np.float32).reshape(shape)


def sqnr_db(signal: float, noise: float) -> float:
    """Return the signal-to-quantization-noise ratio (SQNR) of two energies in dB.

    The ratio is infinite if the quantization error is 0, and -inf if only the signal is 0.

    >>> round(sqnr_db(100.0, 1.0), 3)
    20.0
    """
    if noise == 0:
        return float("inf")
    if signal == 0:
        return float("-inf")
    return 10.0 * (math.log10(signal) - math.log10(noise))


# --- scales of blocks -----------------------------------------------------------------------------------------------

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32] | Doubles


def block_range(values: npt.NDArray[Any], block: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Return the minimum and maximum of each block.

    Args:
        values: float array.
        block: extents of a block, one for each axis.

    Returns:
        Two arrays with an entry for each block, float64 for float64 values and float32 otherwise. A block with a NaN
        gives NaN.

    >>> block_range(np.array([1.0, -2.0, 5.0]), (2,))
    (array([-2.,  5.]), array([1., 5.]))
    """
    grid, dtype = grid_shape(values.shape, block), np.result_type(values.dtype, np.float32)
    low, high = np.full(grid, np.inf, dtype), np.full(grid, -np.inf, dtype)
    # Some types warn of NaN.
    with np.errstate(invalid="ignore"):
        for piece in pieces(values.shape, block):
            piece.gather(piece.part(values), (np.minimum, low), (np.maximum, high))
    return low, high


def params_of_blocks(
    low: Floats, high: Floats, spec: QuantSpec, block: tuple[int, ...], tensor_scale: np.float32 | None = None
) -> QuantParams:
    """Choose scales and zero points of a spec so that each range and zero are representable.

    Ranges become scales as in `params_from_range`; for floating-point formats the largest value of the format is the
    limit. With two levels, as in Burn and NVFP4, the tensor scale maps the largest block scale to the maximum of the
    scale format. The arithmetic is float64.

    Args:
        low: minimum of each block.
        high: maximum of each block, same shape.
        spec: format, symmetry and scales.
        block: extents of a block, one for each axis.
        tensor_scale: the second level; None computes it if the spec has two levels.

    Returns:
        Parameters of the shape of `low`.
    """
    format = format_named(spec.format)
    scale = np.empty(low.shape, np.float32)
    zero_point = None if spec.symmetric else np.empty(low.shape, format.dtype)
    # The grid of small blocks is large itself, so float64 arrays only hold parts of it.
    parts = [slice(start, start + PIECE) for start in range(0, low.size, PIECE)]
    ends = low.reshape(-1), high.reshape(-1)
    if spec.two_level and tensor_scale is None:
        largest = max((float(_wanted_scale(*_to_zero(*ends, part), spec).max()) for part in parts), default=0.0)
        tensor_scale = _tensor_scale(largest, scale_format_named(spec.scale))
    for part in parts:
        lows, highs = _to_zero(*ends, part)
        wanted = _wanted_scale(lows, highs, spec)
        if tensor_scale is not None:
            wanted /= np.float64(tensor_scale)
        rounded = np.where(wanted > 0, on_grid(wanted, spec), np.float32(1.0))
        if spec.has_signed_scales:
            np.negative(rounded, out=rounded, where=highs > -lows)
        scale.reshape(-1)[part] = rounded
        if zero_point is not None:
            effective = QuantParams(rounded, None, tensor_scale).effective_scale
            zero_point.reshape(-1)[part] = format.round(format.minimum - lows / effective.astype(np.float64))
    return QuantParams(scale, zero_point, tensor_scale, block)


def _to_zero(low: Floats, high: Floats, part: slice) -> tuple[Doubles, Doubles]:
    return np.minimum(low[part].astype(np.float64), 0.0), np.maximum(high[part].astype(np.float64), 0.0)


def _wanted_scale(low: Doubles, high: Doubles, spec: QuantSpec) -> Doubles:
    """Return the exact scale of each range; 0 for an empty range."""
    format, magnitude = format_named(spec.format), np.maximum(-low, high)
    if spec.scale_rounding is Rounding.FLOOR:
        wanted = _microscaling(magnitude, format)
    elif spec.has_signed_scales:
        # The other end is off by half a step at most, as are all values.
        wanted = np.maximum(magnitude / -float(format.minimum), np.minimum(-low, high) / (float(format.maximum) + 0.5))
    else:
        width = 2 * magnitude if spec.symmetric else high - low
        wanted = width / float(format.maximum - format.minimum)
    return np.where(high > low, np.maximum(wanted, SMALLEST_SCALE), 0.0)


def on_grid(scales: Doubles, spec: QuantSpec) -> npt.NDArray[np.float32]:
    """Round scales to the scale format of a spec. Powers of two from `FLOOR` stay as they are."""
    scale_format = scale_format_named(spec.scale)
    # Half a unit in the last place of a float32 scale clips less than any integer can resolve.
    if spec.scale_rounding is Rounding.UP and spec.scale != "float32":
        return scale_format.round_up(scales)
    return scale_format.round_nearest(scales)


def _microscaling(magnitude: Doubles, format: QuantDType) -> Doubles:
    """Return `2 ** (floor(log2(magnitude)) - floor(log2(maximum)))` (OCP Microscaling Formats 1.0, section 6.3)."""
    exponent = np.frexp(magnitude)[1] - np.frexp(float(format.maximum))[1]
    powers: Doubles = np.ldexp(np.ones_like(magnitude), exponent)
    return powers


def _tensor_scale(largest: float, scale_format: ScaleFormat) -> np.float32:
    """Return the float32 scale that keeps the largest block scale within its format and each product normal."""
    if largest == 0:
        return np.float32(1)
    wanted = max(largest / scale_format.maximum, SMALLEST_SCALE / scale_format.smallest)
    return np.float32(SCALE_FORMATS["float32"].round_up(np.array(wanted)))


# --- biases in the int32 accumulator --------------------------------------------------------------------------------

# One half of the int32 accumulator is for the bias, the other half for the products.
LARGEST_BIAS = 2**30


def raise_scale_for_bias(
    scale: npt.NDArray[np.float32], bias: npt.NDArray[np.floating], input_scale: float
) -> npt.NDArray[np.float32]:
    """Raise the scales of a weight until its bias fits half of the int32 accumulator.

    A scale is also raised until its product with the input scale is a normal number. In both cases the products are
    tiny beside the bias, so the coarser weights do not matter.

    Args:
        scale: scales of the weight, one or one for each channel, in any shape.
        bias: one value for each channel. If groups share the scales, one value for each channel of each group in turn.
        input_scale: scale of the activations that the weight multiplies.

    >>> raise_scale_for_bias(np.array([0.5, 0.5], np.float32), np.array([1.0, 2.0**31]), input_scale=1.0)
    array([0.5, 2. ], dtype=float32)
    """
    flat = scale.reshape(-1).astype(np.float64)
    wanted = np.abs(bias.reshape(-1, flat.size).astype(np.float64)).max(0, initial=0.0) / (input_scale * LARGEST_BIAS)
    # The product of the two scales must be a normal number as well.
    least = np.maximum(wanted, SMALLEST_SCALE / input_scale)
    return np.clip(flat, least, LARGEST_SCALE).astype(np.float32).reshape(scale.shape)


def quantize_bias(bias: npt.NDArray[np.floating], weight: QTensor, input_scale: float) -> QTensor:
    """Quantize a bias to int32 with scale `input_scale * weight scale` and zero point 0.

    Values beyond half of the int32 range are clipped.

    Args:
        bias: one value for each channel. If groups share the scales, one value for each channel of each group in turn.
        weight: the quantized weight, with one scale or one for each channel of a group.
        input_scale: scale of the activations that the weight multiplies.

    Returns:
        int32 values of shape (channels,), all groups included. The scale has the same shape, or is a scalar if the
        weight has one scale.
    """
    # The kernel multiplies the two scales in float32, so the scale of the bias is computed in float32 too.
    weight_scale = weight.parameters.scale
    weight_scale = weight_scale.reshape(-1 if weight_scale.size > 1 else ())
    scale = np.maximum(np.float32(input_scale) * weight_scale, np.float32(SMALLEST_SCALE))
    flat = bias.reshape(-1).astype(np.float64)
    if scale.ndim:
        scale = np.tile(scale, flat.size // scale.size)
    quantized = FORMATS["int32"].round(np.clip(flat / scale.astype(np.float64), -LARGEST_BIAS, LARGEST_BIAS))
    return QTensor(quantized, QuantParams(np.asarray(scale), None), FORMATS["int32"])


# --- quantization error as a ratio and in decibels ------------------------------------------------------------------


def sqnr_of_ratio(ratio: float) -> float:
    """Convert a noise-to-signal ratio to SQNR in dB.

    >>> sqnr_of_ratio(0.01), sqnr_of_ratio(0.0)
    (20.0, inf)
    """
    return -10 * math.log10(ratio) if ratio > 0 else math.inf


def ratio_of_sqnr(sqnr: float) -> float:
    """Convert an SQNR in dB to a noise-to-signal ratio.

    >>> round(ratio_of_sqnr(20.0), 6), ratio_of_sqnr(math.inf)
    (0.01, 0.0)
    """
    return float(10 ** (-sqnr / 10))


def decibels(value: float | None) -> str:
    """Return an SQNR as text: rounded down, so that no value below a goal reads as if it reached it.

    >>> decibels(20.04), decibels(19.97), decibels(math.inf), decibels(None)
    ('20.0 dB', '19.9 dB', 'equal', '-')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "equal" if value > 0 else f"{value} dB"
    # What an exact figure lacks to itself in binary is not rounded down.
    return f"{math.floor(round(value * 10, 6)) / 10:.1f} dB"


def worst_ratio(ratios: NDArray[np.float64]) -> float:
    """Return the largest ratio, that of the worst output; infinite if one is not finite.

    >>> worst_ratio(np.array([0.5, 0.25])), worst_ratio(np.array([0.5, np.nan])), worst_ratio(np.zeros(0))
    (0.5, inf, 0.0)
    """
    return float(ratios.max(initial=0.0)) if np.isfinite(ratios).all() else math.inf
