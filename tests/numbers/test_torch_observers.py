"""PyTorch's observers, configurations and kernels, on values that PyTorch itself computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.errors import SchemeError
from onnxq.numbers.formats import FORMATS
from onnxq.numbers.numerics import Parameters
from onnxq.numbers.torch_observers import (
    CONFIGURATIONS,
    EPSILON,
    Engine,
    Observer,
    configuration_named,
    dynamic_parameters,
    encode,
    quantize,
)

UINT8 = FORMATS["uint8"]
EIGHT_BITS = st.builds(Observer, st.sampled_from(["int8", "uint8"]), st.booleans())


@pytest.mark.parametrize(
    ("observer", "codes"),
    [
        (Observer("int8"), (-128, 127)),
        (Observer("int8", reduce_range=True), (-64, 63)),
        (Observer("uint8"), (0, 255)),
        (Observer("uint8", reduce_range=True), (0, 127)),
        (Observer("int8-narrow"), (-127, 127)),
    ],
)
def test_a_reduced_range_has_half_of_the_codes(observer: Observer, codes: tuple[int, int]) -> None:
    assert observer.codes == codes


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero_point"),
    [(2.0, 2.0, 0.00784314, 0), (-2.0, -2.0, 0.00784314, 255), (0.0, 0.0, EPSILON, 0), (-1.0, 2.0, 0.0117647, 85)],
)
def test_a_range_of_one_value_is_extended_to_zero(low: float, high: float, scale: float, zero_point: int) -> None:
    found = Observer("uint8").parameters([low], [high])
    assert found.scale == pytest.approx(scale, rel=1e-6)
    assert found.zero_point is not None
    assert found.zero_point.tolist() == [zero_point]


def test_symmetric_scales_divide_by_half_of_the_codes() -> None:
    weight = Observer("int8", symmetric=True).parameters([-1.8], [0.5])
    assert weight.scale[0] == np.float32(1.8) / np.float32(127.5)
    assert weight.zero_point is None
    data = Observer("uint8", symmetric=True).parameters([-1.8], [0.5])
    assert data.zero_point is not None
    assert data.zero_point.tolist() == [128]
    assert Observer("int8-narrow", symmetric=True).parameters([-1.8], [0.5]).scale[0] == np.float32(1.8) / np.float32(
        127
    )


@given(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32), EIGHT_BITS)
def test_zero_is_exact_and_no_scale_is_below_the_smallest(a: float, b: float, observer: Observer) -> None:
    found = observer.parameters([min(a, b)], [max(a, b)])
    assert found.scale[0] >= np.float32(EPSILON)
    tensor = quantize(np.zeros(1), found, FORMATS[observer.format])
    assert tensor.dequantize().tolist() == [0.0]


def test_the_two_engines_add_the_zero_point_before_and_after_rounding() -> None:
    three, ties = Parameters(np.ones((), np.float32), np.array(3, np.uint8)), np.array([0.5, 1.5, 2.5, -0.5])
    assert quantize(ties, three, UINT8, Engine.FBGEMM).codes.tolist() == [4, 4, 6, 2]
    assert quantize(ties, three, UINT8, Engine.QNNPACK).codes.tolist() == [3, 5, 5, 3]


def test_the_inverse_of_the_scale_is_multiplied() -> None:
    value, scale = np.float32([0.273939937]), np.array(0.00214854861, np.float32)
    assert quantize(value, Parameters(scale, None), UINT8).codes.tolist() == [128]
    assert UINT8.round(value / scale).tolist() == [127]


def test_a_weight_has_a_scale_for_each_index_of_its_first_axis() -> None:
    weight = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    weight[3] = 0
    tensor = encode(weight, CONFIGURATIONS["fbgemm"].weight)
    assert tensor.parameters.scale.shape == (4, 1, 1)
    assert tensor.parameters.scale[3] == np.float32(EPSILON)
    expected = np.abs(weight[:3]).max(axis=(1, 2)) / np.float32(127.5)
    np.testing.assert_array_equal(tensor.parameters.scale[:3].ravel(), expected)
    assert encode(weight, CONFIGURATIONS["qnnpack"].weight).parameters.scale.shape == (1, 1, 1)


def test_codes_that_the_observer_has_not_are_clipped() -> None:
    weight = np.array([[-1.0, 1.0]], np.float32)
    assert encode(weight, Observer("int8-narrow", symmetric=True)).codes.tolist() == [[-127, 127]]
    assert encode(weight, Observer("int8", symmetric=True, reduce_range=True)).codes.tolist() == [[-64, 63]]


@pytest.mark.parametrize(
    ("low", "high", "reduced", "scale", "zero_point"),
    [
        (-2.0696630477905273, 1.604894995689392, False, 0.014410031543058508, 144),
        (-0.6365618705749512, -0.2891864776611328, False, 0.00249632106107824, 255),
        (-1.2556976798805408e-05, -8.980516213341616e-06, False, 6.0999998822808266e-05, 255),
        (-0.001104136579670012, 0.03422677889466286, False, 0.00013855260970326616, 8),
        (0.0, 3e-40, False, 0.1, 0),
    ],
)
def test_parameters_of_dynamic_data(low: float, high: float, reduced: bool, scale: float, zero_point: int) -> None:
    found = dynamic_parameters(low, high, reduce_range=reduced)
    assert found.scale == np.float32(scale)
    assert found.zero_point == zero_point


@given(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32), st.booleans())
def test_dynamic_zero_points_are_codes(a: float, b: float, reduced: bool) -> None:
    found = dynamic_parameters(min(a, b), max(a, b), reduce_range=reduced)
    assert found.scale >= np.float32(6.1e-5)
    assert found.zero_point is not None
    assert 0 <= int(found.zero_point) <= (127 if reduced else 255)


def test_an_unknown_configuration_is_told_with_the_nearest() -> None:
    with pytest.raises(SchemeError, match=r"^PyTorch configuration 'fbgem' is not one of .*did you mean 'fbgemm'\?$"):
        configuration_named("fbgem")
    assert configuration_named("x86") == CONFIGURATIONS["fbgemm"]


def test_reduced_ranges_belong_to_the_engines_of_x86() -> None:
    assert {name for name, one in CONFIGURATIONS.items() if one.activation.codes == (0, 127)} == {
        "fbgemm",
        "x86",
        "default",
    }
    assert {name for name, one in CONFIGURATIONS.items() if one.weight.per_channel} == {
        "fbgemm",
        "x86",
        "onednn",
        "symmetric-qnnpack-per-channel",
    }
