"""Rows of libraries become samples of a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples, samples_of
from onnxq.errors import DataError

FLOAT, WHOLE = np.dtype(np.float32), np.dtype(np.int64)
X = Input("x", FLOAT, ("N", 2))
PAIR = (X, Input("ids", WHOLE, ("N", 3)))


class Tensor:
    """What PyTorch's tensors have, and their arrays lack."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, np.float32)

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.values


@pytest.mark.parametrize(
    ("row", "count"),
    [
        ((np.ones((4, 2), np.float32), np.arange(4)), 4),
        ({"x": np.ones((4, 2), np.float32), "label": 3}, 4),
        (np.ones(2), 1),
        ([Tensor(np.ones((3, 2)))], 3),
        ({"x": [0.5, 1.0]}, 1),
    ],
    ids=["batch and labels", "named batch", "one without its axis", "tensors", "a list"],
)
def test_a_row_is_as_many_samples_as_it_stacks(row: object, count: int) -> None:
    found = list(samples_of(row, [X], "row"))
    assert [(sample["x"].shape, sample["x"].dtype) for sample in found] == [((1, 2), FLOAT)] * count


def test_whole_numbers_take_the_width_that_is_wanted_where_none_is_lost() -> None:
    row = {"x": np.ones((1, 2)), "ids": np.array([[1, 2, 3]], np.int32)}
    ((sample,),) = ([*samples_of(row, PAIR, "row")],)
    assert sample["ids"].dtype == WHOLE
    narrow = Input("n", np.dtype(np.int8), (1,))
    assert next(samples_of({"n": np.array([300])}, [narrow], "row"))["n"].dtype == WHOLE


def test_pixels_do_not_become_floats_by_themselves() -> None:
    with pytest.raises(DataError, match=r"'x' is uint8, expected float32; save what the model was trained on"):
        open_samples(iter([(np.ones((1, 2), np.uint8),)]), [X])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"y": 1, "z": 2}, r"row has y, z, expected also 'x' float32\[N, 2\]; rename what holds it"),
        ((1,), r"row has 1 values, expected one for each of 'x' float32\[N, 2\], 'ids'"),
        ({"x": [[1.0], [1.0, 2.0]], "ids": [1]}, r"row: 'x' of type list is no array"),
    ],
)
def test_a_row_that_lacks_something_is_told(row: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(samples_of(row, PAIR, "row"))


def test_a_loader_is_read_batch_by_batch_and_limited_from_all_over() -> None:
    class Loader:
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Any:
            return ((Tensor(np.full((4, 2), batch)), np.zeros(4)) for batch in range(5))

    assert len(open_samples(Loader(), [X])) == 20
    assert [float(sample["x"][0, 0]) for sample in open_samples(Loader(), [X], limit=3)] == [0, 2, 4]
    assert [float(sample["x"][0, 0]) for sample in open_samples(Loader(), [X], limit=5, in_order=True)] == [0] * 4 + [1]
