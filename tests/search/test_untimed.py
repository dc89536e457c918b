"""Where nothing can be timed, plans are weighed by what is to be computed, the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from onnxq import Budget, Data, Goal, quantize
from onnxq.algorithms.encoding_config import Recipe
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.ir import read_model, save
from onnxq.planning.plan import Demotion
from onnxq.runtime.targets import TARGETS
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import open_prepared_model
from onnxq.search.profiling import AnalyticProfiler, PlanProfiler, Timing
from onnxq.system.resources import silent

MODELS = Path(__file__).parents[2] / "models"
CALIB = MODELS / "data" / "calib.npz"


@pytest.fixture
def untimed(build: Callable[..., ModelProto], tmp_path: Path) -> AnalyticProfiler:
    model = build(
        "(float[1,8,16,16] x) => (float[1,8] y) {"
        "[wide] a = Conv <pads = [1,1,1,1]> (x, w0) [relu] b = Relu(a) [pool] c = GlobalAveragePool(b)"
        "[flat] d = Flatten(c) [narrow] y = MatMul(d, w1) }",
        w0=(8, 8, 3, 3),
        w1=(8, 8),
    )
    path = tmp_path / "model.onnx"
    save(read_model(model), path)
    bench = open_prepared_model(read_model(model), PRESETS["int8"], TARGETS["onnxruntime-cpu"], tmp_path)
    samples = [{"x": np.random.default_rng(seed).normal(size=(1, 8, 16, 16)).astype(np.float32)} for seed in range(3)]
    evaluator = PlanEvaluator.of(bench, path, samples, bench.calibrate(bench.plan({}), samples, silent))
    return AnalyticProfiler(evaluator, Recipe(), path, Timing(samples, 0.1))


def test_a_node_takes_what_it_computes_and_a_quarter_as_the_integers_that_are_wanted(untimed: AnalyticProfiler) -> None:
    full = untimed.plan({})
    floats, integers = untimed.times(None), untimed.times(full)
    assert floats.nodes["wide"] > 4 * floats.nodes["narrow"]
    static = {one.node for one in full.decisions if one.mode is Mode.STATIC}
    assert "wide" in static
    for node, time in floats.nodes.items():
        assert integers.nodes[node] == (time / 4 if node in static else time)
    assert untimed.speeds([full])[0] > 2
    assert untimed.run == floats.total / 1e9


def test_integers_that_the_scheme_does_not_want_gain_nothing(untimed: AnalyticProfiler) -> None:
    dynamic = untimed.plan({"narrow": Demotion(Mode.DYNAMIC, "why")})
    assert dynamic.by_node["narrow"].mode is Mode.DYNAMIC
    assert untimed.times(dynamic).nodes["narrow"] == untimed.times(None).nodes["narrow"]


def test_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*given: object) -> None:
        raise AssertionError("something was profiled or timed")

    monkeypatch.setattr(PlanProfiler, "times", timed)
    monkeypatch.setattr(PlanProfiler, "_latencies", timed)
    given = MODELS / "mobilenet.onnx", Data(CALIB, limit=16)
    found = quantize(*given, goal=Goal(min_sqnr=38.0), budget=Budget(latency=0.0, accuracy="off")).report
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
