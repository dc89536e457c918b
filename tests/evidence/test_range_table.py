from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest

from onnxq import extensions
from onnxq.errors import DataError, SchemeError
from onnxq.evidence.entropy import Entropy
from onnxq.evidence.histogram_search import HistogramSearch
from onnxq.evidence.observer import observe
from onnxq.evidence.range_table import ENTRY_POINTS, RANGES, Auto, needs_histogram, parse_range
from onnxq.evidence.ranges import (
    Fixed,
    MeanSquaredError,
    MinMax,
    MovingAverage,
    Percentile,
    RangeMethod,
    expected_errors,
)
from onnxq.evidence.tensor_statistics import TensorStatistics


class Half:
    """A method of somebody else: a share of the extremes."""

    def __init__(self, share: float = 0.5) -> None:
        self.share = share

    def __call__(self, statistics: TensorStatistics) -> tuple[float, float]:
        return statistics.minimum * self.share, statistics.maximum * self.share


def doubled() -> RangeMethod:
    return lambda statistics: (2 * statistics.minimum, 2 * statistics.maximum)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a package is installed that registers the methods above, and one that is broken."""
    entries = EntryPoints(
        EntryPoint(name, f"{__name__}:{target}", ENTRY_POINTS)
        for name, target in (("half", "Half"), ("doubled", "doubled"), ("broken", "Nothing"))
    )
    monkeypatch.setattr(extensions, "entry_points", lambda **wanted: entries.select(**wanted))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("text", "expected"), [("half", (-1, 2)), ("half:0.25", (-0.5, 1)), ("doubled", (-4, 8))])
def test_a_method_of_an_installed_package_is_found_by_its_name(text: str, expected: tuple[float, float]) -> None:
    assert parse_range(text)(observe(np.float32([-2, 4]))) == expected


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hlf", "did you mean 'half'"),
        ("broken", "'broken' of .*:Nothing cannot be loaded"),
        ("doubled:3", "'doubled:3' has '3' for its options"),
        ("half:much", "'much' for its options"),
    ],
)
def test_a_wrong_method_of_an_installed_package_is_told_why(text: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        parse_range(text)


def test_auto_keeps_all_of_an_even_distribution_and_clips_a_heavy_tail() -> None:
    assert Auto().choose(observe(np.linspace(-1, 1, 50_001))) == MinMax()
    tailed = observe(np.random.default_rng(0).standard_t(2, size=100_000))
    chosen = Auto().choose(tailed)
    assert chosen != MinMax()
    ends = np.array([MinMax()(tailed), chosen(tailed)]).T
    before, after = expected_errors(tailed, *ends, 256)
    assert after < 0.9 * before


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("minmax", MinMax()),
        ("percentile", Percentile(99.99)),
        ("percentile:99.9", Percentile(99.9)),
        ("mse", MeanSquaredError(256)),
        ("mse:16", MeanSquaredError(16)),
        ("average", MovingAverage()),
        ("average:0.1", MovingAverage(0.1)),
        ("entropy", Entropy(128)),
        ("histogram", HistogramSearch(256)),
        ("fixed:-1,2.5", Fixed(-1, 2.5)),
        ("auto:16", Auto(16)),
    ],
)
def test_methods_are_parsed(text: str, method: RangeMethod) -> None:
    assert parse_range(text) == method


@pytest.mark.parametrize("name", sorted(set(RANGES) - {"fixed"}))
def test_every_method_is_parsed_by_its_name(name: str) -> None:
    assert parse_range(name) == RANGES[name]()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("percentil", "did you mean 'percentile'"),
        ("", "Range method '' is unknown"),
        ("minmax:3", "'minmax' takes no number, found '3'"),
        ("percentile:high", "'high' for percent, expected a number as in 'percentile:99.99'"),
        ("percentile:0", "Percentile is 0.0, expected above 0"),
        ("percentile:nan", "Percentile is nan"),
        ("percentile:101", "Percentile is 101.0"),
        ("mse:1", "MSE levels are 1, expected at least 2"),
        ("mse:2.5", "'2.5' for levels"),
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
        parse_range(text)


@pytest.mark.parametrize("name", sorted(RANGES))
def test_a_method_says_whether_it_reads_a_histogram(name: str) -> None:
    method = parse_range(name if name != "fixed" else "fixed:-1,1")
    values = np.concatenate([np.random.default_rng(0).normal(size=1000), [-1e4] * 500]).astype(np.float32)
    full, extremes = observe(values, sample=0), observe(values, sample=0, histogram_elements=0)
    if not needs_histogram(method):
        assert method(extremes) == method(full)
    else:
        with pytest.raises(DataError, match="hold extremes and no histogram"):
            method(extremes)


def test_a_method_that_says_nothing_is_given_a_histogram() -> None:
    assert needs_histogram(Half())
