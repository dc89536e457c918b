"""The arithmetic of PyTorch's eager-mode quantization, to the last bit: scales, zero points and quantized values.

After `torch/ao/quantization` and `aten/src/ATen/native/quantized` of PyTorch 2.9 to 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxq.numerics.affine import QTensor, QuantParams
from onnxq.numerics.formats import FORMATS, QuantDType

EPSILON = float(np.finfo(np.float32).eps)
"""The smallest scale of an observer."""


@dataclass(frozen=True)
class Observer:
    """A PyTorch observer: turn a range into scale and zero point.

    Attributes:
        format: `int8` for qint8, `uint8` for quint8, or a narrower format of `FORMATS`.
        symmetric: whether the zero point is the middle of the format's range.
    """

    format: str
    symmetric: bool = False

    def parameters(self, minimum: npt.ArrayLike, maximum: npt.ArrayLike) -> QuantParams:
        """Return the result of `calculate_qparams` for a range, in float32.

        >>> Observer("int8", symmetric=True).parameters([-1.275], [0.5]).scale
        array([0.01], dtype=float32)
        """
        format = FORMATS[self.format]
        lowest, highest = int(format.minimum), int(format.maximum)
        low = np.minimum(np.asarray(minimum, np.float32), np.float32(0))
        high = np.maximum(np.asarray(maximum, np.float32), np.float32(0))
        epsilon = np.float32(EPSILON)
        if self.symmetric:
            scale = np.asarray(np.maximum(np.maximum(-low, high) / np.float32((highest - lowest) / 2), epsilon))
            middle = 0 if format.signed else (lowest + highest + 1) // 2
            return QuantParams(scale, np.full(scale.shape, middle, format.dtype) if middle else None)
        scale = np.asarray(np.maximum((high - low) / np.float32(highest - lowest), epsilon))
        zero_point = np.asarray(np.clip(lowest - np.rint(low / scale), lowest, highest))
        return QuantParams(scale, zero_point.astype(format.dtype))


def quantize(values: npt.NDArray[np.floating], parameters: QuantParams, format: QuantDType) -> QTensor:
    """Quantize as FBGEMM does behind `torch.quantize_per_tensor` and `quantize_per_channel`.

    FBGEMM multiplies by the inverse of the scale and adds the zero point before it rounds, ties to even:
    `saturate(round(zero_point + x * (1 / scale)))`. The parameters must broadcast with `values`.

    >>> three = QuantParams(np.float32(1), np.uint8(3))
    >>> quantize(np.array([0.5, 1.5, 2.5, -0.5]), three, FORMATS["uint8"]).values.tolist()
    [4, 4, 6, 2]
    """
    scaled = values.astype(np.float32, copy=False) * (np.float32(1) / parameters.scale)
    zero_point = np.float32(0) if parameters.zero_point is None else parameters.zero_point.astype(np.float32)
    return QTensor(format.round(np.asarray(scaled + zero_point, np.float32)), parameters, format)


def fixed_parameters(low: float, high: float) -> QuantParams:
    """Return the quint8 scale and zero point of an operator with a fixed output range, such as Sigmoid.

    The upper end of the range is not representable: `FixedQParamsObserver` divides by 256.

    >>> fixed_parameters(-1.0, 1.0).scale, fixed_parameters(-1.0, 1.0).zero_point
    (array(0.0078125, dtype=float32), array(128, dtype=uint8))
    """
    scale = (high - low) / 256
    return QuantParams(np.array(scale, np.float32), np.array(-low / scale, np.uint8))
