"""Calibration methods: one contract for all of them, published results, measured errors, and their texts."""

from __future__ import annotations

import math
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
    ScaledBins,
    bins_of_data,
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

Values = NDArray[np.floating[Any]]
RANDOM = np.random.default_rng(2)
NORMAL = np.random.default_rng(0).normal(size=100_000)
TAILED = np.random.default_rng(1).standard_t(3, size=100_000)
LAPLACE = np.random.default_rng(0).laplace(size=100_000)
HOSTILE = {
    "one element": np.array([-1.5]),
    "a constant": np.full(9, 3.0),
    "zeros": np.zeros(9),
    "an outlier": np.append(RANDOM.normal(size=2000), 6e3),
    "heavy tails": RANDOM.standard_cauchy(2000),
    "far from zero": 1e6 + RANDOM.random(2000),
    "subnormal": 1e-41 * RANDOM.normal(size=2000),
    "largest": 5e37 * RANDOM.normal(size=2000),
    "negative": -np.abs(RANDOM.normal(size=2000)) - 1,
}
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
DECIBEL = 10**0.1


def spec_of(format: str, *, symmetric: bool | None = None) -> QuantSpec:
    return QuantSpec(format, symmetric=format_named(format).signed if symmetric is None else symmetric)


def squared_error(values: Values, ends: tuple[float, float], spec: QuantSpec) -> float:
    """Return the mean squared error of values that are quantized with a range."""
    format, rounded = format_named(spec.format), values.astype(np.float32)
    quantized = quantize(rounded, params_from_range(*ends, format, symmetric=spec.symmetric), format)
    return float(np.mean((quantized.dequantize() - rounded) ** 2, dtype=np.float64))


# The contract of every method.


@settings(max_examples=60)
@given(
    hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.sampled_from(METHODS),
)
def test_every_range_is_ordered_and_within_the_extremes(values: Values, method: CalibrationMethod) -> None:
    tensor = seen(values)
    low, high = method(tensor, AFFINE)
    least, greatest = MinMax()(tensor, AFFINE)
    assert least <= low <= high <= greatest


@pytest.mark.parametrize("name", sorted(set(CALIBRATION_METHODS) - {"fixed"}))
@pytest.mark.filterwarnings("error")
def test_a_range_of_any_data_in_any_format_lies_within_it_and_zero(name: str) -> None:
    method = parse_calibration_method(name)
    # The search of PyTorch takes the longest and depends on the bits only.
    formats = {format.bits if name == "histogram" else format.name: format for format in FORMATS.values()}
    for what, values in HOSTILE.items():
        tensor, rounded = seen(np.float32(values)), np.float32(values)
        for format in formats.values():
            for symmetric in {True, False} - {not format.signed, format.is_float}:
                low, high = find_range(method, tensor, spec_of(format.name, symmetric=symmetric))
                assert min(rounded.min(), 0) <= low <= high <= max(rounded.max(), 0), (what, format.name)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_constants_masks_and_nothing_have_the_ranges_that_they_should(method: CalibrationMethod) -> None:
    assert method(seen(np.zeros(5)), AFFINE) == (0, 0)
    assert method(seen(np.full(5, 3.0)), AFFINE) == (3, 3)
    masked = np.concatenate([NORMAL, np.full(50_000, -3.4e38)])
    assert method(seen(masked), AFFINE) == method(seen(NORMAL), AFFINE)
    with pytest.raises(DataError, match="no elements in any sample, expected some; leave it in float or add samples"):
        method(seen([]), AFFINE)


@pytest.mark.parametrize("name", sorted(CALIBRATION_METHODS))
def test_a_method_reads_the_kinds_that_it_says_and_its_text_makes_an_equal_one(name: str) -> None:
    text = "fixed:-1,2.5" if name == "fixed" else name
    method = parse_calibration_method(text)
    assert method == (Fixed(-1, 2.5) if name == "fixed" else CALIBRATION_METHODS[name]())
    assert parse_calibration_method(format_method(method)) == method
    values = np.concatenate([np.random.default_rng(0).normal(size=1000), [-1e4] * 500]).astype(np.float32)
    kinds = required_kinds([method])
    assert method(seen(values, *kinds), AFFINE) == method(seen(values), AFFINE)
    for missing in set(kinds) - {"range"}:
        with pytest.raises(DataError, match=f"statistics of tensor 't' hold no {missing}, expected one; calibrate"):
            method(seen(values, *(kind for kind in kinds if kind != missing)), AFFINE)


def test_kinds_are_those_of_all_methods_and_range_and_histogram_of_one_that_says_nothing() -> None:
    assert required_kinds([Half()]) == required_kinds(DEFAULT_METHODS) == ("range", "histogram")
    assert required_kinds([MinMax()]) == ("range",)


# Errors of quantized values.

FINE = [name for name in FORMATS if Grid.of(spec_of(name)).is_fine]
CLIPS_AS_TOLD = {"average", "percentile", "fixed"}
"""Methods that leave out as much as their numbers say, whatever the quantized values are."""
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], Values]] = {
    "normal": lambda random, size: random.normal(size=size),
    "laplace": lambda random, size: random.laplace(size=size),
    "rectified": lambda random, size: random.normal(size=size).clip(0),
    "tailed": lambda random, size: random.standard_t(3, size=size),
}


@cache
def of_samples(distribution: str) -> TensorStatistics:
    """Return the statistics of 64 samples, of each of which an eighth is counted."""
    random, observers = np.random.default_rng(0), Observers(wanted(["t"], elements=500))
    for index in range(64):
        observers.add("t", DISTRIBUTIONS[distribution](random, 4000).astype(np.float32), f"{index:032x}", index)
    return CalibrationStatistics(("",), observers.statistics()).of("t")


@pytest.mark.parametrize("name", sorted(set(CALIBRATION_METHODS) - CLIPS_AS_TOLD))
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_fine_codes_of_new_data_are_no_worse_than_those_of_min_max(name: str, distribution: str) -> None:
    new, tensor = DISTRIBUTIONS[distribution](np.random.default_rng(1), 50_000), of_samples(distribution)
    for spec in map(spec_of, FINE):
        ends, widest = (find_range(method, tensor, spec) for method in (parse_calibration_method(name), MinMax()))
        assert squared_error(new, ends, spec) <= DECIBEL * squared_error(new, widest, spec), spec.format


@pytest.mark.parametrize("format", FORMATS)
def test_the_least_error_is_no_worse_than_that_of_other_ranges(format: str) -> None:
    spec = spec_of(format)
    for what, values in {**HOSTILE, "normal": NORMAL[:2000], "positive": np.abs(TAILED[:2000])}.items():
        if what in ("subnormal", "largest"):
            continue
        tensor = seen(np.float32(values))
        ends, (low, high) = find_range(MeanSquaredError(), tensor, spec), MinMax()(tensor, spec)
        for share in (1, 0.8, 0.5, 0.3):
            scaled = squared_error(values, (share * low, share * high), spec)
            assert squared_error(values, ends, spec) <= DECIBEL * scaled, (what, share)


@pytest.mark.parametrize("levels", [16, 256])
@pytest.mark.parametrize("values", [TAILED, np.abs(NORMAL), TAILED.clip(-0.5, 9)], ids=["tails", "positive", "uneven"])
def test_the_least_error_is_close_to_that_of_a_fine_search(values: Values, levels: int) -> None:
    def error(low: float, high: float) -> float:
        scale = (high - low) / (levels - 1)
        zero = np.rint(-low / scale)
        quantized = np.clip(np.rint(values / scale) + zero, 0, levels - 1)
        return float(np.mean(((quantized - zero) * scale - values) ** 2))

    shares = np.linspace(0.05, 1, 20)
    low, high = min(values.min(), 0), max(values.max(), 0)
    best = min(error(low * a, high * b) for a in (shares if low else [1]) for b in shares)
    found = MeanSquaredError(levels)(seen(values), AFFINE)
    assert error(min(found[0], 0), found[1]) <= 1.05 * best
    ends = np.array([0.3, 0.5, 0.9]) * high
    scaled, lows = ScaledBins.of(bins_of_data(seen(values))), np.array([0.3, 0.5, 0.9]) * low
    expected = [error(*pair) / scaled.magnitude**2 for pair in zip(lows, ends, strict=True)]
    assert scaled.errors(lows / scaled.magnitude, ends / scaled.magnitude, Grid(levels)) == pytest.approx(
        expected, rel=0.05
    )


@pytest.mark.parametrize("spec", [spec_of(name) for name in (*FINE, "float8e5m2")], ids=lambda spec: spec.format)
def test_expected_errors_of_fine_and_of_float_codes_are_those_of_the_elements(spec: QuantSpec) -> None:
    tensor, scaled = seen(NORMAL), ScaledBins.of(bins_of_data(seen(NORMAL)))
    for share in (0.7, 1.0):
        low, high = -share * scaled.magnitude, share * scaled.magnitude
        (error,) = scaled.errors(np.array([-share]), np.array([share]), Grid.of(spec))
        measured = squared_error(NORMAL, (low, high), spec) / scaled.magnitude**2
        assert error == pytest.approx(measured, rel=0.05, abs=1e-12 if share == 1 else 3 * scaled.share)
    assert MeanSquaredError()(tensor, spec)[1] > 0.2 * NORMAL.max()


def test_clipping_an_end_that_no_counted_element_has_costs_as_much_as_one_element_of_fine_codes() -> None:
    values = np.tile([-0.5, 0.5], 4000)
    values[1] = 8.0
    data = bins_of_data(seen(values, elements=1000))
    scaled = ScaledBins.of(data)
    assert (data.counts[-1], data.maximum) == (0, 8.0)
    clipped, whole = scaled.errors(np.full(2, -0.5 / 8), np.array([0.5, 8.0]) / 8, Grid(1 << 16))
    assert clipped == pytest.approx((7.5 / 8) ** 2 / data.counts.sum(), rel=1e-3)
    assert whole < 1e-9


# Minimum and maximum, percentiles, averages.


def test_min_max_leaves_masks_out_and_extremes_do_not() -> None:
    masked = seen(np.concatenate([NORMAL, np.full(50_000, -1e4)]))
    assert MinMax()(masked, AFFINE) == (NORMAL.min(), NORMAL.max())
    assert Extremes()(masked, AFFINE) == (-1e4, NORMAL.max())
    assert Fixed(-1, 2)(masked, AFFINE) == (-1, 2)


@pytest.mark.parametrize("percent", [50.0, 90.0, 99.0, 99.9, 100.0])
def test_a_percentile_cuts_half_of_the_rest_on_either_side(percent: float) -> None:
    tail = (100 - percent) / 2
    expected = np.percentile(NORMAL, [tail, 100 - tail])
    assert Percentile(percent)(seen(NORMAL), AFFINE) == pytest.approx(expected, abs=2**-7 if percent < 100 else 0)


def test_a_percentile_is_interpolated_inside_a_bin() -> None:
    low, high = Percentile(80)(seen(np.repeat([0.0, 1024.0], [900, 100])), AFFINE)
    assert (low, high) == (pytest.approx(0.5 / 9), 1024.0)


PUBLISHED = [
    [[-0.059, 1.1674, 0.7119, -1.127], [-1.3974, 0.5077, -0.5601, 0.0683], [-0.0929, 0.9473, 0.7159, -0.4574]],
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


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=8), st.data())
def test_a_moving_average_goes_by_the_digests_of_the_samples_and_not_by_their_arrival(
    values: list[float], data: st.DataObject
) -> None:
    expected = np.float64([min(values[0], 0), max(values[0], 0)])
    for value in values[1:]:
        expected += 0.5 * (np.float64([min(value, 0), max(value, 0)]) - expected)
    order = data.draw(st.permutations(range(len(values))))
    assert averaged([np.float32([value, 0]) for value in values], list(order), 0.5) == tuple(expected)


@pytest.mark.parametrize("mask", [-1e4, 1e4])
def test_a_sample_of_nothing_but_masks_does_not_count_in_a_moving_average(mask: float) -> None:
    data = [np.linspace(-end, 2 * end, 9) for end in (1.0, 2.0, 3.0)]
    assert averaged([np.full(9, mask), *data], [0, 1, 2, 3], 0.5) == averaged(data, [0, 1, 2], 0.5)


# Entropy.


def outlying(outlier: float) -> Values:
    values = np.random.default_rng(0).normal(size=200_000)
    values[0] = outlier
    return values


@pytest.mark.parametrize(
    ("values", "least", "most"),
    [
        (outlying(25.0), 0, 0.3),
        (-outlying(25.0), 0, 0.3),
        (np.random.default_rng(0).standard_t(2, size=100_000), 0, 0.9),
        (np.random.default_rng(0).standard_t(5, size=100_000), 0, 0.9),
        (np.linspace(-1, 1, 100_001), 0.98, 1),
        (1e6 + np.random.default_rng(0).random(1000), 1, 1),
        (np.maximum(TAILED, 0), 0.01, 0.99),
    ],
    ids=["an outlier", "a negative one", "heavy tails", "lighter tails", "even", "far from zero", "positive"],
)
def test_entropy_clips_a_tail_and_nothing_else(values: Values, least: float, most: float) -> None:
    low, high = Entropy()(seen(values), AFFINE)
    assert least <= max(-low, high) / np.abs(values).max() <= most
    if values.min() >= 0:
        assert low == values.min()


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("values", [0.25 * outlying(6), np.abs(NORMAL)], ids=["both signs", "positive"])
def test_the_spike_at_zero_does_not_decide(values: Values, share: float) -> None:
    spiked = np.concatenate([values, np.zeros(int(share / (1 - share) * len(values)))])
    assert Entropy()(seen(spiked), AFFINE)[1] > 0.8 * Entropy()(seen(values), AFFINE)[1]


def test_fewer_levels_clip_more_and_are_half_of_the_codes() -> None:
    tensor = seen(LAPLACE)
    assert Entropy(16)(tensor, AFFINE)[1] < Entropy(128)(tensor, AFFINE)[1]
    levels = {"uint8": 128, "int8": 128, "uint8-7bit": 64, "uint4": 8, "nf4": 8, "int2": 2, "int2-narrow": 2}
    for format, half in levels.items():
        assert Entropy()(tensor, spec_of(format)) == Entropy(half)(tensor, spec_of(format)), format


@pytest.mark.parametrize("format", ["uint16", "int16", "int32"])
def test_codes_finer_than_the_histogram_get_all_elements(format: str) -> None:
    tensor = seen(LAPLACE, elements=1000)
    for method in (Entropy(), HistogramSearch()):
        assert method(tensor, spec_of(format)) == MinMax()(tensor, AFFINE)
    assert HistogramSearch(1 << 16)(tensor, AFFINE) == MinMax()(tensor, AFFINE)


# The search of PyTorch.


def outlier() -> Values:
    values = np.random.RandomState(0).standard_normal(2000).astype(np.float32)
    values[0] = 12
    return values


def test_the_range_of_an_outlier_is_that_of_pytorch_bit_for_bit() -> None:
    values, bins = outlier(), 2048
    low, high = float(values.min()), float(values.max())
    # As torch.histc counts.
    places = ((values - np.float32(low)) * np.float32(bins) / np.float32(high - low)).astype(np.int64)
    counts = np.bincount(np.minimum(places, bins - 1), minlength=bins)
    assert searched_range(counts, low, high, 256) == (-3.046143054962158, 11.992652893066406)
    assert searched_range(np.full(2048, 10), -1.0, 1.0, 256) == pytest.approx((-1, 1), abs=0.01)


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30, 1e-300, 1e300])
def test_our_own_bins_and_any_magnitude_serve_as_well(scale: float) -> None:
    ends = HistogramSearch()(seen(outlier().astype(np.float64) * scale), AFFINE)
    assert ends == pytest.approx((-3.046143 * scale, 11.99 * scale), rel=0.04)


def test_levels_are_all_of_the_type_though_half_are_used() -> None:
    tensor, half = seen(outlier()), QuantSpec("uint8-7bit", symmetric=False, method=Method.TORCH)
    assert HistogramSearch()(tensor, half) == HistogramSearch(256)(tensor, AFFINE)
    assert HistogramSearch(8)(tensor, half) != HistogramSearch(256)(tensor, AFFINE)


# Texts, and methods of installed packages.


@dataclass(frozen=True)
class Half:
    """A method of another package: a share of the extremes."""

    share: float = 0.5

    def __call__(self, seen: TensorStatistics, spec: QuantSpec) -> tuple[float, float]:
        extremes = seen.need(Range)
        return extremes.minimum * self.share, extremes.maximum * self.share


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
def test_methods_of_installed_packages_are_found_by_their_names() -> None:
    for text, ends in (("half", (-1, 2)), ("half:0.25", (-0.5, 1)), ("doubled", (-4, 8))):
        assert parse_calibration_method(text)(seen([-2.0, 4.0]), AFFINE) == ends
    assert parse_calibration_method(format_method(Half(0.3))) == Half(0.3)
    assert format_method(doubled()) == ""


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (Percentile(99.9), "percentile:99.9"),
        (Percentile(99.9999999), "percentile:99.9999999"),
        (Percentile(50), "percentile:50"),
        (Fixed(-0.1, 1 / 3), "fixed:-0.1,0.3333333333333333"),
        (Fixed(-1, 1e300), "fixed:-1,1e+300"),
        (MovingAverage(1e-9), "average:1e-09"),
        (MeanSquaredError(16), "mse:16"),
        (MinMax(), "minmax"),
    ],
)
def test_the_numbers_of_a_method_are_in_its_text(method: CalibrationMethod, text: str) -> None:
    assert format_method(method) == text
    assert parse_calibration_method(f" {text} ") == method


@pytest.mark.usefixtures("installed")
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
        ("mse:1", "MSE levels are 1, expected at least 2, such as 256 for 8 bits"),
        ("mse:2.5", "'2.5' for levels, expected a number as in 'mse:256'"),
        ("mse:2,3", "'2,3' for levels"),
        ("average:0", "Averaging constant is 0.0"),
        ("average:2", "Averaging constant is 2.0"),
        ("entropy:1", "Entropy levels are 1, expected 2 to 1024"),
        ("entropy:1025", "Entropy levels are 1025"),
        ("histogram:1", "Search levels are 1"),
        ("fixed", "'' for low, high, expected numbers as in 'fixed:-1,1'"),
        ("fixed:2,1", "Fixed range is 2.0 to 1.0"),
        ("fixed:-inf,1", "Fixed range is -inf to 1.0"),
        ("auto", "Calibration method 'auto' was removed; leave it out, and the search chooses"),
        ("hlf", "did you mean 'half'"),
        ("broken", "'broken' of .*:Nothing cannot be loaded"),
        ("doubled:3", "Calibration method 'doubled:3' failed: TypeError: .*doubled"),
        ("half:1,2", "'1,2' for share, expected a number as in 'half:0.5'"),
        ("half:much", "'much' for share, expected a number as in 'half:0.5'"),
    ],
)
def test_a_wrong_text_is_told_why(text: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        parse_calibration_method(text)


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


def test_a_range_is_two_plain_numbers() -> None:
    low, high = find_range(lambda seen, spec: np.float32([-0.1, 2]), seen([-2.0, 4.0]), AFFINE)
    assert (type(low), low, high) == (float, float(np.float32(-0.1)), 2.0)
