"""What PyTorch's kernels choose at run time: the oracle of published vectors of operators that onnxq has no twin of."""

from __future__ import annotations

import numpy as np

from onnxq.numerics.affine import QuantParams

# The smallest scale of the kernels that choose it at run time, and the scale of a range of width zero there.
_SMALLEST_DYNAMIC_SCALE = np.float32(6.1e-5)
_EMPTY_DYNAMIC_SCALE = 0.1


def dynamic_parameters(minimum: float, maximum: float, *, reduce_range: bool) -> QuantParams:
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
    return QuantParams(np.array(scale, np.float32), np.asarray(zero_point).astype(np.uint8))
