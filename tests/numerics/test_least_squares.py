"""Alternation reaches the error of a fine search, for any weight that a model may hold."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxq.numerics.affine import QTensor, block_range, params_of_blocks, quantize
from onnxq.numerics.block_encoding import NotFiniteError, quantize_blocks
from onnxq.numerics.blocks import Shape
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.spec import Granularity, Method, QuantSpec

RANDOM = np.random.default_rng(0)
SHAPE = (256, 96)
WEIGHTS = {
    "normal": RANDOM.standard_normal(SHAPE),
    "heavy-tailed": RANDOM.standard_t(3, SHAPE),
    "Laplace": RANDOM.laplace(size=SHAPE),
    "uniform": RANDOM.uniform(-1, 1, SHAPE),
    "channels of many sizes": RANDOM.standard_normal(SHAPE) * np.exp(RANDOM.normal(size=SHAPE[1])),
    "positive": np.abs(RANDOM.standard_normal(SHAPE)),
}
SPECS = {
    "int4": (QuantSpec("int4", (32,), method="mse"), (32, 1)),
    "int4 along rows": (QuantSpec("int4", (1, 32), method="mse"), (1, 32)),
    "int4 in squares": (QuantSpec("int4", (8, 8), method="mse"), (8, 8)),
    "int4, float16 scales": (QuantSpec("int4", (32,), scale="float16", method="mse"), (32, 1)),
    "int4-narrow": (QuantSpec("int4-narrow", (64,), method="mse"), (64, 1)),
    "uint4": (QuantSpec("uint4", (32,), symmetric=False, method="mse"), (32, 1)),
    "int2": (QuantSpec("int2", (16,), method="mse"), (16, 1)),
    "uint2": (QuantSpec("uint2", (16,), symmetric=False, method="mse"), (16, 1)),
    "int8-narrow by channel": (QuantSpec("int8-narrow", Granularity.CHANNEL, method="mse"), (SHAPE[0], 1)),
    "int4 of a tensor": (QuantSpec("int4", method="mse"), SHAPE),
}
# In decibels: how much worse than a fine search a layer may be.
MOST_LOST = 0.02


def noise(values: np.ndarray, found: QTensor) -> float:
    return float(np.square(found.dequantize().astype(np.float64) - values).sum())


def searched_noise(values: np.ndarray, spec: QuantSpec, block: Shape) -> float:
    """Return the squared error if the best of many parts of its range is taken for each block."""
    low, high = block_range(values, block)
    least = np.full(low.shape, np.inf)
    # As large a range as a symmetric format with one integer more below zero can use, down to a fifth.
    for factor in (1.0, *np.arange(1.08, 0.19, -0.02)):
        decoded = quantize(values, params_of_blocks(low * factor, high * factor, spec, block), FORMATS[spec.format])
        squares = np.square(decoded.dequantize().astype(np.float64) - values)
        for axis, length in enumerate(block):
            squares = np.add.reduceat(squares, np.arange(0, values.shape[axis], length), axis)
        least = np.minimum(least, squares)
    return float(least.sum())


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", SPECS)
def test_no_layer_is_worse_than_with_a_fine_search(name: str, kind: str) -> None:
    spec, block = SPECS[name]
    values = WEIGHTS[kind].astype(np.float32)
    lost = 10 * np.log10(noise(values, quantize_blocks(values, spec, block)) / searched_noise(values, spec, block))
    assert lost < MOST_LOST


@pytest.mark.parametrize("name", ["int4", "uint4", "int2"])
def test_a_transposed_weight_has_the_same_integers_and_scales(name: str) -> None:
    # Tied tables are stored once if they do.
    values = (RANDOM.standard_t(4, (8192, 96)) * 0.02).astype(np.float32)
    symmetric = FORMATS[name].signed
    down = quantize_blocks(values, QuantSpec(name, (32,), symmetric, method="mse"), (32, 1))
    along = quantize_blocks(np.ascontiguousarray(values.T), QuantSpec(name, (1, 32), symmetric, method="mse"), (1, 32))
    np.testing.assert_array_equal(down.values, along.values.T)
    np.testing.assert_array_equal(down.parameters.scale, along.parameters.scale.T)


@pytest.mark.parametrize("name", ["int8", "int4-narrow", "uint4"])
def test_a_weight_that_is_quantized_already_is_found_again(name: str) -> None:
    format = FORMATS[name]
    codes = RANDOM.integers(int(format.minimum), int(format.maximum) + 1, (64, 40))
    codes[::32] = format.minimum
    codes[1::32] = format.maximum
    zero = 0 if format.signed else 6
    values = ((codes - zero) * np.float32(0.03)).astype(np.float32)
    found = quantize_blocks(values, QuantSpec(name, (32,), format.signed, method="mse"), (32, 1))
    np.testing.assert_allclose(found.dequantize(), values, rtol=1e-6)


def with_places(shape: Shape, places: Any, value: float) -> np.ndarray:
    values = np.zeros(shape, np.float32)
    values[places] = value
    return values


ODD_WEIGHTS = {
    "zeros": np.zeros((64, 48), np.float32),
    "one value in each block": with_places((64, 48), slice(5, None, 32), -0.7),
    "one value in the whole weight": with_places((64, 48), (3, 4), 0.7),
    "equal values": np.full((64, 48), 0.25, np.float32),
    "negative values": -np.abs(RANDOM.standard_normal((64, 48))).astype(np.float32),
    "denormals": (RANDOM.standard_normal((64, 48)) * 1e-40).astype(np.float32),
    "denormals beside usual values": np.where(
        RANDOM.random((64, 48)) < 0.5, RANDOM.standard_normal((64, 48)), 1e-41
    ).astype(np.float32),
    "very large floats": (RANDOM.uniform(-1, 1, (64, 48)) * 1e38).astype(np.float32),
    "cut blocks": RANDOM.standard_normal((70, 48)).astype(np.float32),
    "a block of one": RANDOM.standard_normal((33, 48)).astype(np.float32),
    "one row": RANDOM.standard_normal((1, 48)).astype(np.float32),
    "one column": RANDOM.standard_normal((64, 1)).astype(np.float32),
    "one value": np.full((1, 1), 0.5, np.float32),
    "no rows": np.zeros((0, 48), np.float32),
    "float16": RANDOM.standard_normal((64, 48)).astype(np.float16),
    "bfloat16": RANDOM.standard_normal((64, 48)).astype(ml_dtypes.bfloat16),
    "float64": RANDOM.standard_normal((64, 48)),
}


@pytest.mark.parametrize("kind", ODD_WEIGHTS)
@pytest.mark.parametrize("scale", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["int8", "int4", "uint4", "int2", "uint2"])
def test_odd_weights_have_usable_scales_and_no_more_error_than_without_a_search(
    name: str, scale: str, kind: str
) -> None:
    values, format = ODD_WEIGHTS[kind], FORMATS[name]
    spec = QuantSpec(name, (32,), format.signed, scale, method="mse")
    found = quantize_blocks(values, spec, (32, 1))
    assert np.isfinite(found.parameters.scale).all()
    assert (np.abs(found.parameters.scale) >= np.finfo(np.float32).tiny).all()
    assert found.values.min(initial=0) >= format.minimum
    assert found.values.max(initial=0) <= format.maximum
    plain = quantize_blocks(values, QuantSpec(name, (32,), format.signed, scale), (32, 1))
    exact = values.astype(np.float64)
    # Rounding in float32 is left.
    assert noise(exact, found) <= noise(exact, plain) * (1 + 1e-6) + np.square(exact).sum() * 1e-13


@pytest.mark.parametrize("method", [Method.MINMAX, Method.MSE, Method.HQQ])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=str)
def test_a_value_that_is_no_number_is_refused_wherever_it_is(dtype: type, value: float, method: str) -> None:
    for place in ((0, 0), (31, 7), (69, 47)):
        values: Any = np.ones((70, 48), dtype)
        values[place] = value
        with pytest.raises(NotFiniteError):
            quantize_blocks(values, QuantSpec("uint4", (32,), symmetric=False, method=method), (32, 1))
