"""Blocks learn one after the other, are kept where they are better, and go on where they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from conftest import Build

from onnxq.system.resources import silent
from onnxq.training.blocks import train_blocks
from onnxq.training.learning import Checkpoint
from onnxq.training.losses import Distillation, Task
from onnxq.training.module import FakeQuantizedModel
from onnxq.training.settings import Training
from onnxq.training.training_set import TrainingSet, run_float_model
from training.modules import images, module_of

DEEP = """(float[N,16] x) => (float[N,16] y) {
    a = MatMul(x, s)  b = Relu(a)  c = MatMul(b, t)  d = MatMul(c, u)  e = MatMul(d, v)  f = Relu(e)
    g = MatMul(f, w)  h = Add(f, g)  y = MatMul(h, z)
}"""
WEIGHTS = dict.fromkeys("stuvwz", (16, 16))
SHORT = Training(epochs=3, batch=8, rate=5e-3)


@pytest.fixture
def module(build: Build) -> FakeQuantizedModel:
    return module_of(build(DEEP, **WEIGHTS), images(8, (1, 16)), "int4-block32")


@pytest.fixture(params=[True, False], ids=["stacked", "single"])
def task(request: pytest.FixtureRequest, build: Build, tmp_path: Path) -> Task:
    onnx.save(build(DEEP, **WEIGHTS), tmp_path / "m.onnx")
    lessons = run_float_model(tmp_path / "m.onnx", images(32, (1, 16)))
    noise = Distillation.of(lessons)
    return Task(noise, TrainingSet(lessons[:24], request.param), TrainingSet(lessons[24:], request.param), noise)


def state_of(module: FakeQuantizedModel) -> list[bytes]:
    return [one.numpy().tobytes() for one in module.state_dict().values()]


def test_all_together_they_are_better(module: FakeQuantizedModel, task: Task) -> None:
    before = task.evaluate(module)[1]
    found = train_blocks(module, task, SHORT, Checkpoint(None), silent)
    assert (found.done, found.better) == (2, 2)
    assert task.evaluate(module)[1] < 0.9 * before


def test_what_is_no_better_stays(module: FakeQuantizedModel, task: Task) -> None:
    before = state_of(module)
    found = train_blocks(module, task, Training(epochs=2, rate=10.0), Checkpoint(None), silent)
    assert (found.done, found.better) == (2, 0)
    assert state_of(module) == before


class StoppedError(Exception):
    pass


def test_what_was_stopped_ends_in_the_same_weights(build: Build, task: Task, tmp_path: Path) -> None:
    def fresh() -> FakeQuantizedModel:
        return module_of(build(DEEP, **WEIGHTS), images(8, (1, 16)), "int4-block32")

    def stopped(stage: str, done: int, total: int) -> None:
        if done == 1:
            raise StoppedError

    whole, resumed = fresh(), fresh()
    expected = train_blocks(whole, task, SHORT, Checkpoint(None), silent)
    keep = Checkpoint(tmp_path / "state", "key")
    with pytest.raises(StoppedError):
        train_blocks(fresh(), task, SHORT, keep, stopped)
    for _ in range(2):
        found = train_blocks(resumed, task, SHORT, keep, silent)
        assert vars(found) == vars(expected)
        assert state_of(resumed) == state_of(whole)


def test_blocks_that_give_no_floats_are_passed(build: Build, tmp_path: Path) -> None:
    text = "(float[N,16] x) => (int64[N,1] y) { h = MatMul(x, s)  y = ArgMax<axis = 1>(h) }"
    model = build(text, s=(16, 16))
    module = module_of(model, images(8, (1, 16)), "int4-block32")
    lessons = TrainingSet(read_lessons_of(model, tmp_path))
    noise = Distillation({"y": 1.0})
    found = train_blocks(module, Task(noise, lessons, lessons, noise), SHORT, Checkpoint(None), silent)
    assert (found.done, found.better) == (1, 0)


def read_lessons_of(model: onnx.ModelProto, folder: Path) -> list:  # type: ignore[type-arg]
    onnx.save(model, folder / "m.onnx")
    return run_float_model(folder / "m.onnx", images(8, (1, 16)))


def test_a_loss_that_is_no_number_is_named_with_its_block(module: FakeQuantizedModel, task: Task) -> None:
    with torch.no_grad():
        next(iter(module.biases.parameters()), next(iter(module.weights.parameters()))).fill_(torch.nan)
    found = train_blocks(module, task, SHORT, Checkpoint(None), silent)
    assert found.undone[0] == "block 1: step 1 of epoch 1 had a loss or gradient of nan and was undone"


def test_what_flows_on_disk_gives_the_same_weights(build: Build, task: Task) -> None:
    states = []
    for memory in (0, 1 << 22):
        module = module_of(build(DEEP, **WEIGHTS), images(8, (1, 16)), "int4-block32")
        train_blocks(module, task, replace(SHORT, memory=memory), Checkpoint(None), silent)
        states.append(state_of(module))
    assert states[0] == states[1]
