"""Statistics that are collected once and serve several calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from onnxq.calibration.data import Data
from onnxq.config.presets import PRESETS
from onnxq.errors import DataError
from onnxq.evaluation.goal import Goal
from onnxq.pipeline import quantize
from onnxq.steps.budget import Budget
from onnxq.steps.calibrating import calibrate

MODELS = Path(__file__).parents[2] / "models"
CALIB = MODELS / "data" / "calib.npz"
UNSEARCHED = Budget(search="off", latency=0)


def test_statistics_collected_once_serve_several_calls() -> None:
    statistics = calibrate(MODELS / "resnet.onnx", Data(CALIB, limit=16))
    assert len(statistics.samples) == 16
    data, budget = Data(CALIB, limit=16, statistics=statistics), Budget(latency=0, search="off")
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
        budget=Budget(search="off", latency=0),
    )
    assert quantized.graph.opset >= 21
