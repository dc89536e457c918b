"""Ranges end where what follows is flat."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from conftest import Build

from onnxq.algorithms.flat_ends import Within, flat_ends, unlimited
from onnxq.calibration.kinds import Observers, request_for
from onnxq.calibration.methods import MinMax, Percentile
from onnxq.calibration.statistics import Evidence, TensorEvidence
from onnxq.config.presets import PRESETS
from onnxq.errors import SchemeError
from onnxq.ir import as_graph
from onnxq.numerics.spec import Spec
from onnxq.onnx_api import infer_shapes
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import TARGETS

NEVER = math.inf


def evidence(tensors: Iterable[str], low: float, high: float) -> Evidence:
    observers = Observers([request_for(tensor, kind) for tensor in tensors for kind in ("range", "histogram")])
    for tensor in tensors:
        observers.add(tensor, np.array([low, high], np.float32))
    return Evidence((), observers.statistics())


def fails(seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
    raise ZeroDivisionError("no counts")


def test_the_method_inside_is_named_where_it_fails() -> None:
    with pytest.raises(SchemeError, match="Range method 'fails' for tensor 'a' failed: ZeroDivisionError: no counts"):
        Within(fails, -1.0, 1.0)(evidence(["a"], -2, 2).of("a"), Spec("int8"))


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
    found = flat_ends(graph, plan, evidence(plan.calibrated, -20, 30)).get("a", (-NEVER, NEVER))
    assert found == pytest.approx((low, high), abs=0.6)


def test_ranges_are_those_of_the_other_method_within_the_ends() -> None:
    seen, spec = evidence("a", -20, 30).of("a"), Spec("uint8", symmetric=False)
    assert Within(MinMax(), -3, NEVER)(seen, spec) == (-3, 30)
    assert Within(MinMax(), -3, 4, room=4)(seen, spec) == (-12, 16)
    assert Within(MinMax(), -40, NEVER)(seen, spec) == (-20, 30)
    assert Within(MinMax(), -3, NEVER).kinds == MinMax.kinds
    assert Within(MinMax(), -3, NEVER).clip(np.array([[-9.0, 9.0]])).tolist() == [[-3, 9]]


def test_plans_name_the_other_method() -> None:
    assert unlimited(Within(Percentile(99.9), -3, NEVER)) == unlimited(Percentile(99.9)) == Percentile(99.9)


def test_where_all_is_flat_a_range_is_none() -> None:
    low, high = Within(MinMax(), -3, NEVER)(evidence("a", -20, -10).of("a"), Spec("uint8", symmetric=False))
    assert low <= high
