"""Means of channels are exact for any order, split and merge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.errors import DataError
from onnxq.evidence.channel_sums import ChannelSums, OnlySums, channel_sums
from onnxq.evidence.observer import TensorObserver, observe
from onnxq.evidence.statistics import Statistics
from onnxq.evidence.storage import described, load_statistics, save_statistics
from onnxq.evidence.tensor_statistics import EMPTY, TensorStatistics, merge


def observed(arrays: list[np.ndarray], axis: int) -> TensorStatistics:
    observer = ChannelSums(TensorObserver("t", 0), "t", axis)
    for index, array in enumerate(arrays):
        observer.add(array, index)
    return observer.statistics()


def arrays_of(seed: int, count: int, scale: float) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [(scale * generator.normal(1, 1, (2, 3, generator.integers(1, 6)))).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 3, 4, 5), 1), ((4, 3), -1), ((3,), 0), ((2, 3, 1), 1), ((5, 1, 3), 2)]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_means_are_those_of_numpy(shape: tuple[int, ...], axis: int, dtype: type[np.floating]) -> None:
    array = np.random.default_rng(0).normal(3, 1, shape).astype(dtype)
    expected = np.moveaxis(array.astype(np.float64), axis, 0).reshape(3, -1).mean(1)
    np.testing.assert_allclose(observed([array], axis).means, expected, rtol=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.floats(1e-6, 1e6))
def test_any_order_and_split_gives_the_same_bits(seed: int, count: int, scale: float) -> None:
    arrays = arrays_of(seed, count, scale)
    whole = observed(arrays, 1)
    parts = [observed([array], 1) for array in arrays]
    middle = count // 2
    assert observed(arrays[::-1], 1).sums.tolist() == whole.sums.tolist()
    assert merge(merge(parts[0], EMPTY), observed(arrays[1:], 1)).sums.tolist() == whole.sums.tolist()
    assert merge(observed(arrays[middle:], 1), observed(arrays[:middle], 1)).means.tolist() == whole.means.tolist()


def test_sums_that_only_one_kept_are_dropped() -> None:
    array = np.ones((2, 3), np.float32)
    assert len(merge(observed([array], 1), observe(array)).means) == 0


def test_channels_that_do_not_fit_are_one_sentence() -> None:
    with pytest.raises(DataError, match="'t' has 2 axes, expected axis 2 for its channels"):
        observed([np.ones((2, 3), np.float32)], 2)
    with pytest.raises(DataError, match="A tensor has 3 and 2 channels, expected one number"):
        observed([np.ones((2, 3), np.float32), np.ones((2, 2), np.float32)], 1)


def test_empty_arrays_add_nothing() -> None:
    assert observed([np.ones((0, 3), np.float32)], 1) == EMPTY
    assert observed([np.ones((0, 3), np.float32), np.ones((1, 3), np.float32)], 1).means.tolist() == [1, 1, 1]


def test_means_stay_within_the_range_whatever_the_sums() -> None:
    huge = np.full((1, 2), 3e38, np.float32)
    assert observed([huge, huge], 1).means.max() <= 3.0000001e38


def test_sums_are_kept_in_files(tmp_path: Path) -> None:
    found = Statistics(2, {"a": observed(arrays_of(0, 2, 1.0), 1), "b": observe(np.ones(3, np.float32))})
    save_statistics(found, tmp_path / "s.npz")
    assert load_statistics(tmp_path / "s.npz") == found


def test_sums_of_a_strided_array_are_those_of_its_values() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(0, 2, 1)
    assert channel_sums(array, 1).tolist() == array.sum((0, 2)).tolist()


def summed(arrays: list[np.ndarray], axis: int = 1) -> TensorStatistics:
    observer = OnlySums("t", axis)
    for index, array in enumerate(arrays):
        observer.add(array, index)
    return observer.statistics()


@pytest.mark.parametrize("axis", [-1, 0, 2])
def test_sums_along_different_axes_are_dropped(axis: int) -> None:
    array = np.ones((3, 3, 3), np.float32)
    for found in (merge(observed([array], 1), observed([array], axis)), merge(summed([array]), summed([array], axis))):
        assert (found.axis, len(found.sums)) == (None, 0)
        assert len(merge(found, observed([array], 1)).sums) == 0


@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_sums_alone_are_those_kept_beside_a_range_in_any_order(seed: int, count: int) -> None:
    arrays = arrays_of(seed, count, 1.0)
    whole = summed(arrays)
    assert whole.means.tolist() == pytest.approx(observed(arrays, 1).means.tolist())
    assert (whole.has_range, len(whole.counts), len(whole.samples), len(whole.channels)) == (False, 0, 0, 0)
    assert merge(summed(arrays[1:]), merge(EMPTY, summed(arrays[:1]))) == whole
    assert merge(observed(arrays[1:], 1), summed(arrays[:1])) == whole


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_mean_is_known_of_what_is_not_finite_whatever_is_merged(value: float) -> None:
    good, bad = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    bad[1, 2] = value
    unknown = summed([bad])
    assert (unknown.count, unknown.axis, len(unknown.sums)) == (6, 1, 0)
    assert summed([good, bad, good]) == merge(merge(summed([good]), unknown), summed([good]))
    for found in (summed([good, bad, good]), merge(EMPTY, unknown), merge(observed([good], 1), unknown)):
        assert len(found.means) == 0
        assert not found.has_range


def test_sums_alone_are_kept_in_files_and_shown(tmp_path: Path) -> None:
    infinite = np.full((1, 3), np.inf, np.float32)
    found = Statistics(2, {"a": summed(arrays_of(0, 2, 1.0), -2), "b": summed([infinite]), "c": summed([])})
    save_statistics(found, tmp_path / "s.npz")
    loaded = load_statistics(tmp_path / "s.npz")
    assert loaded == found
    assert [loaded.tensors[name].axis for name in "abc"] == [-2, 1, None]
    shown = described(loaded)["tensors"]
    assert [shown[name]["note"] for name in "abc"] == [
        "only the means of 3 channels",
        "no mean, which is not finite",
        "empty",
    ]
    assert shown["a"]["minimum"] is shown["a"]["percentile"][0] is None
