"""Arrays and stacks: one sample or several, and rows of files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from data.single_inputs import FLOAT, PAIR, SINGLE, X, dicts, firsts, rows
from onnxq.calibration.data import Data
from onnxq.data import files
from onnxq.data.arrays import npy_array, npz_arrays, read_tensor
from onnxq.data.dataset import origin_of
from onnxq.data.files import as_sample, sample_shape, stack_size
from onnxq.data.inputs import Input, Sample, counts_samples, open_batch, says_nothing
from onnxq.data.rows import samples_of_row
from onnxq.data.samples import Samples, in_batches, open_samples
from onnxq.errors import DataError, SchemeError

ARRAYS = [
    np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
    np.arange(4, dtype=">f4").reshape(4, 1),
    np.zeros((3, 0), np.float16),
    np.array(["a", "bc"]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_npy_arrays_are_read_whole_and_by_row(array: NDArray[np.generic], tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, array)
    stored = npy_array(path)
    assert (stored.shape, stored.dtype) == (array.shape, array.dtype.newbyteorder("="))
    assert np.array_equal(stored.read(), array)
    assert [row.tolist() for row in stored.rows(range(len(array)))] == array.tolist()
    assert [row.tolist() for row in stored.rows([len(array) - 1])] == array[-1:].tolist()
    assert stored.read().dtype.isnative


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_archives_give_their_arrays_by_key(save: object, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    save(path, **{"x": np.float32([1, 2]), "scope/y:0": np.int64(7)})  # type: ignore[operator]
    stored = npz_arrays(path)
    assert {key: value.read().tolist() for key, value in stored.items()} == {"x": [1, 2], "scope/y:0": 7}


def test_rows_hold_one_row_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((100, 10), np.float32))
    monkeypatch.setattr("onnxq.data.arrays.ARRAY_LIMIT", 40)
    assert len(list(npy_array(path).rows(range(100)))) == 100
    with pytest.raises(DataError, match="declares 4000 bytes, expected at most 40"):
        npy_array(path).read()


def test_a_test_data_tensor_gives_name_and_values(tmp_path: Path) -> None:
    path = tmp_path / "input_0.pb"
    path.write_bytes(numpy_helper.from_array(np.float32([[1, 2]]), "x").SerializeToString())
    name, array = read_tensor(path)
    assert (name, array.tolist()) == ("x", [[1, 2]])


def test_a_newer_npy_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.zeros(1), version=(3, 0))
    path.write_bytes(stream.getvalue())
    with pytest.raises(DataError, match=r"is .npy version \(3, 0\)"):
        npy_array(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_rows_of_an_archive_are_picked(save: Callable[..., None], tmp_path: Path) -> None:
    array = np.arange(200_000, dtype=np.float32).reshape(100, 2000)
    save(tmp_path / "a.npz", x=array)
    picked = npz_arrays(tmp_path / "a.npz")["x"].rows([0, 7, 99])
    assert [row[0] for row in picked] == [0, 14_000, 198_000]


PLAIN = Input("x", FLOAT, (3, 2))


@pytest.mark.parametrize(
    ("entry", "shape", "count"),
    [
        (X, (1, 2), None),
        (X, (5, 2), 5),
        (X, (5, 1, 2), 5),
        (PLAIN, (3, 2), None),
        (PLAIN, (4, 3, 2), 4),
    ],
)
def test_an_axis_more_or_a_batch_counts_samples(entry: Input, shape: tuple[int, ...], count: int | None) -> None:
    assert stack_size({"x": shape}, [entry]) == count
    each = sample_shape(shape, entry, count)
    assert len(each) == 2
    if count is not None:
        assert as_sample(np.zeros(shape)[0], entry).shape == each


@pytest.mark.parametrize(
    ("dim", "shapes"),
    [
        *((dim, [(5, 2)]) for dim in ("time", "height", None)),
        *((dim, [(1, 2)] * 5) for dim in ("batch", "batch_size", "N", "b")),
    ],
)
def test_a_leading_dimension_counts_samples_if_it_is_called_batch(
    dim: str | None, shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", x=rows(5))
    samples = open_samples(tmp_path / "a.npz", (Input("x", FLOAT, (dim, 2)),))
    assert [sample["x"].shape for sample in samples] == shapes


def test_500_images_stacked_on_an_axis_that_nobody_named_are_500_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((500, 1, 2, 2), np.float32))
    images = Input("x", FLOAT, ("s0", 1, 2, 2), open_batch=True)
    samples = open_samples(tmp_path, (images,))
    assert len(samples) == 500
    assert next(iter(samples))["x"].shape == (1, 1, 2, 2)


def test_an_axis_more_tells_one_long_sample_from_many_short_ones(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows(5)[None])
    (sample,) = open_samples(tmp_path, (Input("x", FLOAT, (None, 2), open_batch=True),))
    assert sample["x"].shape == (5, 2)


@pytest.mark.parametrize(
    ("arrays", "inputs", "sentence"),
    [
        ({"x": np.zeros((4, 3, 2), np.float32)}, PAIR, r"a.npz: input 'n' int64\[\] is missing, found 'x'"),
        (
            {"x": np.zeros((4, 3, 2), np.float32), "n": np.arange(3)},
            PAIR,
            r"a.npz: 'x' has shape \[4, 3, 2\] of rank 3, expected rank 2",
        ),
        # Headers are checked when a file is opened.
        ({"x": rows(1).astype(np.int64)}, (X,), r"a.npz: 'x' is int64, expected float32"),
    ],
)
def test_a_file_that_does_not_fit_is_told_why(
    arrays: dict[str, NDArray[Any]], inputs: tuple[Input, ...], sentence: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=sentence):
        open_samples(tmp_path / "a.npz", inputs)


def test_an_npz_with_one_more_axis_is_a_stack(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3, 2), np.float32), n=np.arange(4))
    samples = open_samples(tmp_path / "a.npz", PAIR)
    assert len(samples) == 4
    assert [(sample["x"].shape, int(sample["n"])) for sample in samples] == [((3, 2), index) for index in range(4)]


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_leading_axis_on_a_fixed_batch_of_one_is_a_stack(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    np.save(path, rows(4)) if suffix == "npy" else np.savez(path, x=rows(4))
    samples = open_samples(path, SINGLE)
    assert [sample["x"].tolist() for sample in samples] == rows(4)[:, None].tolist()


@pytest.mark.parametrize("wanted", [np.float16, np.float32])
@pytest.mark.parametrize("stored", [np.float16, np.float32, np.float64])
def test_floats_of_any_source_become_the_type_of_the_input(stored: type, wanted: type, tmp_path: Path) -> None:
    entry, array = Input("x", np.dtype(wanted), ("N", 2)), np.array([[1, 0.5], [0.25, -2]], stored)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "b.npz", x=array)
    sources = (tmp_path / "a.npy", tmp_path / "b.npz", [{"x": array}], iter([{"x": array}]), [array], [(array, [0, 1])])
    for source in sources:
        samples = list(open_samples(source, (entry,)))
        assert {sample["x"].dtype for sample in samples} == {np.dtype(wanted)}
        assert np.concatenate([sample["x"] for sample in samples]).tolist() == array.tolist()
    with pytest.raises(DataError, match="'x' holds 1 NaN or infinite values of 2"):
        list(open_samples([{"x": np.array([[1e6, 0]])}], (Input("x", np.dtype(np.float16), ("N", 2)),)))


def test_a_bad_value_in_a_stack_names_file_and_position(tmp_path: Path) -> None:
    bad = rows(3)
    bad[1, 0] = np.inf
    np.save(tmp_path / "a.npy", bad)
    with pytest.raises(DataError, match=r"a.npy, sample 1: 'x' holds 1 NaN or infinite values of 2"):
        list(open_samples(tmp_path, SINGLE))


def test_the_limit_opens_no_more_files_than_it_needs(tmp_path: Path) -> None:
    for name in ("0", "2"):
        np.savez(tmp_path / f"{name}.npz", x=rows(3))
    (tmp_path / "1.npz").write_bytes(b"damaged")
    assert firsts(open_samples(tmp_path, SINGLE, limit=2)) == [0, 4]
    with pytest.raises(DataError, match=r"1.npz cannot be read"):
        open_samples(tmp_path, SINGLE)


WHOLE = np.dtype(np.int64)
ROWS_PAIR = (X, Input("ids", WHOLE, ("N", 3)))


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
    found = [sample for sample, _ in samples_of_row(row, [X], "row")]
    assert [(sample["x"].shape, sample["x"].dtype) for sample in found] == [((1, 2), FLOAT)] * count


def test_whole_numbers_take_the_width_that_is_wanted_where_none_is_lost() -> None:
    row = {"x": np.ones((1, 2)), "ids": np.array([[1, 2, 3]], np.int32)}
    ((sample, _),) = samples_of_row(row, ROWS_PAIR, "row")
    assert sample["ids"].dtype == WHOLE
    narrow = Input("n", np.dtype(np.int8), (1,))
    assert next(samples_of_row({"n": np.array([300])}, [narrow], "row"))[0]["n"].dtype == WHOLE


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
        list(samples_of_row(row, ROWS_PAIR, "row"))


def test_a_loader_is_read_batch_by_batch_and_limited_from_all_over() -> None:
    class Loader:
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Any:
            return ((Tensor(np.full((4, 2), batch)), np.zeros(4)) for batch in range(5))

    assert len(open_samples(Loader(), [X])) == 20
    assert [float(sample["x"][0, 0]) for sample in open_samples(Loader(), [X], limit=3)] == [0, 2, 4]
    assert [float(sample["x"][0, 0]) for sample in open_samples(Loader(), [X], limit=5, in_order=True)] == [0] * 4 + [1]


NUMBERED = (
    *("s0", "s77", "u3", "d0", "unk__12", "unknown_0"),
    *("DynamicDimension.0", "x_dynamic_axes_1", "Concat461_dim_0"),
)
OF_PEOPLE = ["frames", "time", "seq1", "rows", "height", "width2", "image_width", "past_1", "num_nodes", "seq_len"]


@pytest.mark.parametrize(
    ("dims", "counts", "nothing"),
    [
        ([1, "batch", "batch_size", "Batch", "N", "b", "bs", "minibatch"], True, False),
        ([2, 7, *OF_PEOPLE], False, False),
        ([None, *NUMBERED], False, True),
    ],
    ids=["batches", "names of people", "names of programs"],
)
def test_dims_count_samples_or_say_nothing(dims: list[int | str | None], counts: bool, nothing: bool) -> None:
    assert {dim: (counts_samples(dim), says_nothing(dim)) for dim in dims} == dict.fromkeys(dims, (counts, nothing))


def test_a_model_without_inputs_counts_no_samples() -> None:
    assert not open_batch([(None, 3), None], [(None, 2)])
    assert not open_batch([()], [(None, 2)])


def shapes(samples: Samples) -> list[int]:
    return [len(sample["x"]) for sample in samples]


def values(samples: Samples) -> list[float]:
    return [float(value) for sample in samples for value in sample["x"][:, 0]]


def stacks(folder: Path, counts: list[int]) -> Path:
    start = 0
    for number, count in enumerate(counts):
        np.savez(folder / f"{number}.npz", x=rows(start + count)[start:])
        start += count
    return folder


@pytest.mark.parametrize("counts", [[5, 5, 5], [1024, 3, 1], [2, 2]])
def test_several_files_are_run_with_the_rows_that_they_have(counts: list[int], tmp_path: Path) -> None:
    samples = open_samples(stacks(tmp_path, counts), (X,))
    assert shapes(samples) == counts
    assert values(samples) == [2.0 * row for row in range(sum(counts))]


def test_a_single_file_is_a_data_set_of_rows(tmp_path: Path) -> None:
    assert shapes(open_samples(stacks(tmp_path, [5]), (X,))) == [1] * 5
    assert shapes(open_samples(tmp_path / "0.npz", (X,))) == [1] * 5


def test_a_model_of_a_fixed_batch_of_one_is_run_with_single_rows(tmp_path: Path) -> None:
    assert shapes(open_samples(stacks(tmp_path, [3, 2]), SINGLE)) == [1] * 5


def test_an_axis_more_counts_samples_in_several_files_too(tmp_path: Path) -> None:
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", rows(6).reshape(2, 3, 2))
    assert shapes(open_samples(tmp_path, (X,))) == [3] * 4


def test_a_large_file_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_BATCH", 5 * 2 * 4)
    assert shapes(open_samples(stacks(tmp_path, [5, 6]), (X,))) == [5, *[1] * 6]


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7, 11, 100])
@pytest.mark.parametrize("counts", [[11], [4, 4, 3], [1] * 11, [5, 1, 5]])
def test_rows_are_taken_as_many_at_a_time_as_is_asked_for(batch: int, counts: list[int], tmp_path: Path) -> None:
    samples = open_samples(stacks(tmp_path, counts), (X,), batch=batch)
    assert shapes(samples) == [len(range(start, min(start + batch, 11))) for start in range(0, 11, batch)]
    assert values(samples) == [2.0 * row for row in range(11)]
    starts = np.repeat(range(len(counts)), counts)[::batch]
    assert [int(Path(origin_of(samples, place).file).stem) for place in range(len(samples))] == starts.tolist()
    last = samples[len(samples) - 1]["x"]
    assert float(last[0, 0]) == 2.0 * (len(samples) - 1) * batch


def test_rows_are_taken_together_from_objects_and_other_files(tmp_path: Path) -> None:
    assert shapes(open_samples(dicts(5), (X,), batch=2)) == [2, 2, 1]
    assert shapes(open_samples(({"x": rows(4)} for _ in range(3)), (X,), batch=5)) == [5, 5, 2]
    assert shapes(open_samples(stacks(tmp_path, [1] * 6), (X,), batch=2, limit=2)) == [2, 2]


def test_a_fixed_batch_is_never_run_with_fewer_rows(tmp_path: Path) -> None:
    four = (Input("x", FLOAT, (4, 2)),)
    assert shapes(open_samples(stacks(tmp_path, [7, 6]), four, batch=4)) == [4, 4, 4]
    with pytest.raises(DataError, match=r"input 'x' float32\[4, 2\] cannot be run with 8 rows, expected an open"):
        open_samples(tmp_path, four, batch=8)


def test_inputs_without_rows_refuse_a_batch(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"input 'n' int64\[\] cannot be run with 2 rows"):
        open_samples(stacks(tmp_path, [4]), PAIR, batch=2)


def test_rows_of_different_shapes_refuse_a_batch(tmp_path: Path) -> None:
    for number in (2, 3):
        np.save(tmp_path / f"{number}.npy", np.zeros((1, number), np.float32))
    inputs = (Input("x", FLOAT, ("batch", "length")),)
    assert len(list(open_samples(tmp_path, inputs, batch=1))) == 2
    with pytest.raises(DataError, match=r"rows of 'x' have shapes \[1, 2\] and \[1, 3\]"):
        list(open_samples(tmp_path, inputs, batch=2))


def test_a_chain_runs_one_row_after_the_other() -> None:
    assert Data("samples", chain="stateN=state").rows == 1
    assert Data("samples").rows is None
    assert Data("samples", batch=8).rows == 8
    with pytest.raises(SchemeError, match=r"the batch is 8 and inputs are chained, expected 1"):
        Data("samples", chain="stateN=state", batch=8)
    with pytest.raises(SchemeError, match=r"the batch is 0, expected 1 row or more"):
        Data("samples", batch=0)


def test_many_small_files_are_batched_in_one_pass() -> None:
    looks = 0

    class Row(files.SampleFile):
        def __getattribute__(self, name: str) -> object:
            nonlocal looks
            looks += name == "count"
            return super().__getattribute__(name)

    def read(positions: Sequence[int]) -> Iterator[Sample]:
        return ({"x": np.zeros((1, 2), np.float32)} for _ in positions)

    number = 1000
    parts = in_batches([Row("row", "row", 1, read) for _ in range(number)], (X,), number // 2)
    assert [part.count for part in parts] == [1, 1]
    assert [len(sample["x"]) for part in parts for sample in part.read([0])] == [number // 2] * 2
    assert looks < 20 * number
