"""Ranges get room for factors where zero lies close to an end of the codes, and only where that lowers the noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from conftest import Build
from onnx import ModelProto

from onnxq.training import prepare
from onnxq.training.fitting import widen_ranges
from onnxq.training.learning import copy_state
from onnxq.training.losses import Distillation, Task
from onnxq.training.module import FakeQuantizedModel
from onnxq.training.training_set import TrainingSet, run_float_model
from training.modules import Samples, module_of

LAYER = "(float[N,16] x) => (float[N,8] y) { y = Gemm(x, w) }"
# As behind a Gelu: all go as far below zero, and one much farther above it than others.
SIZES = np.r_[16.0, np.ones(15)].astype(np.float32)


def test_where_no_channel_could_be_finer_zero_moves(build: Build, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    samples = [{"x": np.maximum(random.standard_normal((1, 16)) * SIZES, -0.2).astype(np.float32)} for _ in range(40)]
    # Elsewhere the noise of one channel would hide that of others.
    model = build(LAYER, w=(random.standard_normal((16, 8)) / SIZES[:, None]).astype(np.float32))
    module, task = begun(model, samples, tmp_path / "m.onnx", ends=0.999)
    zero, (_, before) = module.quantizer_of("x").zero_point.item(), task.evaluate(module)
    assert widen_ranges(module, task)
    assert module.quantizer_of("x").zero_point.item() > zero + 10
    assert task.evaluate(module)[1] < before / 3
    assert module.codes().factors["x"].values[1:].max() < 0.5


def test_where_all_channels_use_all_codes_nothing_changes(build: Build, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    samples = [{"x": random.uniform(-1, 1, (1, 16)).astype(np.float32)} for _ in range(40)]
    module, task = begun(build(LAYER, w=(16, 8)), samples, tmp_path / "m.onnx", ends=0.999)
    before = copy_state(module)
    assert not widen_ranges(module, task)
    assert all((before[name] == tensor).all() for name, tensor in module.state_dict().items())


def test_without_factors_nothing_is_tried(build: Build, tmp_path: Path) -> None:
    samples = [{"x": np.linspace(-1, 1, 16, dtype=np.float32)[None]}]
    module, task = begun(build(LAYER, w=(16, 8)), samples, tmp_path / "m.onnx")
    assert not widen_ranges(module, task)


def begun(
    model: ModelProto, samples: Samples, path: Path, ends: float | None = None
) -> tuple[FakeQuantizedModel, Task]:
    """Return the module of a model whose input has factors close to 1, or none, and what it learns."""
    onnx.save(model, path)
    plan = module_of(model, samples).plan
    factors = () if ends is None else tuple(np.linspace(ends, 1, 16))
    divided = [
        replace(one, factors=factors, channels=1) if one.tensor == "x" and factors else one for one in plan.activations
    ]
    lessons = run_float_model(path, samples)
    noise = Distillation.of(lessons)
    both = TrainingSet(lessons, True)
    return prepare(model, replace(plan, activations=tuple(divided))), Task(noise, both, both, noise)
