"""Number formats and scale formats: the tables, and how a real number is rounded to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from onnxq.errors import check_name

# --- minifloats -----------------------------------------------------------------------------------------------------

_SIGN_FREE = 0x7FFFFFFF
_EXPONENT = 0x7F800000
_MANTISSA_BITS = 23
_BIAS = 127


@dataclass(frozen=True)
class Minifloat:
    """A floating-point layout: sign, exponent and mantissa bits, with denormals as in IEEE 754.

    Attributes:
        exponent_bits: bits of the exponent, biased by `2 ** (exponent_bits - 1) - 1`.
        mantissa_bits: bits of the mantissa without the leading one.
        maximum: largest finite magnitude; larger values saturate to it.
        nan: bit pattern of the positive NaN. If None, the format has no NaN and NaN rounds to zero.
    """

    exponent_bits: int
    mantissa_bits: int
    maximum: float
    nan: int | None = None

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return 1 + self.exponent_bits + self.mantissa_bits

    def encode_into(self, values: npt.NDArray[np.float32], quantized: npt.NDArray[np.uint8]) -> None:
        """Round to the nearest value, ties to even, saturate, and write the bit patterns.

        The method adds a power of two whose last place is the spacing of the format at the value. The addition rounds,
        and the low bits of the sum are the significand.

        Args:
            values: contiguous; used as scratch and lost.
            quantized: receives the bit patterns, shape of `values`.
        """
        dropped = _MANTISSA_BITS - self.mantissa_bits
        # Exponent field of the smallest normal number. Below it the spacing stays the same.
        smallest = (_BIAS + 2 - 2 ** (self.exponent_bits - 1)) << _MANTISSA_BITS
        bits = values.view(np.int32)
        sign = bits >> 31
        sign &= 1 << (self.bits - 1)
        bits &= _SIGN_FREE
        np.clip(values, 0.0, self.maximum, out=values)
        exponent = bits & _EXPONENT
        np.clip(exponent, smallest, _EXPONENT, out=exponent)
        exponent += dropped << _MANTISSA_BITS
        values += exponent.view(np.float32)
        bits -= exponent
        exponent -= smallest + (dropped << _MANTISSA_BITS)
        exponent >>= dropped
        bits += exponent
        bits |= sign
        np.copyto(quantized, bits, casting="unsafe")


def narrowed(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """Return a float32 copy that rounds to any coarser format as the original does: float64 is rounded to odd.

    Rounding to odd keeps the lost digits visible in the last bit, so that no false tie arises (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums", 2008).
    """
    # Values above the largest float32 become infinite; no rounding is left for them.
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float32)
    if values.dtype != np.float64:
        return nearest
    back = nearest.astype(np.float64)
    finite = np.isfinite(nearest)
    bits = nearest.view(np.int32)
    bits -= (np.abs(back) > np.abs(values)) & finite
    bits |= (back != values) & finite
    return nearest


# --- codebooks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Codebook:
    """The number of each code.

    Attributes:
        numbers: in ascending order; one of them is zero.
    """

    numbers: tuple[float, ...]

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return (len(self.numbers) - 1).bit_length()

    @property
    def zero(self) -> int:
        """The code of zero."""
        return self.numbers.index(0.0)

    @cached_property
    def _middles(self) -> npt.NDArray[np.float32]:
        exact = np.array(self.numbers)
        middles: npt.NDArray[np.float32] = ((exact[:-1] + exact[1:]) / 2).astype(np.float32)
        return middles

    def encode_into(self, values: npt.NDArray[np.float32], quantized: npt.NDArray[np.uint8]) -> None:
        """Write the code of the nearest number; halfway between two numbers, that of the lower one.

        Args:
            values: of any shape.
            quantized: receives the quantized values, shape of `values`.
        """
        np.copyto(quantized, np.searchsorted(self._middles, values), casting="unsafe")


# --- number formats -------------------------------------------------------------------------------------------------

# 1.5 * 2**23: adding it rounds a small float32 to an integer, ties to even, whose two's complement fills the low bits.
_ROUNDER = np.float32(12582912.0)


@dataclass(frozen=True)
class QuantDType:
    """A quantized type: the values that a scaled tensor is rounded to.

    Attributes:
        name: the name in schemes and options, such as `int8`.
        dtype: numpy dtype of one value; integers below 8 bits are held in int8 or uint8.
        onnx_type: `TensorProto.DataType` of the stored values.
        bits: bits of one value in a packed initializer.
        minimum: lowest value in use.
        maximum: highest value in use.
        opset: lowest default-domain opset whose DequantizeLinear reads this type.
        minifloat: layout of a floating-point type; None for others.
        codebook: number of each code; None for integers and minifloats.
    """

    name: str
    dtype: np.dtype[np.generic]
    onnx_type: int
    bits: int
    minimum: float
    maximum: float
    opset: int
    minifloat: Minifloat | None = None
    codebook: Codebook | None = None

    @property
    def signed(self) -> bool:
        """Whether the type has negative values."""
        return self.minimum < 0

    @property
    def is_float(self) -> bool:
        """Whether the type holds other numbers than integers. These types have no zero point."""
        return self.minifloat is not None or self.codebook is not None

    @cached_property
    def values(self) -> npt.NDArray[np.float32]:
        """The float32 value of each of the `2 ** bits` bit patterns; only for formats of at most 8 bits.

        >>> FORMATS["float4e2m1"].values[:8].tolist()
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        """
        assert self.bits <= 8, f"{self.name} has too many values to list"
        patterns = np.arange(2**self.bits, dtype=np.uint8)
        if self.signed and not self.is_float:
            half = 2 ** (self.bits - 1)
            patterns = (patterns ^ half) - np.uint8(half)
        numbers = patterns.view(self.dtype) if self.codebook is None else np.array(self.codebook.numbers)
        values = numbers.astype(np.float32)
        values.flags.writeable = False
        return values

    def numbers(self, quantized: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
        """Return the float32 number of each quantized value, before scale and zero point.

        >>> FORMATS["int8"].numbers(np.array([3, -1], np.int8))
        array([ 3., -1.], dtype=float32)
        """
        if self.is_float:
            # For a minifloat a lookup is faster than the cast.
            return np.asarray(np.take(self.values, quantized.view(np.uint8)))
        return quantized.astype(np.float32)

    def round(self, values: npt.NDArray[np.floating]) -> npt.NDArray[np.generic]:
        """Round to the nearest value, ties to even, and saturate (ONNX QuantizeLinear without its zero point).

        Args:
            values: scaled values of any shape, zero point already added. Infinities saturate. NaN becomes the lowest
                integer, as in onnxruntime; the NaN of an 8-bit float; or zero in other formats.

        Returns:
            Values of `dtype` in `[minimum, maximum]`.

        >>> FORMATS["int8"].round(np.array([0.5, 1.5, -200.0]))
        array([   0,    2, -128], dtype=int8)
        """
        quantized: npt.NDArray[np.generic] = np.empty(np.shape(values), self.dtype)
        if self.bits > 16:
            # float32 holds every 16-bit integer, but not the largest int32.
            exact = np.fmin(np.fmax(np.rint(values.astype(np.float64)), self.minimum), self.maximum)
            np.copyto(quantized, exact, casting="unsafe")
        else:
            self.round_into(narrowed(np.asarray(values)), quantized)
        return quantized

    def round_into(self, values: npt.NDArray[np.float32], quantized: npt.NDArray[np.generic]) -> None:
        """Round float32 values like `round`, without allocating.

        Args:
            values: contiguous; used as scratch and lost.
            quantized: array of `dtype` that receives the result, of the same shape.
        """
        if self.bits > 16:
            np.copyto(quantized, self.round(values))
            return
        unknown = np.isnan(values) if np.isnan(np.max(values, initial=-np.inf)) else None
        if (grid := self.minifloat or self.codebook) is None:
            np.clip(values, self.minimum, self.maximum, out=values)
            values += _ROUNDER
            np.copyto(quantized, values.view(np.int32), casting="unsafe")
        else:
            grid.encode_into(np.atleast_1d(values), np.atleast_1d(quantized.view(np.uint8)))
        if unknown is not None:
            quantized[unknown] = self._pattern_of_nan()

    def _pattern_of_nan(self) -> npt.NDArray[np.generic]:
        if self.codebook is not None:
            return np.array(self.codebook.zero, self.dtype)
        if self.minifloat is None:
            return np.array(self.minimum, self.dtype)
        return np.array(self.minifloat.nan or 0, np.uint8).view(self.dtype)


def _integer(name: str, onnx_type: int, minimum: int, maximum: int, opset: int) -> QuantDType:
    bits = int(name.split("-")[0].removeprefix("u").removeprefix("int"))
    dtype = np.dtype(f"{'int' if minimum < 0 else 'uint'}{max(bits, 8)}")
    return QuantDType(name, dtype, onnx_type, bits, minimum, maximum, opset)


def _float(name: str, dtype: type, onnx_type: int, opset: int, layout: Minifloat) -> QuantDType:
    return QuantDType(name, np.dtype(dtype), onnx_type, layout.bits, -layout.maximum, layout.maximum, opset, layout)


def _codebook(name: str, numbers: tuple[float, ...], onnx_type: int, opset: int) -> QuantDType:
    book = Codebook(numbers)
    return QuantDType(name, np.dtype(np.uint8), onnx_type, book.bits, min(numbers), max(numbers), opset, codebook=book)


# NormalFloat 4 of QLoRA (Dettmers et al. 2023, section 3): quantiles of the normal distribution, divided by the
# largest. The values are those of bitsandbytes and onnxruntime to the last bit.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

# Types without a name in the oldest supported onnx.
_UINT2, _INT2, _FLOAT6E2M3, _FLOAT6E3M2 = 25, 26, 27, 28

_TABLE = (
    _integer("int8", TensorProto.INT8, -128, 127, 13),
    _integer("int8-narrow", TensorProto.INT8, -127, 127, 13),
    _integer("int8-7bit", TensorProto.INT8, -64, 63, 13),
    _integer("uint8", TensorProto.UINT8, 0, 255, 13),
    _integer("uint8-7bit", TensorProto.UINT8, 0, 127, 13),
    _integer("int16", TensorProto.INT16, -32768, 32767, 21),
    _integer("int16-narrow", TensorProto.INT16, -32767, 32767, 21),
    _integer("uint16", TensorProto.UINT16, 0, 65535, 21),
    _integer("int32", TensorProto.INT32, -(2**31), 2**31 - 1, 13),
    _integer("int4", TensorProto.INT4, -8, 7, 21),
    _integer("int4-narrow", TensorProto.INT4, -7, 7, 21),
    _integer("uint4", TensorProto.UINT4, 0, 15, 21),
    _integer("int2", _INT2, -2, 1, 25),
    _integer("int2-narrow", _INT2, -1, 1, 25),
    _integer("uint2", _UINT2, 0, 3, 25),
    _float("float8e4m3fn", ml_dtypes.float8_e4m3fn, TensorProto.FLOAT8E4M3FN, 19, Minifloat(4, 3, 448.0, 0x7F)),
    _float("float8e5m2", ml_dtypes.float8_e5m2, TensorProto.FLOAT8E5M2, 19, Minifloat(5, 2, 57344.0, 0x7F)),
    _float("float4e2m1", ml_dtypes.float4_e2m1fn, TensorProto.FLOAT4E2M1, 23, Minifloat(2, 1, 6.0)),
    _float("float6e2m3", ml_dtypes.float6_e2m3fn, _FLOAT6E2M3, 28, Minifloat(2, 3, 7.5)),
    _float("float6e3m2", ml_dtypes.float6_e3m2fn, _FLOAT6E3M2, 28, Minifloat(3, 2, 28.0)),
    _codebook("nf4", _NF4, TensorProto.UINT4, 21),
)

FORMATS: Mapping[str, QuantDType] = MappingProxyType({row.name: row for row in _TABLE})
"""Every number format by name. To add a format, add a line to the table above."""


def format_named(name: str) -> QuantDType:
    """Return the number format called `name`.

    Raises:
        SchemeError: the format is unknown; the message suggests the nearest name.
    """
    check_name("number format", name, FORMATS)
    return FORMATS[name]


# --- scale formats --------------------------------------------------------------------------------------------------

Scales = npt.NDArray[np.float32] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class ScaleFormat:
    """A type that stores scales.

    The rounding methods return numbers of the format within `[smallest, maximum]`: positive, finite, neither zero nor
    NaN. float32, float16 and bfloat16 scales are never denormal, because division by a denormal overflows.

    Attributes:
        name: the name in schemes and options, such as `float16`.
        onnx_type: `TensorProto.DataType` of stored scales; `ue4m3` is a positive FLOAT8E4M3FN.
        dtype: numpy dtype of one stored scale.
        maximum: largest scale.
        smallest: smallest scale.
    """

    name: str
    onnx_type: int
    dtype: np.dtype[np.generic]
    maximum: float
    smallest: float

    def round_up(self, scales: Scales) -> npt.NDArray[np.float32]:
        """Return the smallest scale of the format that is not below each given scale, so that no value is clipped.

        >>> SCALE_FORMATS["ue4m3"].round_up(np.array([0.3, 500.0])).tolist()
        [0.3125, 448.0]
        """
        return self._neighbours(scales)[1]

    def round_nearest(self, scales: Scales) -> npt.NDArray[np.float32]:
        """Return the nearest scale of the format, ties to the even bit pattern."""
        if self.dtype == np.float32:
            return self._inside(scales).astype(np.float32)
        below, above = self._neighbours(scales)
        exact = self._inside(scales)
        gap = (above.astype(np.float64) - exact) - (exact - below.astype(np.float64))
        odd = self._patterns(below) & 1 == 1
        rounded: npt.NDArray[np.float32] = np.where((gap < 0) | ((gap == 0) & odd), above, below)
        return rounded

    def _inside(self, scales: Scales) -> npt.NDArray[np.float64]:
        return np.clip(np.asarray(scales, np.float64), self.smallest, self.maximum)

    def _patterns(self, scales: Scales) -> npt.NDArray[np.unsignedinteger]:
        """Return the bit patterns, which sort like the positive values."""
        quantized: npt.NDArray[np.unsignedinteger] = scales.astype(self.dtype).view(f"u{self.dtype.itemsize}")
        return quantized

    def _neighbours(self, scales: Scales) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        exact = self._inside(scales)
        quantized = self._patterns(exact)
        found = quantized.view(self.dtype).astype(np.float64)
        below = (quantized - (found > exact)).view(self.dtype).astype(np.float32)
        above = (quantized + (found < exact)).view(self.dtype).astype(np.float32)
        return below, above


def _normal(name: str, onnx_type: int, dtype: type) -> ScaleFormat:
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return ScaleFormat(name, onnx_type, np.dtype(dtype), float(limits.max), float(limits.smallest_normal))


_SCALE_TABLE = (
    _normal("float32", TensorProto.FLOAT, np.float32),
    _normal("float16", TensorProto.FLOAT16, np.float16),
    _normal("bfloat16", TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    # e8m0 also has 2**-127, but that is denormal in float32, the type of the multiplication. 24 is FLOAT8E8M0.
    ScaleFormat("e8m0", 24, np.dtype(ml_dtypes.float8_e8m0fnu), 2.0**127, 2.0**-126),
    ScaleFormat("ue4m3", TensorProto.FLOAT8E4M3FN, np.dtype(ml_dtypes.float8_e4m3fn), 448.0, 2.0**-9),
)

SCALE_FORMATS: Mapping[str, ScaleFormat] = MappingProxyType({row.name: row for row in _SCALE_TABLE})
"""Every scale format by name. To add a format, add a line to the table above."""


def scale_format_named(name: str) -> ScaleFormat:
    """Return the scale format called `name`.

    Raises:
        SchemeError: the format is unknown; the message suggests the nearest name.
    """
    check_name("scale format", name, SCALE_FORMATS)
    return SCALE_FORMATS[name]
