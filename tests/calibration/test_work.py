from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from onnxq.calibration.workers import AdaptiveBatchSizer, Shard, Work
from onnxq.data.inputs import Sample


def samples(count: int) -> list[Sample]:
    return [{"x": np.float32([index])} for index in range(count)]


def values(shard: Shard, count: int) -> list[float]:
    return [float(sample["x"][0]) for _, sample in shard.numbered(samples(count))]


class Stream:
    """Can only be iterated, and counts how much of it was."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sample]:
        for sample in samples(self.count):
            self.read += 1
            yield sample


@given(some.data(), some.integers(1, 40), some.booleans())
def test_every_sample_is_run_once_whatever_is_given_back(data: some.DataObject, count: int, streamed: bool) -> None:
    indices = sorted(data.draw(some.sets(some.integers(0, count - 1))))
    work = Work(Stream(count) if streamed else samples(count), indices)
    finished: list[float] = []
    while work.left:
        shard = work.take(data.draw(some.integers(1, 9)), carried=data.draw(some.booleans()))
        assert values(shard, count) == list(shard.indices)
        if data.draw(some.integers(0, 3)):
            finished += values(shard, count)
        else:
            work.give_back(shard.indices)
    assert sorted(finished) == indices


def test_samples_keep_their_index_among_all() -> None:
    work = Work(samples(4), [1, 3])
    shard = work.take(9, carried=True)
    assert (shard.indices, values(shard, 4), len(shard)) == ([1, 3], [1, 3], 2)
    work.give_back(shard.indices)
    assert work.take(1, carried=False).indices == [1]


def test_samples_in_memory_fill_a_shard_by_their_bytes() -> None:
    work = Work(samples(10), range(10))
    assert [len(work.take(9, carried=True, nbytes=12)) for _ in range(4)] == [3, 3, 3, 1]


def test_a_stream_is_read_as_far_as_it_is_needed() -> None:
    stream = Stream(100)
    Work(stream, range(100)).take(3, carried=True)
    assert stream.read <= 4


@pytest.mark.parametrize(
    ("seconds", "left", "workers", "size"),
    [(0.1, 10**6, 2, 32), (8.0, 10**6, 2, 5), (80.0, 10**6, 2, 1), (0.1, 20, 2, 5), (0.1, 3, 9, 1)],
)
def test_a_shard_lasts_as_long_as_wanted_and_the_last_ones_are_shared(
    seconds: float, left: int, workers: int, size: int
) -> None:
    pace = AdaptiveBatchSizer(5.0)
    assert 1 <= pace.size(left, workers) <= 8
    pace.learn(8, seconds)
    assert pace.size(left, workers) == size
