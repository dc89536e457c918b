"""Finer codes go to as few weights as will do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from onnx import ModelProto

from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode, Spec
from onnxq.ir import Graph
from onnxq.planning.plan import Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import target_named
from onnxq.search.fallback import WeightPrecisionSearch
from onnxq.search.search import FINER, FINEST
from search.timed_models import planned


@dataclass
class Weights:
    """A laboratory in which only weights make noise: less where they are finer, none where they are finest."""

    graph: Graph
    noise: Mapping[str, float]
    finer: float = 0.01
    scheme: str = "int8"
    of_bits: Mapping[str, float] = field(default_factory=dict)
    seen: set[object] = field(default_factory=set)

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        return make_plan(self.graph, preset_named(self.scheme), target_named("onnxruntime-cpu"), demotions)

    def sqnr(self, plan: Plan) -> float:
        self.seen.add(plan.effect)
        weighted = [one for one in plan.decisions if one.weights]
        ratio = sum(self.noise.get(one.node, 0.0) * self.left(one.weights[0].spec) for one in weighted)
        return -10 * math.log10(ratio + 1e-9)

    def left(self, spec: Spec) -> float:
        """The part of its noise that a weight has left with finer codes."""
        return {FINER: self.finer, FINEST: 0.0}.get(spec, self.of_bits.get(spec.format, 1.0))


def finer(
    build: Callable[..., ModelProto], noise: Mapping[str, float], goal: float = 20.0, **known: Any
) -> WeightPrecisionSearch:
    nodes = " ".join(f"[c{i}] t{i + 1} = MatMul(t{i}, w{i})" for i in range(8))
    made = build(f"(float[4,64] t0) => (float[4,64] t8) {{ {nodes} }}", **{f"w{i}": (64, 64) for i in range(8)})
    graph, full = planned(made, known.get("scheme", "int8"))
    integers = (one.node for one in full.decisions if one.mode is Mode.STATIC)
    stores = {node: Demotion(Mode.STORAGE, "why") for node in integers}
    return WeightPrecisionSearch(Weights(graph, noise, **known), full, stores, goal)


def test_quiet_weights_need_nothing(build: Callable[..., ModelProto]) -> None:
    assert not finer(build, dict.fromkeys(("c0", "c1"), 1e-3)).are_needed(1.0)


@pytest.mark.parametrize(
    ("noise", "share", "needed"),
    [(0.008, 0.5, True), (0.008, 0.1, False), (0.012, 0.1, True), (0.004, 0.5, False)],
    ids=["little is left to integers", "which hardly gain by it", "too coarse for the goal", "quiet"],
)
def test_weights_that_make_little_of_all_noise_stay_as_they_are(
    build: Callable[..., ModelProto], noise: float, share: float, needed: bool
) -> None:
    assert finer(build, {"c3": noise}).are_needed(share) is needed


@pytest.mark.parametrize(("share", "spec"), [(0.001, FINER), (0.5, FINEST)], ids=["scales of blocks", "sixteen bits"])
def test_the_noisiest_weights_alone_get_finer_codes(
    build: Callable[..., ModelProto], share: float, spec: object
) -> None:
    noise = {"c3": 0.5, "c5": 0.4, "c0": 1e-4}
    found = finer(build, noise, finer=share)
    assert found.are_needed(1.0)
    better = found.found(noise)
    assert {node for node, one in better.items() if one.weight == spec} == {"c3", "c5"}
    assert found.profiler.sqnr(found.profiler.plan({**found.stores, **better})) >= 20
    assert len(found.profiler.seen) <= 16


def test_when_time_is_up_more_weights_are_finer_than_need_be(build: Callable[..., ModelProto]) -> None:
    noise = {"c3": 0.5, "c5": 0.4, "c0": 1e-4}
    found = replace(finer(build, noise, finer=0.001), is_late=lambda: True)
    assert len(found.found(noise)) == 8
    assert len(found.profiler.seen) <= 2


def test_where_no_codes_are_fine_enough_weights_stay_float(build: Callable[..., ModelProto]) -> None:
    found = finer(build, {"c3": 0.5}, goal=200.0)
    assert {one.mode for one in found.found({"c3": 0.5}).values()} == {Mode.FLOAT}


def test_a_large_quiet_weight_is_not_finer_because_a_small_noisy_one_is(build: Callable[..., ModelProto]) -> None:
    # By noise for its size c0 comes last, and without it the others are not quiet enough.
    noise = {"c0": 0.009, **{f"c{index}": 0.0005 for index in range(1, 8)}}
    found = finer(build, noise, goal=21.0)
    better = found.found({**noise, "c0": 0.0001})
    assert set(better) == {"c0"}


@pytest.mark.parametrize(("goal", "spec"), [(14.0, "int4"), (19.0, "int8-narrow")], ids=["four bits", "eight"])
def test_weights_of_two_bits_become_no_finer_than_need_be(
    build: Callable[..., ModelProto], goal: float, spec: str
) -> None:
    noise = {"c3": 0.5, "c5": 0.01}
    of_bits = {"int4": 0.05, "int8-narrow": 0.001}
    found = finer(build, noise, goal=goal, scheme="int2-block32", of_bits=of_bits, finer=5e-4)
    better = found.found(noise)
    assert {node: one.weight.format for node, one in better.items() if one.weight} == {"c3": spec}
    assert better["c3"].weight.per == ((32,) if spec == "int4" else (128,))
    # The reason speaks of codes that were tried, not of those that are taken.
    assert better["c3"].reason == "its weights as int2 codes in blocks of 32 would hurt the worst output too much"
    assert better["c3"].finer == better["c3"].reason


@pytest.mark.parametrize(
    ("share", "coarse"),
    [(0.001, "int8-narrow codes with one scale a channel"), (0.5, "int8-narrow codes in blocks of 32")],
)
def test_the_reason_names_the_codes_that_are_too_coarse(
    build: Callable[..., ModelProto], share: float, coarse: str
) -> None:
    noise = {"c3": 0.5, "c5": 0.4, "c0": 1e-4}
    reasons = {one.reason for one in finer(build, noise, finer=share).found(noise).values() if one.weight}
    assert f"its weights as {coarse} would hurt the worst output too much" in reasons
