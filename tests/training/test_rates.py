"""The first rate is one that a few steps do well with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import Build

from onnxq.training import learning as rates
from onnxq.training.learning import choose_rate_share, take_step
from onnxq.training.losses import Task
from onnxq.training.module import FakeQuantizedModel
from onnxq.training.settings import Training
from onnxq.training.training_set import TrainingSet
from training.modules import NETWORK, WEIGHTS, images, module_of, task_of


@pytest.fixture
def module(build: Build) -> FakeQuantizedModel:
    return module_of(build(NETWORK, **WEIGHTS), images(4))


@pytest.fixture
def task(build: Build, tmp_path: Path) -> Task:
    return task_of(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("scores", "taken", "trials"),
    [
        ((0.1, 0.2, 0.0, 0.0), 1, 2),
        ((0.4, 0.2, 0.3, 0.0), 1 / 3, 3),
        ((0.4, 0.3, 0.2, 0.1), 1 / 27, 4),
        ((math.inf, 0.3, 0.4, 0.1), 1 / 3, 3),
        ((math.inf,) * 4, 1, 4),
    ],
)
def test_smaller_rates_are_tried_while_they_do_better(
    scores: tuple[float, ...],
    taken: float,
    trials: int,
    module: FakeQuantizedModel,
    task: Task,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = list(scores)
    monkeypatch.setattr(rates, "_score_after_few_steps", lambda *arguments: left.pop(0))
    assert choose_rate_share(module, task, Training()) == taken
    assert len(left) == len(scores) - trials


def test_what_is_faithful_takes_small_steps_and_trials_change_nothing(
    module: FakeQuantizedModel, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "RATE", 0.1)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert choose_rate_share(module, task, Training(batch=4)) < 1
    assert all(tensor.equal(before[name]) for name, tensor in module.state_dict().items())


def test_batches_of_a_step_share_the_codes_of_weights_and_their_gradients_add_up(
    module: FakeQuantizedModel, task: Task
) -> None:
    single = next(TrainingSet(task.training_set.samples).batches(range(4), 4))
    (stacked,) = next(task.training_set.batches(range(4), 4))
    found = []
    for some in (single, [stacked]):
        optimizer = torch.optim.SGD([{"params": list(module.parameters()), "largest": 0.0}], lr=0.0)
        take_step(module, optimizer, task.loss, some, 1.0)
        found.append([one.grad.clone() for one in module.parameters() if one.grad is not None])
    assert len(single) == 4
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
