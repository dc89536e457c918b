"""Observing: array after array of one tensor goes in, statistics come out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import DataError, SchemeError, nearest
from onnxq.evidence.bins import MINIMUM_EXPONENT, add_bins, bin_of, bins_of, exponent_of, stride_of
from onnxq.evidence.tensor_statistics import EMPTY, MASK, TensorStatistics, merged_channels
from onnxq.extensions import registered, registered_names
from onnxq.samples.inputs import is_floating

ENTRY_POINTS = "onnxq.observers"
"""Group of entry points; each names a class or function that makes an `Observer`, called as `TensorObserver` is."""

_BLOCK = 1 << 16


class Observer(Protocol):
    """Anything that is shown the arrays of one tensor and turns them into statistics that can be merged."""

    def add(self, array: NDArray[Any], sample: int | None) -> None:
        """Take in one array of any shape, of the sample with that index."""
        ...

    def statistics(self) -> TensorStatistics:
        """Return the statistics of all that was added."""
        ...


def observer_named(name: str) -> Callable[[str, int | None, int | None], Observer]:
    """Return what makes observers: `TensorObserver` for the empty name, else what an installed package registers.

    Raises:
        SchemeError: No package registers it, or what it registers cannot be loaded.
    """
    if not name:
        return TensorObserver
    found = registered(ENTRY_POINTS, name, "Observer")
    if found is None:
        known = registered_names(ENTRY_POINTS)
        raise SchemeError(
            f"Observer {name!r} is unknown, expected one that an installed package registers as {ENTRY_POINTS}"
            + (f": {', '.join(known)}{nearest(name, known)}" if known else "; none does")
        )
    return found


class TensorObserver:
    """Counts elements into bins that grow with the range: bit for bit what merging the arrays' statistics gives.

    Args:
        name: The tensor, for errors.
        histogram_elements: A larger array is counted into the histogram at about that many evenly spaced elements;
            None counts all. With 0 only elements of at least `MASK` in magnitude are counted, which tell masks apart.
        axis: Keep the extremes of each channel along this axis too; None keeps none.
    """

    def __init__(self, name: str, histogram_elements: int | None, axis: int | None = None) -> None:
        self._name = name
        self._elements = histogram_elements
        self._axis = axis
        self._channels = np.zeros((0, 2))
        self._outer = _Bins()
        self._core: _Bins | None = None

    def add(self, array: NDArray[Any], sample: int | None) -> None:
        """Take in one array.

        Args:
            array: float16, bfloat16, float32, float64 or float8; may be empty.
            sample: The index of the sample, whose extremes are then kept, and for errors; rising.

        Raises:
            DataError: The dtype is no float type, an element is NaN or infinite, or the axis is not there or as long
                as before.
        """
        if not is_floating(array.dtype):
            raise DataError(
                f"Tensor {self._name!r} is {array.dtype.name}, expected a float type; leave it out of calibration"
            )
        values = array.reshape(-1)
        if values.dtype not in (np.float32, np.float64):
            values = values.astype(np.float32)
        if not values.size:
            return
        minimum, maximum = _ends(values)
        if not (math.isfinite(minimum) and math.isfinite(maximum)):
            bad = values.size - int(np.count_nonzero(np.isfinite(values)))
            at = "" if sample is None else f" in sample {sample}"
            raise DataError(
                f"Tensor {self._name!r} holds {bad} NaN or infinite values of {values.size}{at}, expected finite "
                "values; check the sample and the float model, or keep the tensor in float"
            )
        if self._axis is not None:
            self._add_channels(array, self._axis)
        if max(-minimum, maximum) >= MASK:
            self._add_masked(values, minimum, maximum, sample)
            return
        chosen = self._chosen(values)
        if self._core:
            self._core.take(values.size, minimum, maximum, chosen, sample)
        self._outer.take(values.size, minimum, maximum, chosen, sample)

    def statistics(self) -> TensorStatistics:
        """Return the statistics of all that was added."""
        outer = self._outer.statistics()
        core = self._core.statistics() if self._core else None
        return replace(outer, core=core, channels=self._channels.copy()) if outer.count else EMPTY

    def _add_channels(self, array: NDArray[Any], axis: int) -> None:
        if not -array.ndim <= axis < array.ndim:
            raise DataError(
                f"Tensor {self._name!r} has {array.ndim} axes, expected axis {axis} for its channels; observe it whole"
            )
        wide = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).astype(np.float64)
        # Adding 0.0 makes an extreme of -0.0 independent of the order of the elements.
        found = np.stack([wide.min(1), wide.max(1)], 1) + 0.0
        self._channels = merged_channels(self._channels, found) if len(self._channels) else found

    def _add_masked(self, values: NDArray[Any], minimum: float, maximum: float, sample: int | None) -> None:
        # Up to now, all elements were below the magnitude of masks.
        self._core = self._core or copy.deepcopy(self._outer)
        far = np.abs(values) >= MASK
        inner = values[~far]
        if inner.size:
            self._core.take(inner.size, *_ends(inner), self._chosen(inner), sample)
        chosen = values[far] if self._elements == 0 else self._chosen(values)
        self._outer.take(values.size, minimum, maximum, chosen, sample)

    def _chosen(self, values: NDArray[Any]) -> NDArray[Any]:
        return values[:0] if self._elements == 0 else values[:: stride_of(values.size, self._elements)]


class _Bins:
    """Count, extremes and a histogram whose bins become wider as the range grows."""

    def __init__(self) -> None:
        self._count = 0
        self._minimum, self._maximum = math.inf, -math.inf
        self._exponent, self._first, self._size = MINIMUM_EXPONENT, 0, 0
        self._counts = np.zeros(0, np.int64)
        self._samples: list[int] = []
        self._extremes: list[tuple[float, float]] = []

    def take(self, size: int, minimum: float, maximum: float, chosen: NDArray[Any], sample: int | None) -> None:
        """Take in so many elements of that range, of which the chosen ones are counted."""
        self._count += size
        if minimum < self._minimum or maximum > self._maximum:
            self._widen(min(minimum, self._minimum), max(maximum, self._maximum))
        if chosen.size and not self._counts.size:
            self._counts = np.zeros(self._size, np.int64)
        for start in range(0, chosen.size, _BLOCK):
            bins = bins_of(chosen[start : start + _BLOCK], self._exponent, self._first)
            self._counts += np.bincount(bins, minlength=self._size)
        if sample is not None:
            self._samples.append(sample)
            self._extremes.append((minimum, maximum))

    def statistics(self) -> TensorStatistics:
        """Return the statistics of what was taken in."""
        if not self._count:
            return EMPTY
        return TensorStatistics(
            self._count,
            self._minimum,
            self._maximum,
            self._exponent,
            self._first,
            self._counts.copy(),
            samples=np.array(self._samples, np.int64),
            extremes=np.array(self._extremes, np.float64).reshape(-1, 2),
        )

    def _widen(self, minimum: float, maximum: float) -> None:
        exponent = exponent_of(minimum, maximum)
        first = bin_of(minimum, exponent)
        size = bin_of(maximum, exponent) - first + 1
        if self._counts.size:
            counts = np.zeros(size, np.int64)
            add_bins(counts, self._counts, self._first, exponent - self._exponent, first)
            self._counts = counts
        self._minimum, self._maximum = minimum, maximum
        self._exponent, self._first, self._size = exponent, first, size


def _ends(values: NDArray[Any]) -> tuple[float, float]:
    # Adding 0.0 makes an extreme of -0.0 independent of the order of the elements.
    return float(np.minimum.reduce(values)) + 0.0, float(np.maximum.reduce(values)) + 0.0


def observe(
    array: NDArray[Any],
    *,
    name: str = "tensor",
    sample: int | None = None,
    histogram_elements: int | None = None,
    axis: int | None = None,
) -> TensorStatistics:
    """Return the statistics of one float array of any shape.

    Count and extremes are always exact. Without `histogram_elements`, observing arrays one by one and merging equals
    observing all of them at once.

    Args:
        array: float16, bfloat16, float32, float64 or float8; may be empty.
        name: The tensor, for errors.
        sample: The index of the sample, whose extremes are then kept, and for errors.
        histogram_elements: A larger array is counted into the histogram at about that many evenly spaced elements;
            None counts all, 0 none but those of at least `MASK` in magnitude.
        axis: Keep the extremes of each channel along this axis too.

    Raises:
        DataError: The dtype is no float type, or an element is NaN or infinite.

    >>> observe(np.float32([0, 1, 1])).maximum
    1.0
    """
    observer = TensorObserver(name, histogram_elements, axis)
    observer.add(array, sample)
    return observer.statistics()
