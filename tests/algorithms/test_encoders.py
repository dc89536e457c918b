"""Encoders: each method of a spec, those of installed packages, and the checks of what they return."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import MODELS, Build
from numpy.typing import NDArray
from observations import observe
from packaged_encoders import HALVED, SEEING, installed_package

from onnxq.algorithms.encode import encode_with
from onnxq.algorithms.encoders import (
    ENCODERS,
    check_encoded,
    encode_array,
    encode_weight,
    encoder_named,
    encoder_of,
    weight_requests,
)
from onnxq.algorithms.encoding_config import DEFAULT_CONFIG, EncodingConfig
from onnxq.algorithms.encodings import EncodingCache
from onnxq.algorithms.gptq import Gptq, HessianInfo, WeightMatrices
from onnxq.calibration.data import Data
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Mode, Rule, Scheme
from onnxq.errors import ModelError, SchemeError
from onnxq.evaluation.goal import Goal
from onnxq.ir import Graph, as_graph
from onnxq.numerics import burn
from onnxq.numerics.affine import QTensor, QuantParams
from onnxq.numerics.blocks import block_shape
from onnxq.numerics.formats import FORMATS, SCALE_FORMATS, QuantDType
from onnxq.numerics.pairs import Pairs, fit_pairs
from onnxq.numerics.spec import Granularity, Method, QuantSpec
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.plan import Decision, Mean, Plan, Weight
from onnxq.planning.plan_file import load_plan, save_plan

NARROW = FORMATS["int8-narrow"]
INT8 = FORMATS["int8"]


def quantize_weight(
    weight: NDArray[Any], format: QuantDType, axis: int | None, method: Method = Method.MINMAX
) -> QTensor:
    granularity = Granularity.TENSOR if axis is None else Granularity.CHANNEL
    return encode_array(
        weight, QuantSpec(format.name, granularity, method=method), channel_axis=axis or 0, reduction_axis=-1
    )


@pytest.mark.parametrize(
    ("weight", "axis", "method", "scale", "quantized"),
    [
        # Each channel uses its largest magnitude, and one of zeros has scale 1.
        ([[1.0, -2.0, 0.5], [0.25, 0.1, 0.0]], 0, "minmax", [[2 / 127], [0.25 / 127]], [[64, -127, 32], [127, 51, 0]]),
        ([[1.0, -2.0, 0.5], [0.25, 0.1, 0.0]], -2, "minmax", [[2 / 127], [0.25 / 127]], [[64, -127, 32], [127, 51, 0]]),
        ([[0.0, 0.0], [1.0, 2.0]], 0, "minmax", [[1.0], [2 / 127]], [[0, 0], [64, 127]]),
        ([[1.0, -4.0]], None, "minmax", [[4 / 127]], [[32, -127]]),
        # PyTorch's scales are never below its epsilon.
        ([[0.0, 0.0], [0.0, 0.0]], 0, "torch", [[2.0**-23], [2.0**-23]], [[0, 0], [0, 0]]),
    ],
)
def test_a_scale_has_the_rank_of_the_weight(
    weight: list[list[float]], axis: int | None, method: Method, scale: object, quantized: object
) -> None:
    found = quantize_weight(np.float32(weight), NARROW, axis, method)
    np.testing.assert_allclose(found.parameters.scale, scale, rtol=1e-6)
    assert found.parameters.scale.ndim == 2
    assert found.values.tolist() == quantized
    assert found.parameters.zero_point is None


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 5.8e-3, 3e38])
def test_weights_of_any_magnitude_keep_their_codes(magnitude: float) -> None:
    weight = np.array([[magnitude, -magnitude / 2]], np.float32)
    quantized = quantize_weight(weight, NARROW, 0).values
    # Below the smallest normal scale a weight has fewer quantized values, and above it all of them.
    assert quantized.tolist() == ([[127, -64]] if magnitude > 1e-37 else quantized.tolist())
    assert np.isfinite(quantize_weight(weight, NARROW, 0).dequantize()).all()


def test_every_method_has_its_encoder() -> None:
    assert set(ENCODERS) == set(Method)
    assert all(encoder.name is method for method, encoder in ENCODERS.items())


def test_errors_cancel_where_data_is_known_whatever_found_the_scales() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(64, 8)).astype(np.float32)
    data = (rng.normal(size=(500, 4)) @ rng.normal(size=(4, 64)) + rng.normal(size=(500, 64)) / 10).astype(np.float64)
    matrices = WeightMatrices.of_product((64, 8))
    terms = HessianInfo((data.T @ data)[None], matrices)
    for method in (Method.MINMAX, Method.MSE, Method.GPTQ):
        weight = Weight(1, "w", QuantSpec("int4", (32,), method=method), 1, values.size, 0)
        nearest, moved = encode_weight(values, weight), encode_weight(values, weight, terms=terms)
        np.testing.assert_array_equal(moved.parameters.scale, nearest.parameters.scale)
        lost, kept = (np.square(data @ (one.dequantize() - values)).sum() for one in (nearest, moved))
        assert kept < lost / 3
    # Where nothing is known, quantized values are the nearest ones.
    np.testing.assert_array_equal(
        nearest.values, encode_array(values, QuantSpec("int4", (32,)), channel_axis=1, reduction_axis=0).values
    )


def test_encoders_that_look_at_data_say_what_is_to_be_seen() -> None:
    assert [method for method, encoder in ENCODERS.items() if encoder.sums] == [Method.GPTQ]
    spec = QuantSpec("int4", (32,), method=Method.MSE)
    assert encoder_of(spec, None).name is Method.MSE
    assert encoder_of(spec, Gptq(1, bits=4)).name is Method.GPTQ
    assert encoder_of(spec, Gptq(1, bits=0)).name is Method.MSE
    assert encoder_of(replace(spec, method=Method.GPTQ), Gptq(1, bits=0)).name is Method.GPTQ


# --- as a Spec says -------------------------------------------------------------------------------------------------

BLOCKS = [Granularity.TENSOR, Granularity.CHANNEL, (32,), (5,), (2, 3), (2, 3, 4)]
every_format = pytest.mark.parametrize("name", [name for name in FORMATS if name != "int32"])


def spec_of(name: str, **choices: object) -> QuantSpec:
    return QuantSpec(name, symmetric=FORMATS[name].signed, **choices)


def repeated(tensor: QTensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scale and zero point of each value."""
    parameters, shape = tensor.parameters, tensor.values.shape
    block = parameters.block_in(shape)
    places = np.ix_(*(np.arange(extent) // length for extent, length in zip(shape, block, strict=True)))
    zero = np.zeros(parameters.scale.shape) if parameters.zero_point is None else parameters.zero_point
    return parameters.effective_scale.astype(np.float64)[places], zero.astype(np.float64)[places]


def half_step(format: QuantDType, quantized: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return half of the wider gap beside each code."""
    if not format.is_float:
        return np.full(quantized.shape, 0.5)
    points = np.unique(format.values[np.isfinite(format.values)].astype(np.float64))
    place = np.searchsorted(points, quantized)
    gaps = np.diff(points)
    return np.maximum(gaps[np.maximum(place - 1, 0)], gaps[np.minimum(place, len(gaps) - 1)]) / 2


# Scales of ue4m3 are too large for quantized values of 16 bits.
SCALED = [
    (name, scale)
    for name in FORMATS
    for scale in SCALE_FORMATS
    if name != "int32" and not (scale == "ue4m3" and FORMATS[name].bits == 16)
]


@pytest.mark.parametrize(("name", "scale"), SCALED)
@pytest.mark.parametrize("granularity", BLOCKS, ids=str)
def test_a_weight_errs_by_half_a_step_where_no_scale_is_too_small(name: str, granularity: object, scale: str) -> None:
    weight = np.random.default_rng(0).normal(size=(6, 35, 5)).astype(np.float32)
    tensor = encode_array(weight, spec_of(name, granularity=granularity, scale=scale), channel_axis=0, reduction_axis=1)
    step, zero = repeated(tensor)
    quantized = tensor.format.numbers(tensor.values).astype(np.float64)
    scaled = weight / step + zero
    # What is beyond the quantized values by less than one saturates.
    inside = np.clip(scaled, float(tensor.format.minimum), float(tensor.format.maximum))
    slack = 1e-6 * (1 + np.abs(scaled))
    assert (np.abs(quantized - inside) <= half_step(tensor.format, quantized) + slack).all()
    assert (np.abs(scaled - inside) <= 0.5 + slack).all()
    np.testing.assert_array_equal(
        tensor.dequantize(), ((quantized - zero).astype(np.float32) * step.astype(np.float32))
    )


@every_format
def test_one_spec_is_the_same_for_each_type_of_the_model(name: str) -> None:
    weight = np.random.default_rng(1).normal(size=(40, 6)).astype(np.float16)
    spec = spec_of(name, granularity=(16,), scale="float16")
    one, other = (
        encode_array(values, spec, channel_axis=1, reduction_axis=0) for values in (weight, weight.astype(np.float64))
    )
    np.testing.assert_array_equal(one.values.view(np.uint8), other.values.view(np.uint8))
    np.testing.assert_array_equal(one.parameters.scale, other.parameters.scale)
    coarse = encode_array(weight.astype(ml_dtypes.bfloat16), spec, channel_axis=1, reduction_axis=0)
    assert coarse.values.shape == (40, 6)


@every_format
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-30, 1e-5, 1e30, 3.4e38])
@pytest.mark.parametrize("scale", SCALE_FORMATS)
def test_no_magnitude_gives_a_scale_that_cannot_be_used(name: str, magnitude: float, scale: str) -> None:
    weight = np.array([[magnitude, -magnitude / 2, 0], [0, 0, 0]], np.float32)
    for two_level in (False, True) if scale in ("float16", "ue4m3") else (False,):
        spec = spec_of(name, granularity=(3,), scale=scale, two_level=two_level)
        with np.errstate(over="ignore"):
            tensor = encode_array(weight, spec, channel_axis=0, reduction_axis=1)
            decoded = tensor.dequantize()
        effective = tensor.parameters.effective_scale
        assert np.isfinite(effective).all()
        assert (np.abs(effective) >= np.finfo(np.float32).tiny).all()
        assert spec.has_signed_scales or (effective > 0).all()
        assert (decoded[1] == 0).all()
        assert tensor.parameters.scale[1] == 1


def test_a_scalar_and_an_empty_weight_have_codes_too() -> None:
    scalar = encode_array(np.array(-7.0), QuantSpec("int4-narrow"), channel_axis=0, reduction_axis=0)
    assert (scalar.values.shape, int(scalar.values), float(scalar.dequantize())) == ((), -7, -7.0)
    empty = encode_array(np.zeros((0, 4)), QuantSpec("int8", granularity=(2,)), channel_axis=1, reduction_axis=0)
    assert empty.values.shape == (0, 4)
    assert empty.dequantize().shape == (0, 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_has_no_codes_is_told(bad: float) -> None:
    weight = np.array([[1.0, bad]], np.float32)
    for granularity in BLOCKS[:3]:
        with pytest.raises(ModelError, match=r"^the weight holds NaN or infinity"):
            encode_array(weight, QuantSpec("int8", granularity=granularity), channel_axis=0, reduction_axis=1)


def test_an_order_of_memory_changes_nothing() -> None:
    weight = np.random.default_rng(2).normal(size=(33, 48)).astype(np.float32)
    for name in ("int4", "float4e2m1", "float8e4m3fn"):
        one = encode_array(weight, QuantSpec(name, granularity=(32,)), channel_axis=1, reduction_axis=0)
        other = encode_array(
            np.asfortranarray(weight), QuantSpec(name, granularity=(32,)), channel_axis=1, reduction_axis=0
        )
        np.testing.assert_array_equal(one.values.view(np.uint8), other.values.view(np.uint8))


def test_encoding_takes_less_memory_than_the_weight() -> None:
    weight = np.random.default_rng(3).normal(size=(8192, 2048)).astype(np.float32)
    for name in ("int4", "float4e2m1"):
        tracemalloc.start()
        encode_array(weight, QuantSpec(name, granularity=(32,)), channel_axis=1, reduction_axis=0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < weight.nbytes


# --- as other frameworks do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, (2,)])
def test_burn_rounds_halves_away_from_zero(granularity: Granularity | tuple[int, ...]) -> None:
    # With scale 1, every second value lies between two quantized values.
    weight = np.array([[7.0, 2.5, -7.0, -2.5], [0.5, 7.0, -4.5, 7.0]], np.float32)
    spec = QuantSpec("int4-narrow", granularity, method=Method.BURN)
    tensor = encode_array(weight, spec, channel_axis=0, reduction_axis=1)
    assert tensor.parameters.scale.flatten().tolist() == [1.0] * (1 if granularity is Granularity.TENSOR else 4)
    assert tensor.values.tolist() == [[7, 3, -7, -3], [1, 7, -5, 7]]
    usual = encode_array(weight, QuantSpec("int4-narrow", granularity), channel_axis=0, reduction_axis=1)
    assert usual.values.tolist() == [[7, 2, -7, -2], [0, 7, -4, 7]]


def test_blocks_of_burn_lie_along_the_last_axis_whatever_is_summed() -> None:
    weight = np.random.default_rng(3).normal(size=(64, 8)).astype(np.float32)
    spec = QuantSpec("int8-narrow", (4,), method=Method.BURN)
    tensor = encode_array(weight, spec, channel_axis=1, reduction_axis=0)
    assert tensor.parameters.scale.shape == (64, 2)
    np.testing.assert_array_equal(tensor.values, burn.encode(weight, spec).values)


@pytest.mark.parametrize("axis", [0, 1])
def test_pytorch_observes_each_channel_of_any_axis(axis: int) -> None:
    weight = np.random.default_rng(4).normal(size=(6, 10, 3)).astype(np.float32)
    turned = np.moveaxis(weight, axis, 0)
    scale = np.abs(turned).max(axis=(1, 2), keepdims=True) / np.float32(127.5)
    quantized = np.clip(np.rint(turned * (np.float32(1) / scale)), -128, 127)
    spec = QuantSpec("int8", Granularity.CHANNEL, method=Method.TORCH)
    for tensor in (
        encode_array(weight, spec, channel_axis=axis, reduction_axis=1 - axis),
        quantize_weight(weight, INT8, axis - 3, Method.TORCH),
    ):
        np.testing.assert_array_equal(np.moveaxis(tensor.values, axis, 0), quantized)
        assert tensor.parameters.scale.flatten().tolist() == scale.flatten().tolist()


def test_pytorch_multiplies_by_the_inverse_of_the_scale() -> None:
    generator = np.random.default_rng(5)
    weight = generator.normal(size=200_000).astype(np.float32).reshape(1, -1)
    observed, usual = quantize_weight(weight, INT8, None, Method.TORCH), quantize_weight(weight, INT8, None)
    assert observed.parameters.scale == usual.parameters.scale
    inverse = np.float32(1) / observed.parameters.scale
    np.testing.assert_array_equal(observed.values, np.clip(np.rint(weight * inverse), -128, 127))


@pytest.mark.parametrize("method", [Method.MINMAX, Method.MSE])
@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.CHANNEL])
@pytest.mark.parametrize("given", [False, True])
def test_codes_in_pairs_fit_with_scales_of_their_own_or_given_ones(
    method: Method, granularity: Granularity, given: bool
) -> None:
    values = np.random.default_rng(0).standard_normal((12, 5, 3, 3)).astype(np.float32)
    plain = Weight(1, "w", QuantSpec("int8-narrow", granularity, method=method), 0, values.size, 1)
    weight = replace(plain, pairs=Pairs.ROW)
    parameters = encode_weight(values, plain).parameters if given else None
    found = encode_weight(values, weight, parameters)
    assert np.array_equal(fit_pairs(found.values, Pairs.ROW, 0, 1), found.values)
    assert parameters is None or np.array_equal(found.parameters.scale, parameters.scale)
    if not given:
        lost, least = (np.abs(one.dequantize() - values).mean() for one in (found, encode_weight(values, plain)))
        assert lost < 1.5 * least


def test_pairs_of_a_weight_that_is_packed_fit_too() -> None:
    values = np.random.default_rng(5).standard_normal((4096, 1024)).astype(np.float32)
    plain = Weight(1, "w", QuantSpec("int4-narrow", Granularity.CHANNEL), 0, values.size, 1)
    assert encode_weight(values, plain).unpacked == values.shape
    found = encode_weight(values, replace(plain, pairs=Pairs.ROW))
    assert np.array_equal(fit_pairs(found.values, Pairs.ROW, 0, 1), found.values)


# Encoders that packages register are rows like ours: found by name, given data, and refused in a sentence.

FORCED = Goal(force=True)
FOUR_BITS = QuantSpec("int4", (16,))
CHANNELS = QuantSpec("int8-narrow", Granularity.CHANNEL)
VALUES = np.random.default_rng(0).normal(size=(48, 24)).astype(np.float32)
SOME = Gptq(rows=2000, bits=0)
PRODUCT = "(float[999,48] x) => (float[999,24] y) { [n] y = Gemm(x, w, b) }"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with installed_package(monkeypatch):
        yield


def by(method: str, spec: QuantSpec = FOUR_BITS) -> Weight:
    return Weight(1, "w", replace(spec, method=method), 1, VALUES.size, 0)


def plan_by(method: str, mode: Mode = Mode.STORAGE, spec: QuantSpec = FOUR_BITS) -> Plan:
    bias = 2 if mode is Mode.STATIC else None
    return Plan((Decision("n", "Gemm", mode, "", (by(method, spec),), bias, "x", Mean("x", -1)),), (), "s", "t")


def graph_of(build: Build, bias: float = 1.0) -> Graph:
    return as_graph(build(PRODUCT, w=VALUES, b=np.full(24, bias, np.float32)))


def data(seed: int) -> np.ndarray:
    """Return data of which a few causes make all channels."""
    causes = np.random.default_rng(0).normal(size=(48, 48)) / np.arange(1, 49)
    return (np.random.default_rng(seed).normal(size=(999, 48)) @ causes.T).astype(np.float32)


def test_an_encoder_is_found_by_the_name_that_it_is_registered_by() -> None:
    assert encoder_named("halved") is HALVED
    assert encoder_named("mse").name is Method.MSE
    found = encode_array(VALUES, replace(FOUR_BITS, method="halved"), channel_axis=1, reduction_axis=0)
    assert (np.abs(found.dequantize()) <= np.abs(VALUES).max() / 2 * 8 / 7).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("halvd", "method 'halvd' is unknown, .* did you mean 'halved'"),
        ("nothing", "Encoder 'nothing' of packaged_encoders:NOTHING cannot be loaded"),
        ("function", "Encoder 'function' is none, expected an onnxq.algorithms.encoders.Encoder of that name"),
        ("twice", "Encoder 'twice' is none, expected an onnxq.algorithms.encoders.Encoder of that name"),
        ("fails", "encoder 'fails' for weight w failed: ZeroDivisionError: no codes"),
        ("writes", "encoder 'writes' for weight w failed: ValueError: assignment destination is read-only"),
    ],
)
def test_one_that_is_wrong_or_fails_is_told_why(name: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        encode_weight(VALUES, by(name))


def test_scales_that_a_kernel_needs_are_kept_or_the_encoder_is_refused(build: Build) -> None:
    graph, given = graph_of(build, bias=1e9), {"x": QuantParams(np.array(0.05, np.float32), None)}
    usual, halved = (
        encode_with(plan_by(name, Mode.STATIC, CHANNELS), graph, given, {}).weights["n", 1].parameters.scale
        for name in ("minmax", "halved")
    )
    np.testing.assert_array_equal(usual, halved)
    with pytest.raises(SchemeError, match="'own-scales' for weight w failed: ValueError: it changed the given scales"):
        encode_with(plan_by("own-scales", Mode.STATIC, CHANNELS), graph, given, {})


def test_codes_fit_in_pairs_where_a_kernel_takes_them_so() -> None:
    alone = by("halved", CHANNELS)
    for weight, fits in ((alone, False), (replace(alone, pairs=Pairs.ROW), True)):
        encodings = encode_weight(VALUES, weight).values.astype(int)
        assert bool(np.abs(encodings[::2] + encodings[1::2]).max() <= 128) is fits


def test_codes_in_a_cache_are_told_apart_by_encoder(build: Build) -> None:
    graph, cache = graph_of(build), EncodingCache()
    found = [
        encode_with(plan_by(name), graph, {}, {}, cache=cache).weights["n", 1]
        for name in ("minmax", "halved", "halved")
    ]
    assert (found[0].values != found[1].values).any()
    assert found[1] is found[2]


def test_what_asks_for_data_gets_it_at_once_and_nothing_where_none_was_seen(build: Build) -> None:
    graph, plan = graph_of(build), plan_by("seeing")
    requests = weight_requests(plan, graph, SOME)
    assert [(request.tensor, request.kind) for request in requests] == [("x", "hessian")]
    statistics = observe({"x": data(1)}, requests, "0" * 32)
    config = EncodingConfig(gptq=SOME)
    seen, unseen = (
        encode_with(plan, graph, {}, {}, one, config=config) for one in (statistics, CalibrationStatistics())
    )
    errors = [np.square(data(2) @ (one.weights["n", 1].dequantize() - VALUES)).sum() for one in (seen, unseen)]
    assert errors[0] < 0.8 * errors[1]
    same = encode_with(plan_by("gptq"), graph, {}, {}, statistics, config=config).weights["n", 1]
    np.testing.assert_array_equal(seen.weights["n", 1].values, same.values)


def test_codes_that_a_package_chooses_are_not_chosen_again(build: Build) -> None:
    graph, plan, every = graph_of(build), plan_by("halved"), Gptq(rows=2000)
    assert encoder_of(plan.decisions[0].weights[0].spec, every) is HALVED
    assert encoder_of(by("seeing").spec, every) is SEEING
    assert weight_requests(plan, graph, every) == ()
    statistics = observe({"x": data(1)}, weight_requests(plan_by("minmax"), graph, every), "0" * 32)
    one, other = (
        encode_with(plan, graph, {}, {}, statistics, config=config).weights["n", 1].values
        for config in (DEFAULT_CONFIG, EncodingConfig(gptq=every))
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("greedy", "'greedy' for weight w failed: TypeError: it asks for 'everything' of data, expected Sums whose"),
        ("lost", "'lost' for weight w failed: KeyError: 'Gemm'"),
    ],
)
def test_what_asks_for_data_in_another_way_is_told(name: str, message: str, build: Build) -> None:
    with pytest.raises(SchemeError, match=message):
        weight_requests(plan_by(name), graph_of(build), SOME)


@pytest.mark.parametrize(("method", "usual"), [("halved", "minmax"), ("seeing", "gptq")])
def test_a_scheme_asks_for_it_and_the_plan_makes_the_same_bytes_again(method: str, usual: str, tmp_path: Path) -> None:
    data, first, again, ours = Data(MODELS / "data" / "calib.npz", limit=16), *map(tmp_path.joinpath, "abc")
    off = Budget(search="off", latency_seconds=0, accuracy="off", certificate=False)
    scheme = Scheme((Rule(Mode.WEIGHT_ONLY, weight=QuantSpec("int4", (32,), method=method)),))
    plan = quantize(MODELS / "gru.onnx", data, first, scheme=scheme, goal=FORCED, budget=off).report.plan
    assert {weight.spec.method for decision in plan.decisions for weight in decision.weights} == {method}
    assert plan.accuracy == (("gptq",) if method == "seeing" else ())
    save_plan(plan, tmp_path / "plan.toml")
    assert f'method = "{method}"' in (tmp_path / "plan.toml").read_text()
    kept = load_plan(tmp_path / "plan.toml")
    quantize(
        MODELS / "gru.onnx", data, again, scheme=kept, goal=FORCED, budget=Budget(latency_seconds=0, certificate=False)
    )
    assert again.read_bytes() == first.read_bytes()
    scheme = Scheme((Rule(Mode.WEIGHT_ONLY, weight=QuantSpec("int4", (32,), method=usual)),))
    quantize(MODELS / "gru.onnx", data, ours, scheme=scheme, goal=FORCED, budget=off)
    assert (ours.read_bytes() == first.read_bytes()) is (method == "seeing")


# Codes of others are taken when they are what the Spec says, and each fault has its sentence.

SHAPE = (40, 3)
WEIGHT = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
BLOCKS_OF_TWO, AFFINE = QuantSpec("int4-narrow", (16,), scale="float16"), QuantSpec("uint4", (16,), symmetric=False)
TWO_LEVELS = QuantSpec("float4e2m1", (16,), scale="ue4m3", two_level=True)


def encoded(spec: QuantSpec) -> QTensor:
    return encode_array(WEIGHT, spec, channel_axis=1, reduction_axis=0)


def looked_at(found: object, spec: QuantSpec, given: QuantParams | None = None) -> QTensor:
    return check_encoded(
        found, spec, SHAPE, block_shape(spec.granularity, SHAPE, channel_axis=1, reduction_axis=0), given
    )


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "int32"])
@pytest.mark.parametrize("granularity", [*Granularity, (16,), (2, 3), (64,)])
def test_what_our_own_encoders_return_is_taken(name: str, granularity: Any) -> None:
    for scale in ("float32", "bfloat16"):
        spec = QuantSpec(name, granularity, symmetric=FORMATS[name].signed, scale=scale)
        found = encoded(spec)
        assert looked_at(found, spec) is found
        assert looked_at(found, spec, found.parameters) is found


def test_two_levels_and_blocks_that_follow_from_the_scales_are_taken() -> None:
    found = encoded(TWO_LEVELS)
    assert looked_at(found, TWO_LEVELS) is found
    channels = QuantSpec("int8", Granularity.CHANNEL)
    plain = encoded(channels)
    bare = replace(plain, parameters=replace(plain.parameters, block=None))
    assert looked_at(bare, channels) is bare


def with_codes(spec: QuantSpec, *quantized: Any) -> QTensor:
    """Return quantized values of which the first are others."""
    found = encoded(spec)
    changed = found.values.copy()
    changed.view(np.uint8).reshape(-1)[: len(quantized)] = np.array(quantized).astype(np.uint8)
    return replace(found, stored=changed)


def with_parameters(spec: QuantSpec, **changes: Any) -> QTensor:
    found = encoded(spec)
    return replace(found, parameters=replace(found.parameters, **changes))


def with_scale(spec: QuantSpec, value: float) -> QTensor:
    scale = encoded(spec).parameters.scale.copy()
    scale[0, 0] = value
    return with_parameters(spec, scale=scale)


ONES = np.ones((3, 3), np.float32)


@pytest.mark.parametrize(
    ("found", "spec", "message"),
    [
        (encoded(AFFINE), BLOCKS_OF_TWO, "its quantized values are uint4 in uint8, expected int4-narrow in int8"),
        (replace(encoded(BLOCKS_OF_TWO), stored=WEIGHT.astype(np.int64)), BLOCKS_OF_TWO,
         "its quantized values are int4-narrow in int64, expected int4-narrow in int8"),
        (replace(encoded(BLOCKS_OF_TWO), stored=np.zeros((3, 40), np.int8)), BLOCKS_OF_TWO,
         "its quantized values have shape [3, 40], expected that of the weight, [40, 3]"),
        (with_codes(BLOCKS_OF_TWO, -8), BLOCKS_OF_TWO,
         "some of its values are none of int4-narrow, which are from -7 to 7"),
        (with_codes(AFFINE, 16), AFFINE, "some of its values are none of uint4, which are from 0 to 15"),
        (with_codes(TWO_LEVELS, 16), TWO_LEVELS, "some of its values are none of float4e2m1, which are from -6 to 6"),
        (with_codes(QuantSpec("nf4"), 16), QuantSpec("nf4"), "some of its values are none of nf4"),
        (with_codes(QuantSpec("float8e4m3fn"), 0x7F), QuantSpec("float8e4m3fn"),
         "some of its values are none of float8e4m3fn"),
        (with_codes(QuantSpec("float8e5m2"), 0x7C), QuantSpec("float8e5m2"),
         "some of its values are none of float8e5m2"),
        (with_parameters(BLOCKS_OF_TWO, scale=np.ones((40, 3), np.float32)), BLOCKS_OF_TWO,
         "its scales are float32 of shape [40, 3], expected float32 of shape [3, 3]"),
        (with_parameters(BLOCKS_OF_TWO, scale=ONES.astype(np.float64)), BLOCKS_OF_TWO,
         "its scales are float64 of shape [3, 3]"),
        (with_parameters(BLOCKS_OF_TWO, block=(14, 1)), BLOCKS_OF_TWO,
         "its scales are of blocks of [14, 1], expected [16, 1]"),
        (with_parameters(BLOCKS_OF_TWO, block=None), BLOCKS_OF_TWO,
         "its scales are of blocks of [13, 1], expected [16, 1]"),
        (with_scale(BLOCKS_OF_TWO, np.nan), BLOCKS_OF_TWO, "some of its scales are NaN, infinite, zero or negative"),
        (with_scale(BLOCKS_OF_TWO, np.inf), BLOCKS_OF_TWO, "some of its scales are NaN, infinite, zero or negative"),
        (with_scale(BLOCKS_OF_TWO, 0), BLOCKS_OF_TWO, "some of its scales are NaN, infinite, zero or negative"),
        (with_scale(BLOCKS_OF_TWO, -1), BLOCKS_OF_TWO, "some of its scales are NaN, infinite, zero or negative"),
        (with_scale(BLOCKS_OF_TWO, 0.1), BLOCKS_OF_TWO,
         "some of its scales are no float16, of 6.10352e-05 to 65504; round them"),
        (with_scale(QuantSpec("int8", (16,)), 1e-40), QuantSpec("int8", (16,)),
         "some of its scales are no float32, of 1.17"),
        (with_parameters(TWO_LEVELS, tensor_scale=None), TWO_LEVELS, "the scale of its tensor is None, expected one"),
        (with_parameters(TWO_LEVELS, tensor_scale=np.float32(0)), TWO_LEVELS, "the scale of its tensor is 0.0, expect"),
        (with_parameters(BLOCKS_OF_TWO, tensor_scale=np.float32(1)), BLOCKS_OF_TWO,
         "the scale of its tensor is 1.0, expected None"),
        (with_parameters(AFFINE, zero_point=None), AFFINE, "it has no zero points, expected some"),
        (with_parameters(BLOCKS_OF_TWO, zero_point=ONES.astype(np.int8)), BLOCKS_OF_TWO,
         "it has zero points, expected none"),
        (with_parameters(AFFINE, zero_point=np.zeros((3, 1), np.uint8)), AFFINE,
         "its zero points are uint8 of shape [3, 1], expected uint8 like the scales"),
        (with_parameters(AFFINE, zero_point=ONES), AFFINE, "its zero points are float32 of shape [3, 3]"),
        (with_parameters(AFFINE, zero_point=np.full((3, 3), 16, np.uint8)), AFFINE,
         "some of its zero points are no values of uint4"),
    ],
)  # fmt: skip
def test_what_is_not_as_the_spec_says_has_its_sentence(found: QTensor, spec: QuantSpec, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        looked_at(found, spec)


@pytest.mark.parametrize("found", [None, WEIGHT, (WEIGHT, 1.0)])
def test_what_is_no_codes_is_told(found: object) -> None:
    with pytest.raises(TypeError, match=f"it returned {type(found).__name__}, expected an onnxq.numerics.affine.QT"):
        looked_at(found, BLOCKS_OF_TWO)


@pytest.mark.parametrize("changed", ["scale", "zero_point"])
def test_scales_that_were_given_are_kept(changed: str) -> None:
    found = encoded(AFFINE)
    given = replace(found.parameters, **{changed: getattr(found.parameters, changed) + np.uint8(1)})
    with pytest.raises(ValueError, match="it changed the given scales"):
        looked_at(found, AFFINE, given)
