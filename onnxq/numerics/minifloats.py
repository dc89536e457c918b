"""Small floating-point codes: how float32 rounds to a few exponent and mantissa bits, in integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_SIGN_FREE = 0x7FFFFFFF
_EXPONENT = 0x7F800000
_MANTISSA_BITS = 23
_BIAS = 127


@dataclass(frozen=True)
class Minifloat:
    """The bit layout of a sign, ``exponent_bits`` and ``mantissa_bits``, with denormals as IEEE 754 has them.

    Attributes:
        exponent_bits: bits of the exponent, biased by ``2 ** (exponent_bits - 1) - 1``.
        mantissa_bits: bits of the mantissa behind the leading one.
        maximum: largest finite magnitude; what is beyond saturates to it.
        nan: the positive code of NaN; None when the format has none, then NaN rounds to zero.
    """

    exponent_bits: int
    mantissa_bits: int
    maximum: float
    nan: int | None = None

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    def encode_into(self, values: npt.NDArray[np.float32], codes: npt.NDArray[np.uint8]) -> None:
        """Round to the nearest code, ties to even, saturating, and write the codes.

        A power of two is added whose last place is the spacing of the grid at the value: the addition itself rounds,
        and the low bits of the sum are the significand.

        Args:
            values: contiguous; used as scratch and lost.
            codes: receives the bit patterns, shape of ``values``.
        """
        dropped = _MANTISSA_BITS - self.mantissa_bits
        # The exponent field of the smallest normal number: below it the grid is as fine as at it.
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
        np.copyto(codes, bits, casting="unsafe")


def narrowed(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """Return a float32 copy that any coarser rounding treats as it would the original: float64 is rounded to odd.

    Rounding to odd keeps in the last bit that something was cut off, so that no false tie comes up (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    # Above float32's largest number nothing is left to round.
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
