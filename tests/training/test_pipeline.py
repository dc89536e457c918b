"""train() writes what is better than what quantize() writes, and nothing that misses the goal."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from conftest import Build

from onnxq.budget import Budget
from onnxq.judging.goal import Goal
from onnxq.pipeline import quantize
from onnxq.report import FidelityError
from onnxq.training.pipeline import train
from onnxq.training.settings import Training
from training.modules import images

LAYERS = "(float[N,32] x) => (float[N,16] y) { h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v) }"
WEIGHTS = {"w": (32, 32), "v": (32, 16)}
SAMPLES = images(48, (1, 32))
QUICK = Budget("off", "off", latency=0)


def test_the_written_model_is_better_than_without_training(build: Build, tmp_path: Path) -> None:
    model = build(LAYERS, **WEIGHTS)
    without = quantize(model, SAMPLES, scheme="int2-block16", goal=Goal(force=True), budget=QUICK)
    training, output = Training(epochs=8, rate=1e-2), tmp_path / "q.onnx"
    done = train(
        model,
        SAMPLES,
        output,
        scheme="int2-block16",
        goal=Goal(force=True),
        budget=QUICK,
        training=training,
    )
    assert done.report.agreement.worst_sqnr > without.report.agreement.worst_sqnr + 1
    assert done.report.encoding.gains[-1].method == "training"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.onnx"]
    onnx.checker.check_model(tmp_path / "q.onnx")


def test_what_misses_the_goal_is_not_written_and_its_state_waits(build: Build, tmp_path: Path) -> None:
    model, output = build(LAYERS, **WEIGHTS), tmp_path / "q.onnx"
    with pytest.raises(FidelityError):
        train(model, SAMPLES, output, scheme="int2-block16", goal=99, budget=QUICK, training=Training(epochs=1))
    assert [path.name for path in tmp_path.iterdir()] == ["q.onnx.training"]
    done = train(
        model, SAMPLES, output, scheme="int2-block16", goal=Goal(force=True), budget=QUICK, training=Training(epochs=1)
    )
    assert done.report.encoding.gains[-1].kept == "epoch 1 of 1"
    assert [path.name for path in tmp_path.iterdir()] == ["q.onnx"]
