"""Ranges of all samples, once a model has been judged by those that were kept for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnxq.calibration.data import Data
from onnxq.data.dataset import Selection, split
from onnxq.evaluation.agreement import compare
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.reference import ReferenceModel
from onnxq.pipeline import Quantized, quantize
from onnxq.planning.plan_file import load_plan, save_plan
from onnxq.steps.request import Budget

FORCED = Goal(force=True)
ALL_SAMPLES = "all samples"


@pytest.fixture
def samples(perceptron, samples_for) -> list[dict[str, np.ndarray]]:
    """Samples of which those that judge are twice as large as all others."""
    plain = samples_for(perceptron, 16)
    judging = split(range(16))[1]
    assert isinstance(judging, Selection)
    loud = set(judging.places)
    return [{"x": one["x"] * (2 if place in loud else 1)} for place, one in enumerate(plain)]


def quantized(model: object, data: object, folder: Path, accuracy: str) -> Quantized:
    budget = Budget("off", accuracy, latency=0)
    return quantize(model, data, folder / "model.onnx", goal=FORCED, budget=budget)


def judged_again(model: Path, folder: Path, samples: list[dict[str, np.ndarray]]) -> float:
    """Return the SQNR of the file that was written on the samples that judge."""
    views = ComparisonSpec.of(model, folder / "model.onnx")
    return compare(ReferenceModel(model, views), views.open(folder / "model.onnx"), split(samples)[1]).worst_sqnr


@pytest.mark.parametrize("methods", ["ranges", "migration", "ranges,migration,bias"])
def test_what_only_judging_samples_show_is_in_the_ranges_that_are_written(
    methods: str, perceptron, samples, tmp_path: Path
) -> None:
    report = quantized(perceptron, samples, tmp_path, methods).report
    gain = report.encoding.gains[-1]
    assert (gain.method, report.samples.refitted, report.plan.refitted) == (ALL_SAMPLES, 16, True)
    assert gain.after > gain.before + 3
    # The verdict is of the model that had not seen them.
    assert report.fidelity.agreement.worst_sqnr == pytest.approx(gain.before)
    assert "before its ranges became those of all 16" in report.judges


def test_its_figure_is_that_of_the_file(perceptron, samples, tmp_path: Path) -> None:
    path = tmp_path / "float.onnx"
    path.write_bytes(perceptron.SerializeToString())
    gain = quantized(perceptron, samples, tmp_path, "ranges").report.encoding.gains[-1]
    assert judged_again(path, tmp_path, samples) == pytest.approx(gain.after)


def test_a_plan_with_such_ranges_is_carried_out_to_the_same_bytes(perceptron, samples, tmp_path: Path) -> None:
    plan = quantized(perceptron, samples, tmp_path, "ranges,migration,bias").report.plan
    first = (tmp_path / "model.onnx").read_bytes()
    save_plan(plan, tmp_path / "plan.toml")
    replay = load_plan(tmp_path / "plan.toml")
    untimed = Budget("off", latency=0)
    again = quantize(perceptron, samples, tmp_path / "model.onnx", scheme=replay, goal=FORCED, budget=untimed).report
    assert (tmp_path / "model.onnx").read_bytes() == first
    assert again.plan == plan
    # They are no longer samples that it has not seen.
    assert again.samples.split is not None
    assert again.samples.split.seen == again.samples.split.samples


@pytest.mark.parametrize("accuracy", ["off", "fast"])
def test_less_effort_leaves_the_judged_model(accuracy: str, perceptron, samples, tmp_path: Path) -> None:
    report = quantized(perceptron, samples, tmp_path, accuracy).report
    assert (report.samples.refitted, report.plan.refitted) == (0, False)


def test_samples_that_were_given_for_judging_set_no_ranges(perceptron, samples, tmp_path: Path) -> None:
    report = quantized(perceptron, Data(samples[:8], samples[8:]), tmp_path, "ranges").report
    assert ALL_SAMPLES not in [gain.method for gain in report.encoding.gains]


def test_where_more_noise_is_seen_the_judged_model_is_written(
    perceptron, samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxq.calibration.methods import parse_range
    from onnxq.search import attempts
    from onnxq.search.cross_validation import AlgorithmResult

    def worse(validator, full, plan, basis: AlgorithmResult, more) -> AlgorithmResult:
        return replace(basis, recipe=replace(basis.recipe, ranges=parse_range("fixed:-0.01,0.01")))

    monkeypatch.setattr(attempts, "refit", worse)
    path = tmp_path / "float.onnx"
    path.write_bytes(perceptron.SerializeToString())
    report = quantized(perceptron, samples, tmp_path, "ranges").report
    assert report.encoding.gains[-1].left == "no less noise"
    assert report.samples.refitted == 0
    assert judged_again(path, tmp_path, samples) == pytest.approx(report.fidelity.agreement.worst_sqnr)
