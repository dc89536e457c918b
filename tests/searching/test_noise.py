"""How noise is divided among nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto
from timed_models import TARGET, planned, times

from onnxq.encoding.recipe import Recipe
from onnxq.graph import Graph
from onnxq.modelfile import load, save
from onnxq.planning.plan import Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.preparation import prepare
from onnxq.presets import preset_named
from onnxq.progress import silent
from onnxq.scheme import Mode, Spec
from onnxq.searching.alternatives import Alternative
from onnxq.searching.kernel_times import NodeTimes
from onnxq.searching.measures import Effort
from onnxq.searching.noise import NoiseMeter, _ratio, spread_noise
from onnxq.trials import Trials
from onnxq.workbench import Workbench

MODELS = Path(__file__).parents[2] / "models"

UNITS = [f"n{index}" for index in range(32)]


class Bench:
    """Measures groups of units whose noise is known, and counts how often."""

    def __init__(self, **noise: float) -> None:
        self.noise = noise
        self.groups: list[int] = []

    def __call__(self, group: Sequence[str]) -> float:
        self.groups.append(len(group))
        return sum(self.noise.get(unit, 0.001) for unit in group)


def test_each_unit_is_measured_alone_when_there_is_time() -> None:
    bench = Bench(n3=1.0, n20=0.5)
    found = spread_noise(UNITS, bench, whole=2.0, most=32, negligible=0.0)
    assert bench.groups == [1] * 32
    assert (found["n3"], found["n20"], found["n0"]) == (1.0, 0.5, 0.001)


def test_few_measurements_find_the_noisiest_units() -> None:
    bench = Bench(n3=1.0, n20=0.5)
    whole = bench(UNITS)
    found = spread_noise(UNITS, bench, whole=whole, most=20, negligible=0.01)
    assert len(bench.groups) <= 21
    assert sorted(found, key=lambda unit: -found[unit])[:2] == ["n3", "n20"]
    assert found["n3"] == pytest.approx(1.0, rel=0.05)
    assert found["n20"] == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("most", [0, 1, 2, 7, 31])
def test_the_parts_make_the_whole_even_where_errors_point_the_same_way(most: int) -> None:
    found = spread_noise(UNITS, lambda group: len(group) ** 2 / 1024, whole=1.0, most=most, negligible=0.0)
    assert sorted(found) == sorted(UNITS)
    assert sum(found.values()) == pytest.approx(1.0)


def test_quiet_groups_are_not_looked_into() -> None:
    bench = Bench(n5=1.0)
    spread_noise(UNITS, bench, whole=1.03, most=30, negligible=0.1)
    assert bench.groups == [2] * 16 + [1] * 2


def test_groups_of_one_size_come_first_and_then_the_noisiest_are_split() -> None:
    bench = Bench(n3=1.0)
    found = spread_noise(UNITS, bench, whole=1.031, most=10, negligible=0.0)
    assert bench.groups == [4] * 8 + [2] * 2
    assert found["n2"] == found["n3"] > 100 * found["n0"]


def test_what_is_not_finite_is_very_noisy_but_can_be_added_up() -> None:
    assert _ratio(-math.inf) == 1e10
    assert _ratio(math.inf) == 0.0
    found = spread_noise(UNITS, lambda group: _ratio(-math.inf), whole=_ratio(-math.inf), most=8, negligible=0.0)
    assert sum(found.values()) == pytest.approx(1e10)


@dataclass
class Remembering:
    """A laboratory that takes its time for what it has not measured before; noise is by mode, and twice that of c1."""

    graph: Graph
    noise: Mapping[str, float]
    seconds: float = 0.0
    known: dict[object, float] = field(default_factory=dict)
    alone: list[str] = field(default_factory=list)

    @property
    def measured(self) -> int:
        return len(self.known)

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        return make_plan(self.graph, preset_named("int8"), TARGET, demotions)

    def expected_noise(self, plan: Plan) -> float:
        return 10 ** (-self.sqnr(plan) / 10)

    def sqnr(self, plan: Plan) -> float:
        if plan.effect not in self.known:
            time.sleep(self.seconds)
            weighted = [one for one in plan.decisions if one.weights]
            self.alone += [one.node for one in weighted] if len(weighted) == 1 else []
            ratio = 1e-9
            for one in weighted:
                kind = one.weights[0].spec.format if one.mode is Mode.WEIGHT_ONLY else str(one.mode)
                ratio += self.noise.get(kind, 0.0) * (1 + (one.node == "c1"))
            self.known[plan.effect] = -10 * math.log10(ratio)
        return self.known[plan.effect]

    def expresses(self, plan: Plan) -> bool:
        return True

    def times(self, plan: Plan | None) -> NodeTimes:
        return times({})

    def speed(self, plan: Plan) -> float:
        return 1.0


def chained(build: Callable[..., ModelProto], length: int) -> Graph:
    names = ["x", *(f"t{index}" for index in range(length - 1)), "y"]
    nodes = " ".join(f"[c{i}] {names[i + 1]} = MatMul({names[i]}, w{i})" for i in range(length))
    weights = {f"w{i}": (64, 64) for i in range(length)}
    return planned(build(f"(float[4,64] x) => (float[4,64] y) {{ {nodes} }}", **weights))[0]


def meter(laboratory: Remembering, noise_seconds: float) -> NoiseMeter:
    effort = Effort(noise_seconds, grown=0, timed=0, refinements=0, seconds=0.0)
    return NoiseMeter(laboratory, laboratory.plan({}), 20.0, effort)


def test_every_alternative_is_measured_on_the_nodes_that_may_take_it(build: Callable[..., ModelProto]) -> None:
    noise = {"static": 1e-2, "dynamic": 1e-3, "int4": 1e-1, "storage": 1e-4}
    laboratory = Remembering(chained(build, 3), noise)
    dynamic, codes = Alternative(Mode.DYNAMIC), Alternative(Mode.WEIGHT_ONLY, Spec("int4", (32,)))
    offered = {dynamic: ("c0", "c1"), codes: ("c1", "c2"), Alternative(Mode.WEIGHT_ONLY, Spec("int8", (32,))): ()}
    found = meter(laboratory, 100.0).of_integers(offered)
    assert found.static == pytest.approx({"c0": 1e-2, "c1": 2e-2, "c2": 1e-2}, rel=1e-3)
    assert found.alternatives == {
        dynamic: pytest.approx({"c0": 1e-3, "c1": 2e-3}, rel=1e-3),
        codes: pytest.approx({"c1": 2e-1, "c2": 1e-1}, rel=1e-3),
    }
    assert sum(found.stored.values()) == pytest.approx(4e-4, rel=1e-3)
    assert meter(laboratory, 100.0).of_stored().ratios == pytest.approx({"c0": 1e-4, "c1": 2e-4, "c2": 1e-4}, rel=1e-3)


def test_what_is_remembered_says_nothing_of_what_measuring_takes(build: Callable[..., ModelProto]) -> None:
    laboratory = Remembering(chained(build, 16), {"static": 1.0}, seconds=0.005)
    silence = Demotion(Mode.FLOAT, "why")
    laboratory.sqnr(laboratory.plan({f"c{index}": silence for index in range(1, 16)}))
    # There is time for a single one, so only the probe is measured alone, besides what was known.
    found = meter(laboratory, 0.015).of_integers({}).static
    assert set(laboratory.alone) == {"c0", "c1"}
    assert sum(found.values()) == pytest.approx(17.0)


def test_what_is_all_remembered_is_told_node_by_node(build: Callable[..., ModelProto]) -> None:
    laboratory = Remembering(chained(build, 4), {"static": 1.0})
    first = meter(laboratory, 100.0).of_integers({})
    measured = laboratory.measured
    assert meter(laboratory, 0.0).of_integers({}) == first
    assert laboratory.measured == measured


def test_when_time_is_up_the_static_nodes_are_measured_together_and_the_rest_is_taken_as_too_noisy(
    build: Callable[..., ModelProto],
) -> None:
    laboratory = Remembering(chained(build, 4), {"static": 1.0})
    dynamic = Alternative(Mode.DYNAMIC)
    late = replace(meter(laboratory, 100.0), deadline=-math.inf)
    found = late.of_integers({dynamic: ("c0", "c1")})
    assert found.static == pytest.approx(dict.fromkeys(("c0", "c1", "c2", "c3"), 5 / 4))
    assert found.alternatives == {dynamic: {"c0": 1e10, "c1": 1e10}}
    assert (found.alone, laboratory.alone) == ((), [])


def ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Return the rank of each value; equal values share the mean of theirs."""
    return np.array([np.less(values, value).sum() + np.equal(values, value).sum() / 2 for value in values])


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "vit"])
def test_noise_of_groups_ranks_the_nodes_of_trained_models_like_that_of_each_alone(name: str, tmp_path: Path) -> None:
    path = tmp_path / "prepared.onnx"
    save(prepare(load(MODELS / f"{name}.onnx")), path)
    bench = Workbench(path, preset_named("int8"), TARGET)
    samples = [{"image": image[None]} for image in np.load(MODELS / "data" / "calib.npz")["image"][:8]]
    full = bench.plan({})
    trials = Trials.of(bench, path, samples, bench.calibrate(full, samples, silent))
    weighted = [one.node for one in full.decisions if one.weights]
    units = [one.node for one in full.decisions if one.weights and one.mode is Mode.STATIC]

    def measure(group: Sequence[str]) -> float:
        silence = {node: Demotion(Mode.FLOAT, "why") for node in weighted if node not in group}
        return _ratio(trials.sqnr(bench.plan(silence), Recipe()))

    alone = spread_noise(units, measure, whole=0.0, most=len(units), negligible=0.0)
    groups = spread_noise(units, measure, whole=measure(units), most=len(units) // 2, negligible=0.0)
    order = [ranks([found[unit] for unit in units]) for found in (alone, groups)]
    # Spearman's rank correlation; measured 0.55 to 0.64, where any order but the right one would give 0 on average.
    assert np.corrcoef(order)[0, 1] > 0.4

    def held(found: Mapping[str, float]) -> float:
        """Return the noise of the quarter of the nodes that is said to be the noisiest."""
        return sum(alone[unit] for unit in sorted(units, key=lambda unit: -found[unit])[: len(units) // 4])

    assert held(groups) > 0.85 * held(alone)
