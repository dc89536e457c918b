"""Objects that are asked for their samples by place."""

from __future__ import annotations

import errno
import gc
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onnxq.calibration.data import Data
from onnxq.data import samples as items
from onnxq.data.dataset import Origin
from onnxq.data.inputs import Input, Sample
from onnxq.data.samples import evenly, open_samples
from onnxq.errors import DataError, OutputError

X = Input("x", np.dtype(np.float32), ("N", 2))
COUNT = 40


class Numbers:
    """A map-style data set: what can be asked for by place, and in no other way, and never says where it ends."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, place: int) -> Any:
        self.read.append(place)
        return np.full(2, place, np.float32), place


class Torch(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The same as PyTorch's own class."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), float(place)), place


def firsts(samples: Any) -> list[float]:
    return [float(sample["x"].flat[0]) for sample in samples]


@pytest.mark.parametrize("kind", [Numbers, Torch])
def test_items_are_samples_in_their_order(kind: type[Numbers] | type[Torch]) -> None:
    samples = open_samples(Data(kind()).calibration, [X])
    assert firsts(samples) == firsts(samples) == list(range(COUNT))
    assert samples[3]["x"].tolist() == [[3, 3]]


def test_a_limit_takes_items_from_all_over_or_in_order_the_first() -> None:
    assert firsts(open_samples(Numbers(), [X], limit=4)) == [0, 13, 26, 39]
    samples = open_samples(Numbers(), [X], limit=4, in_order=True)
    assert (firsts(samples), samples.truncated) == ([0, 1, 2, 3], True)


def test_items_come_from_memory() -> None:
    assert open_samples(Numbers(), [X], limit=4).origin(2) == Origin(2)


def test_only_what_is_picked_is_read_and_once() -> None:
    numbers = Numbers()
    samples = open_samples(numbers, [X])
    looked = set(numbers.read)
    assert len(numbers.read) == 2 * len(looked) == 16
    numbers.read.clear()
    for _ in range(2):
        assert firsts(evenly(samples, 14)) == list(range(0, COUNT, 3))
    assert numbers.read == [place for place in range(0, COUNT, 3) if place not in looked]


def test_only_what_is_picked_is_read_of_an_object_that_nobody_opened() -> None:
    numbers = Numbers()
    assert [int(label) for _, label in evenly(numbers, 3)] == [0, 20, 39]  # type: ignore[arg-type]
    assert numbers.read == [0, 20, 39]


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_items_that_change_are_read_once_from_the_first_to_the_last(share: float) -> None:
    random = np.random.default_rng(0)

    class Augmented(Numbers):
        def __getitem__(self, place: int) -> Any:
            self.read.append(place)
            return np.full(2, place + (random.random() if random.random() < share else 0), np.float32)

    augmented = Augmented()
    samples = open_samples(augmented, [X])
    assert firsts(samples) == firsts(samples)
    assert augmented.read[-COUNT:] == list(range(COUNT))


def test_batches_are_taken_apart() -> None:
    class Batches(Numbers):
        def __getitem__(self, place: int) -> Any:
            return np.full((3, 2), place, np.float32)

    assert firsts(open_samples(Batches(), [X], limit=120)) == [place // 3 for place in range(120)]


def test_a_single_batch_among_items_is_told() -> None:
    class Odd(Numbers):
        def __getitem__(self, place: int) -> Any:
            return np.zeros((3, 2) if place == 7 else 2, np.float32)

    with pytest.raises(DataError, match="samples, row 7 holds 3 samples, expected one as in other rows"):
        list(open_samples(Odd(), [X]))


def test_an_item_that_cannot_be_read_is_named() -> None:
    class Broken(Numbers):
        def __getitem__(self, place: int) -> Any:
            return {"x": np.zeros((1, 2), np.float32)} if place != 7 else {}["x"]

    with pytest.raises(DataError, match="samples, row 7 failed: KeyError: 'x'"):
        list(open_samples(Broken(), [X]))


def test_an_item_that_does_not_fit_is_named() -> None:
    class Narrow(Numbers):
        def __getitem__(self, place: int) -> Sample:
            return {"x": np.zeros((1, 1 if place == 7 else 2), np.float32)}

    with pytest.raises(DataError, match=r"samples, sample 7: 'x' has shape \[1, 1\]"):
        list(open_samples(Narrow(), [X]))


def test_no_items_are_no_samples() -> None:
    class Empty(Numbers):
        def __len__(self) -> int:
            return 0

    with pytest.raises(DataError, match="holds no samples"):
        open_samples(Empty(), [X])


def test_texts_are_kept_as_they_are_first_read() -> None:
    class Texts(Numbers):
        def __getitem__(self, place: int) -> Sample:
            return {"t": np.array([f"text {place}"], object)}

    samples = open_samples(Texts(), [Input("t", np.dtype(object), (1,))])
    first, again = list(samples), list(samples)
    assert [one["t"].dtype for one in first] == [one["t"].dtype for one in again]
    assert [one["t"].item() for one in first] == [f"text {place}" for place in range(COUNT)]


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    samples = open_samples(Numbers(), [X])
    assert len(list(tmp_path.rglob("*.npz"))) == 8
    del samples
    gc.collect()
    assert not any(tmp_path.iterdir())


def test_a_full_disk_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, written = open_samples(Numbers(), [X]), count()
    keep = items.write_sample

    def full(path: Path, sample: Sample) -> None:
        if next(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        keep(path, sample)

    monkeypatch.setattr(items, "write_sample", full)
    with pytest.raises(OutputError, match=r"samples cannot be kept in .*: No space left on device; make room there"):
        list(samples)
    assert firsts(samples) == list(range(COUNT))
