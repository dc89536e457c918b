"""Codes with a scale for each block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from numerics.ranges_and_formats import NARROW, UINT8
from onnxq.numerics.formats import FORMATS, Format
from onnxq.numerics.numerics import Parameters, dequantize, parameters_from_range, quantize
from onnxq.numerics.packing import pack
from onnxq.runtime.sessions import open_session, run


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 2**32 - 1)
)
def test_a_blocked_scale_equals_the_repeated_one(
    rows: int, columns: int, height: int, width: int, symmetric: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    values = generator.normal(0, 5, (rows * height, columns * width)).astype(np.float32)
    low, high = generator.uniform(-9, -1, (rows, columns)), generator.uniform(1, 9, (rows, columns))
    format = NARROW if symmetric else UINT8
    blocked = parameters_from_range(low, high, format, symmetric=symmetric)

    def spread(parameter: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.kron(parameter, np.ones((height, width), parameter.dtype))

    zero = None if blocked.zero_point is None else spread(blocked.zero_point)
    repeated = Parameters(spread(blocked.scale), zero)
    one, other = quantize(values, blocked, format), quantize(values, repeated, format)
    np.testing.assert_array_equal(one.codes, other.codes)
    np.testing.assert_array_equal(one.dequantize(), other.dequantize())


@pytest.mark.parametrize("format", [one for one in FORMATS.values() if one.bits <= 8], ids=lambda one: one.name)
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.0, 1e-30, 1e30])
def test_every_code_of_a_small_format_comes_back(format: Format, scale: float) -> None:
    finite = (format.values >= format.minimum) & (format.values <= format.maximum)
    codes = format.round(format.values[finite])
    parameters = Parameters(np.full((1,), scale, np.float32), None)
    values = dequantize(codes, parameters, format)
    np.testing.assert_array_equal(values, format.values[finite] * np.float32(scale))
    assert quantize(values, parameters, format).codes.tobytes() == codes.tobytes()


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@settings(max_examples=150)
@given(shapes, st.data(), st.sampled_from(list(FORMATS.values())), st.integers(0, 2**32 - 1))
def test_partial_blocks_equal_the_repeated_scale(
    shape: tuple[int, ...], data: st.DataObject, format: Format, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    block = tuple(data.draw(st.integers(1, extent + 1)) for extent in shape)
    grid = tuple(-(-extent // length) for extent, length in zip(shape, block, strict=True))
    values = generator.normal(0, 5, shape).astype(np.float32)
    scale = generator.uniform(0.01, 2, grid).astype(np.float32)
    level = np.float32(generator.uniform(0.5, 2)) if data.draw(st.booleans()) else None
    zero = None
    if not format.is_float and data.draw(st.booleans()):
        zero = generator.integers(format.minimum, format.maximum, grid).astype(format.dtype)

    def spread(parameter: NDArray[np.generic]) -> NDArray[np.generic]:
        return parameter[np.ix_(*(np.arange(extent) // length for extent, length in zip(shape, block, strict=True)))]

    repeated = Parameters(spread(scale * (level or np.float32(1))), None if zero is None else spread(zero))
    one = quantize(values, Parameters(scale, zero, level, block), format)
    other = quantize(values, repeated, format)
    np.testing.assert_array_equal(one.codes.view(np.uint8), other.codes.view(np.uint8))
    np.testing.assert_array_equal(one.dequantize(), other.dequantize())
    plain = format.round(values / repeated.scale) if zero is None else one.codes
    np.testing.assert_array_equal(one.codes.view(np.uint8), plain.view(np.uint8))


BLOCKED = [name for name in FORMATS if name not in ("int32", "nf4") and name[:6] not in ("float4", "float6")]


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize(("axis", "length"), [(0, 4), (1, 3), (1, 4)])
def test_blocks_decode_as_in_onnxruntime(name: str, axis: int, length: int) -> None:
    format, generator = FORMATS[name], np.random.default_rng(length)
    values = generator.normal(0, 3, (8, 10)).astype(np.float32)
    block = tuple(length if index == axis else 1 for index in range(2))
    grid = tuple(-(-extent // size) for extent, size in zip(values.shape, block, strict=True))
    scale = generator.uniform(0.01, 0.9, grid).astype(np.float32)
    ours = quantize(values, Parameters(scale, None, block=block), format)
    codes = helper.make_tensor("codes", format.onnx_type, values.shape, pack(ours.codes, format).tobytes(), raw=True)
    node = helper.make_node("DequantizeLinear", ["codes", "scale"], ["y"], axis=axis, block_size=length)
    graph = helper.make_graph(
        [node],
        "blocked",
        [helper.make_tensor_value_info("scale", TensorProto.FLOAT, grid)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, values.shape)],
        [codes],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", max(format.opset, 21))], ir_version=11)
    np.testing.assert_array_equal(ours.dequantize(), run(open_session(model), {"scale": scale})[0])
