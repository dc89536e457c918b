"""Scale formats: the types that scales are stored in, and how a scale is brought to one without becoming unusable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from onnxq.errors import check_name

Scales = npt.NDArray[np.float32] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class ScaleFormat:
    """A type that stores scales.

    What the three methods return is of the grid, within ``[smallest, maximum]``: positive, finite, and neither zero
    nor NaN. float32, float16 and bfloat16 scales are never denormal, because a division by one overflows.

    Attributes:
        name: the name users write, such as ``float16``.
        onnx_type: ``TensorProto.DataType`` of stored scales; ``ue4m3`` is a positive FLOAT8E4M3FN.
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
        """Return the smallest scale of the format that is not below each given one, so that no code is clipped.

        >>> SCALE_FORMATS["ue4m3"].round_up(np.array([0.3, 500.0])).tolist()
        [0.3125, 448.0]
        """
        return self._neighbours(scales)[1]

    def round_down(self, scales: Scales) -> npt.NDArray[np.float32]:
        """Return the largest scale of the format that is not above each given one."""
        return self._neighbours(scales)[0]

    def round_nearest(self, scales: Scales) -> npt.NDArray[np.float32]:
        """Return the nearest scale of the format; between two equally near the one with an even code."""
        below, above = self._neighbours(scales)
        exact = self._inside(scales)
        gap = (above.astype(np.float64) - exact) - (exact - below.astype(np.float64))
        odd = self._codes(below) & 1 == 1
        rounded: npt.NDArray[np.float32] = np.where((gap < 0) | ((gap == 0) & odd), above, below)
        return rounded

    def _inside(self, scales: Scales) -> npt.NDArray[np.float64]:
        return np.clip(np.asarray(scales, np.float64), self.smallest, self.maximum)

    def _codes(self, scales: Scales) -> npt.NDArray[np.unsignedinteger]:
        """Return the bit patterns, which are in the order of the positive values."""
        codes: npt.NDArray[np.unsignedinteger] = scales.astype(self.dtype).view(f"u{self.dtype.itemsize}")
        return codes

    def _neighbours(self, scales: Scales) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return the grid's values at or below, and at or above each scale."""
        exact = self._inside(scales)
        codes = self._codes(exact)
        found = codes.view(self.dtype).astype(np.float64)
        below = (codes - (found > exact)).view(self.dtype).astype(np.float32)
        above = (codes + (found < exact)).view(self.dtype).astype(np.float32)
        return below, above


def _normal(name: str, onnx_type: int, dtype: type) -> ScaleFormat:
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return ScaleFormat(name, onnx_type, np.dtype(dtype), float(limits.max), float(limits.smallest_normal))


_TABLE = (
    _normal("float32", TensorProto.FLOAT, np.float32),
    _normal("float16", TensorProto.FLOAT16, np.float16),
    _normal("bfloat16", TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    # 2**-127 is a code, but denormal in the float32 that it is multiplied in. The number is that of FLOAT8E8M0.
    ScaleFormat("e8m0", 24, np.dtype(ml_dtypes.float8_e8m0fnu), 2.0**127, 2.0**-126),
    ScaleFormat("ue4m3", TensorProto.FLOAT8E4M3FN, np.dtype(ml_dtypes.float8_e4m3fn), 448.0, 2.0**-9),
)

SCALE_FORMATS: Mapping[str, ScaleFormat] = MappingProxyType({row.name: row for row in _TABLE})
"""Every scale format by name. A new one is one more line in the table above."""


def scale_format_named(name: str) -> ScaleFormat:
    """Return the row of SCALE_FORMATS called ``name``.

    Raises:
        SchemeError: no such scale format; the message suggests the nearest one.
    """
    check_name("scale format", name, SCALE_FORMATS)
    return SCALE_FORMATS[name]
