"""Kinds of statistics: one contract for all of them, the definition of each, and what is refused."""

from __future__ import annotations

import math
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import EntryPoint, EntryPoints
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from model_texts import model
from numpy.typing import NDArray
from observations import observe, one_by_one, same, seen, statistic

from onnxq.calibration.accumulators import (
    MASK_MAGNITUDE,
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
from onnxq.calibration.methods import attention_mask_values, ends_of_data, find_doubtful_masks
from onnxq.calibration.statistics import load_statistics, save_statistics
from onnxq.errors import DataError, SchemeError
from onnxq.runtime.sessions import open_session, run
from onnxq.system import plugins

Floats = NDArray[np.floating[Any]]
EXACT = {"range", "histogram", "channel-ranges", "sample-extremes"}
"""Kinds whose statistics do not depend on the order of arrays by a single bit; others do by the rounding of sums."""


def digest(index: int) -> str:
    return f"{index:016x}" * 2


def merged(parts: Sequence[Accumulator], first: Accumulator) -> Accumulator:
    return reduce(lambda one, other: one.merge(other), parts, first)


def floats(dtype: type[np.floating[Any]]) -> st.SearchStrategy[Floats]:
    """Arrays of three channels along axis 1: of any finite values, of tame ones, and with mask constants."""
    width = np.dtype(dtype).itemsize * 8
    wild = st.floats(width=width, allow_nan=False, allow_infinity=False)  # type: ignore[call-overload]
    tame = st.floats(-8, 8, width=width)  # type: ignore[call-overload]
    masked = st.sampled_from([0.0, -0.0, -1e4, 1.0, 8192.0, -8192.0, 3e4])
    shapes = st.tuples(st.integers(0, 3), st.just(3), st.integers(1, 6))
    return st.one_of(hnp.arrays(dtype, shapes, elements=elements) for elements in (wild, tame, masked))


ARRAYS = st.lists(st.one_of(map(floats, (np.float16, np.float32, np.float64))), max_size=5)
ROWS = st.lists(hnp.arrays(np.float32, (2, 3, 4), elements=st.floats(-8, 8, width=32)), max_size=5)


# The contract of every kind, and the definition of each.


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(st.data())
def test_any_split_in_any_order_gives_what_one_observer_gives(kind: str, data: st.DataObject) -> None:
    arrays = data.draw(ARRAYS if kind in EXACT else ROWS)
    elements = data.draw(st.sampled_from([0, 5])) if kind == "histogram" else 0
    whole = one_by_one(arrays, kind, 1, elements=elements)
    parts = [statistic(array, kind, 1, digest(index), elements=elements) for index, array in enumerate(arrays)]
    parts, middle = data.draw(st.permutations(parts)), data.draw(st.integers(0, len(parts)))
    nothing = KINDS[kind]()
    both = merged(parts[middle:], nothing).merge(merged(parts[:middle], nothing))
    assert both == whole if kind in EXACT else same(both, whole)
    assert whole.merge(nothing) == whole == nothing.merge(whole)
    assert KINDS[kind].restored(whole.arrays()) == whole
    dtypes = [{name: array.dtype for name, array in one.arrays().items()} for one in (whole, nothing)]
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_name_and_refuses_arrays_that_are_not_its_own(kind: str) -> None:
    assert KINDS[kind].kind == kind
    assert find_kind(kind) is KINDS[kind]
    assert default_request("t", kind, 1) == Request("t", kind, 1, KINDS[kind].options)
    whole = one_by_one([np.float32([[1, 2]])], kind, 1)
    assert whole != KINDS[kind]()
    with pytest.raises(ValueError, match="arrays are"):
        KINDS[kind].restored({**whole.arrays(), "more": np.zeros(1)})


def range_of(values: Floats) -> list[float]:
    flat = values.astype(np.float64).ravel()
    inside, inf = flat[np.abs(flat) < MASK_MAGNITUDE], math.inf
    ends = [bound(part, initial=first) for part in (flat, inside) for bound, first in ((np.min, inf), (np.max, -inf))]
    outside = [
        np.max(flat, initial=-inf, where=flat <= -MASK_MAGNITUDE),
        np.min(flat, initial=inf, where=flat >= MASK_MAGNITUDE),
    ]
    return [flat.size, inside.size, *ends, *outside]


def ends_of_channels(values: Floats) -> Floats:
    wide = np.moveaxis(values, 1, 0).reshape(values.shape[1], -1)
    return np.stack([wide.min(1), wide.max(1)], 1).astype(np.float64)


@settings(max_examples=60)
@given(floats(np.float16) | floats(np.float32) | floats(np.float64))
def test_extremes_and_counts_are_those_of_the_elements(values: Floats) -> None:
    arrays = statistic(values, "range").arrays()
    assert [*arrays["counts"], *arrays["ends"]] == range_of(values)
    if values.size:
        channels, samples = (
            statistic(values, "channel-ranges", 1),
            statistic(values, "sample-extremes", sample="3" * 32),
        )
        assert channels == ChannelRanges(ends_of_channels(values))
        assert samples == SampleExtremes(np.uint64([0x3333333333333333]), np.array([[values.min(), values.max()]]))


def exact_counts(values: Floats, bins: Bins) -> list[int]:
    """Count with integer arithmetic on fractions: the definition of a bin, without any rounding."""
    counts = [0] * len(bins.counts)
    for numerator, denominator in (float(value).as_integer_ratio() for value in values.ravel()):
        shift = -bins.exponent
        scaled = (numerator << shift) // denominator if shift >= 0 else numerator // (denominator << -shift)
        counts[scaled - bins.first] += 1
    return counts


def histogram_of(values: Any, elements: int = 0) -> Histogram:
    histogram = statistic(values, "histogram", elements=elements)
    assert isinstance(histogram, Histogram)
    return histogram


EXTREME = [
    [-0.0, 0.0], [3.25] * 5, [-1e-45, 1e-45], [1e-38, 3e38], [-3.4028235e38, 3.4028235e38], [5e-324, 1e-323],
    [-5e-324, 4.0], [-5e-324, 1e308], [-1.7e308, 1.7e308], [1.0, 1.0 + 2**-52],
]  # fmt: skip


@settings(max_examples=60)
@given(floats(np.float16) | floats(np.float32) | floats(np.float64) | st.sampled_from(EXTREME).map(np.array))
def test_every_element_is_counted_in_its_bin(values: Floats) -> None:
    histogram = histogram_of(values)
    for bins, counted in ((histogram.whole, values), (histogram.below_mask, values[np.abs(values) < MASK_MAGNITUDE])):
        assert bins.counts.tolist() == exact_counts(counted, bins)
        assert len(bins.counts) <= BINS
        if counted.size:
            assert (bins.minimum, bins.maximum) == (counted.min(), counted.max())
    assert (histogram.unmasked is None) == bool((np.abs(values) < MASK_MAGNITUDE).all())
    if values.dtype == np.float32:
        assert histogram == histogram_of(values.astype(np.float64))


def test_bins_are_as_fine_as_their_number_allows_and_blocks_do_not_show() -> None:
    bins = histogram_of(np.linspace(-1, 1, 200_000, dtype=np.float32)).whole
    assert (bins.width, bins.counts.sum()) == (2**-10, 200_000)
    assert BINS / 2 < len(bins.counts) <= BINS
    assert bins.edges[0] <= bins.minimum < bins.edges[1]
    assert bins.edges[-2] <= bins.maximum < bins.edges[-1]


def test_a_selection_of_elements_keeps_the_bins_and_sees_every_channel() -> None:
    channels = np.broadcast_to(np.arange(8, dtype=np.float32), (64, 64, 8))
    whole, some = histogram_of(channels).whole, histogram_of(channels, 512).whole
    assert (some.minimum, some.maximum, len(some.counts)) == (whole.minimum, whole.maximum, len(whole.counts))
    assert (400 < some.counts.sum() <= 512, np.count_nonzero(some.counts)) == (True, 8)
    assert histogram_of(channels[0, 0], 512) == histogram_of(channels[0, 0])


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 3, 4, 5), 1), ((4, 3), -1), ((3,), 0), ((2, 3, 1), 1), ((5, 1, 3), 2)]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_means_and_products_are_those_of_numpy(
    shape: tuple[int, ...], axis: int, dtype: type[np.floating[Any]]
) -> None:
    array = np.random.default_rng(0).normal(3, 1, shape).astype(dtype)
    rows = np.moveaxis(array.astype(np.float64), axis, -1).reshape(-1, 3)
    means, gram = statistic(array, "channel-means", axis), statistic(array, "hessian", axis, rows=0)
    assert isinstance(means, ChannelMeans)
    assert isinstance(gram, HessianAccumulator)
    assert (means.count, means.rows, gram.count) == (array.size, len(rows), len(rows))
    np.testing.assert_allclose(means.means, rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(gram.means(), rows.mean(0)[None], rtol=1e-6)
    np.testing.assert_allclose(gram.moments()[0], rows.T @ rows / len(rows), rtol=1e-6)
    centered = rows - rows.mean(0)
    np.testing.assert_allclose(gram.moments(centered=True)[0], centered.T @ centered / len(rows), atol=1e-5)


def test_products_are_centered_before_they_are_rounded() -> None:
    values = np.random.default_rng(0).normal(1e3, 1, (500, 3))
    gram = statistic(values, "hessian", 1, rows=0)
    assert isinstance(gram, HessianAccumulator)
    expected = np.cov(values.T, bias=True)
    np.testing.assert_allclose(gram.moments(np.float32, centered=True)[0], expected, rtol=1e-4, atol=1e-4)


def test_sums_of_strided_and_of_large_values_are_true() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(0, 2, 1)
    assert channel_sums(array, 1).tolist() == array.sum((0, 2)).tolist()
    large = statistic(np.float64([[2.0**47, 3.0], [2.0**46, -1.0]]), "channel-means", 1)
    assert isinstance(large, ChannelMeans)
    assert large.means.tolist() == [0.75 * 2.0**47, 1]


# Elements that do not count as others do: none, NaN, infinities, masks.


@pytest.mark.parametrize("kind", KINDS)
def test_empty_arrays_add_nothing(kind: str) -> None:
    empty, full = np.ones((0, 3), np.float32), np.ones((1, 3), np.float32)
    assert one_by_one([empty], kind, 1) == KINDS[kind]()
    assert one_by_one([full, empty], kind, 1) == one_by_one([full], kind, 1)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"channel-means"}))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_name_the_tensor_and_the_sample(kind: str, value: float) -> None:
    observers, array = Observers([Request("scores", kind, 0)]), np.float32([1, value, 2])
    with pytest.raises(DataError, match="Tensor 'scores' holds 1 NaN or infinite values of 3 in sample 7, expected"):
        observers.add("scores", array, "ab", 7)
    with pytest.raises(DataError, match="of 3, expected none"):
        observers.add("scores", array)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e14])
def test_the_means_of_what_is_not_finite_or_too_large_are_unknown_whatever_is_merged(value: float) -> None:
    good, bad = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    bad[1, 2] = value
    for order in ([bad], [good, bad, good], [bad, good], [good, bad]):
        means = one_by_one(order, "channel-means", 1)
        assert isinstance(means, ChannelMeans)
        assert (means.count, means.rows, len(means.means)) == (6 * len(order), 0, 0)
        assert ChannelMeans.restored(means.arrays()) == means


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.float64])
def test_every_float_type_is_observed_and_no_other(dtype: type[np.generic]) -> None:
    for array in (np.array([[-1.5, 0], [2, 2]], dtype), np.array([[-1.5, 9, 0, 9, 2, 9, 2]], dtype).T[::2]):
        extremes = seen(array).need(Range)
        assert (extremes.count, extremes.minimum, extremes.maximum) == (4, -1.5, 2)
    assert seen(np.array(2, dtype)).need(Range).count == 1
    for wrong in (np.int64, np.bool_, np.uint8):
        with pytest.raises(DataError, match=r"Tensor 't' is .* expected a float type"):
            seen(np.zeros(2, wrong))


def test_what_lies_below_the_mask_is_taken_out_only_where_something_does_not() -> None:
    plain, masked = TensorSample("t", np.float32([1, 2])), TensorSample("t", np.float32([[1, -1e4], [2, 8192]]))
    assert plain.unmasked is plain.values
    assert (masked.unmasked.tolist(), masked.unmasked_ends) == ([1, 2], (1, 2))
    assert TensorSample("t", np.float32([9e3])).unmasked_ends == (np.inf, -np.inf)


def test_the_sign_of_a_zero_extreme_does_not_depend_on_the_order() -> None:
    for values in ([0.0, -0.0], [-0.0, 0.0], [-0.0]):
        for kind in ("range", "channel-ranges", "sample-extremes"):
            arrays = statistic(np.array([values]), kind, 0).arrays()
            assert math.copysign(1, arrays["ends"].ravel()[0]) == 1


def test_equal_samples_count_as_one_in_the_order_of_their_digests() -> None:
    parts = [(2**63 + 1, [4.0]), (3, [1.0, -2.0]), (3, [2.0])]
    extremes = [statistic(np.float32(values), "sample-extremes", sample=digest(index)) for index, values in parts]
    expected = SampleExtremes(np.uint64([3, 2**63 + 1]), np.float64([[-2, 2], [4, 4]]))
    assert merged(extremes, SampleExtremes()) == expected


SCORES = np.random.default_rng(0).normal(scale=5, size=4000).astype(np.float32)


def with_values(*values: float, count: int = 400, scores: Floats = SCORES) -> Floats:
    return np.concatenate([scores, np.repeat(np.float32(values), count)])


HALF = np.linspace(-1, 1, 100).astype(np.float16)


@pytest.mark.parametrize(
    ("values", "masks"),
    [
        (with_values(-1e4), (-1e4,)),
        (with_values(-65504.0), (-65504.0,)),
        (with_values(-1e9, 1e9), (-1e9, 1e9)),
        (with_values(-3.4e38, count=1), (-3.4e38,)),
        (np.concatenate([SCORES, SCORES - np.float32(1e4)]), ((SCORES - np.float32(1e4)).min(),)),
        (np.append(HALF.astype(np.float32), np.float32(np.float16(-60_000) + HALF)), (-60_000,)),
        (np.append(HALF.astype(np.float32), np.float32(np.float16(60_000) + HALF)), (60_000,)),
        (SCORES, ()),
        (SCORES * 1000, ()),
        (with_values(-1e4, scores=SCORES * 1000), ()),
        (with_values(20_000, count=1, scores=np.tile(SCORES, 3)), ()),
        (np.full(10, -1e4, np.float32), ()),
        (with_values(-1e4, -1e6), ()),
        (with_values(-5000), ()),
        (np.append(SCORES[:63], np.linspace(9000, 10_000, 64)).astype(np.float32), ()),
        (np.append(SCORES, np.linspace(-12_000, -8192, 400)).astype(np.float32), ()),
    ],
)
def test_mask_constants_are_told_from_data(values: Floats, masks: Sequence[float]) -> None:
    tensor = seen(values)
    assert attention_mask_values(tensor.need(Range)) == tuple(np.float32(masks))
    inside = values[np.abs(values) < MASK_MAGNITUDE] if masks else values
    assert ends_of_data(tensor) == (inside.min(), inside.max())


def test_masks_that_may_be_data_are_told_apart_from_those_that_cannot_be() -> None:
    values = {"data": with_values(9000.0), "both": with_values(-1e4, 2e4), "never": with_values(-3.4e38), "no": SCORES}
    ranges = {name: seen(array).need(Range) for name, array in values.items()}
    assert find_doubtful_masks(ranges) == {"data": 9000.0, "both": 2e4}


# Selections and bins.


def test_samples_select_different_places_and_each_always_the_same() -> None:
    array = np.arange(1000.0)
    selections = [array[TensorSample("t", array, digest(index)).selection(1000, 100)] for index in (*range(8), 3)]
    assert len({tuple(selection) for selection in selections}) == 8
    assert selections[3].tolist() == selections[8].tolist()
    assert all(90 <= len(selection) <= 101 for selection in selections)
    assert TensorSample("t", array, digest(5)).selection(1000, None) == slice(0, None, 1)
    assert len(array[:1][TensorSample("t", array, "f" * 32).selection(1, 1)]) == 1
    assert len(array[TensorSample("t", array, "3e8").selection(1000, 1)]) == 1


@given(st.integers(1, 10**6), st.none() | st.integers(1, 10**4))
def test_a_stride_takes_about_as_many_as_asked_for_and_shares_no_factor_with_the_size(
    size: int, elements: int | None
) -> None:
    stride = stride_of(size, elements)
    assert math.gcd(stride, size) == 1
    assert stride == 1 if elements is None or size <= elements else size // elements <= stride
    assert len(range(0, size, stride)) <= (size if elements is None else 2 * elements)


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(FINITE, FINITE)
def test_bins_cover_a_range_and_are_not_finer_than_they_must(a: float, b: float) -> None:
    minimum, maximum = min(a, b), max(a, b)
    exponent = exponent_of(minimum, maximum)
    assert 0 <= bin_of(maximum, exponent) - bin_of(minimum, exponent) < BINS
    finest = max(MINIMUM_EXPONENT, math.frexp(max(-minimum, maximum))[1] - 53)
    if exponent > finest and maximum > minimum:
        assert bin_of(maximum, exponent - 1) - bin_of(minimum, exponent - 1) >= BINS
    first = bin_of(minimum, exponent)
    assert bins_of(np.array([a, b]), exponent, first).tolist() == [bin_of(one, exponent) - first for one in (a, b)]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_values_of_float32_fall_into_the_bins_of_their_elements(values: list[float]) -> None:
    exponent = exponent_of(min(values), max(values))
    first = bin_of(min(values), exponent)
    assert bins_of(np.float32(values), exponent, first).tolist() == [bin_of(one, exponent) - first for one in values]


@given(
    st.lists(st.integers(0, 2**60), min_size=1, max_size=40),
    st.integers(-(2**52), 2**52 - 40),
    st.integers(0, 6) | st.sampled_from([40, 63, 64, 2000]),
)
def test_bins_are_added_to_the_wider_ones_that_they_lie_in(added: list[int], added_first: int, coarser: int) -> None:
    first = (added_first >> coarser) - 1
    counts = np.full(len(added) + 2, 3, np.int64)
    expected = counts.tolist()
    for place, count in enumerate(added, added_first):
        expected[(place >> coarser) - first] += count
    add_bins(counts, np.array(added, np.int64), added_first, coarser, first)
    assert counts.tolist() == expected


# Hessians.

RANDOM = np.random.default_rng(0)


def gram_of(array: Any, axis: int = -1, rows: int = 0, **options: int | str) -> HessianAccumulator:
    gram = statistic(array, "hessian", axis, rows=rows, **options)
    assert isinstance(gram, HessianAccumulator)
    return gram


@pytest.mark.parametrize(
    ("shape", "kernel", "attributes", "group"),
    [
        ((2, 4, 7, 6), (3, 2), {"pads": [1, 0, 2, 1], "strides": [2, 1]}, 1),
        ((1, 4, 9, 8), (3, 3), {"dilations": [2, 1], "pads": [1, 1, 1, 1]}, 2),
        ((2, 4, 11), (3,), {"strides": [3]}, 4),
    ],
)
def test_patches_are_what_a_convolution_multiplies(
    shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, list[int]], group: int
) -> None:
    x = RANDOM.normal(size=shape).astype(np.float32)
    w = RANDOM.normal(size=(8, shape[1] // group, *kernel)).astype(np.float32)
    texts = "".join(f", {name}={extents}" for name, extents in attributes.items())
    dims, open_dims = ",".join(map(str, shape)), ",".join("N" * len(shape))
    text = f"(float[{dims}] x) => (float[{open_dims}] y) {{ y = Conv <group={group}{texts}>(x, w) }}"
    y = run(open_session(model(text, w=w)), {"x": x}, ("y",))[0].astype(np.float64)
    options = {name: ",".join(map(str, extents)) for name, extents in attributes.items()}
    gram = gram_of(x, 1, groups=group, kernel=",".join(map(str, kernel)), **options)
    weights = w.reshape(group, 8 // group, -1).astype(np.float64)
    squares = np.einsum("goi,gij,goj->go", weights, gram.moments(), weights).ravel()
    means = np.einsum("goi,gi->go", weights, gram.means()).ravel()
    space = (0, *range(2, y.ndim))
    assert gram.count == y.size // 8
    np.testing.assert_allclose(squares, (y**2).mean(space), rtol=0.01)
    np.testing.assert_allclose(means, y.mean(space), atol=0.01)
    some = gram_of(x, 1, rows=8, groups=group, kernel=",".join(map(str, kernel)), **options)
    assert 6 <= some.count <= 9


def test_groups_of_channels_and_an_even_selection_of_rows_see_all_of_the_tensor() -> None:
    array = RANDOM.normal(size=(6, 12, 9)).astype(np.float32)
    whole, parts = gram_of(array, 1, groups=3), np.split(np.moveaxis(array, 1, -1).reshape(-1, 12), 3, axis=1)
    for part, moments in zip(parts, whole.moments(), strict=True):
        np.testing.assert_allclose(moments, part.T @ part / 54, atol=2e-3)
    places = np.stack(np.meshgrid(np.arange(40.0), np.arange(40.0)), -1).reshape(1600, 2)
    some = gram_of(places, rows=100)
    assert 90 <= some.count <= 100
    np.testing.assert_allclose(some.means()[0], [19.5, 19.5], atol=1.5)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 600])
def test_bands_make_the_whole_in_little_memory(size: int) -> None:
    rows = RANDOM.integers(-100, 100, (300, size)).astype(np.float32)
    np.testing.assert_allclose(gram_of(rows).moments()[0], rows.astype(np.float64).T @ rows / 300, rtol=1e-12)


def test_a_hessian_takes_less_than_three_times_its_packed_products_while_it_grows() -> None:
    array, total = RANDOM.normal(size=(128, 1536)).astype(np.float32), HessianAccumulator()
    tracemalloc.start()
    for _ in range(6):
        total = total.merge(gram_of(array))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (total.count, total.products.nbytes < 0.6 * 1536 * 1536 * 8) == (6 * 128, True)
    assert peak < 3 * total.products.nbytes


def test_the_digest_of_a_hessian_tells_rows_apart_and_not_how_they_were_added_up() -> None:
    wide, narrow = gram_of([[1.0, 1.0], [-1.0, -1.0]]), gram_of([[1.0, -1.0], [-1.0, 1.0]])
    assert wide.means().tolist() == narrow.means().tolist()
    assert wide.digest != narrow.digest
    assert wide.merge(narrow).digest == narrow.merge(wide).multiplied().digest


def test_products_beyond_float32_are_infinite_there_without_a_warning() -> None:
    gram = gram_of(np.float32([[1e20, 1.0], [-1e20, 2.0]]))
    with warnings.catch_warnings(action="error"):
        products = gram.moments(np.float32)
    assert products[0, 0, 0] == np.inf
    assert np.isfinite(gram.moments()).all()
    assert gram_of(np.full((4, 2), -1e-40, np.float32)).means() == pytest.approx(-1e-40, rel=1e-3)


# What is refused.


@pytest.mark.parametrize(
    ("kind", "shape", "axis", "options", "message"),
    [
        *(
            (kind, (2, 3), axis, {}, f"Tensor 't' has 2 axes, expected axis {axis} for its channels; observe it whole")
            for kind in ("channel-means", "channel-ranges", "hessian")
            for axis in (2, -3, None)
        ),
        ("hessian", (2, 3), 1, {"groups": 2}, "'t' has 3 channels, expected a multiple of 2 groups"),
        ("hessian", (2, 3), 1, {"groups": 0}, "'t' has 3 channels, expected a multiple of 0 groups"),
        ("hessian", (2, 3), 1, {"kernel": "3"}, "'t' has 2 axes, expected 3 for a kernel of 1"),
        ("hessian", (2, 3, 2), 2, {"kernel": "1"}, "'t' has 3 axes, expected 3 for a kernel of 1, channels second"),
        ("hessian", (2, 3, 2), 1, {"kernel": "3"}, r"'t' is \(2,\) with pads, expected a kernel of \[3\] to fit"),
    ],
)
def test_an_array_that_does_not_fit_is_told(
    kind: str, shape: tuple[int, ...], axis: int | None, options: dict[str, int | str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        statistic(np.ones(shape), kind, axis, **options)


@pytest.mark.parametrize("kind", ["channel-means", "channel-ranges", "hessian"])
def test_samples_of_other_numbers_of_channels_are_told(kind: str) -> None:
    with pytest.raises(DataError, match="A tensor has 3 and 2 channels, expected one number in all samples; observe"):
        one_by_one([np.ones((2, 3)), np.ones((2, 2))], kind, 1)


INF = np.inf
DAMAGES: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("range", {"counts": counts, "ends": ends}, "contradict")
        for counts, ends in (
            ([2, 3], [0, 1, 0, 1, -INF, INF]),
            ([2, 2], [2, 1, 2, 1, -INF, INF]),
            ([2, 2], [0, np.nan, 0, 1, -INF, INF]),
            ([2, 2], [0, 1, -1, 1, -INF, INF]),
            ([2, 2], [-INF, INF, 0, 1, -INF, INF]),
            ([0, 0], [0, 1, INF, -INF, -INF, INF]),
            ([2, 0], [0, 1, 0, 1, -INF, INF]),
            ([2, 2], [0, 1, 0, 1, np.nan, INF]),
            ([2, 2], [0, 1, 0, 1, -INF, 2]),
        )
    ),
    ("histogram", {"sizes": [5]}, "do not fit"),
    ("histogram", {"sizes": []}, "do not fit"),
    ("histogram", {"ends": [[0, 1], [0, 1]]}, "do not fit"),
    ("histogram", {"ends": [[0, 9]]}, "contradict"),
    ("histogram", {"counts": [-1] * 3070}, "contradict|do not fit"),
    ("channel-ranges", {"ends": [[2, 1]]}, "out of order"),
    ("channel-ranges", {"ends": [[2, INF]]}, "not finite"),
    ("channel-ranges", {"ends": [2, 3]}, "out of order"),
    ("sample-extremes", {"samples": [2, 1]}, "out of order"),
    ("sample-extremes", {"ends": [[1, INF], [1, 2]]}, "not finite"),
    ("sample-extremes", {"ends": [[1, 2], [2, 1]]}, "out of order"),
    ("sample-extremes", {"ends": [[1, 2]]}, "out of order"),
    ("channel-means", {"count": [2]}, "belong to no channels"),
    ("channel-means", {"count": [7]}, "belong to no channels"),
    ("channel-means", {"sums": [0, INF]}, "belong to no channels"),
    ("channel-means", {"sums": [[0], [1]]}, "belong to no channels"),
    ("hessian", {"count": [-1]}, "not finite"),
    ("hessian", {"sums": [[1.0]]}, "do not fit"),
    ("hessian", {"sums": [1.0]}, "do not fit"),
    ("hessian", {"sums": [[1.0, np.nan, 0]]}, "not finite"),
    ("hessian", {"products": np.full((1, 9), np.nan)}, "not finite"),
    ("hessian", {"products": np.zeros((1, 0))}, "do not fit"),
    ("hessian", {"products": -np.ones((1, 9))}, "negative"),
]


@pytest.mark.parametrize(("kind", "damage", "message"), DAMAGES)
def test_arrays_that_contradict_each_other_are_refused(kind: str, damage: dict[str, Any], message: str) -> None:
    arrays = dict(one_by_one(list(np.arange(12, dtype=np.float32).reshape(2, 2, 3)), kind, 1).arrays())
    KINDS[kind].restored(arrays)
    with pytest.raises(ValueError, match=message):
        KINDS[kind].restored(arrays | {name: np.asarray(value, arrays[name].dtype) for name, value in damage.items()})


# Kinds of installed packages.


@dataclass(frozen=True, eq=False)
class Zeros(Accumulator):
    """A kind of another package: how many elements are zero."""

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


@pytest.mark.usefixtures("installed")
def test_a_kind_of_an_installed_package_is_observed_merged_and_kept(tmp_path: Path) -> None:
    request = default_request("t", "zeros")
    a, b = (observe({"t": np.float32(values)}, [request], sample) for values, sample in (([0, 1], "a"), ([0, 0], "b")))
    save_statistics(a.merge(b), tmp_path / "s.npz")
    assert load_statistics(tmp_path / "s.npz").of("t").need(Zeros).count == 3


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zeroes", "Statistic 'zeroes' is unknown, expected one of range, .*, zeros, .*did you mean 'zeros'"),
        ("broken", "Statistic 'broken' of .*:Nothing cannot be loaded"),
        ("other", "'other' is no class of that kind, expected a subclass of Accumulator whose kind is 'other'"),
        ("twice", "'twice' is no class of that kind"),
    ],
)
def test_a_wrong_kind_is_told_why(name: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        Observers([Request("t", name)])


def fails(*_: Any) -> Any:
    raise ZeroDivisionError("no counts")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("method", "replacement", "message"),
    [
        ("observer", fails, "ZeroDivisionError: no counts"),
        ("observed", fails, "ZeroDivisionError: no counts"),
        ("merge", fails, "ZeroDivisionError: no counts"),
        ("merge", lambda one, other: 3, "TypeError: it is 3, expected Zeros"),
        ("arrays", lambda one: {"count": one.count}, "TypeError: what holds it in a file are no arrays"),
        ("arrays", lambda one: None, "AttributeError: 'NoneType'"),
    ],
)
def test_a_kind_that_fails_is_told_with_the_tensor(
    method: str, replacement: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Zeros, method, replacement)
    with pytest.raises(SchemeError, match=f"Statistic 'zeros' of tensor 't' failed: {message}"):
        observe({"t": np.float32([0, 1])}, [Request("t", "zeros")])


# Requests and observers.


def test_all_kinds_of_a_tensor_look_for_its_extremes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr("onnxq.calibration.accumulators.ends_of", lambda values: looks.append(1) or (0.0, 1.0))
    observers = Observers([Request.of("t", kind, 0) for kind in KINDS])
    observers.add("t", np.float32([0, 1]), "ab")
    assert len(looks) == 1
    assert [request.kind for request in observers.statistics()] == list(KINDS)


def test_tensors_that_are_not_requested_are_passed_over() -> None:
    statistics = observe({"a": np.float32([1]), "b": np.array(["text"])}, [Request("c", "range")], "s")
    assert (statistics.samples, statistics.statistics) == (("s",), {Request("c", "range"): Range()})


REQUESTS = [
    Request("a", "channel-means"),
    Request("a", "channel-means", -1),
    Request("a", "channel-means", 1),
    Request.of("a", "hessian", 1, kernel="3,3"),
    Request.of("a", "hessian", 1, rows=4),
    Request("b", "channel-means"),
]


def test_requests_have_one_order_and_options_have_defaults() -> None:
    for shuffled in permutations(REQUESTS):
        assert sorted(shuffled) == REQUESTS
    request = Request.of("a", "hessian", rows=4, groups=2)
    assert request == Request("a", "hessian", None, (("groups", 2), ("rows", 4)))
    assert (request.option("rows", 1), request.option("kernel", "")) == (4, "")
    assert [str(one) for one in REQUESTS[:2]] == ["channel-means of 'a'", "channel-means of 'a' along axis -1"]
    assert (REQUESTS[3].like(REQUESTS[4]), REQUESTS[0].like(REQUESTS[1])) == (True, False)
