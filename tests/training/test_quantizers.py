"""Fake quantizers round as the written model does, and their gradients are those of the papers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from onnxq.algorithms.encoders import encode_weight
from onnxq.algorithms.equalization import ChannelScales, WeightRescaling
from onnxq.ir import Node, Variable, constant
from onnxq.numerics.affine import QTensor, QuantParams, dequantize, params_from_range, quantize
from onnxq.numerics.formats import FORMATS, QuantDType
from onnxq.numerics.pairs import Pairs, fit_pairs
from onnxq.numerics.spec import Granularity, Method, QuantSpec
from onnxq.planning.plan import Weight
from onnxq.training.quantizers import (
    FakeQuantize,
    FakeQuantizedBias,
    FakeQuantizedWeight,
    SharedChannelScales,
    TensorChannelScales,
    WeightChannelScales,
    dynamic_fake_quantize,
    fake_quantize,
    spread,
    straight_through,
)

DATA = QuantSpec("uint8", symmetric=False)


VALUES = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)


def weight_of(spec: QuantSpec) -> FakeQuantizedWeight:
    weight = Weight(1, "w", spec, 0, VALUES.size, 1)
    return FakeQuantizedWeight(weight, VALUES, encode_weight(VALUES, weight))


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec("int8-narrow"),
        QuantSpec("int4", Granularity.CHANNEL),
        QuantSpec("uint4", (32,), symmetric=False, method=Method.HQQ),
        QuantSpec("int2", (16,), method=Method.MSE),
        QuantSpec("float4e2m1", (16,), scale="ue4m3", two_level=True),
        QuantSpec("nf4", (16,)),
    ],
)
def test_a_weight_gives_the_values_of_its_codes(spec: QuantSpec) -> None:
    weight = weight_of(spec)
    assert np.array_equal(weight().detach().numpy(), weight.quantized().dequantize())


def in_pairs(shape: tuple[int, ...]) -> FakeQuantizedWeight:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    spec = QuantSpec("int8-narrow", Granularity.CHANNEL)
    weight = Weight(1, "w", spec, 0, values.size, 1, Pairs.ROW)
    return FakeQuantizedWeight(weight, values, encode_weight(values, weight))


@pytest.mark.parametrize("shape", [(6, 40), (6, 5, 3, 3)])
def test_codes_in_pairs_fit_whatever_is_learned(shape: tuple[int, ...]) -> None:
    weight = in_pairs(shape)
    with torch.no_grad():
        weight.values.mul_(1.7)
        weight.log_scale.add_(0.1)
    found = weight.quantized()
    assert np.abs(found.values.astype(int)).max() > 120
    assert np.array_equal(fit_pairs(found.values, Pairs.ROW, 0, 1), found.values)
    assert np.array_equal(weight().detach().numpy(), found.dequantize())


def test_values_and_scales_of_large_pairs_learn() -> None:
    weight = in_pairs((4, 6))
    with torch.no_grad():
        weight.values.fill_(1)
        weight.base.fill_(1 / 100)
    weight().sum().backward()
    # What the two give up is decided by their scale and no longer by them.
    assert weight().detach().numpy() == pytest.approx(0.64)
    assert weight.values.grad is not None
    assert weight.values.grad.abs().max() == 0
    assert weight.log_scale.grad is not None
    assert weight.log_scale.grad.numpy() == pytest.approx(6 * 0.64, rel=1e-3)


def test_a_weight_is_decoded_once_as_long_as_it_stays() -> None:
    weight = weight_of(QuantSpec("int8"))
    with torch.no_grad():
        first = weight()
        assert weight() is first
        weight.values.mul_(2)
        doubled = weight()
        assert not doubled.equal(first)
        weight.fake_quant_enabled = False
        assert weight().equal(weight.values)
    assert weight().requires_grad


def test_scales_of_other_types_stay() -> None:
    assert weight_of(QuantSpec("int4", (16,))).log_scale.requires_grad
    assert not weight_of(QuantSpec("int4", (16,), scale="float16")).log_scale.requires_grad


def test_codes_that_are_not_the_nearest_stay_until_they_learn() -> None:
    spec, weight = QuantSpec("int4"), Weight(1, "w", QuantSpec("int4"), 0, VALUES.size, 1)
    nearest = encode_weight(VALUES, weight)
    chosen = nearest.values.copy()
    chosen[0, 0] += 1 if chosen[0, 0] < 7 else -1
    found = FakeQuantizedWeight(weight, VALUES, QTensor(chosen, nearest.parameters, FORMATS[spec.format]))
    assert np.array_equal(found.quantized().values, chosen)
    assert float(found.values.detach()[0, 1]) == VALUES[0, 1]


def test_observers_move_the_range_and_then_stop() -> None:
    quantizer = FakeQuantize(DATA, params_from_range(-1, 1, FORMATS["uint8"], symmetric=False))
    quantizer.observer_enabled = True
    quantizer(torch.tensor([-2.0, 6.0]))
    assert float(quantizer.scale.detach()) == pytest.approx(8 / 255)
    quantizer(torch.tensor([-2.0, 106.0]))
    assert float(quantizer.scale.detach()) == pytest.approx(9 / 255)
    quantizer.observer_enabled = False
    quantizer(torch.tensor([-50.0, 50.0]))
    assert float(quantizer.scale.detach()) == pytest.approx(9 / 255)


def test_the_observer_of_a_weight_takes_its_own_range() -> None:
    weight = weight_of(QuantSpec("int4", Granularity.CHANNEL))
    with torch.no_grad():
        weight.values.mul_(2)
    before = weight.scale.detach()
    weight.observer_enabled = True
    weight()
    np.testing.assert_allclose(weight.scale.detach(), 2 * before, rtol=1e-6)


def test_zero_points_at_an_end_stay_there() -> None:
    learns = [
        FakeQuantize(DATA, params_from_range(low, 1, FORMATS["uint8"], symmetric=False)).zero_point.requires_grad
        for low in (-1, 0)
    ]
    assert learns == [True, False]


def test_scales_never_leave_the_normal_numbers() -> None:
    quantizer = FakeQuantize(DATA, QuantParams(np.array(1, np.float32), np.array(3, np.uint8)))
    for change in (-1e4, 1e4):
        with torch.no_grad():
            quantizer.log_scale.fill_(change)
        assert 0 < float(quantizer.parameters_now().scale) < np.inf


def test_a_bias_counts_in_units_of_the_accumulator() -> None:
    weight = weight_of(QuantSpec("int8-narrow", Granularity.CHANNEL))
    data = FakeQuantize(DATA, params_from_range(-1, 1, FORMATS["uint8"], symmetric=False))
    bias = FakeQuantizedBias(np.linspace(-1, 1, 6, dtype=np.float32), weight, data)
    quantized = bias.quantized()
    assert quantized is not None
    assert np.array_equal(bias().detach().numpy(), quantized.dequantize())
    bias().sum().backward()
    assert bias.values.grad is not None
    assert bias.values.grad.tolist() == [1] * 6
    floats = FakeQuantizedBias(np.ones(6, np.float32), weight, None)
    assert floats.quantized() is None
    assert floats().tolist() == [1] * 6


VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text(encoding="utf-8"))


SMALL = [name for name, one in FORMATS.items() if one.bits <= 16]


@pytest.mark.parametrize("name", SMALL)
def test_values_are_those_of_the_codes_that_are_written(name: str) -> None:
    format, generator = FORMATS[name], np.random.default_rng(0)
    scale = np.float32(0.37 / max(format.maximum, 1)) * generator.uniform(0.5, 2, (4, 1)).astype(np.float32)
    # Halves are ties.
    ties = (np.arange(-40, 40).reshape(4, 20) / 2).astype(np.float32) * scale
    values = np.concatenate([generator.standard_normal((4, 300)).astype(np.float32), ties], 1)
    middle = (format.minimum + format.maximum) // 2 + 1
    zero = None if format.is_float else np.full(scale.shape, middle, format.dtype)
    parameters = QuantParams(scale, zero)
    expected = dequantize(quantize(values, parameters, format).values, parameters, format)
    shift = torch.zeros(4, 1) if zero is None else torch.from_numpy(zero.astype(np.float32))
    found = fake_quantize(torch.from_numpy(values), torch.from_numpy(scale), shift, format)
    assert np.array_equal(found.numpy(), expected)


def gradients(values: list[float], scale: float, zero: float, format: QuantDType) -> list[list[float]]:
    """Return those of values, of the scale and of the zero point for each value."""
    found = []
    x, s, z = (
        torch.tensor(one, requires_grad=True) for one in (values, [scale] * len(values), [float(zero)] * len(values))
    )
    fake_quantize(x, s, z, format).sum().backward()
    for one in (x, s, z):
        assert one.grad is not None
        found.append(one.grad.tolist())
    return found


def test_gradients_are_those_of_learned_step_sizes() -> None:
    one = VECTORS["torch_lsq_grads"]
    assert (one["qmin"], one["qmax"]) == (0, 15)
    found = gradients(one["x"], one["scale"], one["zp"], FORMATS["uint4"])
    for mine, theirs in zip(found, (one["dX"], one["dScale"], one["dZp"]), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_a_scale_of_many_values_has_the_sum_of_their_gradients() -> None:
    one = VECTORS["torch_lsq_grads"]
    scale = torch.tensor(one["scale"], requires_grad=True)
    fake_quantize(torch.tensor(one["x"]), scale, torch.tensor(float(one["zp"])), FORMATS["uint4"]).sum().backward()
    assert scale.grad is not None
    assert float(scale.grad) == pytest.approx(sum(one["dScale"]), abs=1e-5)


def test_a_minifloat_has_them_too() -> None:
    of_values, of_scale, _ = gradients([2.4, 9.0, -9.0], 1.0, 0.0, FORMATS["float4e2m1"])
    assert of_values == [1, 0, 0]
    np.testing.assert_allclose(of_scale, [2.0 - 2.4, 6, -6], atol=1e-6)


def test_blocks_spread_over_a_partial_last_one() -> None:
    grid = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    found = spread(grid, (2, 3), (4, 5))
    assert found[:, 0].tolist() == [1, 1, 3, 3]
    assert found[0].tolist() == [1, 1, 1, 2, 2]
    found.sum().backward()
    assert grid.grad is not None
    assert grid.grad.tolist() == [[6, 4], [6, 4]]


def test_dynamic_data_is_rounded_as_onnxruntime_does(build: Any) -> None:
    from onnxq.runtime.sessions import open_session, run

    text = """(float[7] x) => (float[7] y) {
        c, s, z = DynamicQuantizeLinear(x)
        y = DequantizeLinear(c, s, z) }"""
    x = np.array([-1.3, 0.0, 0.01, 0.4, 2.7, 1.1, -0.6], np.float32)
    (expected,) = run(open_session(build(text), optimize=False), {"x": x})
    values = torch.tensor(x, requires_grad=True)
    found = dynamic_fake_quantize(values)
    assert np.array_equal(found.detach().numpy(), expected)
    found.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1] * 7


def test_what_needs_no_gradient_passes_as_it_was_rounded() -> None:
    exact, rounded = torch.tensor(0.1), torch.tensor(0.3)
    assert straight_through(exact, rounded) is rounded


FACTORS_VALUES = np.linspace(0.2, 1, 6)


def own(values: NDArray[np.float64] = FACTORS_VALUES, axis: int = 1) -> TensorChannelScales:
    return TensorChannelScales(SharedChannelScales(values, np.ones(len(values), bool)), torch.arange(len(values)), axis)


@pytest.mark.parametrize(
    ("op", "attributes", "shape", "made"),
    [
        ("MatMul", {}, (6, 4), 4),
        ("Gemm", {"transB": 1}, (4, 6), 4),
        ("Conv", {}, (4, 6, 3, 3), 4),
        ("Conv", {"group": 6}, (6, 1, 3, 3), 6),
        ("Conv", {"group": 2}, (4, 3, 1, 1), 4),
    ],
)
def test_along_a_weight_they_are_those_of_migration(
    op: str, attributes: dict[str, int], shape: tuple[int, ...], made: int
) -> None:
    node = Node(op, "n", attributes, [Variable("x"), constant("w", np.ones(shape, np.float32))], [Variable("y")])
    behind = np.linspace(0.3, 1, made)
    expected = WeightRescaling(ChannelScales(1, FACTORS_VALUES), ChannelScales(1, behind)).weight(
        node, 1, np.ones(shape)
    )
    times = WeightChannelScales(own().in_weight(node, 1, read=True), own(behind).in_weight(node, 1, read=False))()
    np.testing.assert_allclose(np.broadcast_to(times.detach().numpy(), shape), expected, rtol=1e-6)
    assert times.numel() <= np.prod(shape[:2])


def test_none_grows_beyond_1_nor_does_one_that_is_not_free_change() -> None:
    shared = SharedChannelScales(np.array([0.5, 0.9, 0.9]), np.array([True, True, False]))
    with torch.no_grad():
        shared.log_channel_scales.fill_(0.5)
    assert shared().tolist() == pytest.approx([0.5 * np.exp(0.5), 1, 0.9])


def test_where_all_are_given_nothing_learns() -> None:
    assert not SharedChannelScales(np.array([2.0, 0.5]), np.zeros(2, bool)).log_channel_scales.requires_grad
