"""A selection is some of the samples, and reads no others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from onnxq.errors import DataError
from onnxq.samples.inputs import Sample
from onnxq.samples.selection import Selection


class Stream:
    """Samples that can only be read one after the other."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Sample]:
        return ({"x": np.array(index)} for index in (count() if self.endless else range(3)))

    endless = True


def test_a_stream_is_read_up_to_the_last_one_again_and_again() -> None:
    chosen = Selection(Stream(), (2, 3, 7))
    for _ in range(2):
        assert [int(sample["x"]) for sample in chosen] == [2, 3, 7]
    assert len(chosen) == 3


def test_a_stream_that_has_become_shorter_is_told() -> None:
    shorter = Stream()
    shorter.endless = False
    with pytest.raises(DataError, match="end before sample 7"):
        list(Selection(shorter, (2, 7)))
