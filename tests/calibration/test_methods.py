"""Calibration methods choose ranges from statistics."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from observations import AFFINE, seen, statistics, wanted

from onnxq.calibration.accumulators import Range
from onnxq.calibration.kinds import Observers
from onnxq.calibration.methods import (
    CALIBRATION_METHODS,
    DEFAULT_METHODS,
    ENTRY_POINTS,
    CalibrationMethod,
    Entropy,
    Extremes,
    Fixed,
    Grid,
    HistogramSearch,
    MeanSquaredError,
    MinMax,
    MovingAverage,
    Percentile,
    bins_of_data,
    expected_errors,
    find_range,
    format_method,
    parse_calibration_method,
    required_kinds,
    searched_range,
)
from onnxq.calibration.statistics import CalibrationStatistics, TensorStatistics
from onnxq.errors import DataError, SchemeError
from onnxq.numerics.affine import params_from_range, quantize
from onnxq.numerics.formats import FORMATS, format_named
from onnxq.numerics.spec import Method, QuantSpec
from onnxq.system import plugins


@pytest.mark.parametrize("outlier", [25.0, -25.0])
def test_a_far_tail_is_clipped_and_the_squared_error_falls(outlier: float) -> None:
    values = np.random.default_rng(0).normal(size=1_000_000)
    values[0] = outlier
    tensor = seen(values)
    wide, found = MinMax()(tensor, AFFINE), Entropy()(tensor, AFFINE)
    assert max(-found[0], found[1]) < 0.3 * max(-wide[0], wide[1])
    before, after = expected_errors(bins_of_data(tensor), *np.array([wide, found]).T, Grid(256))
    assert after < 0.6 * before


@pytest.mark.parametrize("freedom", [2, 3, 5])
def test_a_heavy_tail_is_not_min_max(freedom: int) -> None:
    tensor = seen(np.random.default_rng(0).standard_t(freedom, size=100_000))
    assert Entropy()(tensor, AFFINE)[1] < 0.9 * MinMax()(tensor, AFFINE)[1]


def test_an_even_distribution_is_kept() -> None:
    low, high = Entropy()(seen(np.linspace(-1, 1, 100_001)), AFFINE)
    assert (low, high) == pytest.approx((-1, 1), abs=0.02)


def test_what_is_never_negative_stays_so() -> None:
    values = np.maximum(np.random.default_rng(0).standard_t(2, size=100_000), 0)
    low, high = Entropy()(seen(values), AFFINE)
    assert low == 0
    assert 0 < high < values.max()


def test_the_spike_at_zero_does_not_decide() -> None:
    values = np.abs(np.random.default_rng(0).normal(size=100_000))
    spiked = np.concatenate([values, np.zeros(1_000_000)])
    assert Entropy()(seen(spiked), AFFINE) == pytest.approx((0, Entropy()(seen(values), AFFINE)[1]), rel=0.1)


def test_values_far_from_zero_are_kept_in_bounded_memory() -> None:
    values = 1e6 + np.random.default_rng(0).random(1000)
    low, high = Entropy()(seen(values), AFFINE)
    assert (low, high) == (values.min(), values.max())


def test_coarser_levels_clip_more() -> None:
    tensor = seen(np.random.default_rng(0).laplace(size=200_000))
    assert Entropy(16)(tensor, AFFINE)[1] < Entropy(128)(tensor, AFFINE)[1]


@pytest.mark.parametrize(
    ("format", "levels"),
    [("uint8", 128), ("int8", 128), ("uint8-7bit", 64), ("uint4", 8), ("nf4", 8), ("int2", 2), ("int2-narrow", 2)],
)
def test_levels_are_half_of_the_codes(format: str, levels: int) -> None:
    tensor = seen(np.random.default_rng(0).laplace(size=50_000))
    spec = QuantSpec(format, symmetric=format_named(format).signed)
    assert Entropy()(tensor, spec) == Entropy(levels)(tensor, spec)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_the_spike_at_zero_does_not_decide_for_data_of_both_signs(share: float) -> None:
    values = np.random.default_rng(0).normal(0, 0.25, 100_000)
    values[:2] = 1.5, -1.5
    spiked = np.concatenate([values, np.zeros(int(share / (1 - share) * len(values)))])
    assert Entropy()(seen(spiked), AFFINE)[1] > 0.8 * Entropy()(seen(values), AFFINE)[1]


@pytest.mark.parametrize("format", ["uint16", "int16", "int32"])
def test_codes_finer_than_the_histogram_get_all_elements(format: str) -> None:
    tensor = seen(np.random.default_rng(0).laplace(size=50_000), elements=1000)
    assert Entropy()(tensor, QuantSpec(format, symmetric=format != "uint16")) == MinMax()(tensor, AFFINE)


def outlier() -> np.ndarray:
    values = np.random.RandomState(0).standard_normal(2000).astype(np.float32)
    values[0] = 12
    return values


def histogram(values: np.ndarray, bins: int = 2048) -> np.ndarray:
    """Count as torch.histc does."""
    low, high = float(values.min()), float(values.max())
    places = ((values - np.float32(low)) * np.float32(bins) / np.float32(high - low)).astype(np.int64)
    return np.bincount(np.minimum(places, bins - 1), minlength=bins)


def test_the_range_of_an_outlier_is_that_of_pytorch_bit_for_bit() -> None:
    values = outlier()
    found = searched_range(histogram(values), values.min(), values.max(), 256)
    assert found == (-3.046143054962158, 11.992652893066406)
    low, high = found
    assert (high - low) / 255 == pytest.approx(0.058975666761398315, rel=1e-6)
    assert round(-low / ((high - low) / 255)) == 52


def test_the_search_keeps_an_even_distribution() -> None:
    counts = np.full(2048, 10)
    low, high = searched_range(counts, -1.0, 1.0, 256)
    assert (low, high) == pytest.approx((-1, 1), abs=0.01)


def test_our_own_bins_serve_as_well() -> None:
    low, high = HistogramSearch()(seen(outlier()), AFFINE)
    assert low == pytest.approx(-3.046143, abs=0.1)
    assert high == pytest.approx(11.99, abs=0.1)


@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e-300, 1e300])
def test_magnitudes_beyond_float32_do_not_matter(scale: float) -> None:
    values = outlier().astype(np.float64)
    found = HistogramSearch()(seen(values * scale), AFFINE)
    assert found == pytest.approx(np.multiply(HistogramSearch()(seen(values), AFFINE), scale), rel=0.01)


def test_levels_are_all_of_the_type_though_half_are_used() -> None:
    tensor, half = seen(outlier()), QuantSpec("uint8-7bit", symmetric=False, method=Method.TORCH)
    assert HistogramSearch()(tensor, half) == HistogramSearch(256)(tensor, AFFINE)
    assert HistogramSearch(8)(tensor, half) != HistogramSearch(256)(tensor, AFFINE)


def test_the_search_gives_codes_finer_than_the_histogram_all_elements() -> None:
    tensor = seen(np.random.default_rng(0).laplace(size=50_000), elements=1000)
    assert HistogramSearch()(tensor, QuantSpec("int16")) == MinMax()(tensor, AFFINE)
    assert HistogramSearch(1 << 16)(tensor, AFFINE) == MinMax()(tensor, AFFINE)


@dataclass(frozen=True)
class Half:
    """A method of somebody else: a share of the extremes."""

    share: float = 0.5

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        found = seen.need(Range)
        return found.minimum * self.share, found.maximum * self.share


def doubled() -> CalibrationMethod:
    return lambda seen, spec: (2 * seen.need(Range).minimum, 2 * seen.need(Range).maximum)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a package is installed that registers the methods above, and one that is broken."""
    entries = EntryPoints(
        EntryPoint(name, f"{__name__}:{target}", ENTRY_POINTS)
        for name, target in (("half", "Half"), ("doubled", "doubled"), ("broken", "Nothing"))
    )
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: entries.select(**wanted))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("text", "expected"), [("half", (-1, 2)), ("half:0.25", (-0.5, 1)), ("doubled", (-4, 8))])
def test_a_method_of_an_installed_package_is_found_by_its_name(text: str, expected: tuple[float, float]) -> None:
    assert parse_calibration_method(text)(seen([-2.0, 4.0]), AFFINE) == expected


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hlf", "did you mean 'half'"),
        ("broken", "'broken' of .*:Nothing cannot be loaded"),
        ("doubled:3", "Calibration method 'doubled:3' failed: TypeError: .*doubled"),
        ("half:much", "'much' for share"),
    ],
)
def test_a_wrong_method_of_an_installed_package_is_told_why(text: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        parse_calibration_method(text)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("minmax", MinMax()),
        ("extremes", Extremes()),
        ("percentile", Percentile(99.99)),
        ("percentile:99.9", Percentile(99.9)),
        ("mse", MeanSquaredError()),
        ("mse:16", MeanSquaredError(16)),
        ("average", MovingAverage()),
        ("average:0.1", MovingAverage(0.1)),
        ("entropy", Entropy()),
        ("histogram", HistogramSearch()),
        ("fixed:-1,2.5", Fixed(-1, 2.5)),
    ],
)
def test_methods_are_parsed(text: str, method: CalibrationMethod) -> None:
    assert parse_calibration_method(text) == method


@pytest.mark.parametrize("name", sorted(set(CALIBRATION_METHODS) - {"fixed"}))
def test_every_method_is_parsed_by_its_name(name: str) -> None:
    assert parse_calibration_method(name) == CALIBRATION_METHODS[name]()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("percentil", "did you mean 'percentile'"),
        ("", "Calibration method '' is unknown"),
        ("minmax:3", "'minmax' takes no number, found '3'"),
        ("percentile:high", "'high' for percent, expected a number as in 'percentile:99.99'"),
        ("percentile:0", "Percentile is 0.0, expected above 0"),
        ("percentile:nan", "Percentile is nan"),
        ("percentile:101", "Percentile is 101.0"),
        ("mse:1", "MSE levels are 1, expected at least 2"),
        ("mse:2.5", "'2.5' for levels, expected a number as in 'mse:256'"),
        ("mse:2,3", "'2,3' for levels"),
        ("average:0", "Averaging constant is 0.0"),
        ("entropy:1", "Entropy levels are 1"),
        ("histogram:1", "Search levels are 1"),
        ("fixed", "'' for low, high, expected numbers as in 'fixed:-1,1'"),
        ("fixed:2,1", "Fixed range is 2.0 to 1.0"),
        ("auto", "Calibration method 'auto' was removed; leave it out, and the search chooses"),
    ],
)
def test_a_wrong_method_is_told_why(text: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        parse_calibration_method(text)


@pytest.mark.parametrize("name", sorted(CALIBRATION_METHODS))
def test_a_method_reads_the_kinds_that_it_says(name: str) -> None:
    method = parse_calibration_method(name if name != "fixed" else "fixed:-1,1")
    values = np.concatenate([np.random.default_rng(0).normal(size=1000), [-1e4] * 500]).astype(np.float32)
    kinds = required_kinds([method])
    assert method(seen(values, *kinds), AFFINE) == method(seen(values), AFFINE)
    for missing in set(kinds) - {"range"}:
        with pytest.raises(DataError, match=f"statistics of tensor 't' hold no {missing}, expected one; calibrate"):
            method(seen(values, *(kind for kind in kinds if kind != missing)), AFFINE)


def test_a_method_that_says_nothing_is_given_a_histogram() -> None:
    assert required_kinds([Half()]) == ("range", "histogram")
    assert required_kinds([MinMax()]) == ("range",)
    assert required_kinds(DEFAULT_METHODS) == ("range", "histogram")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "method",
    [
        *DEFAULT_METHODS,
        Percentile(99.99999),
        Fixed(-0.1, 1 / 3),
        MovingAverage(1e-9),
        MeanSquaredError(16),
        Half(0.3),
    ],
    ids=repr,
)
def test_the_text_of_a_method_makes_an_equal_one(method: CalibrationMethod) -> None:
    assert parse_calibration_method(format_method(method)) == method


def test_a_method_without_a_name_has_no_text() -> None:
    assert format_method(doubled()) == ""


def raises(seen: Any, spec: Any) -> tuple[float, float]:
    raise ZeroDivisionError("no counts")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (raises, r"'raises' for tensor 't' failed: ZeroDivisionError: no counts \(.*, line \d+\); correct it, or do"),
        (lambda seen, spec: None, "'<lambda>' for tensor 't' failed: TypeError: "),
        (lambda seen, spec: (0, 1, 2), "ValueError: too many values"),
        (lambda seen, spec: (np.zeros(2), np.ones(2)), "TypeError: "),
        (lambda seen, spec: ("low", "high"), "ValueError: could not convert"),
        (lambda seen, spec: (math.nan, 1), "found nan to 1, expected two finite numbers, the lower first; correct"),
        (lambda seen, spec: (-math.inf, 1), "found -inf to 1, expected two finite numbers"),
        (lambda seen, spec: (1, -1), "found 1 to -1, expected two finite numbers, the lower first"),
    ],
)
def test_a_method_that_fails_is_told_with_the_tensor(method: CalibrationMethod, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        find_range(method, seen([-2.0, 4.0]), AFFINE)


def test_a_range_is_two_plain_numbers_and_what_a_method_tells_stays() -> None:
    low, high = find_range(lambda seen, spec: np.float32([-0.1, 2]), seen([-2.0, 4.0]), AFFINE)
    assert (type(low), low, high) == (float, float(np.float32(-0.1)), 2.0)
    with pytest.raises(DataError, match="no elements in any sample"):
        find_range(MinMax(), seen([]), AFFINE)


DECIBEL = 10**0.1
CLIPS_AS_TOLD = {"average", "percentile", "fixed"}


"""Methods that leave out what their numbers say, whatever the quantized values are."""


FINE = [name for name, format in FORMATS.items() if Grid.of(QuantSpec(name, symmetric=format.signed)).is_fine]


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "normal": lambda random, size: random.normal(size=size),
    "laplace": lambda random, size: random.laplace(size=size),
    "rectified": lambda random, size: random.normal(size=size).clip(0),
    "tailed": lambda random, size: random.standard_t(3, size=size),
}


RANDOM = np.random.default_rng(2)


HOSTILE = {
    "one element": [-1.5],
    "a constant": np.full(9, 3.0),
    "zeros": np.zeros(9),
    "an outlier": np.append(RANDOM.normal(size=2000), 6e3),
    "heavy tails": RANDOM.standard_cauchy(2000),
    "far from zero": 1e6 + RANDOM.random(2000),
    "subnormal": 1e-41 * RANDOM.normal(size=2000),
    "largest": 5e37 * RANDOM.normal(size=2000),
    "negative": -np.abs(RANDOM.normal(size=2000)) - 1,
}


def nsr(values: NDArray[np.float32], method: CalibrationMethod, tensor: TensorStatistics, spec: QuantSpec) -> float:
    """Return the squared error of quantized values of the range that a method finds."""
    format = format_named(spec.format)
    parameters = params_from_range(*find_range(method, tensor, spec), format, symmetric=spec.symmetric)
    return float(np.square(quantize(values, parameters, format).dequantize().astype(np.float64) - values).mean())


@cache
def of_samples(distribution: str) -> TensorStatistics:
    """Return what 64 samples show, of each of which an eighth is counted."""
    random, observers = np.random.default_rng(0), Observers(wanted(["t"], elements=500))
    for index in range(64):
        observers.add("t", DISTRIBUTIONS[distribution](random, 4000).astype(np.float32), f"{index:032x}", index)
    return CalibrationStatistics(("",), observers.statistics()).of("t")


@pytest.mark.parametrize("name", sorted(set(CALIBRATION_METHODS) - CLIPS_AS_TOLD))
@pytest.mark.parametrize("format", FINE)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_fine_codes_of_new_data_are_no_worse_than_those_of_min_max(name: str, format: str, distribution: str) -> None:
    spec = QuantSpec(format, symmetric=format_named(format).signed)
    new = DISTRIBUTIONS[distribution](np.random.default_rng(1), 200_000).astype(np.float32)
    tensor = of_samples(distribution)
    assert nsr(new, parse_calibration_method(name), tensor, spec) <= DECIBEL * nsr(new, MinMax(), tensor, spec)


@pytest.mark.parametrize("name", sorted(set(CALIBRATION_METHODS) - {"fixed"}))
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("error")
def test_a_range_of_any_data_lies_within_it_and_zero(name: str, format: str) -> None:
    for symmetric in {True, False} - {not format_named(format).signed, format_named(format).is_float}:
        for what, values in HOSTILE.items():
            tensor = seen(np.float32(values))
            low, high = find_range(parse_calibration_method(name), tensor, QuantSpec(format, symmetric=symmetric))
            assert min(np.float32(values).min(), 0) <= low <= high <= max(np.float32(values).max(), 0), what


@pytest.mark.parametrize("name", ["mse"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("what", ["an outlier", "heavy tails", "far from zero", "negative"])
def test_the_least_error_of_data_is_no_worse_than_that_of_min_max(name: str, format: str, what: str) -> None:
    spec, values = QuantSpec(format, symmetric=format_named(format).signed), np.float32(HOSTILE[what])
    tensor = seen(values)
    assert nsr(values, parse_calibration_method(name), tensor, spec) <= DECIBEL * nsr(values, MinMax(), tensor, spec)


NORMAL = np.random.default_rng(0).normal(size=100_000)
WIDTH = 2**-8
FLOATS = hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


METHODS: list[CalibrationMethod] = [
    MinMax(),
    Percentile(),
    Percentile(50),
    MeanSquaredError(),
    MeanSquaredError(4),
    MovingAverage(),
    Entropy(),
    Entropy(8),
    HistogramSearch(),
]


@settings(max_examples=60)
@given(FLOATS, st.sampled_from(METHODS))
def test_every_range_is_ordered_and_within_the_extremes(values: NDArray[np.float32], method: CalibrationMethod) -> None:
    tensor = seen(values)
    low, high = method(tensor, AFFINE)
    inner = MinMax()(tensor, AFFINE)
    assert inner[0] <= low <= high <= inner[1]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_constant_is_its_own_range(method: CalibrationMethod) -> None:
    assert method(seen(np.zeros(5)), AFFINE) == (0, 0)
    low, high = method(seen(np.full(5, 3.0)), AFFINE)
    assert high == 3.0
    assert low == 3.0


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_no_elements_have_no_range(method: CalibrationMethod) -> None:
    with pytest.raises(DataError, match="no elements in any sample"):
        method(seen([0.0][:0]), AFFINE)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_mask_constants_do_not_widen_a_range(method: CalibrationMethod) -> None:
    masked = np.concatenate([NORMAL, np.full(50_000, -3.4e38)])
    assert method(seen(masked), AFFINE) == method(seen(NORMAL), AFFINE)


def test_min_max_is_exact() -> None:
    assert MinMax()(seen(NORMAL, "range", "histogram"), AFFINE) == (NORMAL.min(), NORMAL.max())


@pytest.mark.parametrize("percent", [50.0, 90.0, 99.0, 99.9])
def test_a_percentile_cuts_half_of_the_rest_on_either_side(percent: float) -> None:
    low, high = Percentile(percent)(seen(NORMAL, "range", "histogram"), AFFINE)
    tail = (100 - percent) / 2
    expected = np.percentile(NORMAL, [tail, 100 - tail])
    assert (low, high) == pytest.approx(expected, abs=2 * WIDTH)


def test_the_whole_is_min_max() -> None:
    assert Percentile(100)(seen(NORMAL, "range", "histogram"), AFFINE) == MinMax()(
        seen(NORMAL, "range", "histogram"), AFFINE
    )


def test_a_percentile_is_interpolated_inside_a_bin() -> None:
    low, high = Percentile(80)(seen(np.repeat([0.0, 1024.0], [900, 100])), AFFINE)
    assert low == pytest.approx(0.5 / 9)
    assert high == 1024.0


PUBLISHED = [
    [
        [-0.059, 1.1674, 0.7119, -1.127],
        [-1.3974, 0.5077, -0.5601, 0.0683],
        [-0.0929, 0.9473, 0.7159, -0.4574],
    ],
    [[-0.0236, -0.7599, 1.029, 0.8914], [-1.1727, -1.2556, -0.2271, 0.9568], [-0.25, 1.4579, 1.4707, 0.4043]],
]


def averaged(values: list[Any], order: list[int], constant: float) -> tuple[float, float]:
    """Return the moving average of samples whose digests are their places, when they come in some order."""
    kinds = ("range", "sample-extremes")
    parts = [statistics({"t": values[index]}, *kinds, sample=f"{index:016x}") for index in order]
    return MovingAverage(constant)(reduce(CalibrationStatistics.merge, parts).of("t"), AFFINE)


def test_a_moving_average_is_that_of_pytorch_on_its_published_example() -> None:
    low, high = averaged([np.float32(values) for values in PUBLISHED], [0, 1], 0.01)
    assert (high - low) / 255 == pytest.approx(0.010064372792840004, rel=1e-6)
    assert round(-low / ((high - low) / 255)) == 139


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=8), st.randoms())
def test_a_moving_average_goes_by_the_digests_of_the_samples_and_not_by_their_arrival(
    values: list[float], random: random.Random
) -> None:
    expected = np.float64([min(values[0], 0), max(values[0], 0)])
    for value in values[1:]:
        expected += 0.5 * (np.float64([min(value, 0), max(value, 0)]) - expected)
    order = list(range(len(values)))
    random.shuffle(order)
    assert averaged([np.float32([value, 0]) for value in values], order, 0.5) == tuple(expected)


@pytest.mark.parametrize("mask", [-1e4, 1e4])
def test_a_sample_of_nothing_but_masks_does_not_count_in_a_moving_average(mask: float) -> None:
    data = [np.linspace(-end, 2 * end, 9) for end in (1.0, 2.0, 3.0)]
    assert averaged([np.full(9, mask), *data], [0, 1, 2, 3], 0.5) == averaged(data, [0, 1, 2], 0.5)


def test_a_moving_average_needs_to_tell_samples_apart() -> None:
    with pytest.raises(DataError, match="hold no sample-extremes"):
        MovingAverage()(seen(NORMAL, "range", "histogram"), AFFINE)


def test_a_fixed_range_asks_nobody() -> None:
    assert Fixed(-1, 2)(seen([0.0]), AFFINE) == (-1, 2)


TAILED = np.random.default_rng(1).standard_t(3, size=100_000)


def squared_error(values: NDArray[np.float64], low: float, high: float, levels: int) -> float:
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / (levels - 1)
    zero = np.rint(-low / scale)
    quantized = np.clip(np.rint(values / scale) + zero, 0, levels - 1)
    return float(np.mean(((quantized - zero) * scale - values) ** 2))


@pytest.mark.parametrize("levels", [16, 256])
def test_mse_clips_a_heavy_tail_and_lowers_the_error(levels: int) -> None:
    values = TAILED
    low, high = MeanSquaredError(levels)(seen(values), AFFINE)
    assert high < values.max()
    assert squared_error(values, low, high, levels) < 0.8 * squared_error(values, values.min(), values.max(), levels)


def test_mse_is_close_to_the_best_of_a_fine_search() -> None:
    values = np.abs(NORMAL)
    low, high = MeanSquaredError(16)(seen(values), AFFINE)
    best = min(squared_error(values, 0, end, 16) for end in np.linspace(1, values.max(), 400))
    assert squared_error(values, low, high, 16) <= 1.02 * best


def test_mse_keeps_the_ends_of_a_uniform_distribution() -> None:
    values = np.linspace(-1, 1, 50_001)
    low, high = MeanSquaredError()(seen(values), AFFINE)
    assert (low, high) == pytest.approx((-1, 1), abs=1 / 64)


@pytest.mark.parametrize("levels", [16, 256])
def test_expected_errors_are_close_to_those_of_the_elements(levels: int) -> None:
    ends = np.array([1.0, 2.5, 4.0])
    data = bins_of_data(seen(NORMAL))
    found = expected_errors(data, -ends, ends, Grid(levels)) * max(-data.minimum, data.maximum) ** 2
    assert found == pytest.approx([squared_error(NORMAL, -end, end, levels) for end in ends], rel=0.02)


def squared_error_of(values: NDArray[np.float64], ends: tuple[float, float], spec: QuantSpec) -> float:
    """Return the mean squared error of what quantized values make of values."""
    format = format_named(spec.format)
    parameters = params_from_range(*ends, format, symmetric=spec.symmetric)
    quantized = quantize(values.astype(np.float32), parameters, format)
    return float(np.mean((quantized.dequantize() - values.astype(np.float32)) ** 2, dtype=np.float64))


SPECS = [
    AFFINE,
    QuantSpec("uint8-7bit", symmetric=False),
    QuantSpec("int8", symmetric=False),
    QuantSpec("int8", symmetric=True),
    QuantSpec("uint4", symmetric=False),
    QuantSpec("uint16", symmetric=False),
    QuantSpec("float8e4m3fn"),
    QuantSpec("nf4"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.format} {spec.symmetric}")
@pytest.mark.parametrize("values", [NORMAL, TAILED, np.abs(TAILED), TAILED.clip(-0.5, 9)], ids=str)
def test_the_error_is_that_of_the_codes_of_the_spec(values: NDArray[np.float64], spec: QuantSpec) -> None:
    tensor = seen(values)
    found, widest = MeanSquaredError()(tensor, spec), MinMax()(tensor, spec)
    assert squared_error_of(values, found, spec) <= 1.01 * squared_error_of(values, widest, spec)
    low, high = widest
    for share in (0.3, 0.5, 0.8):
        assert squared_error_of(values, found, spec) <= 1.05 * squared_error_of(
            values, (share * low, share * high), spec
        )


@pytest.mark.parametrize(
    "spec", [QuantSpec("int16"), QuantSpec("uint16", symmetric=False), QuantSpec("int32")], ids=lambda spec: spec.format
)
@pytest.mark.parametrize("values", [NORMAL, TAILED, np.abs(TAILED)], ids=["normal", "tailed", "positive"])
def test_fine_codes_keep_a_tail_that_is_not_counted(values: NDArray[np.float64], spec: QuantSpec) -> None:
    tensor = seen(values, elements=1000)
    assert bins_of_data(tensor).counts[-1] == 0
    found = MeanSquaredError()(tensor, spec)
    assert squared_error_of(values, found, spec) <= 1.01 * squared_error_of(values, MinMax()(tensor, spec), spec)


def test_what_clipping_the_uncounted_ends_costs_is_expected_of_fine_codes() -> None:
    values = np.tile([-0.5, 0.5], 4000)
    values[1] = 8.0
    tensor = seen(values, elements=1000)
    data = bins_of_data(tensor)
    assert (data.counts[-1], data.maximum) == (0, 8.0)
    clipped, whole = expected_errors(data, np.full(2, -0.5), np.array([0.5, 8.0]), Grid(1 << 16))
    assert clipped == pytest.approx((7.5 / 8) ** 2 / data.counts.sum(), rel=1e-3)
    assert whole < 1e-9


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_float_codes_of_a_wide_range_are_not_evenly_spaced(share: float) -> None:
    spec, end = QuantSpec("float8e5m2"), share * float(np.abs(NORMAL).max())
    found = expected_errors(bins_of_data(seen(NORMAL)), np.array([-end]), np.array([end]), Grid.of(spec))
    measured = squared_error_of(NORMAL, (-end, end), spec) / np.square(np.abs(NORMAL).max())
    assert found == pytest.approx(measured, rel=0.05)
