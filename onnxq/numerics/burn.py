"""The arithmetic of the Burn framework, to the last bit: rounding, scales, second level and zero points.

After burn-ndarray and cubecl of Burn 0.22; zero points after burn-tensor 0.14 to 0.16. Arithmetic is float32.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onnxq.errors import SchemeError
from onnxq.numerics.affine import QTensor, QuantParams, block_range
from onnxq.numerics.blocks import block_shape, pieces
from onnxq.numerics.formats import QuantDType, format_named, scale_format_named
from onnxq.numerics.spec import Granularity, Method, QuantSpec, Rounding

Floats = npt.NDArray[np.float32]

# Smallest scales of Burn, which stores denormal scales. The scale formats of onnxq exclude them.
_DENORMAL = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "e8m0": 2.0**-127}
_EMPTY_SCALE = np.float32(0.1)


def encode(values: npt.NDArray[np.floating], spec: QuantSpec) -> QTensor:
    """Quantize a tensor as Burn's Quantizer does with any parameter of a module.

    Q8S, Q4S and Q2S are the narrow integer formats, Q8F, Q4F and Q2F the full ones. Integers round half away from zero,
    floating-point formats half to even.

    Args:
        values: float array.
        spec: per tensor or per block. The extents of a block are aligned to the tensor's last axes.

    Raises:
        SchemeError: Burn has no equivalent of the spec.

    >>> encode(np.array([-1.8, -1.0, 0.0, 0.5]), QuantSpec("int8-narrow")).values
    array([-127,  -71,    0,   35], dtype=int8)
    """
    check(spec)
    single = values.astype(np.float32, copy=False)
    granularity = spec.granularity
    if isinstance(granularity, tuple):
        # Burn aligns a single extent to the last axis as well.
        granularity = (1,) * (single.ndim - len(granularity)) + granularity
    block = block_shape(granularity, single.shape, channel_axis=0, reduction_axis=-1)
    low, high = (ends.astype(np.float32) for ends in block_range(single, block))
    parameters = replace(_parameters(low, high, spec), block=block)
    return _quantized(single, parameters, format_named(spec.format))


def symmetric_scale(low: Floats, high: Floats, format: QuantDType) -> Floats:
    """Return `2 * max(|low|, |high|) / (maximum - minimum)`; the range is not extended to zero."""
    magnitude = np.maximum(np.abs(low), np.abs(high))
    scale: Floats = np.float32(2) * magnitude / np.float32(format.maximum - format.minimum)
    return scale


def stored_scale(scale: Floats, name: str) -> Floats:
    """Return the smallest scale of a scale format that is not below each given scale, denormals included."""
    format = scale_format_named(name)
    return replace(format, smallest=_DENORMAL.get(name, format.smallest)).round_up(scale)


def half_away(values: Floats) -> Floats:
    """Round to the nearest integer, halves away from zero, as Rust's `f32::round` does.

    >>> half_away(np.array([0.5, -2.5, 0.49999997], np.float32)).tolist()
    [1.0, -3.0, 0.0]
    """
    whole = np.trunc(values)
    with np.errstate(invalid="ignore"):
        rounded: Floats = whole + np.copysign(np.float32(1), values) * (np.abs(values - whole) >= np.float32(0.5))
    return rounded


def check(spec: QuantSpec) -> None:
    """Check that Burn has an equivalent of a spec.

    Raises:
        SchemeError: it has none; the message suggests a change.
    """
    for wrong, what in (
        (spec.granularity is Granularity.CHANNEL, "scales per channel; give a block such as [1, 64]"),
        (spec.method not in (Method.MINMAX, Method.BURN), f'method = "{spec.method}"; leave it out'),
        (spec.scale_rounding is not Rounding.UP, f'scale_rounding = "{spec.scale_rounding}"; leave it out'),
        (
            isinstance(spec.granularity, tuple) and max(spec.granularity) > 255,
            "blocks longer than 255; give smaller ones",
        ),
        (
            not spec.symmetric and (spec.format, spec.granularity) != ("int8", Granularity.TENSOR),
            "offsets but of int8 tensors",
        ),
    ):
        if wrong:
            raise SchemeError(f"Burn has no {what}")


def _parameters(low: Floats, high: Floats, spec: QuantSpec) -> QuantParams:
    format = format_named(spec.format)
    if not spec.symmetric:
        return _affine(low, high, format)
    scale = symmetric_scale(low, high, format)
    tensor_scale = None
    if spec.two_level:
        limit = np.float32(scale_format_named(spec.scale).maximum)
        tensor_scale = np.maximum(scale.max(initial=0) / limit, np.finfo(np.float32).tiny)
        scale = scale / tensor_scale
    return QuantParams(stored_scale(np.where(scale == 0, _EMPTY_SCALE, scale), spec.scale), None, tensor_scale)


def _affine(low: Floats, high: Floats, format: QuantDType) -> QuantParams:
    """Return scale and zero point. Burn 0.14 to 0.16 truncates zero points towards zero."""
    low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
    scale = (high - low) / np.float32(format.maximum - format.minimum)
    scale = np.where(scale == 0, _EMPTY_SCALE, scale)
    wanted = -(low / scale - np.float32(format.minimum))
    return QuantParams(scale, format.round(np.trunc(wanted)))


def _quantized(values: Floats, parameters: QuantParams, format: QuantDType) -> QTensor:
    quantized = np.empty(values.shape, format.dtype)
    scale = parameters.effective_scale
    for piece in pieces(values.shape, parameters.block_in(values.shape)):
        scaled = piece.part(values) / piece.own(scale)
        if parameters.zero_point is not None:
            scaled += piece.own(parameters.zero_point)
        if not format.is_float:
            scaled = half_away(scaled)
        format.round_into(scaled, piece.part(quantized))
    return QTensor(quantized, parameters, format)
