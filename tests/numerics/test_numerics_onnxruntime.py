"""Codes are those of onnxruntime, and decode as there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from onnx import TensorProto

from numerics.ranges_and_formats import QUANTIZED, every_quantized, session
from onnxq.numerics.formats import FORMATS, Format
from onnxq.numerics.numerics import Parameters, dequantize, quantize
from onnxq.runtime.sessions import run


def onnxruntime_codes(
    values: NDArray[np.float32],
    scale: NDArray[np.float32],
    zero_point: NDArray[np.generic],
    format: Format,
    **axis: int,
) -> NDArray[np.int64]:
    """Quantize with onnxruntime, which knows whole types only, and clip to the codes that the format uses."""
    feeds = {"x": values, "scale": scale, "zero": zero_point.astype(format.dtype)}
    codes = run(session("QuantizeLinear", format.onnx_type, axis.get("axis")), feeds)[0]
    return np.clip(codes.astype(np.int64), format.minimum, format.maximum)


def edge_values(scale: float) -> NDArray[np.float32]:
    """Return ties and their neighbours, all codes, values beyond them, and infinities."""
    codes = np.arange(-300, 300, dtype=np.float64)
    ties = (np.concatenate([codes, codes + 0.5]) * scale).astype(np.float32)
    near = np.concatenate([np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    rest = np.array([0.0, -0.0, 1e-40, -1e-40, 3.4e38, -3.4e38, np.inf, -np.inf, 7e4 * scale, -7e4 * scale], np.float32)
    return np.concatenate([ties, near, rest])


@every_quantized
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.1, 0.0235294122248888, 3.1e-5, 1e30])
def test_codes_are_those_of_onnxruntime(format: Format, scale: float) -> None:
    values = edge_values(scale)
    for zero_point in {0, format.minimum, format.maximum, (format.minimum + format.maximum) // 3}:
        zero = np.array(zero_point, format.dtype)
        with np.errstate(over="ignore"):
            ours = quantize(values, Parameters(np.array(scale, np.float32), zero), format).codes
        np.testing.assert_array_equal(ours, onnxruntime_codes(values, np.array(scale, np.float32), zero, format))


@every_quantized
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_codes_per_axis_are_those_of_onnxruntime(format: Format, axis: int) -> None:
    generator = np.random.default_rng(axis)
    values = generator.normal(0, 3, (4, 5, 6)).astype(np.float32)
    extent = values.shape[axis]
    scale = generator.uniform(0.001, 0.1, extent).astype(np.float32)
    zero = generator.integers(format.minimum, format.maximum, extent).astype(format.dtype)
    shape = [extent if index == axis else 1 for index in range(3)]
    ours = quantize(values, Parameters(scale.reshape(shape), zero.reshape(shape)), format)
    np.testing.assert_array_equal(ours.codes, onnxruntime_codes(values, scale, zero, format, axis=axis))
    feeds = {"x": ours.codes, "scale": scale, "zero": zero}
    decoded = run(session("DequantizeLinear", format.onnx_type, axis), feeds)[0]
    np.testing.assert_array_equal(ours.dequantize(), decoded)


@every_quantized
def test_every_code_decodes_as_in_onnxruntime(format: Format) -> None:
    codes = np.arange(format.minimum, format.maximum + 1).astype(format.dtype)
    for scale in (1.0, 0.1, 1.1754944e-38, 1e33):
        for zero_point in {0, format.minimum, format.maximum}:
            zero = np.array(zero_point, format.dtype)
            feeds = {"x": codes, "scale": np.array(scale, np.float32), "zero": zero}
            expected = run(session("DequantizeLinear", format.onnx_type, None), feeds)[0]
            parameters = Parameters(np.array(scale, np.float32), zero)
            np.testing.assert_array_equal(dequantize(codes, parameters, format), expected)


def test_int32_biases_decode_as_in_onnxruntime() -> None:
    codes = np.array([-(2**31), -(2**30) - 1, -1, 0, 1, 2**24 + 1, 2**31 - 1], np.int32)
    scale = np.array(3.7e-5, np.float32)
    feeds = {"x": codes, "scale": scale, "zero": np.zeros((), np.int32)}
    expected = run(session("DequantizeLinear", TensorProto.INT32, None), feeds)[0]
    np.testing.assert_array_equal(dequantize(codes, Parameters(scale, None), FORMATS["int32"]), expected)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(QUANTIZED))
def test_any_values_get_the_codes_of_onnxruntime(data: st.DataObject, format: Format) -> None:
    values = data.draw(arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32)))
    scale = np.array(data.draw(st.floats(2.0**-13, 2.0**13, width=32)), np.float32)
    zero = np.array(data.draw(st.integers(format.minimum, format.maximum)), format.dtype)
    ours = quantize(values, Parameters(scale, zero), format).codes
    np.testing.assert_array_equal(ours, onnxruntime_codes(values, scale, zero, format))
