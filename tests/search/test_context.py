"""What is chosen by measuring: a metric's plans, replayed plans, and steps back."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import MODELS, Build
from onnx import ModelProto
from runtime.elsewhere import Elsewhere, offer_elsewhere, offer_known_times

from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.equalization import ChannelScales, Equalization
from onnxq.calibration.data import Data
from onnxq.config.effort import FAST, FULL, AccuracyEffort
from onnxq.config.scheme import Mode
from onnxq.errors import EngineError, SchemeError
from onnxq.evaluation import latency
from onnxq.evaluation.goal import EvaluationSplit, Goal
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.report import AccuracyError
from onnxq.runtime import engine as local
from onnxq.runtime import kernels
from onnxq.runtime.engine import Engine, LoadedModel, OnnxRuntime
from onnxq.runtime.sessions import open_session
from onnxq.search import refinement
from onnxq.search.context import SearchContext
from onnxq.search.cross_validation import AlgorithmResult
from onnxq.search.evaluator import BuiltModel, PlanEvaluator
from onnxq.search.profiling import PlanProfiler
from onnxq.search.refinement import RefinedEncoding
from search.timed_models import let_integers_be_fast

CALIB = MODELS / "data" / "calib.npz"


@pytest.mark.parametrize("profiles", [True, False])
def test_plans_for_an_engine_are_timed_by_it_alone(monkeypatch: pytest.MonkeyPatch, profiles: bool) -> None:
    offer_elsewhere(monkeypatch, profiles=profiles)
    # Whatever is timed in this process is timed here.
    monkeypatch.setattr(OnnxRuntime, "time", lambda self, *given: timed.append(self.name) or Engine.time(self, *given))
    timed: list[str] = []
    report = quantize(
        MODELS / "vit.onnx",
        Data(CALIB, limit=8),
        target="openvino",
        goal=Goal(force=True),
        budget=Budget(accuracy="off", latency_seconds=0.2, engine="elsewhere"),
    ).report
    assert set(timed) == {"elsewhere"}
    assert ("profile" in Elsewhere.requested) == profiles
    assert bool(report.search.frontier) == profiles
    assert report.performance.latency is not None
    assert report.performance.latency.engine == "elsewhere 1"


def test_a_model_that_an_engine_does_not_load_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(engine: Elsewhere, model: Path, threads: int | None = None) -> LoadedModel:
        raise EngineError(f"engine elsewhere cannot load {model}")

    offer_elsewhere(monkeypatch)
    monkeypatch.setattr(Elsewhere, "load", load)
    budget = Budget(accuracy="off", latency_seconds=0.2, engine="elsewhere")
    with pytest.raises(EngineError, match=f"^engine elsewhere cannot load {MODELS / 'vit.onnx'}$"):
        quantize(MODELS / "vit.onnx", Data(CALIB, limit=8), target="openvino", budget=budget)
    assert "profile" not in Elsewhere.requested


@pytest.mark.parametrize(("speed", "mode", "reported"), [(0.98, Mode.STORAGE, 1.0), (1.02, Mode.STATIC, 1.02)])
def test_integers_that_are_no_faster_on_the_engine_step_back_to_stored_weights_however_times_scatter(
    monkeypatch: pytest.MonkeyPatch, speed: float, mode: Mode, reported: float
) -> None:
    offer_known_times(monkeypatch, speed)
    report = quantize(
        MODELS / "resnet.onnx",
        Data(CALIB, limit=8),
        target="openvino",
        budget=Budget(accuracy="off", latency_seconds=0.2, engine="elsewhere"),
    ).report
    assert {one.mode for one in report.plan.decisions if one.weights} == {mode}
    assert report.performance.latency is not None
    assert report.performance.latency.speed == pytest.approx(reported)


def test_nodes_candidates_and_the_result_are_timed_in_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, set[object]] = {}

    def cached_by_mtime(name: str) -> Callable[..., object]:
        def opening(*given: Any, **options: Any) -> object:
            opened.setdefault(name, set()).add(options["threads"])
            return open_session(*given, **options)

        return opening

    for module in (kernels, local):
        monkeypatch.setattr(module, "open_session", cached_by_mtime(module.__name__))
    budget = Budget(accuracy="off", latency_seconds=0.05, threads=1)
    found = quantize(MODELS / "resnet.onnx", Data(CALIB, limit=8), budget=budget).report.latency
    assert opened == {kernels.__name__: {1}, local.__name__: {1}}
    assert found is not None
    assert found.threads == 1


def test_a_plan_from_a_file_makes_the_same_model(tmp_path: Path) -> None:
    first = quantize(
        MODELS / "mobilenet.onnx", Data(CALIB, limit=16), tmp_path / "a.onnx", goal=26, budget=Budget(latency_seconds=0)
    ).report
    save_plan(first.plan, tmp_path / "plan.toml")
    plan = load_plan(tmp_path / "plan.toml")
    assert plan == first.plan
    assert plan.ranges == first.encoding.ranges
    again = quantize(
        MODELS / "mobilenet.onnx",
        Data(CALIB, limit=16),
        tmp_path / "b.onnx",
        scheme=plan,
        budget=Budget(latency_seconds=0),
    ).report
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert again.plan == plan
    assert again.search.measured == 0


def test_a_plan_of_another_model_is_refused() -> None:
    plan = quantize(
        MODELS / "resnet.onnx",
        Data(CALIB, limit=2),
        goal=Goal(force=True),
        budget=Budget(latency_seconds=0, search="off"),
    ).report.plan
    with pytest.raises(SchemeError, match="the plan does not fit the model: "):
        quantize(MODELS / "vit.onnx", Data(CALIB, limit=2), scheme=plan, budget=Budget(latency_seconds=0))


def test_another_target_is_planned_without_timing_its_nodes() -> None:
    report = quantize(
        MODELS / "resnet.onnx", Data(CALIB, limit=8), target="onnxruntime-cpu-arm", budget=Budget(latency_seconds=0.05)
    ).report
    assert report.search.frontier == ()
    assert report.plan.count(Mode.STATIC) > 20


def test_a_timed_search_keeps_its_frontier_and_regions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Other work on the machine could make it step back.
    monkeypatch.setattr(latency.Latency, "speed", 2.0)
    report = quantize(
        MODELS / "resnet.onnx", Data(CALIB, limit=8), tmp_path / "o.onnx", budget=Budget(latency_seconds=0.05)
    ).report
    assert sum(point.chosen for point in report.search.frontier) == 1
    assert sum(region.nodes for region in report.performance.regions) <= report.plan.count(Mode.STATIC)
    weights = {tensor.name for tensor in onnx.load(tmp_path / "o.onnx").graph.initializer}
    assert weights
    assert np.isfinite(report.agreement.worst_sqnr)


def test_no_plan_counts_as_taken_after_a_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    let_integers_be_fast(monkeypatch)
    monkeypatch.setattr(latency.Latency, "speed", 0.5)
    report = quantize(MODELS / "resnet.onnx", Data(CALIB, limit=8), budget=Budget(latency_seconds=0.05)).report
    assert report.plan.count(Mode.STATIC) == 0
    assert len(report.search.frontier) > 0
    assert not any(point.chosen for point in report.search.frontier)


def test_outputs_that_are_never_finite_are_refused_in_a_sentence(build: Callable[..., ModelProto]) -> None:
    # Small weights beside large ones become zero, and so does the divisor.
    weights = np.full((8, 8, 3, 3), 1e-6, np.float32)
    weights[:, 0, 0, 0] = np.repeat([0.0, 1e6], 4)
    text = "(float[1,8,8,8] x) => (float[1,8,6,6] y) { [a] p = Conv(x, w) [r] y = Reciprocal(p) }"
    images = [np.eye(8, dtype=np.float32)[[index]].repeat(64).reshape(1, 8, 8, 8) for index in (1, 2)]
    # Data of mean zero leaves nothing for a bias to make up for.
    samples = [{"x": sign * image} for image in images for sign in (np.float32(1), np.float32(-1))]
    with pytest.raises(AccuracyError, match="nothing was written"):
        quantize(build(text, w=weights), samples, budget=Budget(latency_seconds=0.01))


@pytest.mark.parametrize("goal", [float("inf"), 4_000.0, 150.0])
def test_a_fidelity_beyond_all_numbers_is_refused_in_a_sentence(build: Callable[..., ModelProto], goal: float) -> None:
    text = "(float[1,8,8,8] x) => (float[1,8,6,6] y) { [a] p = Conv(x, w0) [b] y = Conv(p, w1) }"
    model = build(text, w0=(8, 8, 2, 2), w1=(8, 8, 2, 2))
    samples = [{"x": np.random.default_rng(0).standard_normal((1, 8, 8, 8)).astype(np.float32)}] * 4
    with pytest.raises(AccuracyError, match="nothing was written"):
        quantize(model, samples, goal=goal, budget=Budget(latency_seconds=0.01))


def test_whatever_is_finite_will_do_for_a_fidelity_below_all_numbers(build: Callable[..., ModelProto]) -> None:
    model = build("(float[1,8,8,8] x) => (float[1,8,6,6] y) { [a] y = Conv(x, w) }", w=(8, 8, 3, 3))
    samples = [{"x": np.random.default_rng(0).standard_normal((1, 8, 8, 8)).astype(np.float32)}] * 4
    report = quantize(model, samples, goal=-math.inf, budget=Budget(latency_seconds=0.01)).report
    assert report.agreement.sound


@pytest.fixture
def clipped(build: Build) -> tuple[ModelProto, Data]:
    """A model and samples that are chosen by, and others that reach further than those have shown."""
    model = build(
        """(float[1,32] x) => (float[1,8] y) {
        a = MatMul(x, w0) b = Relu(a) c = MatMul(b, w1) d = Relu(c) y = MatMul(d, w2)
        }""",
        w0=(32, 32),
        w1=(32, 32),
        w2=(32, 8),
    )
    generator = np.random.default_rng(0)
    quiet, loud = (
        [{"x": np.float32(scale) * generator.normal(0, 1, (1, 32)).astype(np.float32)} for _ in range(8)]
        for scale in (1, 8)
    )
    return model, Data(quiet, [*quiet[:2], *loud])


def test_a_plan_that_fails_on_other_samples_is_searched_again(clipped: tuple[ModelProto, Data]) -> None:
    model, data = clipped
    report = quantize(model, data, goal=25.0, budget=Budget(latency_seconds=0, accuracy="off")).report
    assert report.agreement.worst_sqnr >= 25
    assert report.samples.split is not None
    assert report.samples.split.samples == 10
    assert report.samples.split.rounds > 1
    # Those that set the ranges.
    assert report.samples.split.seen == 2
    assert report.samples.split.tried == 8 + report.samples.split.seen - 2


def test_without_a_search_a_plan_that_fails_is_refused(clipped: tuple[ModelProto, Data]) -> None:
    model, data = clipped
    with pytest.raises(AccuracyError, match=r"output y has .* dB, expected 25 dB or more") as refused:
        quantize(model, data, goal=25.0, budget=Budget(search="off", latency_seconds=0, accuracy="off"))
    assert refused.value.report.samples.split == EvaluationSplit(samples=10, seen=2, places=((0, 9),), apart=True)


def test_in_the_end_weights_are_only_stored(clipped: tuple[ModelProto, Data]) -> None:
    model, data = clipped
    report = quantize(model, data, goal=38.0, budget=Budget(latency_seconds=0, accuracy="off")).report
    assert report.agreement.worst_sqnr >= 38
    assert report.plan.count(Mode.STATIC) == 0


@pytest.mark.parametrize(
    ("speeds", "decibels", "kept"),
    [((2.0, 2.0), (30.0, 30.0), True), ((1.0, 2.0), (30.0, 10.0), True), ((1.0, 2.0), (30.0, 25.0), False)],
)
def test_factors_that_cost_time_stay_where_fidelity_needs_them(
    speeds: tuple[float, float],
    decibels: tuple[float, float],
    kept: bool,
    context: SearchContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factors = Equalization({"x": ChannelScales(1, np.array([0.5, 1.0]))})
    recipes = EncodingConfig(equalization=factors), EncodingConfig()
    places = {config.key: place for place, config in enumerate(recipes)}
    monkeypatch.setattr(
        PlanEvaluator, "candidate", lambda _, plan, config: BuiltModel(Path(str(places[config.key])), {})
    )
    monkeypatch.setattr(PlanProfiler, "speeds_of", lambda _, models: [speeds[int(model.name)] for model in models])
    monkeypatch.setattr(PlanEvaluator, "sqnr", lambda _, plan, config: decibels[places[config.key]])
    refined = RefinedEncoding(AlgorithmResult(recipes[0], context.statistics), (), recipes[1])
    found = context.drop_costly_scales(context.bench.plan({}), refined, Goal())
    assert found.basis.config.key == recipes[not kept].key


@pytest.mark.parametrize(("effort", "enough", "refined"), [(FAST, 30.0, False), (FAST, 41.0, True), (FULL, 30.0, True)])
def test_codes_that_are_faithful_beyond_need_are_improved_on_with_all_effort_alone(
    effort: AccuracyEffort, enough: float, refined: bool, context: SearchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlanEvaluator, "sqnr", lambda _, plan, config: 40.0)
    monkeypatch.setattr(refinement, "_decibels", lambda validator, plan, basis: 40.0)
    monkeypatch.setattr(refinement, "CHOOSERS", {"ranges": lambda validator, plan, basis, accuracy: basis})
    assert bool(context.refined(context.bench.plan({}), EncodingConfig(), effort, enough).gains) == refined


def test_without_time_the_scheme_is_taken_as_it_is_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    offer_known_times(monkeypatch, 2.0)
    budget = Budget(latency_seconds=0.05, time_limit=1e-3, engine="elsewhere")
    report = quantize(MODELS / "resnet.onnx", Data(CALIB, limit=16), goal=0.0, budget=budget).report
    assert (report.search.measured, report.encoding.gains) == (0, ())
    assert report.plan.count(Mode.STATIC) > 10
    assert report.latency is not None
    assert report.latency.speed == pytest.approx(2.0, rel=0.05)
    assert report.accuracy.agreement.worst_sqnr > 10


def test_without_time_weights_are_stored_where_the_scheme_is_not_faithful(clipped: tuple[ModelProto, Data]) -> None:
    model, data = clipped
    budget = Budget(latency_seconds=0, time_limit=1e-3)
    report = quantize(model, data, goal=38.0, budget=budget).report
    assert report.plan.count(Mode.STATIC) == 0
    with pytest.raises(AccuracyError, match="expected 140 dB or more"):
        quantize(model, data, goal=140.0, budget=budget)
