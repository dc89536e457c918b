"""train() writes what is better than what quantize() writes, and nothing that misses the goal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Build

from onnxq.errors import DataError, OnnxqError
from onnxq.evaluation.goal import Goal
from onnxq.pipeline import quantize
from onnxq.report import FidelityError
from onnxq.steps.request import Budget
from onnxq.training.pipeline import train
from onnxq.training.settings import Training
from training.modules import images

LAYERS = "(float[N,32] x) => (float[N,16] y) { h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v) }"
WEIGHTS = {"w": (32, 32), "v": (32, 16)}
SAMPLES = images(48, (1, 32))
SQUARE = {"w": (32, 32)}
PRODUCT = "(float[N,32] x) => (float[N,32] y) { y = MatMul(x, w) }"
LOSSES = """
def nothing(outputs, expected, inputs):
    return outputs["y"].sum() * float("nan")

def steep(outputs, expected, inputs):
    return (0 * outputs["y"]).sqrt().sum()

def wrong(outputs, expected, inputs):
    return (outputs["y"].argmax(-1) != expected["y"].argmax(-1)).float().mean()
"""
QUICK = Budget("off", "off", latency_seconds=0)


def test_the_written_model_is_better_than_without_training(build: Build, tmp_path: Path) -> None:
    model = build(LAYERS, **WEIGHTS)
    without = quantize(model, SAMPLES, scheme="int2-block16", goal=Goal(force=True), budget=QUICK)
    training, output = Training(epochs=8, rate=3e-3), tmp_path / "q.onnx"
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


@pytest.mark.parametrize(
    ("text", "weights", "more", "told"),
    [
        (
            PRODUCT,
            SQUARE,
            {"labels": np.zeros(5, np.int64)},
            r"labels .* expected one whole number for each of 48 samples",
        ),
        (PRODUCT, SQUARE, {"labels": np.full(48, 99)}, r"labels lie in 99\.\.99, expected 0\.\.31"),
        (PRODUCT, SQUARE, {"labels": np.zeros(48)}, "labels .* are float64 of shape"),
        (PRODUCT, SQUARE, {"loss": "wrong"}, "has no gradient, so nothing can be learned from it"),
        (
            "(float16[N,32] x) => (float16[N,32] y) { y = MatMul(x, w) }",
            {"w": np.ones((32, 32), np.float16)},
            {},
            "tensor 'w' is float16, expected float32 to train in; convert the model, or take a scheme of integers",
        ),
        ("(float[N,32] x) => (float[N,32] y) { y = Relu(x) }", {}, {}, "there is nothing to quantize in the model"),
        (
            "(float[N,32] x) => (int64[N,1] y) { h = MatMul(x, w)  y = ArgMax<axis = 1>(h) }",
            SQUARE,
            {},
            "no output of the model is a float that is not zero, so there is nothing to learn from",
        ),
    ],
    ids=["count of labels", "range of labels", "type of labels", "flat loss", "float16", "no weights", "no floats"],
)
def test_what_cannot_be_trained_is_told_in_a_sentence(
    text: str, weights: dict[str, Any], more: dict[str, Any], told: str, build: Build, tmp_path: Path
) -> None:
    model = build(text, **weights)
    half = model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    samples = [{"x": one["x"].astype(np.float16 if half else np.float32)} for one in SAMPLES]
    output = tmp_path / "q.onnx"
    with pytest.raises(OnnxqError, match=told) as raised:
        train(model, samples, output, scheme="int4-block32", budget=QUICK, training=training_of(more, tmp_path))
    assert "\n" not in str(raised.value)
    assert not output.exists()


def training_of(more: dict[str, Any], folder: Path) -> Training:
    """Return a training by labels or a loss, whose file is put into a folder."""
    if "labels" in more:
        np.save(folder / "labels.npy", more["labels"])
        return Training(labels=folder / "labels.npy", epochs=1)
    (folder / "losses.py").write_text(LOSSES)
    return Training(loss=f"{folder / 'losses.py'}:{more['loss']}" if more else "", epochs=1)


@pytest.mark.parametrize("loss", ["nothing", "steep"])
def test_a_loss_that_is_never_a_number_is_named_and_nothing_written(loss: str, build: Build, tmp_path: Path) -> None:
    training, output = training_of({"loss": loss}, tmp_path), tmp_path / "q.onnx"
    model, force = build(PRODUCT, **SQUARE), Goal(force=True)
    with pytest.raises(DataError, match=f"losses.py:{loss}' or its gradient is not finite from the first step"):
        train(model, SAMPLES, output, scheme="int4-block32", goal=force, budget=QUICK, training=training)
    assert not output.exists()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_rate_that_is_far_too_large_is_named(build: Build, tmp_path: Path) -> None:
    training, model = Training(rate=1e30, blocks="no", epochs=1), build(PRODUCT, **SQUARE)
    with pytest.raises(DataError, match=r"not finite from the first step on, .* give a smaller rate than 1e\+30"):
        train(model, SAMPLES, scheme="int4-block32", goal=Goal(force=True), budget=QUICK, training=training)


def test_where_no_gradient_passes_what_is_behind_learns(build: Build) -> None:
    text = "(float[N,32] x) => (float[N,32] y) { h = MatMul(x, w)  [hard] m = Hardmax(h)  y = MatMul(m, v) }"
    model, force = build(text, w=(32, 32), v=(32, 32)), Goal(force=True)
    training = Training(epochs=4)
    done = train(model, SAMPLES, scheme="int4-block32", goal=force, budget=QUICK, training=training)
    assert done.report.samples.warnings == ("no gradient passes hard, which torch has no function for here",)
    assert done.report.encoding.gains[-1].kept


def test_half_floats_that_a_scheme_widens_are_trained(build: Build) -> None:
    model = build("(float16[N,32] x) => (float16[N,32] y) { y = MatMul(x, w) }", w=np.eye(32, dtype=np.float16))
    samples = [{"x": one["x"].astype(np.float16)} for one in SAMPLES]
    force, training = Goal(force=True), Training(epochs=1)
    done = train(model, samples, scheme="int8", goal=force, budget=QUICK, training=training)
    assert done.report.encoding.gains[-1].method == "training"
