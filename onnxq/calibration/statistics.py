"""What calibration saw of each tensor: a commutative monoid, exact for any order, split or number of shards."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.arrays import npz_arrays
from onnxq.calibration.inputs import is_floating
from onnxq.errors import DataError, OutputError

BINS = 4096
"""Most bins of a histogram."""
MASK = 8192.0
"""Least magnitude of an attention-mask constant: -1e4 with a score added to it still counts."""

_FORMAT = "onnxq statistics 1"
_MINIMUM_EXPONENT = -1074
_BLOCK = 1 << 16


@dataclass(frozen=True, eq=False)
class TensorStatistics:
    """Count, extremes and histogram of the elements of one tensor.

    Args:
        count: Number of elements seen.
        minimum: Exact least element; +inf if none was seen.
        maximum: Exact greatest element; -inf if none was seen.
        exponent: Bins are ``2**exponent`` wide; a function of `minimum` and `maximum` only, so merging is exact.
        first: Bin ``i`` of `counts` covers ``[(first + i) * 2**exponent, (first + i + 1) * 2**exponent)``.
        counts: Elements per bin, int64 of shape (bins,), at most `BINS` bins; of all elements, or of an even selection
            where `observe` was given a limit.
        core: Statistics of the elements below `MASK` in magnitude if some are not, else None.
    """

    count: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    exponent: int = _MINIMUM_EXPONENT
    first: int = 0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    core: TensorStatistics | None = None

    @property
    def width(self) -> float:
        """The width of a bin."""
        return math.ldexp(1.0, self.exponent)

    @property
    def edges(self) -> NDArray[np.float64]:
        """The bin edges, float64 of shape (bins + 1,)."""
        return np.ldexp(np.arange(self.first, self.first + len(self.counts) + 1, dtype=np.float64), self.exponent)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TensorStatistics)
            and (self.count, self.minimum, self.maximum) == (other.count, other.minimum, other.maximum)
            and (self.exponent, self.first) == (other.exponent, other.first)
            and np.array_equal(self.counts, other.counts)
            and self.core == other.core
        )

    def __hash__(self) -> int:
        return hash((self.count, self.minimum, self.maximum))


EMPTY = TensorStatistics()
"""The statistics of no elements, the neutral element of `merge`."""


def observe(
    array: NDArray[Any], *, name: str = "tensor", sample: int | None = None, histogram_elements: int | None = None
) -> TensorStatistics:
    """Return the statistics of one float array of any shape.

    Count and extremes are always exact. Without `histogram_elements`, observing arrays one by one and merging equals
    observing all of them at once.

    Args:
        array: float16, bfloat16, float32, float64 or float8; may be empty.
        name: The tensor, for errors.
        sample: The index of the sample, for errors.
        histogram_elements: A larger array is counted into the histogram at about that many evenly spaced elements.

    Raises:
        DataError: The dtype is no float type, or an element is NaN or infinite.

    >>> observe(np.float32([0, 1, 1])).maximum
    1.0
    """
    if not is_floating(array.dtype):
        raise DataError(f"Tensor {name!r} is {array.dtype.name}, expected a float type; leave it out of calibration")
    values = array.reshape(-1)
    if values.dtype not in (np.float32, np.float64):
        values = values.astype(np.float32)
    if not values.size:
        return EMPTY
    minimum, maximum = float(values.min()), float(values.max())
    if not (math.isfinite(minimum) and math.isfinite(maximum)):
        bad = values.size - int(np.count_nonzero(np.isfinite(values)))
        at = "" if sample is None else f" in sample {sample}"
        raise DataError(
            f"Tensor {name!r} holds {bad} NaN or infinite values of {values.size}{at}, expected finite values; "
            "check the sample and the float model, or keep the tensor in float"
        )
    outer = _histogram(values, minimum, maximum, histogram_elements)
    if max(-minimum, maximum) < MASK:
        return outer
    inner = values[np.abs(values) < MASK]
    core = _histogram(inner, float(inner.min()), float(inner.max()), histogram_elements) if inner.size else EMPTY
    return replace(outer, core=core)


def merge(a: TensorStatistics, b: TensorStatistics) -> TensorStatistics:
    """Return the statistics of the elements of both: bit for bit what one observation of all of them gives."""
    if not a.count or not b.count:
        return a if a.count else b
    minimum, maximum = min(a.minimum, b.minimum), max(a.maximum, b.maximum)
    exponent = _exponent(minimum, maximum)
    first = _bin(minimum, exponent)
    counts = np.zeros(_bin(maximum, exponent) - first + 1, np.int64)
    for part in (a, b):
        if exponent == part.exponent:
            counts[part.first - first : part.first - first + len(part.counts)] += part.counts
        else:
            # Numpy shifts by at most 63, which already leaves nothing but the sign.
            bins = np.arange(part.first, part.first + len(part.counts)) >> min(exponent - part.exponent, 63)
            np.add.at(counts, bins - first, part.counts)
    core = None if a.core is None and b.core is None else merge(_core(a), _core(b))
    return replace(_statistics(a.count + b.count, minimum, maximum, counts), core=core)


@dataclass(frozen=True)
class Statistics:
    """What calibration saw: the number of samples, and the statistics of each tensor by name."""

    samples: int = 0
    tensors: Mapping[str, TensorStatistics] = field(default_factory=lambda: MappingProxyType({}))

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of the samples of both; tensors that only one has are kept."""
        names = dict.fromkeys([*self.tensors, *other.tensors])
        merged = {name: merge(self.tensors.get(name, EMPTY), other.tensors.get(name, EMPTY)) for name in names}
        return Statistics(self.samples + other.samples, MappingProxyType(merged))

    def save(self, path: Path) -> None:
        """Write one ``.npz`` file without pickles: a JSON header and the counts of all bins.

        Raises:
            OutputError: The file cannot be written; nothing is left behind.
        """
        chains = {name: [part for part in (tensor, tensor.core) if part] for name, tensor in self.tensors.items()}
        header = {
            "format": _FORMAT,
            "samples": self.samples,
            "tensors": {
                name: [[part.count, part.minimum, part.maximum, len(part.counts)] for part in parts]
                for name, parts in chains.items()
            },
        }
        arrays = {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "counts": np.concatenate([EMPTY.counts, *(part.counts for parts in chains.values() for part in parts)]),
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as stream:
                np.savez_compressed(stream, allow_pickle=False, **arrays)
            temporary.replace(path)
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}; choose another place") from error
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> Statistics:
        """Read what `save` wrote.

        Raises:
            DataError: The file cannot be read, or is not what `save` wrote.
        """
        arrays = npz_arrays(path)
        try:
            header = json.loads(arrays["header"].read().tobytes())
            counts = arrays["counts"].read().astype(np.int64, casting="safe")
            ends = np.cumsum([bins for parts in header["tensors"].values() for *_, bins in parts], dtype=np.int64)
            pieces = iter(np.split(counts, ends))
            tensors = {
                name: _chained(
                    [_restored(count, minimum, maximum, next(pieces)) for count, minimum, maximum, _ in parts]
                )
                for name, parts in header["tensors"].items()
            }
            found, samples = header["format"], int(header["samples"])
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise DataError(
                f"{path} does not hold calibration statistics ({error}), expected a file of onnxq; calibrate again"
            ) from error
        if found != _FORMAT:
            raise DataError(f"{path} has format {found!r}, expected {_FORMAT!r}; calibrate again")
        return Statistics(samples, MappingProxyType(tensors))


def _chained(parts: Sequence[TensorStatistics]) -> TensorStatistics:
    return parts[0] if len(parts) == 1 else replace(parts[0], core=parts[1])


def _restored(count: int, minimum: float, maximum: float, counts: NDArray[np.int64]) -> TensorStatistics:
    if not len(counts):
        return EMPTY
    restored = _statistics(int(count), float(minimum), float(maximum), counts)
    last = _bin(restored.maximum, restored.exponent)
    if len(counts) != last - restored.first + 1 or counts.min() < 0 or not 0 < counts.sum() <= count:
        raise ValueError("counts contradict the extremes")
    return restored


def _statistics(count: int, minimum: float, maximum: float, counts: NDArray[np.int64]) -> TensorStatistics:
    exponent = _exponent(minimum, maximum)
    return TensorStatistics(count, minimum, maximum, exponent, _bin(minimum, exponent), counts)


def _core(statistics: TensorStatistics) -> TensorStatistics:
    return statistics if statistics.core is None else statistics.core


def _histogram(values: NDArray[Any], minimum: float, maximum: float, elements: int | None) -> TensorStatistics:
    # Adding 0.0 makes an extreme of -0.0 independent of the order of the elements.
    minimum, maximum = minimum + 0.0, maximum + 0.0
    exponent = _exponent(minimum, maximum)
    first, last = _bin(minimum, exponent), _bin(maximum, exponent)
    counts = np.zeros(last - first + 1, np.int64)
    chosen = values[:: _stride(values.size, elements)]
    for start in range(0, chosen.size, _BLOCK):
        bins = _bins(chosen[start : start + _BLOCK], exponent)
        counts += np.bincount(bins - first, minlength=len(counts))
    return _statistics(values.size, minimum, maximum, counts)


def _stride(size: int, elements: int | None) -> int:
    """Return a step that takes about `elements` of `size`; sharing no factor with any axis, it visits all of each."""
    if elements is None or size <= elements:
        return 1
    stride = size // elements
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


def _bins(values: NDArray[Any], exponent: int) -> NDArray[np.int64]:
    # Multiplying by a power of two from 1 to 2**126 only moves the exponent of a float32, so nothing is rounded.
    if values.dtype == np.float32 and -126 <= exponent <= 0:
        return np.floor(values * np.float32(math.ldexp(1.0, -exponent))).astype(np.int64)
    wide = values.astype(np.float64)
    bins = np.floor(np.ldexp(wide, -exponent)).astype(np.int64)
    # A negative denormal may become -0.0 and lose its sign.
    bins[(bins == 0) & (wide < 0)] = -1
    return bins


def _bin(value: float, exponent: int) -> int:
    index = math.floor(math.ldexp(value, -exponent))
    return -1 if index == 0 and value < 0 else index


def _exponent(minimum: float, maximum: float) -> int:
    """Return the least exponent with which at most `BINS` bins cover the range and bin numbers are exact in float64."""
    magnitude = max(-minimum, maximum)
    if magnitude == 0:
        return _MINIMUM_EXPONENT
    finest = math.frexp(magnitude)[1] - 53
    # Halving large extremes keeps their difference finite; halving tiny ones would lose it.
    halving = -1 if magnitude > 1 else 0
    spread = math.frexp(math.ldexp(maximum, halving) - math.ldexp(minimum, halving))[1] - halving
    exponent = max(_MINIMUM_EXPONENT, finest, spread - BINS.bit_length() - 1 if maximum > minimum else finest)
    while _bin(maximum, exponent) - _bin(minimum, exponent) >= BINS:
        exponent += 1
    return exponent
