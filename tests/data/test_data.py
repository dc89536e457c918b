from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from data.single_inputs import PAIR, SINGLE, X, dicts, firsts, rows
from onnxq.data.arrays import StoredArray
from onnxq.data.samples import Input, Sample, evenly, is_truncated, open_samples
from onnxq.errors import DataError


def test_a_list_of_dicts_is_used_as_it_is() -> None:
    samples = open_samples(dicts(3), SINGLE)
    assert len(samples) == 3
    assert firsts(samples) == firsts(samples) == [0, 2, 4]


@pytest.mark.parametrize("given", [dicts(7), rows(7)], ids=["a list", "an array"])
def test_a_limit_takes_samples_from_all_over_or_in_order_the_first(given: object) -> None:
    assert firsts(open_samples(given, SINGLE, limit=3)) == [0, 6, 12]
    assert firsts(open_samples(given, SINGLE, limit=3, in_order=True)) == [0, 2, 4]


@pytest.mark.parametrize(("limit", "left"), [(2, True), (3, False), (9, False), (None, False)])
@pytest.mark.parametrize("made", [list, iter], ids=["a list", "a stream"])
def test_a_limit_in_order_says_whether_it_leaves_samples_out(
    made: Callable[[list[Sample]], object], limit: int | None, left: bool
) -> None:
    found = open_samples(made(dicts(3)), SINGLE, limit=limit, in_order=True)
    assert (len(found), is_truncated(found)) == (min(limit or 3, 3), left)


def test_a_limit_spreads_over_files_and_what_they_hold(tmp_path: Path) -> None:
    for number in range(4):
        np.savez(tmp_path / f"{number}.npz", x=rows(5) + 100 * number)
    assert firsts(open_samples(tmp_path, SINGLE, limit=2)) == [0, 308]
    assert firsts(open_samples(tmp_path, SINGLE, limit=7)) == [0, 6, 102, 200, 206, 302, 308]
    assert firsts(open_samples(tmp_path, SINGLE, limit=7, in_order=True)) == [0, 2, 4, 6, 8, 100, 102]


def test_a_limited_stack_is_read_at_any_place(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows(10))
    samples = open_samples(tmp_path, SINGLE, limit=4)
    assert [float(samples[place]["x"][0, 0]) for place in range(4)] == firsts(samples) == [0, 6, 12, 18]
    assert len(list(samples.sequences())) == 4


def test_a_re_iterable_without_length_is_counted() -> None:
    class Loader:
        def __iter__(self) -> Iterator[Sample]:
            return iter(dicts(3))

    assert len(open_samples(Loader(), SINGLE)) == 3


def test_a_list_that_shrinks_is_noticed() -> None:
    source = dicts(3)
    samples = open_samples(source, SINGLE)
    source.pop()
    with pytest.raises(DataError, match="now has 2, expected 3 as when opened"):
        list(samples)


class Shuffled(list[Sample]):
    """Begins elsewhere in each pass, as data sets that shuffle or augment do."""

    passes = 0

    def __iter__(self) -> Iterator[Sample]:
        self.passes += 1
        return iter([*self[self.passes :], *self[: self.passes]])


class Augmented:
    """Adds something new to each sample in each pass, and has a length."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Sample]:
        return ({"x": sample["x"] + np.float32(self.generator.random())} for sample in dicts(3))


@pytest.mark.parametrize("kind", [Shuffled, Augmented])
def test_all_passes_over_an_iterable_that_changes_see_the_same(kind: type[Shuffled] | type[Augmented]) -> None:
    source = Shuffled(dicts(3)) if kind is Shuffled else Augmented()
    samples = open_samples(source, SINGLE)
    assert firsts(samples) == firsts(samples) == firsts(samples)
    assert len(firsts(samples)) == 3


def test_one_dict_of_an_iterable_is_one_sample_whatever_its_batch() -> None:
    batches = [{"x": rows(4)}, {"x": rows(2)}]
    for source in (batches, iter(batches)):
        assert [sample["x"].shape for sample in open_samples(source, (X,))] == [(4, 2), (2, 2)]


def test_an_iterable_without_end_is_refused_unless_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.data.samples.MOST_SAMPLES", 5)
    with pytest.raises(DataError, match="holds 6 samples, expected at most 5"):
        open_samples(cycle(dicts(2)), SINGLE)
    assert firsts(open_samples(cycle(dicts(2)), SINGLE, limit=3)) == [0, 2, 0]


def test_evenly_reads_only_what_it_picks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, row in enumerate(rows(6)):
        np.save(tmp_path / f"{index}.npy", row[None])
    np.savez(tmp_path / "6.npz", x=rows(4))
    samples = open_samples(tmp_path, SINGLE)
    read: list[Path | str] = []
    one, several = StoredArray.read, StoredArray.rows
    monkeypatch.setattr(StoredArray, "read", lambda array: read.append(Path(array.where).stem) or one(array))
    monkeypatch.setattr(StoredArray, "rows", lambda array, at: read.append(f"rows {list(at)}") or several(array, at))
    assert firsts(evenly(samples, 4)) == [0, 6, 0, 6]
    assert read == ["0", "3", "rows [0, 3]"]


@pytest.mark.parametrize(("count", "most"), [(3, 9), (9, 3), (1, 1), (5, 1)])
def test_evenly_is_the_same_for_samples_lists_and_streams(count: int, most: int) -> None:
    class Stream:
        def __len__(self) -> int:
            return count

        def __iter__(self) -> Iterator[Sample]:
            return iter(dicts(count))

    kinds = (open_samples(dicts(count), SINGLE), open_samples(iter(dicts(count)), SINGLE), dicts(count), Stream())
    found = [firsts(evenly(samples, most)) for samples in kinds]
    assert found == found[:1] * 4
    assert len(found[0]) == min(count, most)


def test_evenly_keeps_within_the_limit(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows(10))
    assert firsts(evenly(open_samples(tmp_path, SINGLE, limit=4), 2)) == [0, 18]


def test_a_one_shot_iterator_can_be_iterated_again_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    samples = open_samples(iter(dicts(12)), SINGLE)
    assert firsts(samples) == firsts(samples) == [2 * index for index in range(12)]
    assert any(tmp_path.iterdir())
    del samples
    gc.collect()
    assert not any(tmp_path.iterdir())


def test_a_one_shot_iterator_with_a_bad_sample_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(DataError, match="samples, sample 1: input 'x'"):
        open_samples(iter([*dicts(1), {}]), SINGLE)
    assert not any(tmp_path.iterdir())


def test_what_a_killed_process_spooled_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        import os, signal, numpy as np
        from onnxq.data.samples import Input, open_samples
        inputs = (Input("x", np.dtype(np.float32), (2,)),)
        samples = open_samples(iter([{"x": np.ones(2, np.float32)}]), inputs)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    samples = open_samples(iter(dicts(1)), SINGLE)
    assert not left.exists()
    assert len(list(samples)) == 1


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16])
def test_spooled_samples_keep_their_dtype(dtype: type[np.generic]) -> None:
    inputs = (Input("file", np.dtype(dtype), (2,)),)
    (sample,) = open_samples(iter([{"file": np.array([1, -2], dtype)}]), inputs)
    assert sample["file"].dtype == dtype
    assert sample["file"].astype(np.float32).tolist() == [1, -2]


def test_an_iterable_of_arrays_feeds_the_one_input() -> None:
    assert firsts(open_samples(rows(2), SINGLE)) == [0, 2]
    with pytest.raises(DataError, match=r"row 0 has 1 values, expected one for each of 'x' .*, 'n' int64"):
        open_samples(rows(2), PAIR)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_rows_is_taken_as_a_generator_of_them_is(kind: Callable[[Iterable[object]], object]) -> None:
    arrays = [sample["x"] for sample in dicts(3)]
    assert firsts(open_samples(kind(arrays), SINGLE)) == firsts(open_samples(iter(arrays), SINGLE))
    labelled = [(array, 7) for array in arrays]
    assert firsts(open_samples(kind(labelled), SINGLE)) == firsts(open_samples(iter(labelled), SINGLE))


BAD = {"x": np.full((1, 2), np.nan, np.float32)}


@pytest.mark.parametrize(
    ("source", "inputs", "options", "sentence"),
    [
        *((nothing, SINGLE, {}, "holds no samples") for nothing in ([], iter([]), ())),
        *((one, SINGLE, {}, "expected a path or an iterable of dicts") for one in (dicts(1)[0], 3, None)),
        (dicts(1), SINGLE, {"limit": 0}, "limit is 0"),
        (dicts(1), (), {}, "has no inputs"),
        ([*dicts(2), BAD], SINGLE, {}, "sample 2: 'x' holds 2 NaN"),
        (Path("gone"), SINGLE, {}, "gone does not exist; give a file or folder"),
    ],
)
def test_samples_that_cannot_be_opened_are_told_why(
    source: object, inputs: tuple[Input, ...], options: dict[str, int], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        list(open_samples(source, inputs, **options))  # type: ignore[arg-type]
