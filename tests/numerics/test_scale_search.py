"""Searched scales and zero points are never worse than those of the range, and better where tails are long."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.algorithms.encoders import encode_array
from onnxq.numerics.affine import QTensor
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.scale_search import block_error, root
from onnxq.numerics.spec import Granularity, Method, QuantSpec

HEAVY = (np.random.default_rng(0).standard_t(4, size=(128, 96)) * 0.02).astype(np.float32)
GRANULARITIES = [Granularity.TENSOR, Granularity.CHANNEL, (32,), (8, 8)]


def encoded(spec: QuantSpec, weight: np.ndarray = HEAVY) -> QTensor:
    return encode_array(weight, spec, channel_axis=1, reduction_axis=0)


def errors(tensor: QTensor, measure: object, weight: np.ndarray = HEAVY) -> np.ndarray:
    return block_error(weight, tensor.parameters, tensor.format, measure)


@pytest.mark.parametrize("name", ["int8", "int4", "int2-narrow", "uint4", "uint2", "float4e2m1", "float6e3m2"])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("scale", ["float32", "float16", "ue4m3", "e8m0"])
def test_clipping_never_raises_the_squared_error_of_a_scale(name: str, granularity: object, scale: str) -> None:
    choices = {"granularity": granularity, "symmetric": FORMATS[name].signed, "scale": scale}
    plain, clipped = (encoded(QuantSpec(name, method=method, **choices)) for method in (Method.MINMAX, Method.MSE))
    # Few bits are fitted in float32 alone.
    assert (errors(clipped, np.square) <= errors(plain, np.square) * (1 + 1e-6)).all()


def test_clipping_pays_most_where_codes_are_few() -> None:
    gains = []
    for name in ("int2", "int4", "int8"):
        plain, clipped = (
            errors(encoded(QuantSpec(name, granularity=Granularity.CHANNEL, method=method)), np.square).sum()
            for method in (Method.MINMAX, Method.MSE)
        )
        gains.append(10 * np.log10(plain / clipped))
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 2


def test_clipping_finds_the_scale_that_was_hidden_by_one_outlier() -> None:
    generator = np.random.default_rng(1)
    weight = (0.1 * generator.integers(-7, 8, (512, 1))).astype(np.float32)
    weight[0] = 1.4
    clipped = encoded(QuantSpec("int4-narrow", granularity=Granularity.CHANNEL, method=Method.MSE), weight)
    plain = encoded(QuantSpec("int4-narrow", granularity=Granularity.CHANNEL), weight)
    assert errors(clipped, np.square, weight)[0, 0] < errors(plain, np.square, weight)[0, 0] / 2


@pytest.mark.parametrize("two_level", [False, True])
def test_two_levels_keep_the_scale_of_the_tensor(two_level: bool) -> None:
    spec = QuantSpec("float4e2m1", granularity=(16,), scale="ue4m3", two_level=two_level, method=Method.MSE)
    plain = QuantSpec("float4e2m1", granularity=(16,), scale="ue4m3", two_level=two_level)
    assert encoded(spec).parameters.tensor_scale == encoded(plain).parameters.tensor_scale


@pytest.mark.parametrize("name", ["uint8", "uint4", "int4", "uint2"])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("scale", ["float32", "float16"])
def test_half_quadratic_zero_points_never_raise_the_root_error(name: str, granularity: object, scale: str) -> None:
    choices = {"granularity": granularity, "symmetric": False, "scale": scale}
    plain, moved = (encoded(QuantSpec(name, method=method, **choices)) for method in (Method.MINMAX, Method.HQQ))
    assert (errors(moved, root) <= errors(plain, root)).all()
    assert errors(moved, root).sum() < errors(plain, root).sum()


def test_half_quadratic_codes_do_not_depend_on_the_size_of_the_weight() -> None:
    spec = QuantSpec("uint4", granularity=(32,), symmetric=False, method=Method.HQQ)
    one, other = encoded(spec), encoded(spec, HEAVY * np.float32(2.0**-40))
    np.testing.assert_array_equal(one.values, other.values)
    np.testing.assert_array_equal(one.parameters.zero_point, other.parameters.zero_point)


@pytest.mark.parametrize("method", [Method.MSE, Method.HQQ])
@pytest.mark.parametrize("value", [0.0, 0.3, -0.3])
def test_blocks_of_one_value_keep_it(method: Method, value: float) -> None:
    weight = np.full((32, 2), value, np.float32)
    tensor = encoded(QuantSpec("uint4", granularity=(32,), symmetric=False, method=method), weight)
    np.testing.assert_allclose(tensor.dequantize(), weight, rtol=1e-6)


@pytest.mark.parametrize("name", ["int4", "int2"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_symmetric_codes_hold_what_reaches_farthest_above_zero_as_well(name: str, sign: float) -> None:
    weight = np.full((32, 4), sign, np.float32)
    found = encoded(QuantSpec(name, (16,), method=Method.MSE), weight)
    # There is one code less above zero, where scales of the whole range clip half a step.
    assert np.abs(found.dequantize() - weight).max() <= (1e-6 if sign > 0 else 0.05)
