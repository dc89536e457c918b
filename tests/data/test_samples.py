"""Samples are selected, kept, traced to their files and run in batches."""

from __future__ import annotations

import errno
import gc
import itertools
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as some

from data.single_inputs import X, firsts
from onnxq.calibration.data import Data
from onnxq.data import rows as items
from onnxq.data.dataset import (
    Origin,
    Subset,
    TraceableSamples,
    group_by_file,
    halves,
    list_shared_files,
    origin_of,
    ranges_of,
    reads_by_index,
    split,
)
from onnxq.data.inputs import Input, Sample, check_sample, generate_samples
from onnxq.data.samples import Samples, evenly, open_samples
from onnxq.data.sources import Audio
from onnxq.errors import DataError, OutputError

INPUTS = (X,)


class Filed(list[Sample]):
    """Samples of files with so many each."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__({"x": np.array(place)} for place in range(sum(counts)))
        self.files = [file for file, count in enumerate(counts) for _ in range(count)]

    def origin(self, index: int) -> Origin:
        return Origin(index, f"file{self.files[index]}")

    def labels(self, index: int) -> tuple[int, ...]:
        return ()


def stacks(folder: Path, counts: list[int]) -> Samples:
    for file, count in enumerate(counts):
        np.savez(folder / f"{file}.npz", x=np.arange(count * 2, dtype=np.float32).reshape(count, 2))
    return open_samples(folder, INPUTS, batch=1)


def test_rows_of_a_stack_share_their_file_wherever_some_are_selected(tmp_path: Path) -> None:
    samples = stacks(tmp_path, [3] * 8)
    assert group_by_file(samples) == [list(range(first, first + 3)) for first in range(0, 24, 3)]
    assert group_by_file(Subset(samples, range(1, 24))) == [
        [0, 1],
        *([first, first + 1, first + 2] for first in range(2, 23, 3)),
    ]


@pytest.mark.parametrize("counts", [[24], [12] * 7, [1] * 24, [30, *[3] * 20]])
def test_samples_stand_for_themselves_where_files_tell_no_parts_apart(tmp_path: Path, counts: list[int]) -> None:
    assert group_by_file(stacks(tmp_path, counts)) == [[place] for place in range(sum(counts))]


def test_samples_share_files_where_these_can_be_told_apart_among_all_there_are(tmp_path: Path) -> None:
    samples = stacks(tmp_path, [3] * 8)
    assert [Path(file).stem for file in list_shared_files(samples)] == [
        f"{file}" for file in range(8) for _ in range(3)
    ]
    # The few that judge are of few files, but not of too few.
    few = list_shared_files(Subset(Subset(samples, range(6, 12)), [0, 1, 2, 4]))
    assert [file and Path(file).stem for file in few] == ["2", "2", "2", ""]
    assert list_shared_files(Subset(samples, range(0, 24, 3))) == ()


@pytest.mark.parametrize("counts", [[12] * 7, [1] * 24, [30, *[3] * 20]])
def test_samples_count_by_themselves_where_files_tell_no_parts_apart(tmp_path: Path, counts: list[int]) -> None:
    assert list_shared_files(stacks(tmp_path, counts)) == ()


def test_single_files_of_one_folder_share_nothing(tmp_path: Path) -> None:
    for file in range(9):
        np.savez(tmp_path / f"{file}.npz", x=np.full((1, 2), file, np.float32))
    assert list(map(len, group_by_file(open_samples(tmp_path, INPUTS)))) == [1] * 9


def test_windows_of_a_recording_share_it(tmp_path: Path) -> None:
    for file in range(8):
        soundfile.write(tmp_path / f"{file}.wav", np.zeros(800, np.float32), 16_000)
    samples = open_samples(tmp_path, [Input("x", np.dtype(np.float32), ("N", 400))])
    assert group_by_file(samples) == [[first, first + 1] for first in range(0, 16, 2)]


@given(some.lists(some.integers(1, 9), min_size=1, max_size=40), some.integers(2, 64))
def test_halves_share_no_file_and_are_as_many_as_wanted(counts: list[int], count: int) -> None:
    samples = Filed(counts)
    one, other = halves(samples, count)
    assert len({*one, *other}) == len(one) + len(other) == min(count, len(samples))
    assert (one, other) == (sorted(one), sorted(other))
    for origin in group_by_file(samples):
        assert set(one).isdisjoint(origin) or set(other).isdisjoint(origin)


def test_halves_leave_files_to_others_and_are_alike_in_size() -> None:
    samples = Filed([8] * 64)
    one, other = halves(samples, 16)
    assert (len(one), len(other)) == (8, 8)
    assert len({place // 8 for place in chain(one, other)}) == 16


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


def narrow(place: int) -> Any:
    return {"x": np.zeros((1, 1 if place == 7 else 2), np.float32)}


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (
            lambda place: np.zeros((3, 2) if place == 7 else 2, np.float32),
            "samples, row 7 holds 3 samples, expected one as in other rows",
        ),
        (
            lambda place: {"x": np.zeros((1, 2), np.float32)} if place != 7 else {}["x"],
            "samples, row 7 failed: KeyError: 'x'",
        ),
        (narrow, r"samples, sample 7: 'x' has shape \[1, 1\]"),
    ],
    ids=["batch", "error", "shape"],
)
def test_an_item_that_is_no_sample_is_named(item: Callable[[int], Any], sentence: str) -> None:
    class Odd(Numbers):
        def __getitem__(self, place: int) -> Any:
            return item(place)

    with pytest.raises(DataError, match=sentence):
        list(open_samples(Odd(), [X]))


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
    samples, written = open_samples(Numbers(), [X]), itertools.count()
    keep = items.write_sample

    def full(path: Path, sample: Sample) -> None:
        if next(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        keep(path, sample)

    monkeypatch.setattr(items, "write_sample", full)
    with pytest.raises(
        OutputError, match=r"samples cannot be stored in .*: No space left on device; free disk space there"
    ):
        list(samples)
    assert firsts(samples) == list(range(COUNT))


class Stream:
    """Samples that can only be read one after the other."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Sample]:
        return ({"x": np.array(index)} for index in (itertools.count() if self.endless else range(3)))

    endless = True


def test_a_stream_is_read_up_to_the_last_one_again_and_again() -> None:
    chosen = Subset(Stream(), (2, 3, 7))
    for _ in range(2):
        assert [int(sample["x"]) for sample in chosen] == [2, 3, 7]
    assert len(chosen) == 3


def test_a_stream_that_has_become_shorter_is_told() -> None:
    shorter = Stream()
    shorter.endless = False
    with pytest.raises(DataError, match="end before sample 7"):
        list(Subset(shorter, (2, 7)))


def test_a_selection_counts_its_own_samples() -> None:
    chosen = Subset([{"x": np.array(index)} for index in range(10)], (2, 3, 7, 9))
    assert [int(sample["x"]) for sample in chosen.read_samples([1, 3])] == [3, 9]
    assert (reads_by_index(chosen), reads_by_index(Subset(Stream(), (2, 3)))) == (True, False)


def test_errors_name_samples_as_their_file_counts_them(tmp_path: Path) -> None:
    values = np.zeros((5, 2), np.float32)
    values[3] = np.nan
    np.savez(tmp_path / "a.npz", x=values)
    chosen = Subset(open_samples(tmp_path, [Input("x", np.dtype(np.float32), ("N", 2))]), (1, 3))
    with pytest.raises(DataError, match=r"a\.npz, sample 3: 'x' holds 2 NaN"):
        list(chosen.read_samples([0, 1]))


@pytest.mark.parametrize(("count", "holdout"), [(1, 1), (7, 7), (8, 2), (16, 4), (63, 15), (400, 64)])
def test_every_fourth_sample_judges_and_nothing_else(count: int, holdout: int) -> None:
    parts = split([{"x": np.array(index)} for index in range(count)])
    select, gate = ([int(sample["x"]) for sample in part] for part in parts)
    assert len(gate) == holdout
    if count < 8:
        assert select == gate == list(range(count))
    else:
        assert sorted(select + gate) == list(range(count))


@pytest.mark.parametrize(("files", "rows", "holdout"), [(8, 3, 2), (64, 8, 8), (64, 100, 8), (200, 2, 32)])
def test_what_shares_a_file_with_a_sample_that_judges_chooses_nothing(
    files: int, rows: int, holdout: int, tmp_path: Path
) -> None:
    inputs = [Input("x", np.dtype(np.float32), ("N", 1))]
    for number in range(files):
        np.savez(tmp_path / f"{number}.npz", x=np.full((rows, 1), number, np.float32))
    parts = split(open_samples(tmp_path, inputs, batch=1))
    select, gate = ([int(sample["x"].item()) for sample in part] for part in parts)
    assert len(set(gate)) == holdout
    assert len(gate) == min(holdout * rows, 64)
    assert set(select) == set(range(files)).difference(gate)
    assert len(select) == rows * (files - holdout)


def sample(value: float) -> dict[str, np.ndarray]:
    return {"x": np.full((1, 2), value, np.float32)}


def test_the_samples_that_judge_are_traced_through_every_selection() -> None:
    given = open_samples([sample(index) for index in range(40)], INPUTS)
    _, holdout = split(Subset(given, range(40)))
    places = [origin_of(holdout, index).place for index in range(len(holdout))]
    assert places[8] == 35
    # Each number is that of the sample itself.
    assert places == [int(one["x"][0, 0]) for one in holdout]
    assert isinstance(holdout, TraceableSamples)


def test_a_limit_leaves_the_numbers_as_they_were_given() -> None:
    given = open_samples([sample(index) for index in range(10)], INPUTS, limit=4)
    assert [origin_of(given, index) for index in range(4)] == [Origin(0), Origin(3), Origin(6), Origin(9)]


def test_samples_name_the_file_that_holds_them(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", sample(0)["x"])
    np.savez(tmp_path / "b.npz", x=np.concatenate([sample(index)["x"] for index in (1, 2, 3)]))
    np.save(tmp_path / "c.npy", sample(4)["x"])
    given = open_samples(tmp_path, INPUTS, batch=1)
    files = [tmp_path / name for name in ("a.npy", "b.npz", "b.npz", "b.npz", "c.npy")]
    assert [origin_of(given, index) for index in range(5)] == [
        Origin(place, str(file)) for place, file in enumerate(files)
    ]


def test_samples_from_memory_have_no_file() -> None:
    assert origin_of([sample(0), sample(1)], 1) == Origin(1)
    spooled = open_samples((sample(index) for index in range(3)), INPUTS)
    assert origin_of(spooled, 2) == Origin(2)


def test_runs_of_numbers_are_told_by_their_ends() -> None:
    assert ranges_of([]) == ()
    assert ranges_of([3, 5, 6, 7, 9]) == ((3, 3), (5, 7), (9, 9))


WIDE = Input("x", np.dtype(np.float32), ("N", 1000))


def test_a_thousand_samples_take_no_memory() -> None:
    def endless() -> Iterator[Sample]:
        while True:
            yield {"x": np.zeros((1, 1000), np.float32)}

    tracemalloc.start()
    samples = open_samples(endless(), [WIDE], limit=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(samples) == 1000
    assert peak < 4_000_000 / 2


def test_dicts_of_arrays_are_samples_as_they_are_unless_rows_are_joined() -> None:
    row = {"x": np.zeros(1000)}
    with pytest.raises(DataError, match="of rank 1, expected rank 2"):
        list(open_samples([row], [WIDE]))
    (sample,) = open_samples([row], [WIDE], batch=1)
    assert (sample["x"].shape, sample["x"].dtype) == ((1, 1000), np.float32)


def test_a_source_that_takes_no_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"holds no files that Audio\(.*\) takes"):
        open_samples(tmp_path, [WIDE], source=Audio())


MANY_INPUTS = (
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
    samples = list(generate_samples(MANY_INPUTS, 16))
    assert len(samples) == 16
    for sample in samples:
        check_sample(sample, MANY_INPUTS, "made up")
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
    once, again = (list(generate_samples(MANY_INPUTS[:1], 4)) for _ in range(2))
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
