from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from observations import one_by_one, statistic

from onnxq.calibration.histogram import BINS, Bins, Histogram


def floats(dtype: type[np.floating]) -> st.SearchStrategy[NDArray[np.floating]]:
    width = np.dtype(dtype).itemsize * 8
    wild = st.floats(width=width, allow_nan=False, allow_infinity=False)  # type: ignore[call-overload]
    tame = st.floats(-8, 8, width=width)  # type: ignore[call-overload]
    masked = st.sampled_from([0.0, -0.0, -1e4, 1.0, 8192.0, -8192.0, 3e4])
    shapes = hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=20)
    return st.one_of(hnp.arrays(dtype, shapes, elements=elements) for elements in (wild, tame, masked))


ANY_FLOATS = st.one_of(floats(np.float16), floats(np.float32), floats(np.float64))


def observe(values: NDArray[np.floating], elements: int = 0) -> Histogram:
    found = statistic(values, "histogram", elements=elements)
    assert isinstance(found, Histogram)
    return found


def exact_counts(values: NDArray[np.floating], seen: Bins) -> list[int]:
    """Count with integer arithmetic on fractions: the definition of a bin, without any rounding."""
    counts = [0] * len(seen.counts)
    for numerator, denominator in (float(value).as_integer_ratio() for value in values.ravel()):
        shift = -seen.exponent
        scaled = (numerator << shift) // denominator if shift >= 0 else numerator // (denominator << -shift)
        counts[scaled - seen.first] += 1
    return counts


@given(ANY_FLOATS)
def test_every_element_is_counted_in_its_bin(values: NDArray[np.floating]) -> None:
    seen = observe(values).whole
    assert seen.counts.sum() == values.size
    assert seen.counts.tolist() == exact_counts(values, seen)
    assert len(seen.counts) <= BINS
    if values.size:
        assert (seen.minimum, seen.maximum) == (float(values.min()), float(values.max()))


@given(ANY_FLOATS, st.data())
def test_any_split_in_any_order_gives_what_one_observation_gives(
    values: NDArray[np.floating], data: st.DataObject
) -> None:
    flat = values.ravel()
    owners = data.draw(hnp.arrays(np.int64, flat.size, elements=st.integers(0, 3)))
    parts = data.draw(st.permutations([flat[owners == owner] for owner in range(4)]))
    assert reduce(Histogram.merge, map(observe, parts)) == observe(values)


@given(ANY_FLOATS, ANY_FLOATS)
def test_merging_is_commutative(a: NDArray[np.floating], b: NDArray[np.floating]) -> None:
    assert observe(a).merge(observe(b)) == observe(b).merge(observe(a))


@given(ANY_FLOATS, ANY_FLOATS, ANY_FLOATS)
def test_merging_is_associative(a: NDArray[np.floating], b: NDArray[np.floating], c: NDArray[np.floating]) -> None:
    x, y, z = map(observe, (a, b, c))
    assert x.merge(y).merge(z) == x.merge(y.merge(z))


@given(ANY_FLOATS)
def test_nothing_is_the_neutral_element(values: NDArray[np.floating]) -> None:
    seen = observe(values)
    assert seen.merge(Histogram()) == seen == Histogram().merge(seen)
    assert Histogram.restored(seen.arrays()) == seen


@given(floats(np.float32))
def test_float64_holding_float32_values_is_the_same(values: NDArray[np.floating]) -> None:
    assert observe(values) == observe(values.astype(np.float64))


def test_bins_are_as_fine_as_the_limit_allows() -> None:
    seen = observe(np.linspace(-1, 1, 10_000, dtype=np.float32)).whole
    assert seen.width == 2**-10
    assert BINS / 2 < len(seen.counts) <= BINS
    assert seen.edges[0] <= seen.minimum < seen.edges[1]
    assert seen.edges[-2] <= seen.maximum < seen.edges[-1]


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [-0.0, 0.0],
        [3.25] * 5,
        [-1e-45, 1e-45],
        [1e-38, 3e38],
        [-3.4028235e38, 3.4028235e38],
        [5e-324, 1e-323],
        [-5e-324, 4.0],
        [-5e-324, 1e308],
        [-1.7e308, 1.7e308],
        [1.0, 1.0 + 2**-52],
    ],
    ids=str,
)
def test_extreme_ranges_are_counted_exactly(values: list[float]) -> None:
    array = np.array(values)
    seen = observe(array).whole
    assert (seen.minimum, seen.maximum) == (min(values), max(values))
    assert seen.counts.tolist() == exact_counts(array, seen)
    assert (
        reduce(Histogram.merge, (observe(array[i : i + 1]) for i in range(len(values)))).whole.counts.tolist()
        == seen.counts.tolist()
    )


def test_blocks_do_not_show() -> None:
    values = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    seen = observe(values).whole
    assert seen.counts.tolist() == exact_counts(values, seen)


def test_mask_constants_leave_a_fine_histogram_of_the_rest() -> None:
    scores = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    seen = observe(np.concatenate([scores, np.full(500, -3.4028235e38, np.float32)]))
    assert seen.unmasked is not None
    assert Histogram(seen.unmasked) == observe(scores)
    assert observe(scores).unmasked is None


def test_a_limited_histogram_keeps_its_bins() -> None:
    values = np.random.default_rng(0).normal(size=(8, 32, 28, 28)).astype(np.float32)
    full, limited = observe(values).whole, observe(values, 1000).whole
    assert (limited.minimum, limited.maximum) == (full.minimum, full.maximum)
    assert len(limited.counts) == len(full.counts)
    assert 900 <= limited.counts.sum() <= 1000
    assert observe(values[0, 0, 0], 1000) == observe(values[0, 0, 0])


def test_a_limited_histogram_sees_every_channel() -> None:
    channels = np.broadcast_to(np.arange(8, dtype=np.float32), (64, 64, 8))
    limited = observe(channels, 512).whole
    assert len(limited.counts[limited.counts > 0]) == 8


@given(st.lists(ANY_FLOATS, max_size=4), st.sampled_from([0, 5]))
def test_adding_arrays_is_merging_their_histograms(arrays: list[NDArray[np.floating]], elements: int) -> None:
    parts = [
        statistic(array, "histogram", sample=f"{index:032x}", elements=elements) for index, array in enumerate(arrays)
    ]
    assert one_by_one(arrays, "histogram", elements=elements) == reduce(Histogram.merge, parts, Histogram())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{"sizes": [5]}, {"ends": [[0, 9]]}, {"counts": [-1, 2]}, {"ends": [[0, 1], [0, 1]]}, {"sizes": []}],
    ids=str,
)
def test_contradictions_are_refused(changes: dict[str, list[object]]) -> None:
    arrays = dict(observe(np.float32([1, 1])).arrays())
    arrays |= {name: np.array(value, arrays[name].dtype) for name, value in changes.items()}
    with pytest.raises(ValueError, match=r"contradict|do not fit"):
        Histogram.restored(arrays)
