"""Number formats: the one table that lists what a code may be and how a real number becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from onnxq.errors import SchemeError, nearest


@dataclass(frozen=True)
class Format:
    """An integer code type: the grid of values that a scaled tensor is rounded to.

    Attributes:
        name: the name users write, such as ``int8``.
        dtype: numpy dtype that holds one code.
        onnx_type: ``TensorProto.DataType`` of the stored codes.
        bits: bits one code takes in a packed initializer.
        minimum: lowest code that is used.
        maximum: highest code that is used.
        opset: lowest default-domain opset whose DequantizeLinear reads this type.
    """

    name: str
    dtype: np.dtype[np.generic]
    onnx_type: int
    bits: int
    minimum: int
    maximum: int
    opset: int

    @property
    def signed(self) -> bool:
        """Whether negative codes exist."""
        return self.minimum < 0

    def round(self, values: npt.NDArray[np.floating]) -> npt.NDArray[np.generic]:
        """Round to the nearest code, ties to even, and saturate (ONNX QuantizeLinear without its zero point).

        Args:
            values: scaled values of any shape, zero point already added; infinities saturate.

        Returns:
            Codes of ``dtype`` in ``[minimum, maximum]``.

        >>> FORMATS["int8"].round(np.array([0.5, 1.5, -200.0]))
        array([   0,    2, -128], dtype=int8)
        """
        # float32 holds every code of 16 bits, but not the last of int32.
        exact = np.result_type(values, np.float32 if self.bits <= 16 else np.float64)
        rounded = np.rint(values).astype(exact, copy=False)
        codes: npt.NDArray[np.generic] = np.clip(rounded, self.minimum, self.maximum).astype(self.dtype)
        return codes


def _integer(name: str, onnx_type: int, minimum: int, maximum: int, opset: int) -> Format:
    dtype = np.dtype(name.split("-")[0])
    return Format(name, dtype, onnx_type, dtype.itemsize * 8, minimum, maximum, opset)


_TABLE = (
    _integer("int8", TensorProto.INT8, -128, 127, 13),
    _integer("int8-narrow", TensorProto.INT8, -127, 127, 13),
    _integer("int8-7bit", TensorProto.INT8, -64, 63, 13),
    _integer("uint8", TensorProto.UINT8, 0, 255, 13),
    _integer("uint8-7bit", TensorProto.UINT8, 0, 127, 13),
    _integer("int16", TensorProto.INT16, -32768, 32767, 21),
    _integer("uint16", TensorProto.UINT16, 0, 65535, 21),
    _integer("int32", TensorProto.INT32, -(2**31), 2**31 - 1, 13),
)

FORMATS: Mapping[str, Format] = MappingProxyType({row.name: row for row in _TABLE})
"""Every number format by name. A new format is one more line in the table above."""


def format_named(name: str) -> Format:
    """Return the row of FORMATS called ``name``.

    Raises:
        SchemeError: no such format; the message suggests the nearest one.
    """
    if name not in FORMATS:
        raise SchemeError(f"number format {name!r} is not one of {', '.join(FORMATS)}{nearest(name, FORMATS)}")
    return FORMATS[name]
