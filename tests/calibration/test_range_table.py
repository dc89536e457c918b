from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from observations import AFFINE, evidence, seen, wanted

from onnxq.calibration.accumulators import Range
from onnxq.calibration.kinds import Observers
from onnxq.calibration.methods import (
    CALIBRATION_METHODS,
    DEFAULT_METHODS,
    ENTRY_POINTS,
    Auto,
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
    list_chosen_methods,
    parse_calibration_method,
    required_kinds,
)
from onnxq.calibration.statistics import CalibrationStatistics, TensorStatistics
from onnxq.errors import DataError, SchemeError
from onnxq.numerics.affine import params_from_range, quantize
from onnxq.numerics.formats import FORMATS, format_named
from onnxq.numerics.spec import QuantSpec
from onnxq.system import plugins


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


def test_auto_keeps_all_of_an_even_distribution_and_clips_a_heavy_tail() -> None:
    assert Auto().choose(seen(np.linspace(-1, 1, 50_001)), AFFINE) == MinMax()
    tailed = seen(np.random.default_rng(0).standard_t(2, size=100_000))
    chosen = Auto().choose(tailed, AFFINE)
    assert chosen != MinMax()
    ends = np.array([MinMax()(tailed, AFFINE), chosen(tailed, AFFINE)]).T
    before, after = expected_errors(bins_of_data(tailed), *ends, Grid(256))
    assert after < 0.9 * before


def test_auto_keeps_a_tail_that_is_not_counted_where_codes_are_fine() -> None:
    tensor = seen(np.random.default_rng(0).normal(size=100_000), elements=1000)
    assert Auto().choose(tensor, QuantSpec("uint16", symmetric=False)) == MinMax()


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
        ("auto:16", Auto(16)),
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
        ("auto:1", "Auto levels are 1"),
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


def test_what_a_method_chose_is_told_for_what_was_seen() -> None:
    found = evidence({"a": np.linspace(-1, 1, 5000), "b": np.zeros(0)})
    assert list_chosen_methods(Auto(), {"a": AFFINE, "b": AFFINE}, found) == {"a": "MinMax()"}
    assert list_chosen_methods(MinMax(), {"a": AFFINE}, found) == {}


def raises(seen: Any, spec: Any) -> tuple[float, float]:
    raise ZeroDivisionError("no counts")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (raises, "'raises' for tensor 't' failed: ZeroDivisionError: no counts; correct it, or do without it"),
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
"""Methods that leave out what their numbers say, whatever the codes are."""
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


def noise(values: NDArray[np.float32], method: CalibrationMethod, tensor: TensorStatistics, spec: QuantSpec) -> float:
    """Return the squared error of codes of the range that a method finds."""
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
    assert noise(new, parse_calibration_method(name), tensor, spec) <= DECIBEL * noise(new, MinMax(), tensor, spec)


@pytest.mark.parametrize("name", sorted(set(CALIBRATION_METHODS) - {"fixed"}))
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("error")
def test_a_range_of_any_data_lies_within_it_and_zero(name: str, format: str) -> None:
    for symmetric in {True, False} - {not format_named(format).signed, format_named(format).is_float}:
        for what, values in HOSTILE.items():
            tensor = seen(np.float32(values))
            low, high = find_range(parse_calibration_method(name), tensor, QuantSpec(format, symmetric=symmetric))
            assert min(np.float32(values).min(), 0) <= low <= high <= max(np.float32(values).max(), 0), what


@pytest.mark.parametrize("name", ["mse", "auto"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("what", ["an outlier", "heavy tails", "far from zero", "negative"])
def test_the_least_error_of_data_is_no_worse_than_that_of_min_max(name: str, format: str, what: str) -> None:
    spec, values = QuantSpec(format, symmetric=format_named(format).signed), np.float32(HOSTILE[what])
    tensor = seen(values)
    assert noise(values, parse_calibration_method(name), tensor, spec) <= DECIBEL * noise(
        values, MinMax(), tensor, spec
    )
