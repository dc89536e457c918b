"""Which ranges lower the error beyond chance, and limits where functions saturate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from conftest import Build

from onnxq.algorithms.range_search import (
    SaturatingRange,
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
    assert SaturatingRange(MinMax(), -3, 4)(seen, spec) == (-3, 4)
    assert SaturatingRange(MinMax(), -40, NEVER)(seen, spec) == (-20, 30)
    assert SaturatingRange(MinMax(), -3, NEVER).kinds == MinMax.kinds


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
