"""Statistics to scales: groups share one range, fixed ranges need no statistics."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.encoding.parameters import activation_parameters, channel_means
from onnxq.errors import DataError
from onnxq.evidence.observer import observe
from onnxq.evidence.ranges import MinMax
from onnxq.evidence.statistics import Statistics
from onnxq.evidence.tensor_statistics import EMPTY, only_sums
from onnxq.numbers.torch_observers import Observer, fixed_parameters
from onnxq.planning.plan import Activation, Decision, Mean, Plan
from onnxq.scheme import Method, Mode, Spec

AFFINE = Spec("uint8", symmetric=False)


def plan(*activations: Activation) -> Plan:
    return Plan((), activations, "int8", "onnxruntime-cpu")


def statistics(**values: list[float]) -> Statistics:
    return Statistics(1, {name: observe(np.array(one, np.float32)) for name, one in values.items()})


def test_each_tensor_has_the_scale_of_its_range() -> None:
    found = activation_parameters(
        plan(Activation("a", AFFINE, "a"), Activation("b", Spec("int8"), "b")),
        statistics(a=[-1.0, 2.0], b=[-4.0, 1.0]),
        MinMax(),
    )
    assert (found["a"].scale, found["a"].zero_point) == (np.float32(3 / 255), 85)
    assert (found["b"].scale, found["b"].zero_point) == (np.float32(8 / 255), None)


def test_a_group_has_the_range_of_all_its_tensors() -> None:
    found = activation_parameters(
        plan(Activation("a", AFFINE, "a"), Activation("b", AFFINE, "a"), Activation("c", AFFINE, "c")),
        statistics(a=[-1.0, 0.5], b=[0.0, 4.0], c=[0.0, 1.0]),
        MinMax(),
    )
    assert found["a"].scale == found["b"].scale == np.float32(5 / 255)
    assert found["a"].zero_point == found["b"].zero_point == 51
    assert found["c"].scale == np.float32(1 / 255)


def test_a_fixed_range_needs_no_statistics_and_widens_its_group() -> None:
    found = activation_parameters(
        plan(Activation("s", AFFINE, "s", fixed_range=(0.0, 1.0)), Activation("b", AFFINE, "s")),
        statistics(b=[-1.0, 0.5]),
        MinMax(),
    )
    assert found["s"].scale == found["b"].scale == np.float32(2 / 255)


def test_a_tensor_that_was_never_seen_is_told() -> None:
    with pytest.raises(DataError, match=r"^tensor a has no calibration statistics; calibrate with the plan's taps$"):
        activation_parameters(plan(Activation("a", AFFINE, "a")), statistics(b=[1.0]), MinMax())


def test_a_tensor_that_was_always_empty_has_scale_one() -> None:
    found = activation_parameters(plan(Activation("a", AFFINE, "a")), Statistics(1, {"a": EMPTY}), MinMax())
    assert found["a"].scale == 1.0


def test_the_range_method_decides() -> None:
    seen = statistics(a=[-10.0, 10.0])
    found = activation_parameters(plan(Activation("a", Spec("int8-narrow"), "a")), seen, lambda one: (-1.0, 1.0))
    assert found["a"].scale == np.float32(1 / 127)


OBSERVED = Spec("uint8-7bit", symmetric=False, method=Method.TORCH)


def test_scales_of_pytorch_are_those_of_its_observers() -> None:
    found = activation_parameters(
        plan(Activation("a", OBSERVED, "a"), Activation("b", Spec("int8", method=Method.TORCH), "b")),
        statistics(a=[-0.3, 2.0], b=[-1e-9, 1e-9]),
        MinMax(),
    )
    expected = Observer("uint8-7bit").parameters(np.float32(-0.3), 2.0)
    assert (found["a"].scale, found["a"].zero_point) == (expected.scale, expected.zero_point)
    # Half the codes, and no scale below the epsilon.
    assert found["a"].zero_point == 17
    assert (found["b"].scale, found["b"].zero_point) == (2.0**-23, None)


def test_pytorch_gives_fixed_ranges_all_codes() -> None:
    activations = [
        Activation("sigmoid", OBSERVED, "sigmoid", fixed_range=(0.0, 1.0)),
        Activation("tanh", OBSERVED, "joined", fixed_range=(-1.0, 1.0)),
        Activation("other", OBSERVED, "joined"),
    ]
    found = activation_parameters(plan(*activations), statistics(other=[-4.0, 4.0]), MinMax())
    assert (found["sigmoid"].scale, found["sigmoid"].zero_point) == (1 / 256, 0)
    assert found["tanh"].scale == found["other"].scale == np.float32(8 / 127)
    assert fixed_parameters(0.0, 1.0).scale == 1 / 256


def test_no_range_is_asked_of_what_has_only_sums() -> None:
    seen = Statistics(1, {"a": only_sums(4, np.ones((2, 2), np.int64), 1)})
    with pytest.raises(DataError, match="tensor a has no calibration statistics"):
        activation_parameters(plan(Activation("a", AFFINE, "a")), seen, MinMax())


@pytest.mark.parametrize(("axis", "known"), [(1, []), (-1, ["x"]), (None, [])])
def test_means_are_given_along_the_axis_of_the_plan_only(axis: int | None, known: list[str]) -> None:
    decision = Decision("n", "MatMul", Mode.STORAGE, "", mean=Mean("x", -1))
    sums = np.array([[6, 0], [2, 0]][: 2 if axis is not None else 0], np.int64).reshape(-1, 2)
    found = channel_means(Plan((decision,), (), "s", "t"), Statistics(1, {"x": only_sums(4, sums, axis)}))
    assert {name: means.tolist() for name, means in found.items()} == {name: [3, 1] for name in known}
