"""Accumulators are exact for any order, split and merge."""

from __future__ import annotations

import math
import tracemalloc
import warnings
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import EntryPoint, EntryPoints
from itertools import permutations, product
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from observations import KINDS as OBSERVED_KINDS
from observations import observe as observe_all
from observations import one_by_one, same, seen, statistic

from onnxq.calibration.accumulators import (
    Accumulator,
    ChannelMeans,
    ChannelRanges,
    Range,
    Request,
    SampleExtremes,
    TensorSample,
    channel_sums,
    stride_of,
)
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.calibration.histogram import BINS, MINIMUM_EXPONENT, Bins, Histogram, add_bins, bin_of, bins_of, exponent_of
from onnxq.calibration.kinds import ENTRY_POINTS, KINDS, Observers, default_request, find_kind
from onnxq.calibration.methods import attention_mask_values, data_range, find_doubtful_masks
from onnxq.calibration.statistics import load_statistics, save_statistics
from onnxq.errors import DataError, SchemeError
from onnxq.runtime.sessions import open_session, run
from onnxq.system import plugins

AXES = {"channel-means": 1, "channel-ranges": 1, "hessian": 1}
ARRAYS = list(np.random.default_rng(0).normal(size=(5, 2, 4, 3)).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_merges_in_any_order_and_survives_its_arrays(kind: str) -> None:
    whole, axis = one_by_one(ARRAYS, kind, AXES.get(kind)), AXES.get(kind)
    parts = [statistic(array, kind, axis, f"{index:032x}") for index, array in enumerate(ARRAYS)]
    nothing = KINDS[kind]()
    merged = nothing
    for part in parts[::-1]:
        merged = part.merge(merged)
    assert same(merged, whole)
    assert whole == whole.merge(nothing) == nothing.merge(whole)
    assert parts[0] != whole
    assert KINDS[kind].restored(whole.arrays()) == whole
    assert KINDS[kind].restored(nothing.arrays()) == nothing


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_a_kind_have_one_dtype_each(kind: str) -> None:
    full, nothing = one_by_one(ARRAYS, kind, AXES.get(kind)).arrays(), KINDS[kind]().arrays()
    assert {name: array.dtype for name, array in full.items()} == {name: array.dtype for name, array in nothing.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_are_missing_or_too_many_are_refused(kind: str) -> None:
    arrays = dict(one_by_one(ARRAYS, kind, AXES.get(kind)).arrays())
    with pytest.raises(ValueError, match="arrays are"):
        KINDS[kind].restored(arrays | {"more": np.zeros(1)})


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.float64])
def test_every_float_type_is_observed(dtype: type[np.generic]) -> None:
    found = seen(np.array([[-1.5, 0], [2, 2]], dtype)).need(Range)
    assert (found.count, found.minimum, found.maximum) == (4, -1.5, 2)


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.uint8])
def test_other_types_are_an_error(dtype: type[np.generic]) -> None:
    with pytest.raises(DataError, match=r"Tensor 't' is .* expected a float type"):
        seen(np.zeros(2, dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_name_tensor_and_sample(bad: float) -> None:
    with pytest.raises(DataError, match="Tensor 'scores' holds 1 NaN or infinite values of 3 in sample 7"):
        _ = TensorSample("scores", np.float32([1, bad, 2]), index=7).ends


def test_a_scalar_and_a_strided_view_are_observed() -> None:
    assert seen(np.float32(2).reshape(())).need(Range).count == 1
    assert seen(np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]).need(Range).count == 6


def test_what_lies_below_the_mask_is_taken_out_only_where_something_does_not() -> None:
    plain, masked = TensorSample("t", np.float32([1, 2])), TensorSample("t", np.float32([[1, -1e4], [2, 8192]]))
    assert plain.unmasked is plain.values
    assert (masked.unmasked.tolist(), masked.unmasked_ends) == ([1, 2], (1, 2))
    assert TensorSample("t", np.float32([9e3])).unmasked_ends == (np.inf, -np.inf)


def test_samples_select_different_places_and_each_always_the_same() -> None:
    array, digests = np.arange(1000.0), [f"{index:032x}" for index in range(8)]
    places = [array[TensorSample("t", array, digest).selection(1000, 100)].tolist() for digest in digests]
    assert len({tuple(one) for one in places}) == 8
    assert places[3] == array[TensorSample("t", array, digests[3]).selection(1000, 100)].tolist()
    assert all(90 <= len(one) <= 101 for one in places)
    assert TensorSample("t", array, digests[5]).selection(1000, None) == slice(0, None, 1)
    assert len(array[:1][TensorSample("t", array, "f" * 32).selection(1, 1)]) == 1
    assert len(array[TensorSample("t", array, "3e8").selection(1000, 1)]) == 1


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(FINITE, FINITE)
def test_bins_cover_a_range_and_are_not_finer_than_they_must(a: float, b: float) -> None:
    minimum, maximum = min(a, b), max(a, b)
    exponent = exponent_of(minimum, maximum)
    assert 0 <= bin_of(maximum, exponent) - bin_of(minimum, exponent) < BINS
    finest = max(MINIMUM_EXPONENT, math.frexp(max(-minimum, maximum))[1] - 53)
    if exponent > finest and maximum > minimum:
        assert bin_of(maximum, exponent - 1) - bin_of(minimum, exponent - 1) >= BINS


@given(st.lists(FINITE, min_size=1, max_size=20), st.sampled_from([np.float32, np.float64]))
def test_arrays_fall_into_the_bins_of_their_elements(values: list[float], dtype: type[np.floating]) -> None:
    with np.errstate(over="ignore"):
        array = np.array(values, dtype)
    array = array[np.isfinite(array)]
    if array.size:
        minimum, maximum = float(array.min()), float(array.max())
        exponent = exponent_of(minimum, maximum)
        first = bin_of(minimum, exponent)
        assert bins_of(array, exponent, first).tolist() == [bin_of(float(one), exponent) - first for one in array]


@pytest.mark.parametrize(("size", "elements"), [(10, None), (10, 10), (100, 10), (7 * 2**12, 1000), (3**9, 10)])
def test_a_stride_takes_about_as_many_as_wanted_and_shares_no_factor_with_the_size(
    size: int, elements: int | None
) -> None:
    stride = stride_of(size, elements)
    assert math.gcd(stride, size) == 1
    assert len(range(0, size, stride)) <= (elements or size) + 1


@given(
    st.lists(st.integers(0, 2**60), min_size=1, max_size=40),
    st.integers(-(2**52), 2**52 - 40),
    st.one_of(st.integers(0, 6), st.sampled_from([40, 63, 64, 2000])),
)
def test_bins_are_added_to_the_wider_ones_that_they_lie_in(added: list[int], added_first: int, coarser: int) -> None:
    first = (added_first >> coarser) - 1
    counts = np.full(len(added) + 2, 3, np.int64)
    expected = counts.tolist()
    for place, count in enumerate(added, added_first):
        expected[(place >> coarser) - first] += count
    add_bins(counts, np.array(added, np.int64), added_first, coarser, first)
    assert counts.tolist() == expected


def means_of(arrays: list[np.ndarray], axis: int = 1) -> ChannelMeans:
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
    np.testing.assert_allclose(means_of([array], axis).means, expected, rtol=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.floats(1e-6, 1e6))
def test_any_order_and_split_gives_the_same_means(seed: int, count: int, scale: float) -> None:
    arrays = arrays_of(seed, count, scale)
    whole, middle = means_of(arrays), count // 2
    for found in (
        means_of(arrays[::-1]),
        means_of(arrays[:1]).merge(ChannelMeans()).merge(means_of(arrays[1:])),
        means_of(arrays[middle:]).merge(means_of(arrays[:middle])),
    ):
        assert found.count == whole.count
        np.testing.assert_allclose(found.means, whole.means, rtol=1e-12, atol=1e-12 * scale)


def test_channels_that_do_not_fit_are_one_sentence() -> None:
    with pytest.raises(DataError, match="'t' has 2 axes, expected axis 2 for its channels"):
        means_of([np.ones((2, 3), np.float32)], 2)
    with pytest.raises(DataError, match="A tensor has 3 and 2 channels, expected one number"):
        means_of([np.ones((2, 3), np.float32), np.ones((2, 2), np.float32)])


def test_empty_arrays_add_nothing() -> None:
    assert means_of([np.ones((0, 3), np.float32)]) == ChannelMeans()
    assert means_of([np.ones((0, 3), np.float32), np.ones((1, 3), np.float32)]).means.tolist() == [1, 1, 1]


def test_sums_of_a_strided_array_are_those_of_its_values() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(0, 2, 1)
    assert channel_sums(array, 1).tolist() == array.sum((0, 2)).tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -1e15])
def test_no_mean_is_known_of_what_is_not_finite_or_too_large_whatever_is_merged(value: float) -> None:
    good, bad = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    bad[1, 2] = value
    unknown = means_of([bad])
    assert (unknown.count, len(unknown.sums), len(unknown.means)) == (6, 0, 0)
    assert means_of([good, bad, good]) == means_of([good]).merge(unknown).merge(means_of([good]))
    for found in (means_of([good, bad, good]), ChannelMeans().merge(unknown), means_of([good]).merge(unknown)):
        assert len(found.means) == 0


def test_sums_of_large_values_are_true() -> None:
    values = np.float64([[2.0**47, 3.0], [2.0**46, -1.0]])
    assert means_of([values]).means.tolist() == values.mean(0).tolist()


def test_means_survive_their_arrays() -> None:
    for arrays in (arrays_of(0, 2, 1.0), [np.full((1, 3), np.inf, np.float32)], []):
        found = means_of(arrays)
        assert ChannelMeans.restored(found.arrays()) == found
    with pytest.raises(ValueError, match="sums belong to no channels"):
        ChannelMeans.restored({"count": np.int64([2]), "sums": np.zeros(3)})
    with pytest.raises(ValueError, match="sums belong to no channels"):
        ChannelMeans.restored({"count": np.int64([7]), "sums": np.zeros(3)})
    with pytest.raises(ValueError, match="sums belong to no channels"):
        ChannelMeans.restored({"count": np.int64([2]), "sums": np.array([0, np.inf])})


def extremes_of_channels(array: np.ndarray, axis: int) -> ChannelRanges:
    found = statistic(array, "channel-ranges", axis)
    assert isinstance(found, ChannelRanges)
    return found


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_extremes_of_channels_are_exact(axis: int) -> None:
    array = np.arange(12, dtype=np.float32).reshape(2, 2, 3).transpose(0, 2, 1)
    whole = extremes_of_channels(array, axis)
    along = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    assert whole.ends.tolist() == [[row.min(), row.max()] for row in along]
    shifted = whole.merge(extremes_of_channels(array + 1, axis))
    assert shifted.ends.tolist() == [[low, high + 1] for low, high in whole.ends]


@given(st.integers(0, 2**32 - 1), st.randoms())
def test_any_order_gives_what_one_observer_gives(seed: int, random: object) -> None:
    arrays = list(np.random.default_rng(seed).normal(size=(4, 2, 3)).astype(np.float32))
    parts = [extremes_of_channels(array, 1) for array in arrays]
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert parts[0].merge(parts[1]).merge(parts[2].merge(parts[3])) == one_by_one(arrays, "channel-ranges", 1)
    assert parts[0].merge(ChannelRanges()) == parts[0] == ChannelRanges().merge(parts[0])


def test_what_does_not_fit_is_one_sentence() -> None:
    with pytest.raises(DataError, match="'t' has 2 axes, expected axis 2 for its channels"):
        extremes_of_channels(np.ones((2, 3), np.float32), 2)
    with pytest.raises(DataError, match="A tensor has 3 and 2 channels, expected one number"):
        extremes_of_channels(np.ones((2, 3), np.float32), 1).merge(extremes_of_channels(np.ones((2, 2), np.float32), 1))
    with pytest.raises(DataError, match="'t' holds 1 NaN or infinite values of 6"):
        extremes_of_channels(np.float32([[1, 2, 3], [4, np.nan, 6]]), 1)


def test_ranges_of_channels_survive_their_arrays() -> None:
    found = extremes_of_channels(np.float32([[1, -2], [3, 4]]), 1)
    assert ChannelRanges.restored(found.arrays()) == found
    assert ChannelRanges.restored(ChannelRanges().arrays()) == ChannelRanges()
    with pytest.raises(ValueError, match="out of order"):
        ChannelRanges.restored({"ends": np.array([[2.0, 1.0]])})
    with pytest.raises(ValueError, match="not finite"):
        ChannelRanges.restored({"ends": np.array([[2.0, np.inf]])})


RANDOM = np.random.default_rng(0)


def gram_of(array: NDArray[np.floating], axis: int = -1, rows: int = 0, **options: int | str) -> HessianAccumulator:
    found = statistic(array, "hessian", axis, rows=rows, **options)
    assert isinstance(found, HessianAccumulator)
    return found


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_rows_are_those_of_an_axis(axis: int, groups: int) -> None:
    array = RANDOM.normal(size=(6, 12, 9)).astype(np.float32)
    found = gram_of(array, axis, groups=groups)
    rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
    parts = np.split(rows.astype(np.float64), groups, axis=1)
    assert found.count == len(rows)
    for group, part in enumerate(parts):
        np.testing.assert_allclose(found.moments()[group], part.T @ part / len(rows), atol=2e-3)
        np.testing.assert_allclose(found.means()[group], part.mean(0), atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "kernel", "attributes", "group"),
    [
        ((2, 4, 7, 6), (3, 2), {"pads": [1, 0, 2, 1], "strides": [2, 1]}, 1),
        ((1, 4, 9, 8), (3, 3), {"dilations": [2, 1], "pads": [1, 1, 1, 1]}, 2),
        ((2, 4, 11), (3,), {"strides": [3]}, 4),
    ],
)
def test_patches_are_what_a_convolution_multiplies(
    shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, list[int]], group: int, build
) -> None:
    x = RANDOM.normal(size=shape).astype(np.float32)
    w = RANDOM.normal(size=(8, shape[1] // group, *kernel)).astype(np.float32)
    given = ", ".join(f"{name}=[{', '.join(map(str, one))}]" for name, one in attributes.items())
    dims = ",".join(map(str, shape))
    open_dims = ",".join("N" for _ in shape)
    text = f"(float[{dims}] x) => (float[{open_dims}] y) {{ y = Conv <group={group}, {given}>(x, w) }}"
    y = run(open_session(build(text, w=w)), {"x": x}, ("y",))[0].astype(np.float64)
    options = {name: ",".join(map(str, one)) for name, one in attributes.items()}
    found = gram_of(x, 1, groups=group, kernel=",".join(map(str, kernel)), **options)
    weights = w.reshape(group, 8 // group, -1).astype(np.float64)
    squares = np.einsum("goi,gij,goj->go", weights, found.moments(), weights).ravel()
    means = np.einsum("goi,gi->go", weights, found.means()).ravel()
    others = (0, *range(2, y.ndim))
    assert found.count == y.size // 8
    np.testing.assert_allclose(squares, (y**2).mean(others), rtol=0.01)
    np.testing.assert_allclose(means, y.mean(others), atol=0.01)


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.data())
def test_any_order_and_split_gives_the_same_products(seed: int, count: int, data: st.DataObject) -> None:
    generator = np.random.default_rng(seed)
    arrays = [
        generator.normal(size=(generator.integers(1, 30), 5)) * 10 ** generator.uniform(-1, 1) for _ in range(count)
    ]
    parts = [gram_of(array) for array in data.draw(st.permutations(arrays))]
    middle = data.draw(st.integers(0, count))
    left, right = (
        reduce(HessianAccumulator.merge, some, HessianAccumulator()) for some in (parts[:middle], parts[middle:])
    )
    whole = one_by_one(arrays, "hessian", -1)
    assert same(right.merge(left), whole)
    assert same(left.multiplied().merge(right), whole)


def test_an_even_selection_of_rows_sees_all_of_the_tensor() -> None:
    places = np.array(list(product(range(40), range(40))), np.float32).reshape(1600, 2)
    found = gram_of(places, rows=100)
    assert 90 <= found.count <= 100
    np.testing.assert_allclose(found.means()[0], [19.5, 19.5], atol=1.5)


def test_4096_inputs_take_less_than_200_megabytes() -> None:
    array = RANDOM.normal(size=(128, 4096)).astype(np.float32)
    tracemalloc.start()
    total = HessianAccumulator()
    for _ in range(24):
        total = total.merge(gram_of(array))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (total.count, total.products.size > 0) == (24 * 128, True)
    assert peak < 200e6


@pytest.mark.parametrize("size", [255, 256, 257, 600])
def test_bands_make_the_whole(size: int) -> None:
    rows = RANDOM.integers(-100, 100, (300, size)).astype(np.float32)
    expected = rows.astype(np.float64).T @ rows / 300
    np.testing.assert_allclose(gram_of(rows).moments()[0], expected, rtol=1e-12)


def test_zeros_and_constants_have_a_gram() -> None:
    assert not gram_of(np.zeros((4, 3))).moments().any()
    assert gram_of(np.full((4, 3), 0.5)).moments().tolist() == [[[0.25] * 3] * 3]
    assert gram_of(np.full((4, 2), -1e-40, np.float32)).means() == pytest.approx(-1e-40, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "axis", "options", "message"),
    [
        ((2, 3), 2, {}, "'t' has 2 axes, expected axis 2"),
        ((2, 3), 1, {"groups": 2}, "'t' has 3 channels, expected a multiple of 2 groups"),
        ((2, 3), 1, {"kernel": "3"}, "'t' has 2 axes, expected 3 for a kernel of 1"),
        ((2, 3, 2), 1, {"kernel": "3"}, r"'t' is \(2,\) with pads, expected a kernel of \[3\] to fit"),
    ],
)
def test_a_hessian_that_does_not_fit_is_one_sentence(
    shape: tuple[int, ...], axis: int, options: dict[str, int | str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        gram_of(np.ones(shape), axis, **options)
    with pytest.raises(DataError, match="has 3 and 2 channels"):
        gram_of(np.ones((1, 3))).merge(gram_of(np.ones((1, 2))))


def test_it_survives_its_arrays_and_says_what_it_holds() -> None:
    found = gram_of(RANDOM.normal(size=(7, 4)), groups=2)
    assert HessianAccumulator.restored(found.arrays()) == found
    with pytest.raises(ValueError, match="do not fit"):
        HessianAccumulator.restored(dict(found.arrays()) | {"products": np.zeros((2, 3))})


def test_its_digest_tells_other_rows_of_the_same_means_and_not_how_they_were_added_up() -> None:
    wide, narrow = np.array([[1.0, 1.0], [-1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, 1.0]])
    one, other = (statistic(rows, "hessian", -1, rows=0) for rows in (wide, narrow))
    assert isinstance(one, HessianAccumulator)
    assert isinstance(other, HessianAccumulator)
    assert one.means().tolist() == other.means().tolist()
    assert one.digest != other.digest
    assert one.merge(other).digest == other.merge(one).multiplied().digest


def test_sums_and_products_that_cannot_be_are_told() -> None:
    sound = gram_of(RANDOM.normal(size=(6, 4))).arrays()
    HessianAccumulator.restored(sound)
    for wrong in (
        {"count": -sound["count"]},
        {"sums": sound["sums"][:, 1:]},
        {"products": sound["products"] * np.nan},
        {"products": np.zeros((1, 0))},
        {"products": -sound["products"]},
    ):
        with pytest.raises(ValueError, match=r"fit|finite|negative"):
            HessianAccumulator.restored({**sound, **wrong})


def test_products_beyond_float32_are_infinite_there_without_a_warning() -> None:
    found = gram_of(np.float32([[1e20, 1.0], [-1e20, 2.0]]))
    with warnings.catch_warnings(action="error"):
        products = found.moments(np.float32)
    assert products[0, 0, 0] == np.inf
    assert np.isfinite(found.moments()).all()


def floats(dtype: type[np.floating]) -> st.SearchStrategy[NDArray[np.floating]]:
    width = np.dtype(dtype).itemsize * 8
    wild = st.floats(width=width, allow_nan=False, allow_infinity=False)  # type: ignore[call-overload]
    tame = st.floats(-8, 8, width=width)  # type: ignore[call-overload]
    masked = st.sampled_from([0.0, -0.0, -1e4, 1.0, 8192.0, -8192.0, 3e4])
    shapes = hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=20)
    return st.one_of(hnp.arrays(dtype, shapes, elements=elements) for elements in (wild, tame, masked))


ANY_FLOATS = st.one_of(floats(np.float16), floats(np.float32), floats(np.float64))


def histogram_of(values: NDArray[np.floating], elements: int = 0) -> Histogram:
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
    seen = histogram_of(values).whole
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
    assert reduce(Histogram.merge, map(histogram_of, parts)) == histogram_of(values)


@given(ANY_FLOATS, ANY_FLOATS)
def test_merging_is_commutative(a: NDArray[np.floating], b: NDArray[np.floating]) -> None:
    assert histogram_of(a).merge(histogram_of(b)) == histogram_of(b).merge(histogram_of(a))


@given(ANY_FLOATS, ANY_FLOATS, ANY_FLOATS)
def test_merging_is_associative(a: NDArray[np.floating], b: NDArray[np.floating], c: NDArray[np.floating]) -> None:
    x, y, z = map(histogram_of, (a, b, c))
    assert x.merge(y).merge(z) == x.merge(y.merge(z))


@given(ANY_FLOATS)
def test_nothing_is_the_neutral_element(values: NDArray[np.floating]) -> None:
    seen = histogram_of(values)
    assert seen.merge(Histogram()) == seen == Histogram().merge(seen)
    assert Histogram.restored(seen.arrays()) == seen


@given(floats(np.float32))
def test_float64_holding_float32_values_is_the_same(values: NDArray[np.floating]) -> None:
    assert histogram_of(values) == histogram_of(values.astype(np.float64))


def test_bins_are_as_fine_as_the_limit_allows() -> None:
    seen = histogram_of(np.linspace(-1, 1, 10_000, dtype=np.float32)).whole
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
    seen = histogram_of(array).whole
    assert (seen.minimum, seen.maximum) == (min(values), max(values))
    assert seen.counts.tolist() == exact_counts(array, seen)
    assert (
        reduce(Histogram.merge, (histogram_of(array[i : i + 1]) for i in range(len(values)))).whole.counts.tolist()
        == seen.counts.tolist()
    )


def test_blocks_do_not_show() -> None:
    values = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    seen = histogram_of(values).whole
    assert seen.counts.tolist() == exact_counts(values, seen)


def test_mask_constants_leave_a_fine_histogram_of_the_rest() -> None:
    scores = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    seen = histogram_of(np.concatenate([scores, np.full(500, -3.4028235e38, np.float32)]))
    assert seen.unmasked is not None
    assert Histogram(seen.unmasked) == histogram_of(scores)
    assert histogram_of(scores).unmasked is None


def test_a_limited_histogram_keeps_its_bins() -> None:
    values = np.random.default_rng(0).normal(size=(8, 32, 28, 28)).astype(np.float32)
    full, limited = histogram_of(values).whole, histogram_of(values, 1000).whole
    assert (limited.minimum, limited.maximum) == (full.minimum, full.maximum)
    assert len(limited.counts) == len(full.counts)
    assert 900 <= limited.counts.sum() <= 1000
    assert histogram_of(values[0, 0, 0], 1000) == histogram_of(values[0, 0, 0])


def test_a_limited_histogram_sees_every_channel() -> None:
    channels = np.broadcast_to(np.arange(8, dtype=np.float32), (64, 64, 8))
    limited = histogram_of(channels, 512).whole
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
    arrays = dict(histogram_of(np.float32([1, 1])).arrays())
    arrays |= {name: np.array(value, arrays[name].dtype) for name, value in changes.items()}
    with pytest.raises(ValueError, match=r"contradict|do not fit"):
        Histogram.restored(arrays)


@dataclass(frozen=True, eq=False)
class Zeros(Accumulator):
    """A kind of somebody else: how many elements are zero."""

    kind: ClassVar[str] = "zeros"
    count: int = 0

    @classmethod
    def observed(cls, seen: TensorSample, request: Request) -> Zeros:
        return cls(int(np.count_nonzero(seen.values == 0)))

    def merge(self, other: Zeros) -> Zeros:
        return Zeros(self.count + other.count)

    def arrays(self) -> dict[str, Any]:
        return {"count": np.array([self.count])}

    @classmethod
    def restored(cls, arrays: Any) -> Zeros:
        return cls(int(arrays["count"][0]))


class Other:
    kind = "other"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a package is installed that registers the kind above, and some that are broken."""
    entries = EntryPoints(
        EntryPoint(name, f"{__name__}:{target}", ENTRY_POINTS)
        for name, target in (("zeros", "Zeros"), ("other", "Other"), ("twice", "Zeros"), ("broken", "Nothing"))
    )
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: entries.select(**wanted))


@pytest.mark.parametrize("name", KINDS)
def test_every_row_is_named_as_its_kind(name: str) -> None:
    assert KINDS[name].kind == name
    assert find_kind(name) is KINDS[name]
    assert default_request("t", name, 1) == Request("t", name, 1, KINDS[name].options)


@pytest.mark.usefixtures("installed")
def test_a_kind_of_an_installed_package_is_observed_merged_and_kept(tmp_path: Path) -> None:
    request = default_request("t", "zeros")
    a, b = (
        observe_all({"t": np.float32(values)}, [request], sample) for values, sample in (([0, 1], "a"), ([0, 0], "b"))
    )
    save_statistics(a.merge(b), tmp_path / "s.npz")
    assert load_statistics(tmp_path / "s.npz").of("t").need(Zeros).count == 3


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zeroes", "Statistic 'zeroes' is unknown, expected one of range, .*, zeros, .*did you mean 'zeros'"),
        ("broken", "Statistic 'broken' of .*:Nothing cannot be loaded"),
        ("other", "'other' is no class of that kind"),
        ("twice", "'twice' is no class of that kind"),
    ],
)
def test_a_wrong_kind_is_told_why(name: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        observe_all({}, [Request("t", name)])


def fails(*_: Any) -> Any:
    raise ZeroDivisionError("no counts")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("observer", fails, "ZeroDivisionError: no counts"),
        ("observed", fails, "ZeroDivisionError: no counts"),
        ("merge", fails, "ZeroDivisionError: no counts"),
        ("merge", lambda one, other: None, "TypeError: it is None, expected Zeros"),
        ("merge", lambda one, other: 3, "TypeError: it is 3, expected Zeros"),
        ("arrays", lambda one: {"count": one.count}, "TypeError: what holds it in a file are no arrays"),
        ("arrays", lambda one: None, "AttributeError: 'NoneType'"),
    ],
)
def test_a_kind_that_fails_is_told_with_the_tensor(
    method: str, given: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Zeros, method, given)
    with pytest.raises(SchemeError, match=f"Statistic 'zeros' of tensor 't' failed: {message}"):
        observe_all({"t": np.float32([0, 1])}, [Request("t", "zeros")])


def test_tensors_of_which_nothing_is_wanted_and_empty_arrays_are_passed_over() -> None:
    found = observe_all({"a": np.float32([1]), "b": np.array(["text"]), "c": np.zeros(0)}, [Request("c", "range")], "s")
    assert (found.samples, found.statistics) == (("s",), {Request("c", "range"): Range()})


def test_all_kinds_of_a_tensor_see_the_same_array_once(monkeypatch) -> None:
    looks = []
    monkeypatch.setattr("onnxq.calibration.accumulators.ends_of", lambda values: looks.append(1) or (0.0, 1.0))
    observers = Observers([Request.of("t", kind) for kind in OBSERVED_KINDS])
    observers.add("t", np.float32([0, 1]), "ab")
    assert len(looks) == 1
    assert [request.kind for request in observers.statistics()] == list(OBSERVED_KINDS)


def extremes_of_samples(values: list[float], sample: int) -> SampleExtremes:
    found = statistic(np.float32(values), "sample-extremes", sample=f"{sample:016x}ffff")
    assert isinstance(found, SampleExtremes)
    return found


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.floats(-8, 8, width=32), max_size=4)), max_size=8), st.data())
def test_they_do_not_depend_on_the_order(parts: list[tuple[int, list[float]]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(parts))
    merged, again = (
        reduce(
            SampleExtremes.merge,
            (extremes_of_samples(values, index) for index, values in order),
            SampleExtremes(),
        )
        for order in (parts, shuffled)
    )
    assert merged == again
    for index, (low, high) in zip(merged.samples, merged.ends, strict=True):
        values = [value for at, part in parts if at == index for value in part]
        assert (low, high) == (min(values), max(values))
    assert set(merged.samples) == {index for index, values in parts if values}


def test_extremes_of_samples_survive_their_arrays() -> None:
    found = extremes_of_samples([1, -2], 3).merge(extremes_of_samples([4], 2**63 + 1))
    assert SampleExtremes.restored(found.arrays()) == found
    assert found.samples.tolist() == [3, 2**63 + 1]
    with pytest.raises(ValueError, match="out of order"):
        SampleExtremes.restored({"samples": found.samples[::-1], "ends": found.ends})
    with pytest.raises(ValueError, match="not finite"):
        SampleExtremes.restored({"samples": found.samples, "ends": found.ends * np.inf})


SCORES = np.random.default_rng(0).normal(scale=5, size=4000).astype(np.float32)


def range_of_attention(values: NDArray[np.float32]) -> Range:
    return seen(values, "range").need(Range)


def with_values(*values: float, count: int = 400, scores: NDArray[np.float32] = SCORES) -> NDArray[np.float32]:
    return np.concatenate([scores, np.repeat(np.float32(values), count)])


@pytest.mark.parametrize("mask", [-1e4, -65504.0, -1e9, -np.finfo(np.float32).max, 1e9])
def test_mask_constants_are_recognised_and_left_out(mask: float) -> None:
    found = range_of_attention(with_values(mask))
    assert attention_mask_values(found) == (np.float32(mask),)
    assert data_range(found) == (SCORES.min(), SCORES.max())


def test_scores_added_to_a_mask_are_still_a_mask() -> None:
    found = range_of_attention(np.concatenate([SCORES, SCORES - np.float32(1e4)]))
    assert attention_mask_values(found) == (found.minimum,)
    assert data_range(found) == (SCORES.min(), SCORES.max())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rounding_of_large_numbers_is_no_spread(dtype: type[np.floating]) -> None:
    masked = np.float32(dtype(-60_000) + np.linspace(-1, 1, 100).astype(dtype))
    assert (
        len(attention_mask_values(range_of_attention(np.append(np.linspace(-1, 1, 100, dtype=np.float32), masked))))
        == 1
    )


def test_masks_on_both_sides_are_recognised() -> None:
    assert attention_mask_values(range_of_attention(with_values(-1e9, 1e9))) == (-1e9, 1e9)


def test_a_single_smallest_float_is_a_mask() -> None:
    assert attention_mask_values(range_of_attention(with_values(-3.4e38, count=1))) == (np.float32(-3.4e38),)


@pytest.mark.parametrize(
    "values",
    [
        SCORES,
        SCORES * 1000,
        with_values(-1e4, scores=SCORES * 1000),
        with_values(20_000, count=1, scores=np.tile(SCORES, 3)),
        np.full(10, -1e4, np.float32),
        with_values(-1e4, -1e6),
        with_values(-5000),
        np.append(SCORES[:63], np.linspace(9000, 10_000, 64)).astype(np.float32),
        np.append(SCORES, np.linspace(-12_000, -8192, 400)).astype(np.float32),
    ],
    ids=[
        "scores",
        "wide",
        "wide with -1e4",
        "one outlier",
        "nothing else",
        "two clusters",
        "too small",
        "large data",
        "large negative data",
    ],
)
def test_data_is_not_taken_for_a_mask(values: NDArray[np.float32]) -> None:
    found = range_of_attention(values)
    assert attention_mask_values(found) == ()
    assert data_range(found) == (values.min(), values.max())


def test_masks_that_may_be_data_are_told_apart_from_those_that_cannot_be() -> None:
    values = {"data": with_values(9000.0), "both": with_values(-1e4, 2e4), "never": with_values(-3.4e38), "no": SCORES}
    assert find_doubtful_masks({name: range_of_attention(one) for name, one in values.items()}) == {
        "data": 9000.0,
        "both": 2e4,
    }


VALUES = st.lists(st.one_of(st.floats(-1e5, 1e5, width=32), st.sampled_from([8192.0, -8192.0, -3e38])), max_size=8)


def range_of(values: object) -> Range:
    found = statistic(values, "range")
    assert isinstance(found, Range)
    return found


@given(st.lists(VALUES, max_size=4), st.data())
def test_ranges_of_any_split_and_order_are_those_of_one_observation(
    parts: list[list[float]], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(parts))
    merged = reduce(Range.merge, (range_of(np.float32(part)) for part in shuffled), Range())
    assert merged == range_of(np.float32([value for part in parts for value in part]))
    assert Range.restored(merged.arrays()) == merged


def test_the_part_below_the_mask_and_what_is_nearest_to_it_are_kept() -> None:
    found = range_of(np.float32([1, -2, -9000, -1e4, 8192, 5]))
    assert (found.count, found.minimum, found.maximum) == (6, -1e4, 8192)
    assert (found.unmasked_count, found.unmasked_minimum, found.unmasked_maximum) == (3, -2, 5)
    assert (found.below, found.above) == (-9000, 8192)
    assert range_of(np.float32([-9000, -1e4])).unmasked_count == 0


def test_the_sign_of_a_zero_extreme_does_not_depend_on_the_order() -> None:
    for values in ([0.0, -0.0], [-0.0, 0.0], [-0.0]):
        assert math.copysign(1, range_of(np.array(values)).minimum) == 1


@pytest.mark.parametrize(
    ("counts", "ends"),
    [
        ([2, 3], [0, 1, 0, 1, -np.inf, np.inf]),
        ([2, 2], [2, 1, 2, 1, -np.inf, np.inf]),
        ([2, 2], [0, np.nan, 0, 1, -np.inf, np.inf]),
        ([2, 2], [0, 1, -1, 1, -np.inf, np.inf]),
        ([2, 2], [-np.inf, np.inf, 0, 1, -np.inf, np.inf]),
        ([0, 0], [0, 1, np.inf, -np.inf, -np.inf, np.inf]),
        ([2, 0], [0, 1, 0, 1, -np.inf, np.inf]),
        ([2, 2], [0, 1, 0, 1, np.nan, np.inf]),
        ([2, 2], [0, 1, 0, 1, -np.inf, 2]),
    ],
)
def test_contradicting_ranges_are_refused(counts: list[int], ends: list[float]) -> None:
    with pytest.raises(ValueError, match="contradict"):
        Range.restored({"counts": np.int64(counts), "ends": np.float64(ends)})


REQUESTS = [
    Request("a", "channel-means"),
    Request("a", "channel-means", -1),
    Request("a", "channel-means", 1),
    Request.of("a", "hessian", 1, kernel="3,3"),
    Request.of("a", "hessian", 1, rows=4),
    Request("b", "channel-means"),
]


def test_requests_have_one_order_whatever_their_axes_and_options() -> None:
    for shuffled in permutations(REQUESTS):
        assert sorted(shuffled) == REQUESTS


def test_options_are_in_order_and_have_defaults() -> None:
    request = Request.of("a", "hessian", rows=4, groups=2)
    assert request == Request("a", "hessian", None, (("groups", 2), ("rows", 4)))
    assert (request.option("rows", 1), request.option("kernel", "")) == (4, "")
    assert str(Request("a", "hessian", 1)) == "hessian of 'a' along axis 1"
