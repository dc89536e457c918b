"""Inputs that nobody gave: they fit what a model declares, and are the same each time."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from onnxq.data.inputs import Input, check_sample, generate_samples

INPUTS = (
    Input("x", np.dtype(np.float32), ("N", 3, None)),
    Input("half", np.dtype(np.float16), ("N",)),
    Input("brain", np.dtype(ml_dtypes.bfloat16), (2,)),
    Input("ids", np.dtype(np.int64), ("N", "L")),
    Input("mask", np.dtype(np.bool_), ("N", "L")),
    Input("text", np.dtype(object), ("N",)),
    Input("any", np.dtype(np.float64), None),
    Input("waves", np.dtype(np.complex64), (2,)),
)


def test_samples_fit_the_inputs() -> None:
    samples = list(generate_samples(INPUTS, 16))
    assert len(samples) == 16
    for sample in samples:
        check_sample(sample, INPUTS, "made up")
        assert sample["ids"].min() >= -2
        assert sample["ids"].max() <= 3
    assert {sample["x"].shape[0] for sample in samples} == {1, 2, 3, 4}


def test_the_first_samples_have_values_of_all_kinds() -> None:
    inputs = (Input("x", np.dtype(np.float32), ("N", 50)), Input("i", np.dtype(np.int64), ("N", 9)))
    samples = list(generate_samples(inputs, 4))
    assert all((sample["x"] == 0).any() and (sample["x"] < 0).any() for sample in samples)
    assert max(np.abs(sample["x"]).max() for sample in samples) > 10
    assert {np.sign(number) for sample in samples for number in sample["i"].flat} == {-1, 0, 1}


def test_dims_are_equal_where_they_have_one_name_alone() -> None:
    inputs = [Input(name, np.dtype(np.float32), ("N", None, "L", None)) for name in "ab"]
    for sample in list(generate_samples(inputs, 8))[::2]:
        assert sample["a"].shape[::2] == sample["b"].shape[::2]
        assert len({*sample["a"].shape, *sample["b"].shape[1::2]}) == 6


def test_samples_are_the_same_each_time_and_differ_from_each_other() -> None:
    once, again = (list(generate_samples(INPUTS[:1], 4)) for _ in range(2))
    for sample, other in zip(once, again, strict=True):
        np.testing.assert_array_equal(sample["x"], other["x"], strict=True)
    assert len({sample["x"].tobytes() for sample in once}) == 4


def test_every_second_sample_has_equal_dims_wherever_they_are_free() -> None:
    inputs = [Input(name, np.dtype(np.float32), (None, "L")) for name in "ab"]
    shapes = [{array.shape for array in sample.values()} for sample in generate_samples(inputs, 8)]
    assert all(len(shape) == 1 and len(set(*shape)) == 1 for shape in shapes[1::2])
    assert any(len(shape) > 1 for shape in shapes[::2])


def test_what_may_be_left_out_is_left_out() -> None:
    inputs = (Input("x", np.dtype(np.float32), (1,)), Input("state", np.dtype(np.float32), (1,), optional=True))
    assert [list(sample) for sample in generate_samples(inputs, 1)] == [["x"]]


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_without_inputs_is_fed_nothing(count: int) -> None:
    assert list(generate_samples((), count)) == [{}] * count
