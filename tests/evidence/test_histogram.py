from __future__ import annotations

import dataclasses
import math
from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from onnxq.errors import DataError
from onnxq.evidence.bins import BINS
from onnxq.evidence.observer import observe
from onnxq.evidence.tensor_statistics import EMPTY, TensorStatistics, merge


def floats(dtype: type[np.floating]) -> st.SearchStrategy[NDArray[np.floating]]:
    width = np.dtype(dtype).itemsize * 8
    wild = st.floats(width=width, allow_nan=False, allow_infinity=False)  # type: ignore[call-overload]
    tame = st.floats(-8, 8, width=width)  # type: ignore[call-overload]
    masked = st.sampled_from([0.0, -0.0, -1e4, 1.0, 8192.0, -8192.0, 3e4])
    shapes = hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=20)
    return st.one_of(hnp.arrays(dtype, shapes, elements=elements) for elements in (wild, tame, masked))


ANY_FLOATS = st.one_of(floats(np.float16), floats(np.float32), floats(np.float64))


def exact_counts(values: NDArray[np.floating], seen: TensorStatistics) -> list[int]:
    """Count with integer arithmetic on fractions: the definition of a bin, without any rounding."""
    counts = [0] * len(seen.counts)
    for numerator, denominator in (float(value).as_integer_ratio() for value in values.ravel()):
        shift = -seen.exponent
        scaled = (numerator << shift) // denominator if shift >= 0 else numerator // (denominator << -shift)
        counts[scaled - seen.first] += 1
    return counts


@given(ANY_FLOATS)
def test_every_element_is_counted_in_its_bin(values: NDArray[np.floating]) -> None:
    seen = observe(values)
    assert seen.count == values.size
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
    assert reduce(merge, map(observe, parts)) == observe(values)


@given(ANY_FLOATS, ANY_FLOATS)
def test_merging_is_commutative(a: NDArray[np.floating], b: NDArray[np.floating]) -> None:
    assert merge(observe(a), observe(b)) == merge(observe(b), observe(a))


@given(ANY_FLOATS, ANY_FLOATS, ANY_FLOATS)
def test_merging_is_associative(a: NDArray[np.floating], b: NDArray[np.floating], c: NDArray[np.floating]) -> None:
    x, y, z = map(observe, (a, b, c))
    assert merge(merge(x, y), z) == merge(x, merge(y, z))


@given(ANY_FLOATS)
def test_nothing_is_the_neutral_element(values: NDArray[np.floating]) -> None:
    seen = observe(values)
    assert merge(seen, EMPTY) == seen == merge(EMPTY, seen)


@given(floats(np.float32))
def test_float64_holding_float32_values_is_the_same(values: NDArray[np.floating]) -> None:
    assert observe(values) == observe(values.astype(np.float64))


def test_bins_are_as_fine_as_the_limit_allows() -> None:
    seen = observe(np.linspace(-1, 1, 10_000, dtype=np.float32))
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
    seen = observe(array)
    assert (seen.minimum, seen.maximum) == (min(values), max(values))
    assert seen.counts.tolist() == exact_counts(array, seen)
    assert reduce(merge, (observe(array[i : i + 1]) for i in range(len(values)))) == seen


def test_the_sign_of_a_zero_extreme_does_not_depend_on_the_order() -> None:
    for values in ([0.0, -0.0], [-0.0, 0.0], [-0.0]):
        assert math.copysign(1, observe(np.array(values)).minimum) == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.float64])
def test_every_float_type_is_observed(dtype: type[np.generic]) -> None:
    seen = observe(np.array([[-1.5, 0], [2, 2]], dtype))
    assert (seen.count, seen.minimum, seen.maximum) == (4, -1.5, 2)


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.uint8])
def test_other_types_are_an_error(dtype: type[np.generic]) -> None:
    with pytest.raises(DataError, match=r"Tensor 'ids' is .* expected a float type"):
        observe(np.zeros(2, dtype), name="ids")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_name_tensor_and_sample(bad: float) -> None:
    with pytest.raises(DataError, match="Tensor 'scores' holds 1 NaN or infinite values of 3 in sample 7"):
        observe(np.float32([1, bad, 2]), name="scores", sample=7)


def test_a_scalar_and_a_strided_view_are_observed() -> None:
    assert observe(np.float32(2).reshape(())).count == 1
    assert observe(np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]).counts.sum() == 6


def test_blocks_do_not_show() -> None:
    values = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    seen = observe(values)
    assert seen.counts.tolist() == exact_counts(values, seen)


def test_mask_constants_leave_a_fine_histogram_of_the_rest() -> None:
    scores = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    seen = observe(np.concatenate([scores, np.full(500, -3.4028235e38, np.float32)]))
    assert seen.core == observe(scores)
    assert observe(scores).core is None


def test_a_limited_histogram_keeps_count_and_extremes_exact() -> None:
    values = np.random.default_rng(0).normal(size=(8, 32, 28, 28)).astype(np.float32)
    full, limited = observe(values), observe(values, histogram_elements=1000)
    assert (limited.count, limited.minimum, limited.maximum) == (full.count, full.minimum, full.maximum)
    assert (limited.exponent, limited.first) == (full.exponent, full.first)
    assert 900 <= limited.counts.sum() <= 1000
    assert observe(values[0, 0, 0], histogram_elements=1000) == observe(values[0, 0, 0])


def test_a_limited_histogram_sees_every_channel() -> None:
    channels = np.broadcast_to(np.arange(8, dtype=np.float32), (64, 64, 8))
    limited = observe(channels, histogram_elements=512)
    assert len(limited.counts[limited.counts > 0]) == 8


def test_equality_looks_at_every_field() -> None:
    seen = observe(np.float32([1, 2, 9000]))
    for field in ("count", "minimum", "maximum", "exponent", "first"):
        assert seen != dataclasses.replace(seen, **{field: getattr(seen, field) + 1})
    assert seen != dataclasses.replace(seen, counts=seen.counts + 1)
    assert seen != dataclasses.replace(seen, core=None)
    assert seen != "seen"


@given(st.lists(st.tuples(st.integers(0, 6), floats(np.float32)), max_size=8), st.data())
def test_extremes_of_samples_do_not_depend_on_the_order(
    seen: list[tuple[int, NDArray[np.floating]]], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(seen))
    merged, again = (
        reduce(merge, (observe(values, sample=index) for index, values in parts), EMPTY) for parts in (seen, shuffled)
    )
    assert merged == again
    for index, (low, high) in zip(merged.samples, merged.extremes, strict=True):
        values = np.concatenate([part.ravel() for at, part in seen if at == index])
        assert (low, high) == (values.min(), values.max())
    assert set(merged.samples) == {index for index, values in seen if values.size}
