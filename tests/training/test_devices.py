"""The device that trains is the one whose steps take the least time, unless one is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import Build

from onnxq.errors import DataError
from onnxq.system.resources import silent
from onnxq.training import devices, fitting
from onnxq.training.devices import Step, StepTime, describe_times, time_devices
from onnxq.training.fitting import TrainedEncodings, train_encodings
from onnxq.training.learning import copy_state, rehearsed_step
from onnxq.training.settings import Training
from training.modules import NETWORK, WEIGHTS, images, module_of, task_of


@dataclass
class Devices:
    """Devices without hardware: each step takes its seconds on a clock that only steps move."""

    seconds: dict[str, list[float]]
    now: float = 0.0
    steps: list[str] = field(default_factory=list)

    def start(self, name: str) -> Step:
        left = iter(self.seconds[name])

        def step() -> None:
            self.steps.append(name)
            self.now += next(left)

        return step

    def times(self) -> tuple[StepTime, ...]:
        return time_devices(list(self.seconds), self.start, lambda: self.now)


@pytest.mark.parametrize(
    ("seconds", "chosen", "steps"),
    [
        # The first step of a GPU loads kernels, and its later ones are slower than the processor's.
        ({"cuda": [9.0, 0.25, 0.25, 0.25], "cpu": [0.5, 0.125, 0.25, 0.125]}, "cpu", 8),
        # A GPU that is faster after a slow first step is taken, and the processor is given up after one step.
        ({"cuda": [9.0, 0.125, 0.25, 0.125], "cpu": [4.0]}, "cuda", 5),
        # One slow step of a busy machine decides nothing.
        ({"cuda": [1.0, 0.25, 0.125, 0.25], "cpu": [0.25, 0.25, 9.0, 0.25]}, "cuda", 8),
        ({"cuda": [1.0, 0.25, 0.25, 0.25], "cpu": [0.25, 0.25, 0.25, 0.25]}, "cpu", 8),
    ],
)
def test_the_device_of_the_fastest_step_is_first(seconds: dict[str, list[float]], chosen: str, steps: int) -> None:
    found = Devices(seconds)
    assert found.times()[0].device == chosen
    assert len(found.steps) == steps


@pytest.mark.parametrize("error", [RuntimeError("out of\nmemory"), DataError("out of memory")])
def test_a_device_that_fails_is_last_and_says_why(error: Exception) -> None:
    def start(name: str) -> Step:
        if name == "cuda":
            raise error
        return lambda: None

    first, last = time_devices(["cuda", "cpu"], start)
    assert (first.device, last) == ("cpu", StepTime("cuda", math.inf, "out of memory"))
    assert describe_times([StepTime("cpu", 0.5), last]) == "cpu (500 ms a step; cuda: out of memory)"


def test_a_step_to_time_changes_no_parameter(build: Build, tmp_path: Path) -> None:
    module = module_of(build(NETWORK, **WEIGHTS), images(4), "int4-block32")
    before, task = copy_state(module), task_of(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")
    step = rehearsed_step(module, task, Training(batch=16))
    for _ in range(4):
        step()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize(
    ("named", "present", "told"),
    [
        ("", ("cpu",), ""),
        ("cpu", ("cuda", "cpu"), "cpu"),
        ("", ("cpu:0", "cpu"), "cpu (125 ms a step; cpu:0: 250 ms)"),
    ],
)
def test_training_runs_on_the_chosen_device_and_the_gain_names_it(
    named: str, present: tuple[str, ...], told: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Devices({"cpu:0": [1.0, 0.25, 0.25, 0.25], "cpu": [0.5, 0.125, 0.125, 0.125]})

    def timed(names: tuple[str, ...], start: Callable[[str], Step]) -> tuple[StepTime, ...]:
        for name in names:
            start(name)()
        return devices.time_devices(names, clock.start, lambda: clock.now)

    monkeypatch.setattr(fitting, "available_devices", lambda: present)
    monkeypatch.setattr(fitting, "time_devices", timed)
    onnx.save(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")
    module = module_of(build(NETWORK, **WEIGHTS), images(4), "int4-block32")

    def fitted() -> TrainedEncodings:
        training = Training(epochs=1, blocks="no", device=named)
        return train_encodings(
            module.graph, module.plan, module.encodings(), tmp_path / "m.onnx", images(16), training, silent
        )

    assert fitted().gain.device == told


def test_a_step_beside_the_processor_waits_for_no_number(build: Build, tmp_path: Path) -> None:
    """Torch's meta device has no values, so a step that reads one fails."""
    text = """(float[N,3,8,8] x) => (float[N,16] y) {
        [c] h = Conv<pads = [1,1,1,1]>(x, w, b)
        r = Clip(h, low, high)
        [d] e = Conv(r, v)
        p = Pow(e, two)
        q = GlobalAveragePool(p)
        s = Shape(q)
        n = Gather<axis = 0>(s, first)
        t = Concat<axis = 0>(n, rest)
        f = Reshape(q, t)
        [g] y = Gemm(f, u, a)
    }"""
    shapes = {"first": np.array([0]), "rest": np.array([32])}
    limits = {"low": np.float32(0), "high": np.float32(6), "two": np.float32(2)}
    model = build(text, **WEIGHTS, **shapes, **limits)
    module, task = module_of(model, images(4)), task_of(model, tmp_path / "m.onnx")
    ((batch,),) = task.training_set.batches([0, 1], 2)
    away = torch.device("meta")
    module.to(away)
    batch = batch.to(away)
    loss = task.loss(module.outputs(batch.inputs), batch)
    loss.backward()
    assert loss.device == away
    with pytest.raises(RuntimeError, match="meta"):
        loss.item()


@pytest.mark.parametrize(("memory", "device"), [(1 << 20, "meta"), (10, "cpu")])
def test_samples_are_copied_once_if_they_fit(memory: int, device: str, build: Build, tmp_path: Path) -> None:
    task = task_of(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx").on(torch.device("meta")).held(memory)
    assert {one.inputs["x"].device.type for one in task.training_set.samples} == {device}
