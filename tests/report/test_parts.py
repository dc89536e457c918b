"""What a report holds: the machine, values of tensors, and its parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from conftest import Build

from onnxq.calibration.histogram import Bins, Histogram
from onnxq.calibration.kinds import default_request
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.ir import Graph, as_graph
from onnxq.planning.plan import Activation, Decision, Plan, Weight
from onnxq.report.parts import (
    AppliedPass,
    Machine,
    ModelFiles,
    Stopwatch,
    peak_memory,
    tensor_values,
    weight_channels,
)
from onnxq.rewrite import Changes, Pass, PassResult


@dataclass(frozen=True)
class Scale(Pass):
    factor: float = 2.0

    def apply(self, graph: Graph) -> Changes:
        return Changes()


def test_a_pass_is_told_in_plain_values() -> None:
    applied = PassResult(Scale(3.0), Changes(("a", "b"), (("c", "not wanted"),)), 0.5)
    options = {"factor": "3.0"}
    assert AppliedPass.of(applied) == AppliedPass("Scale", options, 0.5, 2, ("a", "b"), 1, (("c", "not wanted"),))


def test_the_size_ratio_is_a_share_of_the_float_model() -> None:
    assert ModelFiles("a.onnx", None, float_bytes=400, bytes=100).size_ratio == 0.25


# Stages and the machine are told as they are.


def test_stages_follow_one_another_and_are_no_longer_than_the_whole() -> None:
    watch = Stopwatch()
    for name in ("prepare", "calibrate"):
        watch.lap(name)
    assert [stage.name for stage in watch.stages] == ["prepare", "calibrate"]
    assert 0 <= sum(stage.seconds for stage in watch.stages) <= watch.seconds


def test_a_stage_that_work_went_back_to_stands_once() -> None:
    watch = Stopwatch()
    for name in ("prepare", "calibrate", "prepare"):
        watch.lap(name)
    assert [stage.name for stage in watch.stages] == ["prepare", "calibrate"]
    assert 0 <= sum(stage.seconds for stage in watch.stages) <= watch.seconds


def test_memory_only_grows() -> None:
    before = peak_memory()
    assert 0 < before <= peak_memory()


def test_the_machine_names_what_decides_the_outcome() -> None:
    found = Machine.this()
    assert found.cores >= 1
    assert found.versions["onnxruntime"]


# Values and channels are counted as NumPy counts them.

CODES = QuantSpec("uint8", symmetric=False)


def plan_of(*activations: Activation, weights: tuple[Weight, ...] = ()) -> Plan:
    return Plan((Decision("a", "MatMul", Mode.STATIC, "why", weights),), activations, "int8", "onnxruntime-cpu")


def seen(counts: list[int]) -> CalibrationStatistics:
    # Sixteenths from 0 to 1.
    bins = Bins(0.0, 0.999, np.array(counts)) if counts else Bins()
    return CalibrationStatistics(("s",), {default_request("x", "histogram"): Histogram(bins)})


@pytest.mark.parametrize(("high", "clipped"), [(2.0, 0.0), (0.75, 0.5), (-1.0, 1.0)])
def test_what_lies_outside_the_range_is_clipped(high: float, clipped: float) -> None:
    exact = Histogram(Bins(0.0, 0.999, np.ones(1, np.int64))).whole
    counts = np.zeros(round(1 / exact.width), np.int64)
    counts[0] = counts[-1] = 4
    found = tensor_values(plan_of(Activation("x", CODES, "x", (-2.0, high))), seen(counts.tolist()))
    assert (found[0].clipped, sum(found[0].counts)) == (clipped, 8)
    assert found[0].counts[0] == found[0].counts[-1] == 4


@pytest.mark.parametrize(
    "activation",
    [Activation("y", CODES, "y", (0.0, 1.0)), Activation("x", CODES, "x", (0.0, 1.0), factors=(0.5,))],
    ids=["not seen", "divided"],
)
def test_what_was_not_seen_as_it_is_is_left_out(activation: Activation) -> None:
    assert tensor_values(plan_of(activation), seen([8])) == ()


def test_an_empty_histogram_is_left_out() -> None:
    assert tensor_values(plan_of(Activation("x", CODES, "x", (0.0, 1.0))), seen([])) == ()


def test_channels_are_spread_as_their_largest_magnitudes(build: Build) -> None:
    weight = np.diag([1.0, -2.0, 3.0, -4.0, 5.0]).astype(np.float32)
    model = build("(float[1,5] x) => (float[1,5] y) { [a] y = MatMul(x, w) }", w=weight)
    plan = plan_of(weights=(Weight(1, "w", QuantSpec("int8-narrow", per=Granularity.CHANNEL), axis=-1),))
    found = weight_channels(plan, as_graph(model))
    assert [(one.tensor, one.channels, one.maxima) for one in found] == [("w", 5, (1.0, 2.0, 3.0, 4.0, 5.0))]
