"""Means of channels are exact for any order, split and merge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import one_by_one, statistic

from onnxq.calibration.accumulators import ChannelMeans, channel_sums
from onnxq.errors import DataError


def observed(arrays: list[np.ndarray], axis: int = 1) -> ChannelMeans:
    found = one_by_one(arrays, "channel-means", axis)
    assert isinstance(found, ChannelMeans)
    return found


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
    whole, middle = observed(arrays), count // 2
    assert observed(arrays[::-1]) == whole
    assert observed(arrays[:1]).merge(ChannelMeans()).merge(observed(arrays[1:])) == whole
    assert observed(arrays[middle:]).merge(observed(arrays[:middle])).means.tolist() == whole.means.tolist()


def test_channels_that_do_not_fit_are_one_sentence() -> None:
    with pytest.raises(DataError, match="'t' has 2 axes, expected axis 2 for its channels"):
        observed([np.ones((2, 3), np.float32)], 2)
    with pytest.raises(DataError, match="A tensor has 3 and 2 channels, expected one number"):
        observed([np.ones((2, 3), np.float32), np.ones((2, 2), np.float32)])


def test_empty_arrays_add_nothing() -> None:
    assert observed([np.ones((0, 3), np.float32)]) == ChannelMeans()
    assert observed([np.ones((0, 3), np.float32), np.ones((1, 3), np.float32)]).means.tolist() == [1, 1, 1]


def test_sums_of_a_strided_array_are_those_of_its_values() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(0, 2, 1)
    assert channel_sums(array, 1).tolist() == array.sum((0, 2)).tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -1e15])
def test_no_mean_is_known_of_what_is_not_finite_or_too_large_whatever_is_merged(value: float) -> None:
    good, bad = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    bad[1, 2] = value
    unknown = observed([bad])
    assert (unknown.count, len(unknown.sums), len(unknown.means)) == (6, 0, 0)
    assert unknown.note == "no mean, which is not finite or too large"
    assert observed([good, bad, good]) == observed([good]).merge(unknown).merge(observed([good]))
    for found in (observed([good, bad, good]), ChannelMeans().merge(unknown), observed([good]).merge(unknown)):
        assert len(found.means) == 0


def test_sums_of_large_values_are_true() -> None:
    values = np.float64([[2.0**47, 3.0], [2.0**46, -1.0]])
    assert observed([values]).means.tolist() == values.mean(0).tolist()


@pytest.mark.parametrize("value", [2.0**47, -(2.0**47), 2.0**48, 0.1, -0.1])
def test_sums_of_more_arrays_than_anybody_has_do_not_wrap_around(value: float) -> None:
    one = whole = observed([np.float64([[value, -3 * value / 4]])])
    for _ in range(25):
        whole = whole.merge(whole)
    assert whole.rows == 1 << 25
    np.testing.assert_allclose(whole.means, one.means, rtol=1e-15)
    back = observed([np.float64([[-value, 3 * value / 4]])])
    for _ in range(25):
        back = back.merge(back)
    assert whole.merge(back).means.tolist() == [0, 0]
    assert whole.merge(back).merge(one) == back.merge(one).merge(whole)


def test_it_survives_its_arrays() -> None:
    for arrays in (arrays_of(0, 2, 1.0), [np.full((1, 3), np.inf, np.float32)], []):
        found = observed(arrays)
        assert ChannelMeans.restored(found.arrays()) == found
    with pytest.raises(ValueError, match="sums belong to no channels"):
        ChannelMeans.restored({"count": np.int64([2]), "sums": np.zeros((3, 2), np.int64)})
    with pytest.raises(ValueError, match="sums belong to no channels"):
        ChannelMeans.restored({"count": np.int64([7]), "sums": np.zeros((3, 2), np.int64)})
    for rest in (-1, 1 << 62):
        with pytest.raises(ValueError, match="sums have a rest that is a whole unit or more"):
            ChannelMeans.restored({"count": np.int64([2]), "sums": np.int64([[0, rest]])})
    assert observed(arrays_of(0, 1, 1.0)).note == "means of 3 channels"
    assert statistic(np.zeros((0, 3), np.float32), "channel-means", 1).note == ""
