"""Codes that enter or leave a float model are what QuantizeLinear and DequantizeLinear would make of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from onnxq.errors import ModelError
from onnxq.ir import Graph, Names, Node, Variable, constant, to_model
from onnxq.passes.dequantize.code_ports import code_range, decode_codes, encode_codes
from onnxq.runtime.sessions import open_session, run

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.uint8, (0, 255)),
        (np.int16, (-32768, 32767)),
        (ml_dtypes.int4, (-8, 7)),
        (ml_dtypes.uint2, (0, 3)),
        (np.float32, None),
        (ml_dtypes.float8_e4m3fn, None),
        (np.bool_, None),
    ],
)
def test_ranges_of_codes(dtype: Any, expected: tuple[int, int] | None) -> None:
    assert code_range(np.dtype(dtype)) == expected


@pytest.mark.parametrize("code", INTEGERS)
@settings(max_examples=20)
@given(
    values=arrays(np.float32, 64, elements=st.floats(-1e9, 1e9, width=32)),
    scale=st.floats(2**-10, 2**10, width=32),
    share=st.floats(0, 1),
)
def test_encoding_is_quantize_linear_bit_for_bit(code: Any, values: Any, scale: float, share: float) -> None:
    limits = np.iinfo(code)
    values = values.copy()
    # Values half way between two codes are rounded to the even one.
    values[:16] = (np.arange(16) - 8 + 0.5) * np.float32(scale)
    x, y, expected = Variable("x", np.float32, [64]), Variable("y", code, [64]), Variable("expected", code, [64])
    step = constant("s", np.float32(scale))
    zero = constant("z", np.array(limits.min + int(share * (int(limits.max) - limits.min)), code))
    graph = Graph([Node("QuantizeLinear", "q", {}, [x, step, zero], [expected])], [x], [y, expected], "g", opset=21)
    graph.nodes.extend(encode_codes(x, step, zero, y, Names(graph), graph.opset))
    found, wanted = run(open_session(to_model(graph), optimize=False), {"x": values})
    np.testing.assert_array_equal(found, wanted, strict=True)


@pytest.mark.parametrize("scale_type", [np.float32, np.float16])
@pytest.mark.parametrize("zero", [None, 100])
@pytest.mark.parametrize("code", INTEGERS)
def test_decoding_is_dequantize_linear_bit_for_bit(code: Any, zero: int | None, scale_type: Any) -> None:
    limits = np.iinfo(code)
    x = Variable("x", code, [256])
    y, expected = Variable("y", scale_type, [256]), Variable("expected", scale_type, [256])
    step = constant("s", scale_type(0.0371))
    point = None if zero is None else constant("z", np.array(zero, code))
    inputs = [x, step] if point is None else [x, step, point]
    graph = Graph([Node("DequantizeLinear", "d", {}, inputs, [expected])], [x], [y, expected], "g", opset=21)
    graph.nodes.extend(decode_codes(x, step, point, y, Names(graph)))
    reached = min(limits.max, 2000)
    codes = np.linspace(max(limits.min, -2000), reached, 256).astype(code)
    found, wanted = run(open_session(to_model(graph), optimize=False), {"x": codes})
    np.testing.assert_array_equal(found, wanted, strict=True)


def test_codes_that_cannot_be_encoded_are_refused_by_name() -> None:
    x, y = Variable("x"), Variable("y")
    step = constant("s", np.float32(1))
    float8 = constant("z", np.zeros((), ml_dtypes.float8_e4m3fn))
    with pytest.raises(ModelError, match="codes of tensor y leave the model as float8_e4m3fn at opset 21"):
        encode_codes(x, step, float8, y, Names(Graph()), 21)
    with pytest.raises(ModelError, match="as uint8 at opset 10, expected integers at opset 11 or above"):
        encode_codes(x, step, constant("z", np.uint8(0)), y, Names(Graph()), 10)
