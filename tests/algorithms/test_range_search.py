"""Range search by the error of the whole model, and limits where functions saturate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from conftest import Build
from hypothesis import given
from hypothesis import strategies as st

from onnxq.algorithms.range_search import (
    NsrBySample,
    RangeChoice,
    SaturatingRange,
    choose_ranges,
    is_significant_reduction,
    saturation_limits,
    without_limits,
)
from onnxq.calibration.kinds import Observers, default_request
from onnxq.calibration.methods import MinMax, Percentile
from onnxq.calibration.statistics import CalibrationStatistics, TensorStatistics
from onnxq.config.presets import PRESETS
from onnxq.errors import SchemeError
from onnxq.ir import as_graph
from onnxq.numerics.spec import QuantSpec
from onnxq.onnx_api import infer_shapes
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import TARGETS

METHODS = ("wide", "middle", "narrow")
CALIBRATION_METHODS = {tensor: {"wide": (-9.0, 9.0), "middle": (-3.0, 3.0), "narrow": (-1.0, 1.0)} for tensor in "abc"}
SAMPLES = 8


def additive(nsr: Mapping[str, Mapping[str, float]]) -> Callable[[RangeChoice[str]], NsrBySample]:
    """Return a measure by which each tensor adds its own noise to every sample's."""

    def measure(choice: RangeChoice[str]) -> NsrBySample:
        return np.full((SAMPLES, 1), sum(known[choice.of(tensor)] for tensor, known in nsr.items()) / SAMPLES)

    return measure


@given(st.lists(st.floats(0.01, 1), min_size=9, max_size=9))
def test_where_noises_add_up_and_measurements_are_many_each_tensor_gets_its_best(values: list[float]) -> None:
    nsr = {tensor: dict(zip(METHODS, values[3 * n : 3 * n + 3], strict=True)) for n, tensor in enumerate("abc")}
    measure = additive(nsr)
    found = measure(choose_ranges(CALIBRATION_METHODS, measure, most=100, methods=METHODS)).sum()
    least = sum(min(known.values()) for known in nsr.values())
    # What takes off less than 2 % of all noise there is then is left alone, for each tensor.
    first = measure(RangeChoice(METHODS[0])).sum()
    assert found <= least + len(nsr) * 0.02 * first * (1 + 1e-9)


def test_measurements_are_counted_and_the_noisiest_tensors_come_first() -> None:
    requested: list[RangeChoice[str]] = []
    nsr = {tensor: {"wide": 1.0, "middle": 0.5, "narrow": 9.0} for tensor in "abc"}

    def measure(choice: RangeChoice[str]) -> NsrBySample:
        requested.append(choice)
        return additive(nsr)(choice)

    assert choose_ranges(CALIBRATION_METHODS, measure, most=2, methods=METHODS) == RangeChoice("middle")
    assert requested == [RangeChoice("wide"), RangeChoice("middle")]
    requested.clear()
    choose_ranges(CALIBRATION_METHODS, measure, most=5, methods=METHODS)
    assert requested[3:] == [RangeChoice("middle", {"a": "wide"}), RangeChoice("middle", {"a": "narrow"})]


def test_methods_of_like_ranges_are_not_told_apart() -> None:
    ranges = {"a": {"wide": (-9.0, 9.0), "middle": (-9.1, 9.1), "narrow": (-1.0, 1.0)}}
    requested: list[RangeChoice[str]] = []

    def measure(choice: RangeChoice[str]) -> NsrBySample:
        requested.append(choice)
        return np.ones((SAMPLES, 1))

    assert choose_ranges(ranges, measure, most=100, methods=METHODS) == RangeChoice("wide")
    assert requested[3:] == [RangeChoice("wide", {"a": "narrow"})]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([[1.0], [1.0], [1.0]], [[0.5], [0.6], [0.4]], True),
        # One sample has all of the gain.
        ([[9.0], [1.0], [1.0]], [[1.0], [1.1], [1.1]], False),
        ([[1.0], [1.0], [1.0]], [[0.99], [0.99], [0.99]], False),
        # The worst output counts, before and after.
        ([[1.0, 2.0], [1.0, 2.0]], [[0.1, 2.0], [0.1, 2.0]], False),
        ([[1.0, 2.0], [1.0, 2.0]], [[3.0, 0.1], [3.0, 0.1]], False),
        ([[1.0]], [[0.5]], True),
        ([[np.inf], [1.0]], [[0.5], [0.5]], True),
        ([[1.0], [1.0]], [[np.nan], [0.5]], False),
    ],
)
def test_what_takes_off_noise_does_so_on_most_samples(
    before: list[list[float]], after: list[list[float]], expected: bool
) -> None:
    assert is_significant_reduction(np.array(before), np.array(after)) is expected


@pytest.mark.parametrize(("gains", "expected"), [([0.5, 0.5, 0.5, -0.4], False), ([0.5, 0.5, 0.5, 0.4], True)])
def test_single_tensors_have_to_gain_more_surely_than_all_together(gains: list[float], expected: bool) -> None:
    def measure(choice: RangeChoice[str]) -> NsrBySample:
        return 1.0 - np.array(gains)[:, None] * (choice.of("a") == "narrow")

    ranges = {"a": {"wide": (-9.0, 9.0), "narrow": (-1.0, 1.0)}}
    assert choose_ranges({}, measure, most=2, methods=("wide", "narrow")) == RangeChoice("narrow")
    single = choose_ranges(
        ranges, lambda one: measure(RangeChoice("wide", one.own)), most=9, methods=("wide", "narrow")
    )
    assert (single.of("a") == "narrow") is expected


@pytest.mark.parametrize(("patience", "tried"), [(1, "abc"), (2, "abcd")])
def test_what_clips_more_than_some_that_are_no_better_is_not_tried(patience: int, tried: str) -> None:
    requested: list[str] = []
    nsr = {"a": 1.0, "b": 0.8, "c": 0.9, "d": 1.2, "e": 0.1}

    def measure(choice: RangeChoice[str]) -> NsrBySample:
        requested.append(choice.default)
        return np.full((SAMPLES, 1), nsr[choice.default])

    assert choose_ranges({}, measure, most=9, methods=tuple(nsr), patience=patience) == RangeChoice("b")
    assert "".join(requested) == tried


def test_of_a_tensor_no_more_than_two_in_a_row_that_are_no_better_are_tried() -> None:
    requested: list[str] = []
    nsr = {"a": 1.0, "b": 1.1, "c": 1.2, "d": 0.1}
    ends = {"a": 9.0, "b": 7.0, "c": 5.0, "d": 3.0}
    ranges = {"x": {name: (-end, end) for name, end in ends.items()}}

    def measure(choice: RangeChoice[str]) -> NsrBySample:
        requested.append(choice.of("x"))
        return np.full((SAMPLES, 1), nsr[choice.of("x")])

    assert choose_ranges(ranges, measure, most=99, methods=tuple(nsr)) == RangeChoice("a")
    assert requested == ["a", "b", "c", "b", "c"]


# Ranges end where what follows is flat.

NEVER = math.inf


def statistics(tensors: Iterable[str], low: float, high: float) -> CalibrationStatistics:
    observers = Observers([default_request(tensor, kind) for tensor in tensors for kind in ("range", "histogram")])
    for tensor in tensors:
        observers.add(tensor, np.array([low, high], np.float32))
    return CalibrationStatistics((), observers.statistics())


def fails(seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
    raise ZeroDivisionError("no counts")


def test_the_method_inside_is_named_where_it_fails() -> None:
    with pytest.raises(
        SchemeError, match="Calibration method 'fails' for tensor 'a' failed: ZeroDivisionError: no counts"
    ):
        SaturatingRange(fails, -1.0, 1.0)(statistics(["a"], -2, 2).of("a"), QuantSpec("int8"))


@pytest.mark.parametrize(
    ("behind", "low", "high"),
    [
        ("b = HardSigmoid <alpha = 0.25, beta = 0.5> (a)", -2, 2),
        ("s = HardSigmoid <alpha = 0.25, beta = 0.5> (a) b = Mul(a, s)", -2, NEVER),
        ("s = Sigmoid(a) b = Mul(s, a)", -10.5, NEVER),
        ("d = Div(a, two) e = Erf(d) f = Add(e, one) b = Mul(a, f)", -4, NEVER),
        # One channel is read as it is, and the other halved.
        ("s = Mul(a, factors) b = HardSigmoid <alpha = 0.25, beta = 0.5> (s)", -4, 4),
        # What follows is nowhere flat, or looks at more than one element.
        ("s = HardSigmoid(a) b = Add(s, a)", -NEVER, NEVER),
        ("b = LeakyRelu <alpha = 0.5> (a)", -NEVER, NEVER),
        ("b = Softmax(a)", -NEVER, NEVER),
    ],
)
def test_values_make_no_difference_where_what_follows_is_flat(
    build: Build, tmp_path: Path, behind: str, low: float, high: float
) -> None:
    # Told from what all of the function gives, in the 8 bits of what follows.
    own = {"two": np.float32(1.414), "one": np.float32(1), "factors": np.array([1, 0.5], np.float32).reshape(2, 1, 1)}
    used = {name: values for name, values in own.items() if name in behind}
    text = f"(float[N,2,4,4] x) => (float[N,2,4,4] y) {{a = Conv(x, w) {behind} y = Conv(b, v)}}"
    graph = as_graph(build(text, w=(2, 2, 1, 1), v=(2, 2, 1, 1), **used))
    infer_shapes(graph)
    plan = make_plan(graph, PRESETS["int8"], TARGETS["onnxruntime-cpu"])
    found = saturation_limits(graph, plan, statistics(plan.calibrated, -20, 30)).get("a", (-NEVER, NEVER))
    assert found == pytest.approx((low, high), abs=0.6)


def test_ranges_are_those_of_the_other_method_within_the_ends() -> None:
    seen, spec = statistics("a", -20, 30).of("a"), QuantSpec("uint8", symmetric=False)
    assert SaturatingRange(MinMax(), -3, NEVER)(seen, spec) == (-3, 30)
    assert SaturatingRange(MinMax(), -3, 4, room=4)(seen, spec) == (-12, 16)
    assert SaturatingRange(MinMax(), -40, NEVER)(seen, spec) == (-20, 30)
    assert SaturatingRange(MinMax(), -3, NEVER).kinds == MinMax.kinds
    assert SaturatingRange(MinMax(), -3, NEVER).clip(np.array([[-9.0, 9.0]])).tolist() == [[-3, 9]]


def test_plans_name_the_other_method() -> None:
    assert (
        without_limits(SaturatingRange(Percentile(99.9), -3, NEVER))
        == without_limits(Percentile(99.9))
        == Percentile(99.9)
    )


def test_where_all_is_flat_a_range_is_none() -> None:
    low, high = SaturatingRange(MinMax(), -3, NEVER)(
        statistics("a", -20, -10).of("a"), QuantSpec("uint8", symmetric=False)
    )
    assert low <= high
