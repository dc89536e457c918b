"""Every encoder makes codes of any weight as its Spec says; those of other frameworks to the bit."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from onnxq.algorithms.encoders import ENCODERS, encode_array, encode_weight, encoder_of
from onnxq.algorithms.gptq import Compensation, Matrices, Moments, Terms
from onnxq.errors import ModelError
from onnxq.numerics import burn
from onnxq.numerics.affine import QTensor
from onnxq.numerics.formats import FORMATS, SCALE_FORMATS, Format
from onnxq.numerics.pairs import Pairs, fitted
from onnxq.numerics.spec import Granularity, Method, Spec
from onnxq.planning.plan import Weight

NARROW = FORMATS["int8-narrow"]
INT8 = FORMATS["int8"]


def quantize_weight(weight: NDArray[Any], format: Format, axis: int | None, method: Method = Method.MINMAX) -> QTensor:
    per = Granularity.TENSOR if axis is None else Granularity.CHANNEL
    return encode_array(weight, Spec(format.name, per, method=method), channel_axis=axis or 0, reduction_axis=-1)


def test_each_channel_uses_its_largest_magnitude() -> None:
    weight = np.array([[1.0, -2.0, 0.5], [0.25, 0.1, 0.0]], np.float32)
    quantized = quantize_weight(weight, NARROW, 0)
    assert quantized.parameters.scale.shape == (2, 1)
    assert quantized.codes.tolist() == [[64, -127, 32], [127, 51, 0]]
    assert quantized.parameters.zero_point is None


def test_negative_axes_count_from_the_end() -> None:
    weight = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    one, other = quantize_weight(weight, NARROW, -1), quantize_weight(weight, NARROW, 2)
    assert one.parameters.scale.shape == (1, 1, 5)
    np.testing.assert_array_equal(one.codes, other.codes)


def test_one_scale_for_all_has_the_rank_of_the_weight() -> None:
    quantized = quantize_weight(np.array([[1.0, -4.0]]), NARROW, None)
    assert quantized.parameters.scale.shape == (1, 1)
    assert quantized.codes.tolist() == [[32, -127]]


def test_a_channel_of_zeros_stays_zero() -> None:
    quantized = quantize_weight(np.array([[0.0, 0.0], [1.0, 2.0]], np.float32), NARROW, 0)
    assert quantized.parameters.scale.reshape(-1)[0] == 1.0
    assert quantized.dequantize()[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 5.8e-3, 3e38])
def test_weights_of_any_magnitude_keep_their_codes(magnitude: float) -> None:
    weight = np.array([[magnitude, -magnitude / 2]], np.float32)
    codes = quantize_weight(weight, NARROW, 0).codes
    # Below the smallest normal scale a weight has fewer codes, and above it all of them.
    assert codes.tolist() == ([[127, -64]] if magnitude > 1e-37 else codes.tolist())
    assert np.isfinite(quantize_weight(weight, NARROW, 0).dequantize()).all()


def test_every_method_has_its_encoder() -> None:
    assert set(ENCODERS) == set(Method)
    assert all(encoder.name is method for method, encoder in ENCODERS.items())


def test_errors_cancel_where_data_is_known_whatever_found_the_scales() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(64, 8)).astype(np.float32)
    data = (rng.normal(size=(500, 4)) @ rng.normal(size=(4, 64)) + rng.normal(size=(500, 64)) / 10).astype(np.float64)
    matrices = Matrices.of_product((64, 8))
    terms = Terms(Moments((data.T @ data)[None]), matrices)
    for method in (Method.MINMAX, Method.MSE, Method.COMPENSATED):
        weight = Weight(1, "w", Spec("int4", (32,), method=method), 1, values.size, 0)
        nearest, moved = encode_weight(values, weight), encode_weight(values, weight, terms=terms)
        np.testing.assert_array_equal(moved.parameters.scale, nearest.parameters.scale)
        lost, kept = (np.square(data @ (one.dequantize() - values)).sum() for one in (nearest, moved))
        assert kept < lost / 3
    # Where nothing is known, codes are the nearest ones.
    np.testing.assert_array_equal(
        nearest.codes, encode_array(values, Spec("int4", (32,)), channel_axis=1, reduction_axis=0).codes
    )


def test_encoders_that_look_at_data_say_what_is_to_be_seen() -> None:
    assert [method for method, encoder in ENCODERS.items() if encoder.sums] == [Method.COMPENSATED]
    spec = Spec("int4", (32,), method=Method.MSE)
    assert encoder_of(spec, None).name is Method.MSE
    assert encoder_of(spec, Compensation(1, bits=4)).name is Method.COMPENSATED
    assert encoder_of(spec, Compensation(1, bits=0)).name is Method.MSE
    assert encoder_of(replace(spec, method=Method.COMPENSATED), Compensation(1, bits=0)).name is Method.COMPENSATED


# --- as a Spec says -------------------------------------------------------------------------------------------------

BLOCKS = [Granularity.TENSOR, Granularity.CHANNEL, (32,), (5,), (2, 3), (2, 3, 4)]
every_format = pytest.mark.parametrize("name", [name for name in FORMATS if name != "int32"])


def spec_of(name: str, **choices: object) -> Spec:
    return Spec(name, symmetric=FORMATS[name].signed, **choices)


def repeated(tensor: QTensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scale and zero point of each value."""
    parameters, shape = tensor.parameters, tensor.codes.shape
    block = parameters.block_in(shape)
    places = np.ix_(*(np.arange(extent) // length for extent, length in zip(shape, block, strict=True)))
    zero = np.zeros(parameters.scale.shape) if parameters.zero_point is None else parameters.zero_point
    return parameters.effective_scale.astype(np.float64)[places], zero.astype(np.float64)[places]


def half_step(format: Format, codes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return half of the wider gap beside each code."""
    if not format.is_float:
        return np.full(codes.shape, 0.5)
    points = np.unique(format.values[np.isfinite(format.values)].astype(np.float64))
    place = np.searchsorted(points, codes)
    gaps = np.diff(points)
    return np.maximum(gaps[np.maximum(place - 1, 0)], gaps[np.minimum(place, len(gaps) - 1)]) / 2


# Scales of ue4m3 are too large for codes of 16 bits.
SCALED = [
    (name, scale)
    for name in FORMATS
    for scale in SCALE_FORMATS
    if name != "int32" and not (scale == "ue4m3" and FORMATS[name].bits == 16)
]


@pytest.mark.parametrize(("name", "scale"), SCALED)
@pytest.mark.parametrize("per", BLOCKS, ids=str)
def test_a_weight_errs_by_half_a_step_where_no_scale_is_too_small(name: str, per: object, scale: str) -> None:
    weight = np.random.default_rng(0).normal(size=(6, 35, 5)).astype(np.float32)
    tensor = encode_array(weight, spec_of(name, per=per, scale=scale), channel_axis=0, reduction_axis=1)
    step, zero = repeated(tensor)
    codes = tensor.format.numbers(tensor.codes).astype(np.float64)
    scaled = weight / step + zero
    # What is beyond the codes by less than one saturates.
    inside = np.clip(scaled, float(tensor.format.minimum), float(tensor.format.maximum))
    slack = 1e-6 * (1 + np.abs(scaled))
    assert (np.abs(codes - inside) <= half_step(tensor.format, codes) + slack).all()
    assert (np.abs(scaled - inside) <= 0.5 + slack).all()
    np.testing.assert_array_equal(tensor.dequantize(), ((codes - zero).astype(np.float32) * step.astype(np.float32)))


@every_format
def test_one_spec_is_the_same_for_each_type_of_the_model(name: str) -> None:
    weight = np.random.default_rng(1).normal(size=(40, 6)).astype(np.float16)
    spec = spec_of(name, per=(16,), scale="float16")
    one, other = (
        encode_array(values, spec, channel_axis=1, reduction_axis=0) for values in (weight, weight.astype(np.float64))
    )
    np.testing.assert_array_equal(one.codes.view(np.uint8), other.codes.view(np.uint8))
    np.testing.assert_array_equal(one.parameters.scale, other.parameters.scale)
    coarse = encode_array(weight.astype(ml_dtypes.bfloat16), spec, channel_axis=1, reduction_axis=0)
    assert coarse.codes.shape == (40, 6)


@every_format
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-30, 1e-5, 1e30, 3.4e38])
@pytest.mark.parametrize("scale", SCALE_FORMATS)
def test_no_magnitude_gives_a_scale_that_cannot_be_used(name: str, magnitude: float, scale: str) -> None:
    weight = np.array([[magnitude, -magnitude / 2, 0], [0, 0, 0]], np.float32)
    for two_level in (False, True) if scale in ("float16", "ue4m3") else (False,):
        spec = spec_of(name, per=(3,), scale=scale, two_level=two_level)
        with np.errstate(over="ignore"):
            tensor = encode_array(weight, spec, channel_axis=0, reduction_axis=1)
            decoded = tensor.dequantize()
        effective = tensor.parameters.effective_scale
        assert np.isfinite(effective).all()
        assert (effective >= np.finfo(np.float32).tiny).all()
        assert (decoded[1] == 0).all()
        assert tensor.parameters.scale[1] == 1


def test_a_scalar_and_an_empty_weight_have_codes_too() -> None:
    scalar = encode_array(np.array(-7.0), Spec("int4-narrow"), channel_axis=0, reduction_axis=0)
    assert (scalar.codes.shape, int(scalar.codes), float(scalar.dequantize())) == ((), -7, -7.0)
    empty = encode_array(np.zeros((0, 4)), Spec("int8", per=(2,)), channel_axis=1, reduction_axis=0)
    assert empty.codes.shape == (0, 4)
    assert empty.dequantize().shape == (0, 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_has_no_codes_is_told(bad: float) -> None:
    weight = np.array([[1.0, bad]], np.float32)
    for per in BLOCKS[:3]:
        with pytest.raises(ModelError, match=r"^the weight holds NaN or infinity"):
            encode_array(weight, Spec("int8", per=per), channel_axis=0, reduction_axis=1)


def test_an_order_of_memory_changes_nothing() -> None:
    weight = np.random.default_rng(2).normal(size=(33, 48)).astype(np.float32)
    for name in ("int4", "float4e2m1", "float8e4m3fn"):
        one = encode_array(weight, Spec(name, per=(32,)), channel_axis=1, reduction_axis=0)
        other = encode_array(np.asfortranarray(weight), Spec(name, per=(32,)), channel_axis=1, reduction_axis=0)
        np.testing.assert_array_equal(one.codes.view(np.uint8), other.codes.view(np.uint8))


def test_encoding_takes_less_memory_than_the_weight() -> None:
    weight = np.random.default_rng(3).normal(size=(1024, 2048)).astype(np.float32)
    for name in ("int4", "float4e2m1"):
        tracemalloc.start()
        encode_array(weight, Spec(name, per=(32,)), channel_axis=1, reduction_axis=0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < weight.nbytes


# --- as other frameworks do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", [Granularity.TENSOR, (2,)])
def test_burn_rounds_halves_away_from_zero(per: Granularity | tuple[int, ...]) -> None:
    # With scale 1, every second value lies between two codes.
    weight = np.array([[7.0, 2.5, -7.0, -2.5], [0.5, 7.0, -4.5, 7.0]], np.float32)
    spec = Spec("int4-narrow", per, method=Method.BURN)
    tensor = encode_array(weight, spec, channel_axis=0, reduction_axis=1)
    assert tensor.parameters.scale.flatten().tolist() == [1.0] * (1 if per is Granularity.TENSOR else 4)
    assert tensor.codes.tolist() == [[7, 3, -7, -3], [1, 7, -5, 7]]
    usual = encode_array(weight, Spec("int4-narrow", per), channel_axis=0, reduction_axis=1)
    assert usual.codes.tolist() == [[7, 2, -7, -2], [0, 7, -4, 7]]


def test_blocks_of_burn_lie_along_the_last_axis_whatever_is_summed() -> None:
    weight = np.random.default_rng(3).normal(size=(64, 8)).astype(np.float32)
    spec = Spec("int8-narrow", (4,), method=Method.BURN)
    tensor = encode_array(weight, spec, channel_axis=1, reduction_axis=0)
    assert tensor.parameters.scale.shape == (64, 2)
    np.testing.assert_array_equal(tensor.codes, burn.encode(weight, spec).codes)


@pytest.mark.parametrize("axis", [0, 1])
def test_pytorch_observes_each_channel_of_any_axis(axis: int) -> None:
    weight = np.random.default_rng(4).normal(size=(6, 10, 3)).astype(np.float32)
    turned = np.moveaxis(weight, axis, 0)
    scale = np.abs(turned).max(axis=(1, 2), keepdims=True) / np.float32(127.5)
    codes = np.clip(np.rint(turned * (np.float32(1) / scale)), -128, 127)
    spec = Spec("int8", Granularity.CHANNEL, method=Method.TORCH)
    for tensor in (
        encode_array(weight, spec, channel_axis=axis, reduction_axis=1 - axis),
        quantize_weight(weight, INT8, axis - 3, Method.TORCH),
    ):
        np.testing.assert_array_equal(np.moveaxis(tensor.codes, axis, 0), codes)
        assert tensor.parameters.scale.flatten().tolist() == scale.flatten().tolist()


def test_pytorch_multiplies_by_the_inverse_of_the_scale() -> None:
    generator = np.random.default_rng(5)
    weight = generator.normal(size=200_000).astype(np.float32).reshape(1, -1)
    observed, usual = quantize_weight(weight, INT8, None, Method.TORCH), quantize_weight(weight, INT8, None)
    assert observed.parameters.scale == usual.parameters.scale
    inverse = np.float32(1) / observed.parameters.scale
    np.testing.assert_array_equal(observed.codes, np.clip(np.rint(weight * inverse), -128, 127))


def test_scales_of_pytorch_are_never_below_its_epsilon() -> None:
    tensor = quantize_weight(np.zeros((2, 3), np.float32), INT8, 0, Method.TORCH)
    assert tensor.parameters.scale.flatten().tolist() == [2.0**-23] * 2


@pytest.mark.parametrize("method", [Method.MINMAX, Method.MSE])
@pytest.mark.parametrize("per", [Granularity.TENSOR, Granularity.CHANNEL])
@pytest.mark.parametrize("given", [False, True])
def test_codes_in_pairs_fit_with_scales_of_their_own_or_given_ones(
    method: Method, per: Granularity, given: bool
) -> None:
    values = np.random.default_rng(0).standard_normal((12, 5, 3, 3)).astype(np.float32)
    plain = Weight(1, "w", Spec("int8-narrow", per, method=method), 0, values.size, 1)
    weight = replace(plain, pairs=Pairs.ROW)
    parameters = encode_weight(values, plain).parameters if given else None
    found = encode_weight(values, weight, parameters)
    assert np.array_equal(fitted(found.codes, Pairs.ROW, 0, 1), found.codes)
    assert parameters is None or np.array_equal(found.parameters.scale, parameters.scale)
    if not given:
        lost, least = (np.abs(one.dequantize() - values).mean() for one in (found, encode_weight(values, plain)))
        assert lost < 1.5 * least
