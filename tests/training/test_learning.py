"""The loop learns, keeps what is better, undoes what is no number, and goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conftest import Build

from onnxq.system.resources import silent
from onnxq.training import learning
from onnxq.training.learning import Checkpoint, parameter_groups, train_module
from onnxq.training.losses import Distillation, Task
from onnxq.training.module import FakeQuantizedModel
from onnxq.training.settings import Training
from onnxq.training.training_set import Batch
from training.modules import NETWORK, WEIGHTS, images, module_of, task_of

SHORT = Training(epochs=3, batch=8, rate=1e-3)


@pytest.fixture
def module(build: Build) -> FakeQuantizedModel:
    return module_of(build(NETWORK, **WEIGHTS), images(4), "int4-block32")


@pytest.fixture
def task(build: Build, tmp_path: Path) -> Task:
    return task_of(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")


def state_of(module: FakeQuantizedModel) -> list[bytes]:
    return [one.numpy().tobytes() for one in module.state_dict().values()]


def test_it_learns(module: FakeQuantizedModel, task: Task) -> None:
    found = train_module(module, task, Training(epochs=6, batch=8, rate=5e-3), Checkpoint(None), silent)
    assert found.after < 0.7 * found.before
    assert found.best > 0
    assert task.evaluate(module)[1] == pytest.approx(found.after)


def test_a_seed_gives_the_same_weights(build: Build, task: Task) -> None:
    states = []
    for seed in (0, 0, 1):
        one = module_of(build(NETWORK, **WEIGHTS), images(4), "int4-block32")
        train_module(one, task, Training(epochs=2, batch=8, seed=seed), Checkpoint(None), silent)
        states.append(state_of(one))
    assert states[0] == states[1] != states[2]


def test_what_is_no_better_is_not_kept(module: FakeQuantizedModel, task: Task) -> None:
    before = state_of(module)
    found = train_module(module, task, Training(epochs=9, batch=8, rate=10.0, patience=2), Checkpoint(None), silent)
    assert (found.best, found.epochs, found.after) == (0, 2, found.before)
    assert state_of(module) == before


def test_an_epoch_that_goes_too_far_is_undone_and_steps_are_shorter(module: FakeQuantizedModel, task: Task) -> None:
    noises = list[float]()
    training = Training(
        epochs=9, batch=8, rate=1.0, on_progress=lambda standing: noises.append(standing.noise_to_signal)
    )
    found = train_module(module, task, training, Checkpoint(None), silent)
    assert noises[0] > 10 * found.before
    assert found.after < found.before


@pytest.mark.parametrize(
    ("learned", "kinds"),
    [
        (("weights",), {"weights values"}),
        (("scales", "zero-points"), {"weights log_scale"}),
        (("biases",), {"biases values"}),
    ],
)
def test_only_what_is_named_learns(learned: tuple[str, ...], kinds: set[str], module: FakeQuantizedModel) -> None:
    names = {id(one): name for name, one in module.named_parameters()}
    found = [names[id(group["params"][0])] for group in parameter_groups(module, Training(learn=learned))]
    assert {f"{name.split('.')[0]} {name.split('.')[-1]}" for name in found} == kinds


@pytest.mark.parametrize(("scheme", "coarse"), [("int8", False), ("int4-block32", True), ("int2-block16", True)])
def test_steps_are_relative_to_the_size_of_a_tensor_or_of_its_codes(scheme: str, coarse: bool, build: Build) -> None:
    module = module_of(build(NETWORK, **WEIGHTS), images(4), scheme)
    scales = {id(one.values): float(one.scale.detach().mean()) for one in module.weights}
    for group in parameter_groups(module, Training(learn=("weights",))):
        (values,) = group["params"]
        size = 4 * scales[id(values)] if coarse else float(values.detach().square().mean().sqrt())
        assert group["largest"] == pytest.approx(1e-3 * size, rel=1e-5)


class NoNumber:
    """A loss that is NaN at some steps."""

    def __init__(self, noise: Distillation, at: set[int]) -> None:
        self.noise, self.at, self.step = noise, at, 0

    def __call__(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        self.step += 1
        found = self.noise(outputs, batch)
        return found * float("nan") if self.step in self.at else found


def test_a_step_without_a_number_is_undone_and_named(module: FakeQuantizedModel, task: Task) -> None:
    # Before the first step, held samples take one call.
    loss = NoNumber(task.distillation, {4})
    found = train_module(
        module, Task(loss, task.training_set, task.holdout, task.distillation), SHORT, Checkpoint(None), silent
    )
    assert found.undone == ("step 3 of epoch 1 had a loss or gradient of nan and was undone",)
    assert (found.epochs, found.best > 0) == (3, True)
    assert all(one.isfinite().all() for name, one in module.state_dict().items() if "range" not in name)


def test_a_loss_that_is_never_a_number_ends_training(module: FakeQuantizedModel, task: Task) -> None:
    before = state_of(module)
    loss = NoNumber(task.distillation, set(range(2, 100)))
    found = train_module(
        module, Task(loss, task.training_set, task.holdout, task.distillation), SHORT, Checkpoint(None), silent
    )
    assert (found.epochs, len(found.undone)) == (0, 4)
    assert state_of(module) == before


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("stop", [1, 2])
def test_what_was_stopped_ends_in_the_same_weights(stop: int, build: Build, task: Task, tmp_path: Path) -> None:
    model = build(NETWORK, **WEIGHTS)
    whole = module_of(model, images(4), "int4-block32")
    train_module(whole, task, SHORT, Checkpoint(None), silent)

    def stopped(stage: str, done: int, total: int) -> None:
        if done == stop:
            raise StoppedError

    keep = Checkpoint(tmp_path / "state", "key")
    with pytest.raises(StoppedError):
        train_module(module_of(model, images(4), "int4-block32"), task, SHORT, keep, stopped)
    resumed = module_of(model, images(4), "int4-block32")
    found = train_module(resumed, task, SHORT, keep, silent)
    assert found.epochs == 3
    assert state_of(resumed) == state_of(whole)


def test_time_that_is_over_ends_it_with_the_smallest_steps(
    module: FakeQuantizedModel, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def monotonic() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(learning.time, "monotonic", monotonic)
    rates = []
    step = learning.take_step
    monkeypatch.setattr(learning, "take_step", lambda *arguments: (rates.append(arguments[-1]), step(*arguments))[1])
    found = train_module(module, task, Training(epochs=1000, batch=8, minutes=0.5, rate=1e-3), Checkpoint(None), silent)
    assert 1 < found.epochs < 30
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.9
    assert rates[-1] < 0.1
