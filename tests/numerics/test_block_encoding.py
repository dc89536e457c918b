"""Bands that threads take give the bits of the whole array."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from onnxq.numerics import block_encoding
from onnxq.numerics.affine import block_range, quantize
from onnxq.numerics.block_encoding import quantize_blocks
from onnxq.numerics.blocks import Shape, bands, grid_shape, pieces, whole_blocks
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.packing import pack
from onnxq.numerics.scale_search import search_params
from onnxq.numerics.spec import QuantSpec

RANDOM = np.random.default_rng(0)
SHAPES = {
    "columns": ((512, 300), (32, 1)),
    "partial blocks": ((70, 900), (32, 1)),
    "pieces of 11 rows": ((64, 5632), (32, 1)),
    "rows": ((300, 512), (1, 32)),
    "partial rows": ((1031, 130), (1, 32)),
    "experts": ((3, 256, 100), (1, 32, 1)),
    "one expert": ((1, 512, 100), (1, 32, 1)),
    "kernel": ((64, 128, 3, 3), (1, 32, 1, 1)),
    "one column": ((65536, 1), (32, 1)),
    "channels": ((256, 200), (256, 1)),
    "tensor": ((256, 200), (256, 200)),
    "squares": ((256, 200), (8, 8)),
}


def cut_small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_encoding, "_BAND", 1 << 14)
    monkeypatch.setattr(block_encoding, "bands", partial(bands, piece=1 << 16))


def weight(shape: Shape, kind: str) -> np.ndarray:
    if kind == "grid":
        # Many candidates are exact, so that their errors are equal but for rounding.
        return (RANDOM.integers(-8, 8, shape) * 0.013).astype(np.float32)
    values = (RANDOM.standard_t(4, shape) * 0.02).astype(np.float32)
    if kind == "odd":
        flat = values.reshape(-1)
        flat[::3] = 0
        flat[: flat.size // 8] = 0
        flat[-flat.size // 8 :] *= np.float32(1e-37)
        flat[flat.size // 2 : flat.size // 2 + 1000] = 0.5
    return values


def check(values: np.ndarray, spec: QuantSpec, block: Shape) -> None:
    expected = search_params(values, *block_range(values, block), spec, block)
    found = quantize_blocks(values, spec, block)
    np.testing.assert_array_equal(found.parameters.scale, expected.scale)
    if expected.zero_point is not None:
        np.testing.assert_array_equal(found.parameters.zero_point, expected.zero_point)
    np.testing.assert_array_equal(found.values, quantize(values, expected, FORMATS[spec.format]).values)
    assert found.parameters.tensor_scale == expected.tensor_scale
    assert found.shape == values.shape
    assert found.packed.tobytes() == pack(found.values, FORMATS[spec.format]).tobytes()


@pytest.mark.parametrize("place", SHAPES)
@pytest.mark.parametrize("kind", ["usual", "grid", "odd"])
@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "int8-narrow"])
def test_least_squares_finds_the_bits_of_the_whole_array(
    name: str, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_bands(monkeypatch)
    shape, block = SHAPES[place]
    check(weight(shape, kind), QuantSpec(name, symmetric=FORMATS[name].signed, method="mse"), block)


@pytest.mark.parametrize("method", ["minmax", "mse", "hqq"])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("place", ["columns", "pieces of 11 rows", "rows"])
def test_other_methods_and_types_find_the_bits_of_the_whole_array(
    place: str, dtype: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_bands(monkeypatch)
    shape, block = SHAPES[place]
    check(weight(shape, "usual").astype(dtype), QuantSpec("uint4", symmetric=False, method=method), block)


@pytest.mark.parametrize("scale", ["float16", "e8m0"])
def test_other_scale_formats_find_the_bits_of_the_whole_array(scale: str) -> None:
    check(weight((4096, 600), "usual"), QuantSpec("int4", (32,), scale=scale, method="mse"), (32, 1))


@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_two_levels_find_the_bits_of_the_whole_array(method: str) -> None:
    spec = QuantSpec("float4e2m1", (16,), scale="ue4m3", two_level=True, method=method)
    check(weight((256, 200), "usual"), spec, (16, 1))


@pytest.mark.parametrize("place", SHAPES)
def test_bands_are_cut_into_the_pieces_of_the_whole(place: str) -> None:
    shape, block = SHAPES[place]
    whole = [piece.split for piece in pieces(shape, block, 2048)]
    seen = []
    for values, _ in bands(shape, block, 4096, 2048):
        part = np.empty(shape, np.bool_)[values]
        seen += [piece.split for piece in pieces(part.shape, block, 2048)]
    assert seen == whole


@pytest.mark.parametrize("place", SHAPES)
def test_parts_hold_whole_blocks_and_cover_the_tensor_once(place: str) -> None:
    shape, block = SHAPES[place]
    values, scales = np.zeros(shape, int), np.zeros(grid_shape(shape, block), int)
    for part, own in whole_blocks(shape, block, 4096):
        values[part] += 1
        scales[own] += 1
        assert grid_shape(values[part].shape, block) == scales[own].shape
    assert (values == 1).all()
    assert (scales == 1).all()


@pytest.mark.parametrize(
    ("values", "format", "scale", "quantized"),
    [
        ([4.0, -2.0], "int4", -0.5, [-8, 4]),
        ([2.0, -4.0], "int4", 0.5, [4, -8]),
        # No value errs by more than half a step: the smaller end is 7.5 steps away.
        ([8.0, -7.875], "int4", -1.05, [-8, 7]),
        ([1.0, 0.0], "int2", -0.5, [-2, 0]),
        ([0.0, 0.0], "int4", 1.0, [0, 0]),
        # As many integers on both sides.
        ([7.0, -2.0], "int4-narrow", 1.0, [7, -2]),
    ],
)
def test_the_larger_end_of_a_block_falls_on_the_lowest_integer(
    values: list[float], format: str, scale: float, quantized: list[int]
) -> None:
    found = quantize_blocks(np.array(values), QuantSpec(format, (2,)), (2,))
    assert found.parameters.scale == pytest.approx([scale])
    assert found.values.astype(int).tolist() == quantized


def test_rounding_to_nearest_errs_no_more_than_onnxruntimes_quantizer() -> None:
    values = np.random.default_rng(5).normal(size=(64, 512)).astype(np.float32)
    blocks = values.reshape(-1, 32)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1) / -8
    theirs = np.clip(np.rint(blocks / extreme), -8, 7) * extreme
    ours = quantize_blocks(values, QuantSpec("int4", (1, 32)), (1, 32)).dequantize()
    assert np.square(ours - values).sum() < 1.01 * np.square(theirs - blocks).sum()
