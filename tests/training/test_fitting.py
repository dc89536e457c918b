"""Codes of a plan are trained on some samples and compared on others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build

from onnxq.algorithms.encodings import Encodings
from onnxq.errors import ModelError, SchemeError
from onnxq.system.resources import silent
from onnxq.training.fitting import TrainedEncodings, train_encodings
from onnxq.training.module import FakeQuantizedModel
from onnxq.training.settings import Training, TrainingProgress
from training.modules import NETWORK, WEIGHTS, images, module_of


def fit(
    module: FakeQuantizedModel, codes: Encodings, folder: Path, training: Training, state: Path | None = None
) -> TrainedEncodings:
    reference = folder / "m.onnx"
    return train_encodings(module.graph, module.plan, codes, reference, images(16), training, state, silent)


@pytest.fixture
def module(build: Build, tmp_path: Path) -> FakeQuantizedModel:
    onnx.save(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")
    return module_of(build(NETWORK, **WEIGHTS), images(4), "int4-block32")


def test_codes_become_better_or_stay(module: FakeQuantizedModel, tmp_path: Path) -> None:
    before = module.codes()
    done = fit(module, before, tmp_path, Training(epochs=3, rate=5e-3))
    assert done.codes is not before
    assert done.gain.after > done.gain.before
    assert (done.gain.method, done.gain.left) == ("training", "")
    left = fit(module, before, tmp_path, Training(epochs=1, rate=10.0))
    assert left.codes is before
    assert (left.gain.kept, left.gain.left) == ("", "no lower error")


def test_labels_are_learned(module: FakeQuantizedModel, tmp_path: Path) -> None:
    np.save(tmp_path / "l.npy", np.full(16, 3))
    done = fit(module, module.codes(), tmp_path, Training(labels=tmp_path / "l.npy", epochs=2))
    assert done.gain.kept == "epoch 2 of 2"


def test_a_finished_training_is_not_run_again(module: FakeQuantizedModel, tmp_path: Path) -> None:
    state, training = tmp_path / "state", Training(epochs=2)
    first = fit(module, module.codes(), tmp_path, training, state)
    last = state.stat().st_mtime_ns
    again = fit(module, module.codes(), tmp_path, training, state)
    assert state.stat().st_mtime_ns == last
    assert (again.gain.before, again.gain.after) == (first.gain.before, first.gain.after)


@pytest.mark.parametrize("loss", [False, True])
def test_other_labels_or_another_loss_begin_anew(module: FakeQuantizedModel, loss: bool, tmp_path: Path) -> None:
    def learned(number: int) -> int:
        np.save(tmp_path / "l.npy", np.full(16, number))
        text = (
            f"def far(outputs, expected, inputs):\n    return next(iter(outputs.values())).square().mean() * {number}\n"
        )
        (tmp_path / "mine.py").write_text(text)
        own = {"loss": f"{tmp_path / 'mine.py'}:far"} if loss else {"labels": tmp_path / "l.npy"}
        fit(module, module.codes(), tmp_path, Training(epochs=2, **own), state)
        return state.stat().st_mtime_ns

    state = tmp_path / "state"
    first = learned(3)
    assert learned(3) == first
    assert learned(2) > first


def test_what_cannot_learn_is_told(build: Build, tmp_path: Path) -> None:
    onnx.save(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")
    module = module_of(build(NETWORK, **WEIGHTS), images(4), "mxfp4")
    with pytest.raises(
        ModelError, match="no scales of the model are quantized, so training changes nothing; quantize it"
    ):
        fit(module, module.codes(), tmp_path, Training(learn=("scales",)))


def test_nodes_that_pass_no_gradient_are_named(build: Build, tmp_path: Path) -> None:
    text = "(float[N,64] x) => (float[N,16] y) { h = MatMul(x, w)  [hard] m = Hardmax(h)  y = MatMul(m, v) }"
    model = build(text, w=(64, 16), v=(16, 16))
    onnx.save(model, tmp_path / "m.onnx")
    module = module_of(model, images(4, (1, 64)), "int4-block32")
    done = train_encodings(
        module.graph,
        module.plan,
        module.codes(),
        tmp_path / "m.onnx",
        images(8, (1, 64)),
        Training(epochs=1),
        None,
        silent,
    )
    assert done.doubts == ("no gradient passes hard, which torch has no function for here",)


def test_a_device_that_is_none_is_told(module: FakeQuantizedModel, tmp_path: Path) -> None:
    for name in ("cuda:99", "gpu", "meta"):
        with pytest.raises(SchemeError, match=f"torch has no device '{name}' here .*; take cpu, or leave it out"):
            fit(module, module.codes(), tmp_path, Training(device=name))


def test_a_device_that_is_named_is_taken_and_samples_may_be_on_disk(module: FakeQuantizedModel, tmp_path: Path) -> None:
    codes = module.codes()
    found = [
        fit(module, codes, tmp_path, Training(epochs=2, device=device, memory=memory)).codes.weights
        for device, memory in (("", 1 << 20), ("cpu", 0))
    ]
    for key, one in found[0].items():
        assert np.array_equal(one.codes, found[1][key].codes)


def test_where_training_stands_is_told_after_every_epoch(module: FakeQuantizedModel, tmp_path: Path) -> None:
    told: list[TrainingProgress] = []
    fit(module, module.codes(), tmp_path, Training(epochs=2, on_progress=told.append))
    assert [(one.block, one.blocks, one.epoch) for one in told] == [(0, 0, 1), (0, 0, 2)]
    assert all(0 < one.noise_to_signal < 1 and 0 < one.loss < 1 and one.epochs == 2 for one in told)
