"""Range methods by name: the table, one that chooses among them, and those that other packages register."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxq.errors import SchemeError, nearest
from onnxq.evidence.entropy import Entropy
from onnxq.evidence.histogram_search import HistogramSearch
from onnxq.evidence.ranges import (
    Fixed,
    MeanSquaredError,
    MinMax,
    MovingAverage,
    Percentile,
    RangeMethod,
    expected_errors,
    histogram_of,
)
from onnxq.evidence.statistics import Statistics
from onnxq.evidence.tensor_statistics import TensorStatistics
from onnxq.extensions import registered, registered_names

ENTRY_POINTS = "onnxq.ranges"
"""Group of entry points; each names a class or function that makes a `RangeMethod`."""

_CANDIDATES: tuple[RangeMethod, ...] = (MinMax(), Percentile(99.99), Percentile(99.9), Entropy(), MeanSquaredError())
# A method that clips must be better than this share of the error of one before it.
_WORTH = 0.95


@dataclass(frozen=True)
class Auto:
    """For each tensor the method of least expected quantization error with `levels` codes, min-max unless it pays.

    Raises:
        SchemeError: `levels` is below 2.
    """

    levels: int = 256

    def __post_init__(self) -> None:
        if self.levels < 2:
            raise SchemeError(f"Auto levels are {self.levels}, expected at least 2, such as 256 for 8 bits")

    def choose(self, statistics: TensorStatistics) -> RangeMethod:
        """Return the method for a tensor.

        Raises:
            DataError: No element was seen.
        """
        data = histogram_of(statistics)
        lows, highs = np.array([method(data) for method in _CANDIDATES]).T
        errors = expected_errors(data, lows, highs, self.levels)
        chosen = 0
        for index in range(1, len(errors)):
            if errors[index] < errors[chosen] * _WORTH:
                chosen = index
        return _CANDIDATES[chosen]

    def __call__(self, statistics: TensorStatistics) -> tuple[float, float]:
        """Return (low, high) of the chosen method.

        Raises:
            DataError: No element was seen.
        """
        return self.choose(statistics)(statistics)


RANGES: Mapping[str, Callable[..., RangeMethod]] = MappingProxyType(
    {
        "minmax": MinMax,
        "average": MovingAverage,
        "percentile": Percentile,
        "entropy": Entropy,
        "mse": MeanSquaredError,
        "histogram": HistogramSearch,
        "fixed": Fixed,
        "auto": Auto,
    }
)


def parse_range(text: str) -> RangeMethod:
    """Return the range method for ``NAME`` or ``NAME:NUMBER``, such as ``percentile:99.9``, ``mse:16``, ``fixed:-1,1``.

    Names are those of `RANGES` and those that installed packages register as entry points of the group
    ``onnxq.ranges``: what such an entry point names is called with the numbers.

    Raises:
        SchemeError: The name is unknown, or its numbers are none or not allowed.

    >>> parse_range("percentile:99.9")
    Percentile(percent=99.9)
    """
    name, separator, numbers = text.strip().partition(":")
    make = RANGES.get(name) or registered(ENTRY_POINTS, name, "Range method")
    if make is None:
        known = [*RANGES, *registered_names(ENTRY_POINTS)]
        raise SchemeError(f"Range method {name!r} is unknown, expected one of {', '.join(known)}{nearest(name, known)}")
    options = _options(make)
    if separator and name in RANGES and not options:
        raise SchemeError(f"Range method {name!r} takes no number, found {numbers!r}; write {name!r} alone")
    whole = bool(options) and isinstance(options[0].default, int)
    try:
        given = [int(number) if whole else float(number) for number in numbers.split(",")] if separator else []
        return make(*given)
    except (TypeError, ValueError) as error:
        wanted = ", ".join(option.name for option in options) or "its options"
        raise SchemeError(
            f"Range method {text!r} has {numbers!r} for {wanted}, expected {_example(name, options)}"
        ) from error


def range_text(method: object) -> str:
    """Return what `parse_range` makes a method of the table from; an empty string for any other.

    >>> range_text(Percentile(99.99)), range_text(MinMax())
    ('percentile:99.99', 'minmax')
    """
    for name, make in RANGES.items():
        if type(method) is make:
            numbers = ",".join(f"{getattr(method, field.name):g}" for field in _options(make))
            return f"{name}:{numbers}" if numbers else name
    return ""


def needs_histogram(method: object) -> bool:
    """Return whether a method reads more than the extremes, as it does unless it has ``histogram = False``."""
    return bool(getattr(method, "histogram", True))


def chosen_methods(method: object, tensors: Iterable[str], statistics: Statistics) -> dict[str, str]:
    """Return which method a method that chooses has chosen for each tensor; nothing for one that does not."""
    if not isinstance(method, Auto):
        return {}
    seen = {name: statistics.tensors[name] for name in tensors}
    return {name: repr(method.choose(one)) for name, one in seen.items() if one.count}


def _options(make: object) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(make) if isinstance(make, type) and dataclasses.is_dataclass(make) else ()


def _example(name: str, options: tuple[dataclasses.Field[Any], ...]) -> str:
    if options and options[0].default is not dataclasses.MISSING:
        return f"a number as in '{name}:{options[0].default}'"
    return f"numbers as in '{name}:-1,1'"
