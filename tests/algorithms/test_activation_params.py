"""Statistics to scales: groups share one range, fixed ranges need no statistics."""

from __future__ import annotations

import numpy as np
import pytest
from observations import observe, statistics

from onnxq.algorithms.activation_params import activation_parameters, channel_means, requests_for
from onnxq.calibration.accumulators import Request
from onnxq.calibration.methods import DEFAULT_METHODS, MinMax, MovingAverage
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Method, Mode, QuantSpec
from onnxq.errors import DataError
from onnxq.numerics.torch_observers import Observer, fixed_parameters
from onnxq.planning.plan import Activation, Decision, Mean, Plan

AFFINE = QuantSpec("uint8", symmetric=False)


def plan(*activations: Activation) -> Plan:
    return Plan((), activations, "int8", "onnxruntime-cpu")


def ranges_of(**values: list[float]) -> CalibrationStatistics:
    return statistics({name: np.array(one, np.float32) for name, one in values.items()}, "range")


def test_each_tensor_has_the_scale_of_its_range() -> None:
    found = activation_parameters(
        plan(Activation("a", AFFINE, "a"), Activation("b", QuantSpec("int8"), "b")),
        ranges_of(a=[-1.0, 2.0], b=[-4.0, 1.0]),
        MinMax(),
    )
    assert (found["a"].scale, found["a"].zero_point) == (np.float32(3 / 255), 85)
    assert (found["b"].scale, found["b"].zero_point) == (np.float32(8 / 255), None)


def test_a_group_has_the_range_of_all_its_tensors() -> None:
    found = activation_parameters(
        plan(Activation("a", AFFINE, "a"), Activation("b", AFFINE, "a"), Activation("c", AFFINE, "c")),
        ranges_of(a=[-1.0, 0.5], b=[0.0, 4.0], c=[0.0, 1.0]),
        MinMax(),
    )
    assert found["a"].scale == found["b"].scale == np.float32(5 / 255)
    assert found["a"].zero_point == found["b"].zero_point == 51
    assert found["c"].scale == np.float32(1 / 255)


def test_a_fixed_range_needs_no_statistics_and_widens_its_group() -> None:
    found = activation_parameters(
        plan(Activation("s", AFFINE, "s", fixed_range=(0.0, 1.0)), Activation("b", AFFINE, "s")),
        ranges_of(b=[-1.0, 0.5]),
        MinMax(),
    )
    assert found["s"].scale == found["b"].scale == np.float32(2 / 255)


def test_a_tensor_that_was_never_seen_is_told() -> None:
    with pytest.raises(DataError, match=r"^The statistics of tensor 'a' hold no range, expected one; calibrate again"):
        activation_parameters(plan(Activation("a", AFFINE, "a")), ranges_of(b=[1.0]), MinMax())


def test_a_tensor_that_was_always_empty_has_scale_one() -> None:
    found = activation_parameters(plan(Activation("a", AFFINE, "a")), ranges_of(a=[]), MinMax())
    assert found["a"].scale == 1.0


def test_the_range_method_decides() -> None:
    seen = ranges_of(a=[-10.0, 10.0])
    found = activation_parameters(
        plan(Activation("a", QuantSpec("int8-narrow"), "a")), seen, lambda one, spec: (-1.0, 1.0)
    )
    assert found["a"].scale == np.float32(1 / 127)


OBSERVED = QuantSpec("uint8-7bit", symmetric=False, method=Method.TORCH)


def test_scales_of_pytorch_are_those_of_its_observers() -> None:
    found = activation_parameters(
        plan(Activation("a", OBSERVED, "a"), Activation("b", QuantSpec("int8", method=Method.TORCH), "b")),
        ranges_of(a=[-0.3, 2.0], b=[-1e-9, 1e-9]),
        MinMax(),
    )
    expected = Observer("uint8-7bit").parameters(np.float32(-0.3), 2.0)
    assert (found["a"].scale, found["a"].zero_point) == (expected.scale, expected.zero_point)
    # Half the quantized values, and no scale below the epsilon.
    assert found["a"].zero_point == 17
    assert (found["b"].scale, found["b"].zero_point) == (2.0**-23, None)


def test_pytorch_gives_fixed_ranges_all_codes() -> None:
    activations = [
        Activation("sigmoid", OBSERVED, "sigmoid", fixed_range=(0.0, 1.0)),
        Activation("tanh", OBSERVED, "joined", fixed_range=(-1.0, 1.0)),
        Activation("other", OBSERVED, "joined"),
    ]
    found = activation_parameters(plan(*activations), ranges_of(other=[-4.0, 4.0]), MinMax())
    assert (found["sigmoid"].scale, found["sigmoid"].zero_point) == (1 / 256, 0)
    assert found["tanh"].scale == found["other"].scale == np.float32(8 / 127)
    assert fixed_parameters(0.0, 1.0).scale == 1 / 256


def test_no_range_is_asked_of_what_has_only_sums() -> None:
    seen = observe({"a": np.ones((2, 2), np.float32)}, [Request("a", "channel-means", 1)])
    with pytest.raises(DataError, match="statistics of tensor 'a' hold no range"):
        activation_parameters(plan(Activation("a", AFFINE, "a")), seen, MinMax())


@pytest.mark.parametrize(("axis", "known"), [(1, []), (-1, ["x"]), (0, [])])
def test_means_are_given_along_the_axis_of_the_plan_only(axis: int, known: list[str]) -> None:
    decision = Decision("n", "MatMul", Mode.STORAGE, "", mean=Mean("x", -1))
    seen = observe({"x": np.float32([[2, 1], [4, 1]] * 4)}, [Request("x", "channel-means", axis)])
    found = channel_means(Plan((decision,), (), "s", "t"), seen)
    assert {name: means.tolist() for name, means in found.items()} == {name: [3, 1] for name in known}


@pytest.mark.parametrize(("rows", "known"), [(1, []), (2, []), (3, ["x"])])
def test_means_of_few_rows_correct_no_bias(rows: int, known: list[str]) -> None:
    decision = Decision("n", "MatMul", Mode.STORAGE, "", mean=Mean("x", -1))
    seen = observe({"x": np.ones((rows, 2), np.float32)}, [Request("x", "channel-means", -1)])
    assert list(channel_means(Plan((decision,), (), "s", "t"), seen)) == known


def test_what_is_requested_is_what_the_range_methods_read() -> None:
    decision = Decision("n", "MatMul", Mode.STATIC, "", mean=Mean("a", -1))
    found = Plan((decision,), (Activation("a", AFFINE, "a"), Activation("f", AFFINE, "f", (0.0, 1.0))), "s", "t")
    ranges, means = Request("a", "range"), Request("a", "channel-means", -1)
    assert requests_for(found, [MinMax()]) == (ranges, means)
    assert requests_for(found, DEFAULT_METHODS) == (
        ranges,
        means,
        Request.of("a", "histogram", elements=8192),
    )
    assert requests_for(found, [MovingAverage()]) == (ranges, means, Request("a", "sample-extremes"))
