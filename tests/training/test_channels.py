"""What a module with factors of channels computes is what its written model does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from conftest import Build

import onnxq
from onnxq.runtime.sessions import open_session, run
from onnxq.training import convert, prepare
from training.modules import NETWORK, WEIGHTS, images, module_of


def test_factors_of_channels_learn_with_all_else(build: Build, tmp_path: Path) -> None:
    model = build(NETWORK, **WEIGHTS)
    plan = module_of(model, images(4)).plan
    by_channels = {"x": 3, "r": 16}
    divided = [
        replace(one, factors=tuple(np.linspace(0.2, 1, by_channels[one.tensor])), channels=1)
        if one.tensor in by_channels
        else one
        for one in plan.activations
    ]
    module = prepare(model, replace(plan, activations=tuple(divided)))
    begun = module.codes().factors
    assert begun.keys() == by_channels.keys()
    module(torch.from_numpy(images(1)[0]["x"])).sum().backward()
    assert all(one.log_channel_scales.grad.abs().sum() > 0 for one in module.channels.shared)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    learned = module.codes().factors
    for name, factors in learned.items():
        assert not np.allclose(factors.values, begun[name].values, rtol=1e-3)
        assert factors.values.max() <= 1
    onnxq.save(convert(module), tmp_path / "q.onnx")
    sample = images(1, seed=5)[0]
    (written,) = run(open_session(tmp_path / "q.onnx", optimize=False), sample)
    found = module(torch.from_numpy(sample["x"])).detach().numpy()
    # Sums of what was divided round otherwise, and a value between two codes becomes the other one.
    assert np.abs(found - written).max() < 1e-2 * np.abs(written).max()
