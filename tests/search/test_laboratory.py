"""A laboratory measures real models: how faithful, how long each node takes, how fast."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.algorithms.encoding_config import Recipe
from onnxq.calibration.provenance import file_digest
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Mode
from onnxq.errors import EngineError, collect_failures
from onnxq.evaluation.latency import Latency
from onnxq.ir import read_model, save
from onnxq.planning.plan import Demotion
from onnxq.preparing.preparation import prepare
from onnxq.runtime.engine import OnnxRuntime
from onnxq.runtime.targets import target_named
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.profiling import PlanProfiler, Timing, _of_other_shapes
from onnxq.search.sensitivity import QuantizerId, likely_shares
from onnxq.system.resources import available_cores, silent


@pytest.fixture
def profiler(residual: ModelProto, samples_for: Callable[..., list], tmp_path: Path) -> PlanProfiler:
    path = tmp_path / "prepared.onnx"
    save(prepare(read_model(residual)), path)
    bench = PreparedModel(path, preset_named("int8"), target_named("onnxruntime-cpu"))
    samples = samples_for(residual, 4)
    statistics = bench.calibrate(bench.plan({}), samples, silent)
    return PlanProfiler(PlanEvaluator.of(bench, path, samples, statistics), Recipe(), path, Timing(samples, 0.05))


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
    assert profiler.timed.keys() == {file_digest(profiler.evaluator.candidate(profiler.plan({}), profiler.recipe).path)}


def test_a_model_that_could_not_be_timed_has_no_speed_and_is_timed_the_next_time(
    profiler: PlanProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [profiler.plan({}), profiler.plan({"stem": Demotion(Mode.STORAGE, "why")})]
    failing = profiler.evaluator.candidate(plans[0], profiler.recipe).path

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
    model = profiler.evaluator.candidate(profiler.plan({}), profiler.recipe).path
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
    found = profiler.noises(plan, None, runs=500)
    assert found.tensors.keys() >= {"x", "y"}
    assert found.nodes.keys() == {"stem", "left", "right", "last"}
    assert 0 < max(found.nodes.values()) < found.joint.max() < 1
    assert profiler.noises(plan, {"stem"}, runs=0).ratios.keys() == {QuantizerId("stem", is_node=True)}
    assert 0.4 < profiler.process < 60


def test_noise_of_groups_is_likely_shared_as_histograms_tell(profiler: PlanProfiler) -> None:
    plan, evidence = profiler.plan({}), profiler.evaluator.evidence
    shares = likely_shares(plan, evidence)
    assert shares.keys() == {QuantizerId(tensor) for tensor in plan.calibrated}
    assert all(0 < share < 0.01 for share in shares.values())
    # A range has no histogram.
    ranges = {one: found for one, found in evidence.statistics.items() if one.kind == "range"}
    assert likely_shares(plan, replace(evidence, statistics=ranges)) == {}
