"""Quantizers hold what learns, and hand back what is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onnxq.algorithms.encoders import encode_weight
from onnxq.numerics.affine import QTensor, QuantParams, params_from_range
from onnxq.numerics.formats import FORMATS
from onnxq.numerics.pairs import Pairs, fit_pairs
from onnxq.numerics.spec import Granularity, Method, QuantSpec
from onnxq.planning.plan import Weight
from onnxq.training.quantizers import FakeQuantize, FakeQuantizedBias, FakeQuantizedWeight

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
    assert np.array_equal(weight().detach().numpy(), weight.codes().dequantize())


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
    found = weight.codes()
    assert np.abs(found.codes.astype(int)).max() > 120
    assert np.array_equal(fit_pairs(found.codes, Pairs.ROW, 0, 1), found.codes)
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
    chosen = nearest.codes.copy()
    chosen[0, 0] += 1 if chosen[0, 0] < 7 else -1
    found = FakeQuantizedWeight(weight, VALUES, QTensor(chosen, nearest.parameters, FORMATS[spec.format]))
    assert np.array_equal(found.codes().codes, chosen)
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
    codes = bias.codes()
    assert codes is not None
    assert np.array_equal(bias().detach().numpy(), codes.dequantize())
    bias().sum().backward()
    assert bias.values.grad is not None
    assert bias.values.grad.tolist() == [1] * 6
    floats = FakeQuantizedBias(np.ones(6, np.float32), weight, None)
    assert floats.codes() is None
    assert floats().tolist() == [1] * 6
