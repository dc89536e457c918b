"""A laboratory measures real models: how faithful, how long each node takes, how fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from conftest import MODELS
from onnx import ModelProto

from onnxq import Budget, Data, Goal, quantize
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.calibration.provenance import file_digest
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.errors import EngineError, collect_failures
from onnxq.evaluation.latency import Latency
from onnxq.ir import Graph, read_model, save
from onnxq.passes.preparing.preparation import prepare
from onnxq.planning.plan import Demotion, Plan
from onnxq.planning.planner import make_plan
from onnxq.runtime.engine import OnnxRuntime
from onnxq.runtime.targets import target_named
from onnxq.search.cost_model import CostModel, KernelOption
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.kernel_times import NodeTimes
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.profiling import (
    PlanProfiler,
    PlanTester,
    Profiler,
    Timing,
    _of_other_shapes,
    profile_costs,
)
from onnxq.search.sensitivity import QuantizerId, likely_shares
from onnxq.system.resources import available_cores, silent
from search.table_laboratory import Table
from search.timed_models import TARGET, planned


@pytest.fixture
def profiler(residual: ModelProto, samples_for: Callable[..., list], tmp_path: Path) -> PlanProfiler:
    path = tmp_path / "prepared.onnx"
    save(prepare(read_model(residual)), path)
    bench = PreparedModel(path, preset_named("int8"), target_named("onnxruntime-cpu"))
    samples = samples_for(residual, 4)
    statistics = bench.calibrate(bench.plan({}), samples, silent)
    return PlanProfiler(
        PlanEvaluator.of(bench, path, samples, statistics), EncodingConfig(), path, Timing(samples, 0.05)
    )


def test_storing_all_weights_is_more_faithful_than_integers(profiler: PlanProfiler) -> None:
    stored = profiler.plan({name: Demotion(Mode.STORAGE, "why") for name in ("stem", "left", "right", "last")})
    assert 20 < profiler.sqnr(profiler.plan({})) < profiler.sqnr(stored)


def test_every_convolution_has_a_time_in_both_models(profiler: PlanProfiler) -> None:
    plan = profiler.plan({})
    floats, integers = profiler.times(None), profiler.times(plan)
    for times in (floats, integers):
        assert all(times.nodes[name] > 0 for name in ("stem", "left", "right", "last"))
        assert times.rest == 0
    assert {"x", "y"} <= integers.borders.keys()


def test_speed_is_a_ratio_beside_the_float_model(profiler: PlanProfiler) -> None:
    assert all(0.01 < speed < 100 for speed in profiler.speeds([profiler.plan({}), profiler.plan({})]))
    assert profiler.timed.keys() == {file_digest(profiler.evaluator.candidate(profiler.plan({}), profiler.config).path)}


def test_a_model_that_could_not_be_timed_has_no_speed_and_is_timed_the_next_time(
    profiler: PlanProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [profiler.plan({}), profiler.plan({"stem": Demotion(Mode.STORAGE, "why")})]
    failing = profiler.evaluator.candidate(plans[0], profiler.config).path

    def measured(models: tuple[Path, ...], *given: object, **options: object) -> list[Latency]:
        if failing in models:
            raise EngineError("the engine took longer than 1 s")
        return [Latency(2.0, 1.0, 1, 6) for _ in models[1:]]

    monkeypatch.setattr("onnxq.search.profiling.measure_latencies", measured)
    with collect_failures() as failures:
        speeds = profiler.speeds(plans)
    assert math.isnan(speeds[0])
    assert (speeds[1], len(failures)) == (2.0, 1)
    failing = Path()
    assert profiler.speeds(plans) == [2.0, 2.0]


def test_a_verdict_on_the_speed_of_a_model_stays(profiler: PlanProfiler) -> None:
    model = profiler.evaluator.candidate(profiler.plan({}), profiler.config).path
    assert [profiler.found_speed(model, now) for now in (0.9, 1.2)] == [0.9, 0.9]


def test_times_of_other_threads_are_not_taken_for_these(profiler: PlanProfiler) -> None:
    profiler.times(None)
    for threads, known in ((1, 2), (1, 2), (available_cores(), 2)):
        engine = OnnxRuntime(threads=threads)
        replace(profiler, timing=replace(profiler.timing, engine=engine)).times(None)
        assert len(profiler.costs.known) == (known if available_cores() > 1 else 1)


def test_of_samples_of_one_shape_one_is_profiled() -> None:
    small, large = ({"x": np.zeros(shape)} for shape in ((1, 4), (1, 8)))
    assert list(_of_other_shapes([small, large, small, large])) == [small, large]


def test_noise_is_told_of_every_tensor_and_weight(profiler: PlanProfiler) -> None:
    plan = profiler.plan({})
    found = profiler.measure_sensitivities(plan, None, runs=500)
    assert found.tensors.keys() >= {"x", "y"}
    assert found.nodes.keys() == {"stem", "left", "right", "last"}
    assert 0 < max(found.nodes.values()) < found.joint.max() < 1
    assert profiler.measure_sensitivities(plan, {"stem"}, runs=0).ratios.keys() == {QuantizerId("stem", is_node=True)}
    assert 0.4 < profiler.process < 60


def test_noise_of_groups_is_likely_shared_as_histograms_tell(profiler: PlanProfiler) -> None:
    plan, statistics = profiler.plan({}), profiler.evaluator.statistics
    shares = likely_shares(plan, statistics)
    assert shares.keys() == {QuantizerId(tensor) for tensor in plan.calibrated}
    assert all(0 < share < 0.01 for share in shares.values())
    # A range has no histogram.
    ranges = {one: found for one, found in statistics.statistics.items() if one.kind == "range"}
    assert likely_shares(plan, replace(statistics, statistics=ranges)) == {}


# Where nothing can be timed, the plan keeps as many integer nodes as the goal allows, the same everywhere.

CALIB = MODELS / "data" / "calib.npz"


def test_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*given: object) -> None:
        raise AssertionError("something was profiled or timed")

    monkeypatch.setattr(PlanProfiler, "times", timed)
    monkeypatch.setattr(PlanProfiler, "_latencies", timed)
    given = MODELS / "mobilenet.onnx", Data(CALIB, limit=16)
    found = quantize(*given, goal=Goal(min_sqnr=38.0), budget=Budget(latency_seconds=0.0, accuracy="off")).report
    assert found.plan.count(Mode.STATIC)
    assert found.search.sensitivities
    assert (found.search.frontier, found.performance.times) == ((), ())


def test_two_searches_for_another_machine_write_the_same_bytes(tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in ("one.onnx", "other.onnx")]
    for output in outputs:
        quantize(
            MODELS / "mobilenet.onnx",
            Data(CALIB, limit=16),
            output,
            goal=38.0,
            target="qnn",
            budget=Budget(accuracy="off"),
        )
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


# What a search asks for is what a laboratory measures.


def test_a_laboratory_and_that_of_the_tests_measure_all_that_is_asked() -> None:
    requested = {name for one in (PlanTester, Profiler) for name in vars(one) if not name.startswith("_")}
    assert {"plan", "sqnr", "measure_sensitivities", "times", "speeds"} <= requested
    for profiler in (PlanProfiler, Table):
        assert requested <= set(dir(profiler))


# What is profiled before a search.


@dataclass
class Recorder:
    """A laboratory that only remembers which plans were profiled."""

    graph: Graph
    scheme: str = "int8"
    can_decode: bool = True
    fits: bool = True
    others: float = 0.0
    profiled: list[Plan | None] = field(default_factory=list)
    measured: int = 0

    def plan(self, demotions: Mapping[str, Demotion]) -> Plan:
        return make_plan(self.graph, preset_named(self.scheme), TARGET, demotions)

    def sqnr(self, plan: Plan) -> float:
        return math.inf

    def expresses(self, plan: Plan) -> bool:
        return self.can_decode or not plan.count(Mode.WEIGHT_ONLY)

    def times(self, plan: Plan | None) -> NodeTimes:
        self.profiled.append(plan)
        return NodeTimes({"first": 1.0, "other": self.others} if self.fits else {}, {}, {}, 0.0)

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        return [1.0 for _ in plans]


def profiled(profiler: Recorder, latest: float = math.inf) -> CostModel:
    full = profiler.plan({})
    stores = {one.node: Demotion(Mode.STORAGE, "why") for one in full.decisions if one.mode is Mode.STATIC}
    return profile_costs(profiler, profiler.graph, TARGET, stores, latest=latest, progress=silent)


def test_each_alternative_is_profiled_where_all_take_it(perceptron: ModelProto) -> None:
    profiler = Recorder(planned(perceptron)[0])
    costs = profiled(profiler)
    assert [offer.nodes for offer in costs.offers] == [{"first", "second"}] * 3
    assert [None if plan is None else plan.by_node["first"].mode for plan in profiler.profiled] == [
        None,
        Mode.STATIC,
        Mode.DYNAMIC,
        Mode.WEIGHT_ONLY,
        Mode.WEIGHT_ONLY,
    ]


@pytest.mark.parametrize(("scheme", "offers"), [("int8", 0), ("int8-dynamic", 1)])
def test_nodes_that_take_hardly_any_time_are_not_profiled_otherwise(
    perceptron: ModelProto, scheme: str, offers: int
) -> None:
    profiler = Recorder(planned(perceptron)[0], scheme, others=99.0)
    assert len(profiled(profiler).offers) == offers
    assert len(profiler.profiled) == 2


def test_nothing_is_profiled_that_no_node_can_take(residual: ModelProto) -> None:
    profiler = Recorder(planned(residual)[0])
    assert profiled(profiler).offers == ()
    assert len(profiler.profiled) == 2


def test_an_alternative_that_no_model_can_express_is_left_out(perceptron: ModelProto) -> None:
    profiler = Recorder(planned(perceptron)[0], can_decode=False)
    assert [offer.alternative.mode for offer in profiled(profiler).offers] == [Mode.DYNAMIC]


def test_what_makes_too_many_events_for_a_profile_is_no_offer(perceptron: ModelProto) -> None:
    profiler = Recorder(planned(perceptron)[0], fits=False)
    costs = profiled(profiler)
    assert (costs.offers, costs.static_nodes, costs.borders) == ((), {}, ())


@pytest.mark.parametrize(("scheme", "offers"), [("int8", []), ("int8-dynamic", [{"first", "second"}])])
def test_when_it_is_late_only_what_the_scheme_wants_is_offered_and_nothing_more_is_profiled(
    perceptron: ModelProto, scheme: str, offers: list[set[str]]
) -> None:
    profiler = Recorder(planned(perceptron)[0], scheme)
    costs = profiled(profiler, latest=-math.inf)
    assert [offer.nodes for offer in costs.offers] == offers
    assert all(offer.alternative == KernelOption(Mode.DYNAMIC) for offer in costs.offers)
    assert len(profiler.profiled) == 2
