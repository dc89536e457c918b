"""Samples become tensors beside what the float model gives, and are stacked where that changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import Build

from onnxq.data.dataset import Subset
from onnxq.errors import DataError
from onnxq.training.training_set import TrainingSet, can_stack, run_float_model
from training.modules import NETWORK, WEIGHTS, images, module_of


@pytest.fixture
def reference(build: Build, tmp_path: Path) -> Path:
    onnx.save(build(NETWORK, **WEIGHTS), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_lessons_hold_what_the_float_model_gives(reference: Path) -> None:
    lessons = run_float_model(reference, images(3))
    assert [tuple(one.expected["y"].shape) for one in lessons] == [(1, 16)] * 3
    assert lessons[0].labels is None


def test_labels_are_those_of_the_samples_that_were_selected(reference: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "l.npy", np.arange(10))
    some = Subset(Subset(images(10), [1, 3, 5, 7, 9]), [0, 2, 4])
    lessons = run_float_model(reference, some, tmp_path / "l.npy")
    assert [int(one.labels) for one in lessons if one.labels is not None] == [1, 5, 9]


@pytest.mark.parametrize("labels", [np.arange(9), np.ones(10), np.ones((10, 1), np.int64)])
def test_labels_that_do_not_fit_are_refused(labels: np.ndarray, reference: Path, tmp_path: Path) -> None:  # type: ignore[type-arg]
    np.save(tmp_path / "l.npy", labels)
    with pytest.raises(DataError, match="expected one whole number for each of 10 samples"):
        run_float_model(reference, images(10), tmp_path / "l.npy")


def test_samples_are_stacked_where_that_gives_the_same(reference: Path, build: Build) -> None:
    model = build(NETWORK, **WEIGHTS)
    lessons = run_float_model(reference, images(3))
    assert can_stack(module_of(model, images(4)), lessons)
    (batch,), (alone,) = TrainingSet(lessons, True).batches([2, 0, 1], 2)
    assert (batch.count, tuple(batch.inputs["x"].shape), alone.count) == (2, (2, 3, 8, 8), 1)
    assert batch.expected["y"][0].equal(lessons[2].expected["y"][0])


def test_samples_that_mix_when_stacked_are_run_one_by_one(build: Build, tmp_path: Path) -> None:
    text = "(float[N,8] x) => (float[N,4] y) { m = ReduceMean<axes = [0]>(x)  d = Sub(x, m)  y = MatMul(d, w) }"
    model, samples = build(text, w=(8, 4)), images(4, (2, 8))
    onnx.save(model, tmp_path / "m.onnx")
    lessons = run_float_model(tmp_path / "m.onnx", samples)
    assert not can_stack(module_of(model, samples), lessons)
    assert [len(some) for some in TrainingSet(lessons).batches(range(4), 3)] == [3, 1]


def test_where_no_two_samples_have_the_same_shape_each_is_run_by_itself(reference: Path, build: Build) -> None:
    lessons = [*run_float_model(reference, images(1)), *run_float_model(reference, images(1, (2, 3, 8, 8)))]
    assert not can_stack(module_of(build(NETWORK, **WEIGHTS), images(4)), lessons)


def test_samples_of_equal_shapes_are_stacked_and_what_is_left_makes_steps_of_several_shapes(
    reference: Path, build: Build
) -> None:
    single = [*run_float_model(reference, images(3)), *run_float_model(reference, images(4, (2, 3, 8, 8)))]
    assert can_stack(module_of(build(NETWORK, **WEIGHTS), images(4)), single)
    steps = list(TrainingSet(single, True).batches([6, 0, 3, 1, 4, 2, 5], 2))
    shapes = [[len(one.inputs["x"]) for one in step] for step in steps]
    assert shapes == [[4], [2], [4], [1]]
    assert [[one.count for one in step] for step in steps] == [[2], [2], [2], [1]]
    mixed = list(TrainingSet(single, True).batches([0, 1, 2, 3, 4], 4))
    assert [[one.count for one in step] for step in mixed] == [[3, 1], [1]]


@pytest.mark.parametrize("memory", [0, 2000, 1 << 20])
def test_samples_beyond_the_memory_are_on_disk_and_the_same(memory: int, reference: Path) -> None:
    held, samples = run_float_model(reference, images(3), memory=memory), images(3)
    assert [one.inputs["x"].numpy().tobytes() for one in held] == [one["x"].tobytes() for one in samples]
    held.close()
    assert not held.inputs.of(0)


def test_batches_are_on_the_device_that_is_asked_for(reference: Path) -> None:
    lessons = TrainingSet(run_float_model(reference, images(2)), stacked=True, device=torch.device("meta"))
    ((batch,),) = lessons.batches([0, 1], 2)
    assert {one.device.type for one in (*batch.inputs.values(), *batch.expected.values())} == {"meta"}
