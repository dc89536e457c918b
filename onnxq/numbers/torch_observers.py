"""What PyTorch's eager-mode quantization computes, to the last bit: observers, default configurations and kernels.

After ``torch/ao/quantization`` and ``aten/src/ATen/native/quantized`` of PyTorch 2.9 to 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from onnxq.errors import SchemeError, nearest
from onnxq.numbers.formats import FORMATS, Format
from onnxq.numbers.numerics import Parameters, QTensor

Floats = npt.NDArray[np.float32]

EPSILON = float(np.finfo(np.float32).eps)
_XNNPACK_EPSILON = 2.0**-12
# The smallest scale of the kernels that choose it at run time, and the scale of a range of width zero there.
_SMALLEST_DYNAMIC_SCALE = np.float32(6.1e-5)
_EMPTY_DYNAMIC_SCALE = 0.1


class Statistic(StrEnum):
    """What an observer remembers of a tensor."""

    MINMAX = "minmax"
    HISTOGRAM = "histogram"


class Engine(StrEnum):
    """Which library multiplies; they place the zero point differently when they quantize."""

    FBGEMM = "fbgemm"
    """The zero point is added before rounding."""
    QNNPACK = "qnnpack"
    """The zero point is added after rounding, as ONNX does."""


@dataclass(frozen=True)
class Observer:
    """An observer of PyTorch: from a range to scale and zero point.

    Attributes:
        format: ``int8`` for qint8, ``uint8`` for quint8, or a narrower row of FORMATS for a custom range of codes.
        symmetric: whether zero is the middle code.
        reduce_range: whether half of the codes is used.
        per_channel: whether each index along axis 0 has its own.
        statistic: what it remembers.
        epsilon: smallest scale.
    """

    format: str
    symmetric: bool = False
    reduce_range: bool = False
    per_channel: bool = False
    statistic: Statistic = Statistic.MINMAX
    epsilon: float = EPSILON

    @property
    def codes(self) -> tuple[int, int]:
        """Lowest and highest code.

        >>> Observer("uint8", reduce_range=True).codes
        (0, 127)
        """
        format = FORMATS[self.format]
        divisor = 2 if self.reduce_range else 1
        return int(format.minimum) // divisor, int(format.maximum) // divisor

    def parameters(self, minimum: npt.ArrayLike, maximum: npt.ArrayLike) -> Parameters:
        """Return what ``calculate_qparams`` does for a range, in float32.

        Args:
            minimum: lowest value, scalar or array.
            maximum: highest value, same shape.

        >>> Observer("int8", symmetric=True).parameters([-1.275], [0.5]).scale
        array([0.01], dtype=float32)
        """
        lowest, highest = self.codes
        low = np.minimum(np.asarray(minimum, np.float32), np.float32(0))
        high = np.maximum(np.asarray(maximum, np.float32), np.float32(0))
        epsilon, format = np.float32(self.epsilon), FORMATS[self.format]
        if self.symmetric:
            scale = np.asarray(np.maximum(np.maximum(-low, high) / np.float32((highest - lowest) / 2), epsilon))
            middle = 0 if format.signed else (lowest + highest + 1) // 2
            return Parameters(scale, np.full(scale.shape, middle, format.dtype) if middle else None)
        scale = np.asarray(np.maximum((high - low) / np.float32(highest - lowest), epsilon))
        zero_point = np.asarray(np.clip(lowest - np.rint(low / scale), lowest, highest))
        return Parameters(scale, zero_point.astype(format.dtype))


@dataclass(frozen=True)
class Configuration:
    """Observers of activations and weights; PyTorch calls it a qconfig."""

    activation: Observer
    weight: Observer


_PER_TENSOR = Observer("int8", symmetric=True)
_PER_CHANNEL = Observer("int8", symmetric=True, per_channel=True)
_HISTOGRAM = Observer("uint8", statistic=Statistic.HISTOGRAM)
_REDUCED = Observer("uint8", reduce_range=True, statistic=Statistic.HISTOGRAM)
_XNNPACK = Observer("int8", statistic=Statistic.HISTOGRAM, epsilon=_XNNPACK_EPSILON)
_XNNPACK_PER_TENSOR = Observer("int8-narrow", symmetric=True, epsilon=_XNNPACK_EPSILON)
_XNNPACK_PER_CHANNEL = replace(_XNNPACK_PER_TENSOR, per_channel=True)

CONFIGURATIONS: Mapping[str, Configuration] = MappingProxyType(
    {
        "fbgemm": Configuration(_REDUCED, _PER_CHANNEL),
        "x86": Configuration(_REDUCED, _PER_CHANNEL),
        "qnnpack": Configuration(_HISTOGRAM, _PER_TENSOR),
        "onednn": Configuration(_HISTOGRAM, _PER_CHANNEL),
        "default": Configuration(Observer("uint8-7bit"), _PER_TENSOR),
        "symmetric-qnnpack": Configuration(_XNNPACK, _XNNPACK_PER_TENSOR),
        "symmetric-qnnpack-per-channel": Configuration(_XNNPACK, _XNNPACK_PER_CHANNEL),
        "dynamic": Configuration(Observer("uint8"), _PER_TENSOR),
    }
)
"""The default configurations of PyTorch by name."""


def configuration_named(name: str) -> Configuration:
    """Return the entry of CONFIGURATIONS called ``name``.

    Raises:
        SchemeError: no such configuration; the message suggests the nearest one.
    """
    if name not in CONFIGURATIONS:
        known = ", ".join(CONFIGURATIONS)
        raise SchemeError(f"PyTorch configuration {name!r} is not one of {known}{nearest(name, CONFIGURATIONS)}")
    return CONFIGURATIONS[name]


def encode(weight: npt.NDArray[np.floating], observer: Observer, engine: Engine = Engine.FBGEMM) -> QTensor:
    """Quantize a weight as ``convert`` does; its channels lie along axis 0.

    Args:
        weight: float array.
        observer: of the weight.
        engine: which library's kernel makes the codes.

    Returns:
        Codes of the weight's shape; the scale has its rank.

    >>> encode(np.array([[-2.0, 1.0], [0.5, 0.0]]), _PER_CHANNEL).parameters.scale.ravel()
    array([0.01568628, 0.00392157], dtype=float32)
    """
    axes = tuple(range(1 if observer.per_channel else 0, weight.ndim))
    values = weight.astype(np.float32, copy=False)
    parameters = observer.parameters(values.min(axis=axes, keepdims=True), values.max(axis=axes, keepdims=True))
    # The kernel saturates at the type's codes; only the observer knows of fewer, and clips them afterwards.
    whole = quantize(values, parameters, FORMATS["int8" if FORMATS[observer.format].signed else "uint8"], engine)
    codes = np.clip(whole.codes, *observer.codes)
    return QTensor(codes, parameters, FORMATS[observer.format])


def quantize(
    values: npt.NDArray[np.floating], parameters: Parameters, format: Format, engine: Engine = Engine.FBGEMM
) -> QTensor:
    """Quantize as ``torch.quantize_per_tensor`` and ``quantize_per_channel`` do: by the inverse of the scale.

    ``saturate(round(zero_point + x * (1 / scale)))`` with ties to even; QNNPACK and fake quantization add the zero
    point after rounding.

    Args:
        values: float array.
        parameters: scale and zero point that broadcast with the values.
        format: the codes' format.
        engine: which library's kernel it is.

    >>> three = Parameters(np.float32(1), np.uint8(3))
    >>> quantize(np.array([0.5, 1.5, 2.5, -0.5]), three, FORMATS["uint8"]).codes.tolist()
    [4, 4, 6, 2]
    """
    scaled = values.astype(np.float32, copy=False) * (np.float32(1) / parameters.scale)
    zero_point = np.float32(0) if parameters.zero_point is None else parameters.zero_point.astype(np.float32)
    shifted = scaled + zero_point if engine is Engine.FBGEMM else np.rint(scaled) + zero_point
    return QTensor(format.round(np.asarray(shifted, np.float32)), parameters, format)


def fixed_parameters(low: float, high: float) -> Parameters:
    """Return the scale and zero point of quint8 data that an operator keeps in a range, such as a Sigmoid.

    The end of the range itself is no code: ``FixedQParamsObserver`` divides by 256.

    >>> fixed_parameters(-1.0, 1.0).scale, fixed_parameters(-1.0, 1.0).zero_point
    (array(0.0078125, dtype=float32), array(128, dtype=uint8))
    """
    scale = (high - low) / 256
    return Parameters(np.array(scale, np.float32), np.array(-low / scale, np.uint8))


def dynamic_parameters(minimum: float, maximum: float, *, reduce_range: bool) -> Parameters:
    """Choose scale and zero point of quint8 data at run time, as ``ChooseQuantizationParams`` does in float64.

    The range is extended to zero, a width of zero gives scale 0.1, and no scale is below 6.1e-5. The zero point is
    found from the end of the range that loses less.

    Args:
        minimum: lowest value.
        maximum: highest value.
        reduce_range: whether 7 bits are used, as FBGEMM does; QNNPACK does not.

    >>> dynamic_parameters(-1.0, 2.0, reduce_range=True).zero_point
    array(42, dtype=uint8)
    """
    steps = 127 if reduce_range else 255
    low, high = float(np.float32(min(minimum, 0.0))), float(np.float32(max(maximum, 0.0)))
    scale = (high - low) / steps
    with np.errstate(over="ignore", divide="ignore"):
        if np.float32(scale) == 0 or np.isinf(np.float32(1) / np.float32(scale)):
            scale = _EMPTY_DYNAMIC_SCALE
    if scale < _SMALLEST_DYNAMIC_SCALE:
        # Rescaling the range is the one step in float32.
        amplifier = _SMALLEST_DYNAMIC_SCALE / np.float32(scale)
        scale = float(_SMALLEST_DYNAMIC_SCALE)
        if low == 0:
            high = scale * steps
        elif high == 0:
            low = -scale * steps
        else:
            low, high = (float(np.float32(end) * amplifier) for end in (low, high))
    from_low, from_high = -low / scale, steps - high / scale
    initial = from_low if -abs(low / scale) < steps - abs(high / scale) else from_high
    zero_point = np.rint(np.clip(initial, 0, steps))
    return Parameters(np.array(scale, np.float32), np.asarray(zero_point).astype(np.uint8))
