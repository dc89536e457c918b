"""Which samples set ranges and which judge, and statistics collected once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxq.calibration.calibrate import Collection
from onnxq.calibration.data import Data
from onnxq.calibration.methods import DEFAULT_METHODS, MinMax
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.effort import FULL
from onnxq.config.presets import PRESETS
from onnxq.errors import DataError
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.metrics import Metric, Top1
from onnxq.pipeline import calibrate, plan, quantize
from onnxq.runtime.targets import DEFAULT_TARGET
from onnxq.search.prepared_model import PreparedModel
from onnxq.steps.calibrate import accuracy_tried, calibrate_model, initial_recipe, range_methods
from onnxq.steps.prepare import PreparedRun, prepare_model
from onnxq.steps.request import Budget, QuantizationRequest
from onnxq.steps.search import open_search


def ready(model, folder: Path, scheme="int8") -> PreparedRun:
    return prepare_model(model, QuantizationRequest.of(scheme, DEFAULT_TARGET, ()), folder, None, Budget())


def test_what_the_scheme_names_is_not_tried_against_others(residual, tmp_path: Path) -> None:
    free = ready(residual, tmp_path)
    named = ready(residual, tmp_path, replace(PRESETS["int8"], ranges="minmax"))
    assert initial_recipe(free).methods == initial_recipe(named).methods == (MinMax(),)
    assert [("ranges" in accuracy_tried(model, Budget()).methods) for model in (free, named)] == [True, False]
    assert range_methods(free, Budget()) == DEFAULT_METHODS
    assert range_methods(named, Budget()) == (MinMax(),)


@pytest.mark.parametrize(("accuracy", "models"), [("fast", 4), ("full", FULL.models)])
def test_of_a_large_model_only_the_likeliest_ranges_are_tried(
    accuracy: str, models: int, residual, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreparedModel, "is_large", True)
    model = prepare_model(residual, QuantizationRequest.of("int8", DEFAULT_TARGET, ()), tmp_path, None, Budget())
    found = accuracy_tried(model, Budget(accuracy=accuracy))
    assert (found.methods, found.models) == (("ranges",), models)


def test_validation_samples_set_no_ranges(residual, samples_for, tmp_path: Path) -> None:
    samples = samples_for(residual, 6)
    seen = calibrate_model(ready(residual, tmp_path), Data(samples[:2], samples[2:]), DEFAULT_METHODS, Goal(), Budget())
    assert (len(seen.samples), len(seen.judged), len(seen.evidence.samples)) == (2, 4, 2)


def test_equal_samples_count_once_but_for_a_metric(residual, samples_for, tmp_path: Path) -> None:
    samples, model, by_metric = samples_for(residual, 3), ready(residual, tmp_path), Metric("mine", lambda *_: 1.0)
    cases = (None, Goal()), (samples[:2] * 2, Goal()), (None, Goal(metric=by_metric))
    found = [
        calibrate_model(model, Data(samples * 4, others), DEFAULT_METHODS, goal, Budget()) for others, goal in cases
    ]
    assert [(len(one.samples), len(one.judged)) for one in found] == [(3, 3), (3, 2), (12, 12)]


def test_some_samples_are_kept_for_judging_unless_a_metric_counts_on_their_order(
    residual, samples_for, tmp_path: Path
) -> None:
    data, model = Data(samples_for(residual, 9)), ready(residual, tmp_path)
    parted, whole = (
        calibrate_model(model, data, DEFAULT_METHODS, goal, Budget())
        for goal in (Goal(), Goal(metric=Metric("mine", lambda outputs, samples: 1.0)))
    )
    assert (len(parted.samples), len(parted.judged), len(parted.evidence.samples)) == (7, 2, 7)
    assert (len(whole.samples), len(whole.judged), len(whole.evidence.samples)) == (9, 9, 9)


@pytest.mark.parametrize(("given", "parts"), [(9, (7, 2)), (400, (300, 100)), (7, (7, 7))])
def test_of_a_metric_that_knows_samples_all_that_are_kept_apart_judge(
    given: int, parts: tuple[int, int], residual, samples_for, tmp_path: Path
) -> None:
    metric, samples = Metric("top1", Top1(np.zeros(given, np.int64))), samples_for(residual, 3) * 134
    for others in (None, samples[:5]):
        data = Data(samples[:given], others)
        seen = calibrate_model(ready(residual, tmp_path), data, DEFAULT_METHODS, Goal(metric=metric), Budget())
        assert (len(seen.samples), len(seen.judged)) == (parts if others is None else (given, 5))


def test_memory_for_calibration_is_that_for_gram_matrices(residual, tmp_path: Path) -> None:
    model = ready(residual, tmp_path)
    assert accuracy_tried(model, Budget()).memory is None
    assert accuracy_tried(model, Budget(collection=Collection())).memory is None
    assert accuracy_tried(model, Budget(collection=Collection(memory="30MB"))).memory == 30 * 10**6


@pytest.mark.parametrize(("accuracy", "judges"), [("fast", 16), ("full", 25)])
def test_more_of_many_samples_judge_with_all_effort(
    accuracy: str, judges: int, residual, samples_for, tmp_path: Path
) -> None:
    budget, data = Budget(accuracy=accuracy), Data(samples_for(residual, 134))
    carried = replace(plan(residual), thorough=accuracy == "full")
    for name, scheme in (("first", "int8"), ("replay", carried)):
        (tmp_path / name).mkdir()
        model = ready(residual, tmp_path / name, scheme)
        seen = calibrate_model(model, data, DEFAULT_METHODS, Goal(), budget)
        chooser = open_search(model, seen, Goal(), budget)
        assert len(chooser.evaluator.answered.samples) == judges
        # The float model does not run again.
        assert chooser.with_evidence(CalibrationStatistics()).evaluator.answered is chooser.evaluator.answered


MODELS = Path(__file__).parents[2] / "models"
CALIB = MODELS / "data" / "calib.npz"
UNSEARCHED = Budget(search="off", latency_seconds=0)


def test_statistics_collected_once_serve_several_calls() -> None:
    statistics = calibrate(MODELS / "resnet.onnx", Data(CALIB, limit=16))
    assert len(statistics.samples) == 16
    data, budget = Data(CALIB, limit=16, statistics=statistics), Budget(latency_seconds=0, search="off")
    reused, again = (quantize(MODELS / "resnet.onnx", data, budget=budget).report for _ in range(2))
    assert reused.agreement == again.agreement
    # The statistics are of all samples, those included that judge.
    assert reused.samples.split is not None
    assert (reused.samples.split.samples, reused.samples.split.seen) == (4, 4)
    assert reused.agreement.worst_sqnr > 20


def test_statistics_of_another_model_or_without_what_is_needed_are_refused() -> None:
    resnet, options = MODELS / "resnet.onnx", {"goal": Goal(force=True), "budget": UNSEARCHED}
    others = calibrate(MODELS / "vit.onnx", Data(CALIB, limit=2))
    with pytest.raises(DataError, match="given statistics are of another model, expected those of this one"):
        quantize(resnet, Data(CALIB, limit=4, statistics=others), **options)
    scheme = replace(PRESETS["int8"], ranges="minmax")
    extremes = Data(CALIB, limit=4, statistics=calibrate(resnet, Data(CALIB, limit=4), scheme=scheme))
    with pytest.raises(DataError, match=r"given statistics lack the histogram of '.*', expected what this plan"):
        quantize(resnet, extremes, **options)
    assert quantize(resnet, extremes, scheme=scheme, **options).report.samples.calibrated == 4


def test_statistics_serve_a_plan_that_needs_a_later_opset(build, samples_for) -> None:
    model = build("(float[4,64] x) => (float[4,64] y) { h = MatMul(x, w) y = Relu(h) }", opset=13, w=(64, 64))
    samples = samples_for(model)
    seen = calibrate(model, samples)
    quantized = quantize(
        model,
        Data(samples, statistics=seen),
        scheme="int4-block32",
        goal=Goal(force=True),
        budget=Budget(search="off", latency_seconds=0),
    )
    assert quantized.graph.opset >= 21
