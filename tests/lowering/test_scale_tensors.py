"""Scales keep the format that they are stored in until a node needs another."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from onnxq.algorithms.encoders import encode_array
from onnxq.config.scheme import QuantSpec
from onnxq.ir import Constant, Graph, Names
from onnxq.lowering import NodeBuilder
from onnxq.lowering.decode import scale_tensor, strict_scale, zero_point_codes, zero_point_numbers
from onnxq.numerics.affine import QTensor
from onnxq.numerics.formats import SCALE_FORMATS


def quantized(spec: QuantSpec) -> QTensor:
    return encode_array(np.linspace(-3, 5, 64, dtype=np.float32).reshape(8, 8), spec, channel_axis=0, reduction_axis=1)


def new_chain() -> NodeBuilder:
    return NodeBuilder("w", Names(Graph()))


@pytest.mark.parametrize("name", SCALE_FORMATS)
def test_a_scale_is_stored_in_its_format_and_cast(name: str) -> None:
    chain, spec = new_chain(), QuantSpec("int8", (4,), scale=name)
    scale = scale_tensor(chain, quantized(spec), spec, (8, 2), TensorProto.FLOAT)
    stored = scale if isinstance(scale, Constant) else chain.nodes[0].inputs[0]
    assert stored.tensor_data.onnx_dtype == (TensorProto.UINT8 if name == "e8m0" else SCALE_FORMATS[name].onnx_type)
    assert stored.shape == (8, 2)
    assert [node.op for node in chain.nodes] == {"float32": [], "e8m0": ["Cast", "Gather"]}.get(name, ["Cast"])
    values = stored.values.view(SCALE_FORMATS[name].dtype).astype(np.float32)
    np.testing.assert_array_equal(values, quantized(spec).parameters.scale)


def test_powers_of_two_are_looked_up_by_their_exponents() -> None:
    chain, spec = new_chain(), QuantSpec("int8", (4,), scale="e8m0")
    scale_tensor(chain, quantized(spec), spec, (8, 2), TensorProto.FLOAT16)
    table = chain.nodes[1].inputs[0].values
    assert (table[127], table[128], table[1]) == (1.0, 2.0, np.float32(2.0**-126))
    assert [node.op for node in chain.nodes] == ["Cast", "Gather", "Cast"]


@pytest.mark.parametrize(
    ("scale", "dtype", "ops"),
    [
        ("ue4m3", TensorProto.FLOAT, ["Cast", "Mul"]),
        ("float16", TensorProto.FLOAT16, ["Cast", "Mul", "Cast"]),
    ],
)
def test_two_levels_are_multiplied_in_float32(scale: str, dtype: int, ops: list[str]) -> None:
    chain, spec = new_chain(), QuantSpec("int4", (4,), scale=scale, two_level=True)
    scale_tensor(chain, quantized(spec), spec, (8, 2), dtype)
    assert [node.op for node in chain.nodes] == ops


@pytest.mark.parametrize(
    ("scale", "two_level", "ops"),
    [
        ("e8m0", False, []),
        ("bfloat16", False, []),
        ("ue4m3", False, ["DequantizeLinear"]),
        ("ue4m3", True, ["DequantizeLinear"]),
        ("float16", True, ["Cast", "Mul"]),
    ],
)
def test_strict_scales_are_cast_only_where_dequantizelinear_takes_none_of_them(
    scale: str, two_level: bool, ops: list[str]
) -> None:
    chain, spec = new_chain(), QuantSpec("int4", (4,), scale=scale, two_level=two_level)
    strict_scale(chain, quantized(spec), spec, (8, 2))
    assert [node.op for node in chain.nodes] == ops


def test_a_symmetric_weight_has_no_zero_point() -> None:
    spec = QuantSpec("int4", (4,))
    assert zero_point_codes(new_chain(), quantized(spec), (8, 2)) is None
    assert zero_point_numbers(new_chain(), quantized(spec), (8, 2), in_bytes=False) is None


@pytest.mark.parametrize(("in_bytes", "dtype"), [(True, TensorProto.UINT8), (False, TensorProto.UINT4)])
def test_a_zero_point_takes_the_type_of_the_codes_or_bytes(in_bytes: bool, dtype: int) -> None:
    chain, spec = new_chain(), QuantSpec("uint4", (4,), symmetric=False)
    zero_point_numbers(chain, quantized(spec), (8, 2), in_bytes=in_bytes)
    assert chain.nodes[0].inputs[0].tensor_data.onnx_dtype == dtype
