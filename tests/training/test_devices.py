"""The device that trains, and what is copied to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import Build

from onnxq.system.resources import silent
from onnxq.training.fitting import torch_device, train_encodings
from onnxq.training.settings import Training
from training.modules import NETWORK, WEIGHTS, images, module_of, task_of


@pytest.mark.parametrize("named", ["", "cpu"])
def test_the_gain_names_a_device_that_was_asked_for(named: str, build: Build, tmp_path: Path) -> None:
    onnx.save(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")
    module = module_of(build(NETWORK, **WEIGHTS), images(4), "int4-block32")
    training = Training(epochs=1, blocks="no", device=named)
    arguments = module.graph, module.plan, module.encodings(), tmp_path / "m.onnx", images(16), training, silent
    assert train_encodings(*arguments).gain.device == (named or ("cuda" if torch.cuda.is_available() else ""))


@pytest.mark.parametrize(("has_gpu", "found"), [(False, "cpu"), (True, "cuda")])
def test_a_gpu_is_taken_if_torch_has_one(has_gpu: bool, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: zeros)
    assert torch_device("").type == found


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
