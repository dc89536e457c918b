"""Stacks of samples: which leading axis counts samples, and which belongs to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.single_inputs import FLOAT, PAIR, SINGLE, X, firsts, rows
from onnxq.data.samples import Input, open_samples
from onnxq.errors import DataError


@pytest.mark.parametrize("dim", ["time", "height", None])
def test_a_leading_dimension_that_is_no_batch_belongs_to_the_sample(dim: str | None, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=rows(5))
    (sample,) = open_samples(tmp_path / "a.npz", (Input("x", np.dtype(np.float32), (dim, 2)),))
    assert sample["x"].shape == (5, 2)


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


def test_a_stack_that_lacks_an_input_is_told_which(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3, 2), np.float32))
    with pytest.raises(DataError, match=r"a.npz: input 'n' int64\[\] is missing, found 'x'"):
        open_samples(tmp_path / "a.npz", PAIR)


@pytest.mark.parametrize("dim", ["batch", "batch_size", "N", "b"])
def test_a_leading_dimension_that_is_called_batch_counts_samples(dim: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=rows(5))
    samples = open_samples(tmp_path / "a.npz", (Input("x", np.dtype(np.float32), (dim, 2)),))
    assert [sample["x"].shape for sample in samples] == [(1, 2)] * 5


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


def test_a_stack_with_unequal_counts_is_no_stack(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3, 2), np.float32), n=np.arange(3))
    with pytest.raises(DataError, match=r"a.npz: 'x' has shape \[4, 3, 2\] of rank 3, expected rank 2"):
        open_samples(tmp_path / "a.npz", PAIR)


def test_headers_are_checked_when_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=rows(1).astype(np.float64))
    with pytest.raises(DataError, match=r"a.npz: 'x' is float64, expected float32"):
        open_samples(tmp_path, (X,))


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
