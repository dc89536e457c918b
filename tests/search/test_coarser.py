"""Weights get 4 bits where size is preferred: the quiet ones that hold much, as many as the goal takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.calibration.data import Data
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.evaluation.goal import Goal
from onnxq.ir import Graph
from onnxq.pipeline import quantize
from onnxq.planning.plan import Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import target_named
from onnxq.search.fallback import COARSER, choose_fewer_bits
from onnxq.search.sensitivity import QuantizerId, Sensitivities
from onnxq.steps.request import Budget
from search.timed_models import planned

MODELS = Path(__file__).parents[2] / "models"
TARGET = target_named("onnxruntime-cpu")


@dataclass
class Weights:
    """A laboratory in which only weights of 4 bits make noise, and some opsets express only those that are stored."""

    graph: Graph
    noise: Mapping[str, float]
    scheme: str = "int8"
    stores: bool = True
    seen: set[object] = field(default_factory=set)

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        return make_plan(self.graph, preset_named(self.scheme), TARGET, demotions)

    def coarse(self, plan: Plan) -> list[str]:
        return [one.node for one in plan.decisions if one.weights and one.weights[0].spec == COARSER]

    def sqnr(self, plan: Plan) -> float:
        self.seen.add(plan.effect)
        return -10 * math.log10(1e-9 + sum(self.noise[node] for node in self.coarse(plan)))

    def noises(self, plan: Plan, nodes: Set[str], runs: int) -> Sensitivities:
        return Sensitivities({QuantizerId(node, is_node=True): np.array([self.noise[node]]) for node in nodes})

    def expresses(self, plan: Plan) -> bool:
        stored = [one for one in plan.decisions if one.mode is Mode.STORAGE and one.node in self.coarse(plan)]
        return self.stores or not stored


def weights(build: Callable[..., ModelProto], noise: Mapping[str, float], **given: object) -> Weights:
    """Six layers, of which the first is a convolution, whose weights are only stored, and the last is small."""
    text = """(float[1,64,1] x) => (float[1,8] y) {
        [c0] t0 = Conv(x, w0) [a] t = Flatten(t0)
        [c1] t1 = MatMul(t, w1) [c2] t2 = MatMul(t1, w2) [c3] t3 = MatMul(t2, w3) [c4] t4 = MatMul(t3, w4)
        [c5] y = MatMul(t4, w5) }"""
    shapes = {f"w{place}": (64, 64) for place in range(1, 5)}
    made = build(text, w0=(64, 64, 1), **shapes, w5=(64, 8))
    return replace(Weights(planned(made)[0], dict.fromkeys((f"c{i}" for i in range(6)), 0.0) | dict(noise)), **given)


def coarser(profiler: Weights, goal: float = 20.0, most: int = 20, late: bool = False) -> list[str]:
    found = choose_fewer_bits(profiler, TARGET, goal, runs=9, most=most, is_late=lambda: late)
    assert all(one.weight == COARSER for one in found.values())
    return sorted(found)


ALL = ["c0", "c1", "c2", "c3", "c4", "c5"]


@pytest.mark.parametrize(
    ("noise", "found"),
    [
        ({}, ALL),
        ({"c1": 1.0}, ["c0", "c2", "c3", "c4", "c5"]),
        # Of what is as noisy the small one stays.
        ({"c2": 0.004, "c5": 0.004}, ["c0", "c1", "c2", "c3", "c4"]),
        (dict.fromkeys(ALL, 1.0), []),
    ],
)
def test_as_many_get_four_bits_as_the_goal_takes(
    build: Callable[..., ModelProto], noise: Mapping[str, float], found: list[str]
) -> None:
    profiler = weights(build, noise)
    assert coarser(profiler) == found
    assert len(profiler.seen) <= 12


def test_integer_kernels_are_left_a_part_of_the_noise(build: Callable[..., ModelProto]) -> None:
    # The goal allows 0.01, of which weights may make 0.006.
    assert coarser(weights(build, {"c1": 0.007})) == ["c0", "c2", "c3", "c4", "c5"]
    assert coarser(weights(build, {"c1": 0.005})) == ALL


def test_where_an_opset_expresses_no_stored_codes_those_are_coarser_that_are_multiplied(
    build: Callable[..., ModelProto],
) -> None:
    assert coarser(weights(build, {}, stores=False)) == ["c1", "c2", "c3", "c4", "c5"]


def test_weights_whose_size_the_scheme_names_stay_and_so_do_all_when_time_is_up(
    build: Callable[..., ModelProto],
) -> None:
    assert coarser(weights(build, {}, scheme="int8-block32")) == []
    assert coarser(weights(build, {}), late=True) == []


def test_no_more_models_are_built_than_asked_for(build: Callable[..., ModelProto]) -> None:
    profiler = weights(build, {"c1": 1.0, "c4": 1.0})
    assert coarser(profiler, most=1) in ([], ["c0", "c2", "c3", "c5"], ["c0", "c2", "c3"])
    assert len(profiler.seen) == 2


def test_a_file_is_smaller_where_that_is_preferred_and_as_faithful_as_was_asked(tmp_path: Path) -> None:
    data, budget = Data(MODELS / "data" / "calib.npz", limit=16), Budget(latency=0, accuracy="off")
    fast, small = (
        quantize(MODELS / "vit.onnx", data, tmp_path / wish, goal=Goal(prefer=wish), budget=budget).report
        for wish in ("speed", "size")
    )
    quantize(MODELS / "vit.onnx", data, tmp_path / "again", scheme=small.plan, budget=budget)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "size").read_bytes()
    assert small.files.bytes < 0.85 * fast.files.bytes
    assert small.agreement.worst_sqnr >= 20
    assert any(one.weights and one.weights[0].spec.format == "int4" for one in small.plan.decisions)
