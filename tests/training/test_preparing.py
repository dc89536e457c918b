"""From Python: a module for any training loop, and the model that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Build

import onnxq
from onnxq.errors import DataError, SchemeError
from onnxq.runtime.sessions import open_session, run
from onnxq.training import (
    convert,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
    prepare,
)
from training.modules import NETWORK, WEIGHTS, images, module_of


def test_a_loop_of_ones_own_learns_and_its_model_runs(build: Build, tmp_path: Path) -> None:
    model = build(NETWORK, **WEIGHTS)
    module = module_of(model, images(4), "int4-block32")
    x = torch.from_numpy(images(1, (16, 3, 8, 8))[0]["x"])
    (expected,) = (torch.from_numpy(one) for one in run(open_session(model), {"x": x.numpy()}))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.mse_loss(module(x), expected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    onnxq.save(convert(module), tmp_path / "q.onnx")
    (found,) = run(open_session(tmp_path / "q.onnx", optimize=False), {"x": x.numpy()})
    assert torch.allclose(torch.from_numpy(found), module(x).detach(), atol=1e-5)
    assert "int4-block32" in onnxq.load(tmp_path / "q.onnx").metadata.values()


def test_switches_work_as_those_of_torch(build: Build) -> None:
    module = module_of(build(NETWORK, **WEIGHTS), images(4))
    x = torch.from_numpy(images(1, seed=5)[0]["x"])
    coded = module(x)
    module.apply(disable_fake_quant)
    assert not torch.equal(module(x), coded)
    module.apply(enable_fake_quant)
    assert torch.equal(module(x), coded)
    before = [one.base.clone() for one in module.quantizers]
    module.apply(enable_observer)
    module(10 * x)
    module.apply(disable_observer)
    after = [one.base.clone() for one in module.quantizers]
    module(20 * x)
    assert any(not one.equal(other) for one, other in zip(before, after, strict=True))
    assert all(one.base.equal(other) for one, other in zip(module.quantizers, after, strict=True))


def test_a_plan_without_ranges_waits_for_calibration(build: Build) -> None:
    model = build(NETWORK, **WEIGHTS)
    with pytest.raises(DataError, match="calibrat"):
        prepare(model, onnxq.plan(model))


def test_a_plan_of_another_model_is_refused(build: Build) -> None:
    plan = module_of(build(NETWORK, **WEIGHTS), images(4)).plan
    with pytest.raises(SchemeError):
        prepare(build(NETWORK, **{**WEIGHTS, "w": (16, 3, 3, 3), "b": (16,), "v": (8, 16, 1, 1), "u": (8, 16)}), plan)


def test_what_is_no_plan_or_module_is_told(build: Build) -> None:
    with pytest.raises(SchemeError, match="expected a Plan"):
        prepare(build(NETWORK, **WEIGHTS), "int8")  # type: ignore[arg-type]
    with pytest.raises(SchemeError, match=r"the module is Linear, expected one of onnxq.training.prepare\(\)"):
        convert(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
