from __future__ import annotations

import pytest

from onnxq.data.inputs import counts_samples, open_batch, says_nothing


@pytest.mark.parametrize("dim", [1, "batch", "batch_size", "Batch", "N", "b", "bs", "minibatch"])
def test_one_and_names_of_batches_count_samples(dim: int | str) -> None:
    assert counts_samples(dim)


@pytest.mark.parametrize("dim", [2, "time", "height", "num_nodes", "seq_len", None, "s0"])
def test_other_dims_do_not_say_that_they_count_samples(dim: int | str | None) -> None:
    assert not counts_samples(dim)


@pytest.mark.parametrize(
    "dim",
    [
        None,
        "s0",
        "s77",
        "u3",
        "unk__12",
        "unknown_0",
        "DynamicDimension.0",
        "x_dynamic_axes_1",
        "Concat461_dim_0",
        "d0",
    ],
)
def test_names_that_programs_number_say_nothing(dim: str | None) -> None:
    assert says_nothing(dim)


@pytest.mark.parametrize("dim", [1, 7, "frames", "time", "seq1", "rows", "height", "width2", "image_width", "past_1"])
def test_names_that_people_give_say_something(dim: int | str) -> None:
    assert not says_nothing(dim)


def test_a_model_without_inputs_counts_no_samples() -> None:
    assert not open_batch([(None, 3), None], [(None, 2)])
    assert not open_batch([()], [(None, 2)])
