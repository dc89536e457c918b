"""Range methods by name: the table, one that chooses among them, and those that other packages register."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxq.calibration.entropy import Entropy
from onnxq.calibration.evidence import Evidence, TensorEvidence
from onnxq.calibration.histogram_search import HistogramSearch
from onnxq.calibration.ranges import Extremes, Fixed, MinMax, MovingAverage, Percentile, RangeMethod, bins_of_data
from onnxq.calibration.squared_error import Grid, MeanSquaredError, expected_errors
from onnxq.calibration.value_range import Range
from onnxq.errors import SchemeError, did_you_mean
from onnxq.numerics.spec import Spec
from onnxq.system.plugins import load_registered, registered_names, wrap_plugin_errors

ENTRY_POINTS = "onnxq.ranges"
"""Group of entry points; each names a class or function that makes a `RangeMethod`."""

FIRST_RANGES: tuple[RangeMethod, ...] = (
    MinMax(),
    Percentile(99.999),
    Percentile(99.99),
    MeanSquaredError(),
    Percentile(99.9),
    Entropy(),
)
"""The range methods that are tried when the user names none; the first is taken where nothing is measured."""

_CANDIDATES: tuple[RangeMethod, ...] = (MinMax(), Percentile(99.99), Percentile(99.9), Entropy(), MeanSquaredError())
_KINDS = ("range", "histogram")
# A method that clips must be better than this share of the error of one before it.
_WORTH = 0.95


@dataclass(frozen=True)
class Auto:
    """For each tensor the method of least expected quantization error, min-max unless it pays.

    Args:
        levels: Number of codes, evenly spaced and with one for zero; None takes those of the spec.

    Raises:
        SchemeError: `levels` is below 2.
    """

    levels: int | None = None

    def __post_init__(self) -> None:
        if self.levels is not None and self.levels < 2:
            raise SchemeError(f"Auto levels are {self.levels}, expected at least 2, such as 256 for 8 bits")

    def choose(self, seen: TensorEvidence, spec: Spec) -> RangeMethod:
        """Return the method for a tensor.

        Raises:
            DataError: No element was seen.
        """
        lows, highs = np.array([method(seen, spec) for method in _CANDIDATES]).T
        errors = expected_errors(bins_of_data(seen), lows, highs, Grid.of(spec, self.levels))
        chosen = 0
        for index in range(1, len(errors)):
            if errors[index] < errors[chosen] * _WORTH:
                chosen = index
        return _CANDIDATES[chosen]

    def __call__(self, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
        """Return (low, high) of the chosen method.

        Raises:
            DataError: No element was seen.
        """
        return self.choose(seen, spec)(seen, spec)


RANGES: Mapping[str, Callable[..., RangeMethod]] = MappingProxyType(
    {
        "minmax": MinMax,
        "extremes": Extremes,
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
    make = RANGES.get(name) or load_registered(ENTRY_POINTS, name, "Range method")
    if make is None:
        known = [*RANGES, *registered_names(ENTRY_POINTS)]
        raise SchemeError(
            f"Range method {name!r} is unknown, expected one of {', '.join(known)}{did_you_mean(name, known)}"
        )
    options = _options(make)
    if separator and name in RANGES and not options:
        raise SchemeError(f"Range method {name!r} takes no number, found {numbers!r}; write {name!r} alone")
    # What may be left out is a number of codes.
    whole = bool(options) and (options[0].default is None or isinstance(options[0].default, int))
    try:
        given = [int(number) if whole else float(number) for number in numbers.split(",")] if separator else []
        with wrap_plugin_errors(f"Range method {text!r}") if name not in RANGES and not options else nullcontext():
            return make(*given)
    except (TypeError, ValueError) as error:
        wanted = ", ".join(option.name for option in options) or "its options"
        raise SchemeError(
            f"Range method {text!r} has {numbers!r} for {wanted}, expected {_example(name, options)}"
        ) from error


def range_by(method: RangeMethod, seen: TensorEvidence, spec: Spec) -> tuple[float, float]:
    """Return the range that a method finds for a tensor.

    Raises:
        DataError: No element was seen.
        SchemeError: The method, which may be a user's, fails or gives something else than a range.
    """

    def what() -> str:
        name = range_text(method) or getattr(method, "__name__", repr(method))
        return f"Range method {name!r} for tensor {seen.tensor!r}"

    with wrap_plugin_errors(what):
        low, high = map(float, method(seen, spec))
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(f"it found {low:g} to {high:g}, expected two finite numbers, the lower first")
    return low, high


def range_text(method: object) -> str:
    """Return what `parse_range` makes an equal method from; an empty string for one that has no name.

    >>> range_text(Percentile(99.9999999)), range_text(MinMax()), range_text(MeanSquaredError(16))
    ('percentile:99.9999999', 'minmax', 'mse:16')
    """
    for name, make in chain(RANGES.items(), _packaged()):
        if type(method) is make:
            given = [getattr(method, field.name) for field in _options(make)]
            numbers = ",".join(_number_text(number) for number in given if number is not None)
            return f"{name}:{numbers}" if numbers else name
    return ""


def _packaged() -> Iterator[tuple[str, object]]:
    """Yield what installed packages register and can be loaded, by name."""
    for name in registered_names(ENTRY_POINTS):
        with suppress(SchemeError):
            yield name, load_registered(ENTRY_POINTS, name, "Range method")


def _number_text(number: float) -> str:
    """Return a number with all of its digits."""
    return str(int(number)) if float(number).is_integer() and abs(number) < 2**53 else repr(float(number))


def kinds_read(methods: Iterable[object]) -> tuple[str, ...]:
    """Return the kinds of statistics that range methods read, each once."""
    return tuple(dict.fromkeys(kind for method in methods for kind in getattr(method, "kinds", _KINDS)))


def chosen_methods(method: object, specs: Mapping[str, Spec], evidence: Evidence) -> dict[str, str]:
    """Return which method a method that chooses has chosen for each tensor; nothing for one that does not."""
    if not isinstance(method, Auto):
        return {}
    seen = {tensor: evidence.of(tensor) for tensor in specs}
    return {name: repr(method.choose(one, specs[name])) for name, one in seen.items() if one.need(Range).count}


def _options(make: object) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(make) if isinstance(make, type) and dataclasses.is_dataclass(make) else ()


def _example(name: str, options: tuple[dataclasses.Field[Any], ...]) -> str:
    if options and options[0].default is None:
        return f"a number as in '{name}:256'"
    if options and options[0].default is not dataclasses.MISSING:
        return f"a number as in '{name}:{options[0].default}'"
    return f"numbers as in '{name}:-1,1'"
