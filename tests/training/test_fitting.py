"""Encodings of a plan are trained on some samples and compared on others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build
from onnx import ModelProto

from onnxq.algorithms.encodings import Encodings
from onnxq.errors import ModelError, SchemeError
from onnxq.system.resources import silent
from onnxq.training import prepare
from onnxq.training.fitting import TrainedEncodings, train_encodings, widen_ranges
from onnxq.training.learning import copy_state
from onnxq.training.losses import Distillation, Task
from onnxq.training.module import FakeQuantizedModel
from onnxq.training.settings import Training, TrainingProgress
from onnxq.training.training_set import TrainingSet, run_float_model
from training.modules import NETWORK, WEIGHTS, Samples, images, module_of


def fit(module: FakeQuantizedModel, encodings: Encodings, folder: Path, training: Training) -> TrainedEncodings:
    return train_encodings(module.graph, module.plan, encodings, folder / "m.onnx", images(16), training, silent)


@pytest.fixture
def module(build: Build, tmp_path: Path) -> FakeQuantizedModel:
    onnx.save(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")
    return module_of(build(NETWORK, **WEIGHTS), images(4), "int4-block32")


def test_codes_become_better_or_stay(module: FakeQuantizedModel, tmp_path: Path) -> None:
    before = module.encodings()
    done = fit(module, before, tmp_path, Training(epochs=3, rate=5e-3))
    assert done.encodings is not before
    assert done.gain.after > done.gain.before
    assert (done.gain.method, done.gain.left) == ("training", "")
    left = fit(module, before, tmp_path, Training(epochs=1, rate=10.0))
    assert left.encodings is before
    assert (left.gain.kept, left.gain.left) == ("", "no lower error")


def test_labels_are_learned(module: FakeQuantizedModel, tmp_path: Path) -> None:
    np.save(tmp_path / "l.npy", np.full(16, 3))
    done = fit(module, module.encodings(), tmp_path, Training(labels=tmp_path / "l.npy", epochs=2))
    assert done.gain.kept == "epoch 2 of 2"


def test_a_loss_of_the_user_is_learned(module: FakeQuantizedModel, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def small(outputs, expected, inputs):\n    return outputs['y'].square().mean()\n"
    )
    done = fit(
        module, module.encodings(), tmp_path, Training(epochs=2, loss=f"{tmp_path / 'mine.py'}:small", rate=1e-2)
    )
    assert done.gain.kept == "epoch 2 of 2"
    assert done.gain.after < done.gain.before


def test_what_cannot_learn_is_told(build: Build, tmp_path: Path) -> None:
    onnx.save(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")
    module = module_of(build(NETWORK, **WEIGHTS), images(4), "mxfp4")
    with pytest.raises(
        ModelError, match="no scales of the model are quantized, so training changes nothing; quantize it"
    ):
        fit(module, module.encodings(), tmp_path, Training(learn=("scales",)))


def test_nodes_that_pass_no_gradient_are_named(build: Build, tmp_path: Path) -> None:
    text = "(float[N,64] x) => (float[N,16] y) { h = MatMul(x, w)  [hard] m = Hardmax(h)  y = MatMul(m, v) }"
    model = build(text, w=(64, 16), v=(16, 16))
    onnx.save(model, tmp_path / "m.onnx")
    module = module_of(model, images(4, (1, 64)), "int4-block32")
    done = train_encodings(
        module.graph,
        module.plan,
        module.encodings(),
        tmp_path / "m.onnx",
        images(8, (1, 64)),
        Training(epochs=1),
        silent,
    )
    assert done.warnings == ("no gradient passes hard, which torch has no function for here",)


def test_a_device_that_is_none_is_told(module: FakeQuantizedModel, tmp_path: Path) -> None:
    for name in ("cuda:99", "gpu", "meta"):
        with pytest.raises(SchemeError, match=f"torch has no device '{name}' here .*; take cpu, or leave it out"):
            fit(module, module.encodings(), tmp_path, Training(device=name))


def test_a_device_that_is_named_is_taken_and_samples_may_be_on_disk(module: FakeQuantizedModel, tmp_path: Path) -> None:
    encodings = module.encodings()
    found = [
        fit(module, encodings, tmp_path, Training(epochs=2, device=device, memory=memory)).encodings.weights
        for device, memory in (("", 1 << 20), ("cpu", 0))
    ]
    for key, one in found[0].items():
        assert np.array_equal(one.values, found[1][key].values)


def test_where_training_stands_is_told_after_every_epoch(module: FakeQuantizedModel, tmp_path: Path) -> None:
    reported: list[TrainingProgress] = []
    fit(module, module.encodings(), tmp_path, Training(epochs=2, on_progress=reported.append))
    assert [(one.block, one.blocks, one.epoch) for one in reported] == [(0, 0, 1), (0, 0, 2)]
    assert all(0 < one.nsr_by_output < 1 and 0 < one.loss < 1 and one.epochs == 2 for one in reported)


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
    assert module.encodings().factors["x"].values[1:].max() < 0.5


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
    nsr = Distillation.of(lessons)
    both = TrainingSet(lessons, True)
    return prepare(model, replace(plan, activations=tuple(divided))), Task(nsr, both, both, nsr)
