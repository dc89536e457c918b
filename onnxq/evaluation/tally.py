"""What is counted and summed of one output while two models are compared, sample by sample: the one measure of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxq.data.inputs import is_floating
from onnxq.evaluation.bounds import RISK, Energies, lower_bound, of_files, spread_of_parts
from onnxq.evaluation.joined import Part
from onnxq.evaluation.labels import decibels_of_labels, telling
from onnxq.evaluation.probabilities import Rows, are_probabilities, expected_noises, unseen_noise, unsure_rows
from onnxq.evaluation.worst_places import Place, furthest
from onnxq.failures import tolerated
from onnxq.numerics.numerics import signal_to_noise
from onnxq.runtime.sessions import Array
from onnxq.system.remembering import remembered_of_array

_FLOAT32 = np.dtype(np.float32)
# Less signal is summed in float64, as squares of its errors may be too small for float32.
_FAINT = 1e-12
# Squares of larger numbers, and of smaller ones, are no float64.
_LARGE, _SMALL = 1e140, 1e-140


class Tally:
    """Energies and counts of one output.

    Attributes:
        is_float: whether any of it is.
        same_shapes: whether every shape is the reference's.
        finite: whether the candidate is finite wherever the reference is.
        elements: how many were compared.
        skipped: how many were not, as the reference is NaN or infinite there.
        energies: of each sample.
    """

    def __init__(self) -> None:
        self.is_float = self.halves = False
        self.same_shapes = self.finite = True
        self.equal = self.compared = self.elements = self.skipped = 0
        self.energies: list[Energies] = []
        self.counts: list[tuple[int, int]] = []
        self.spreads: list[float | None] = []
        self._unit = 0.0
        self._arrays = 0
        self._rows: list[Rows] = []

    def add_sample(self, expected: Any, found: Any) -> None:
        """Add what both models gave for a sample."""
        equal, compared = self.equal, self.compared
        self.energies.append((0.0, 0.0))
        self._add(expected, found, ())
        self.counts.append((self.compared - compared - (self.equal - equal), self.compared - compared))

    def bound(self, risk: float = RISK, files: Sequence[str] = ()) -> float:
        """Return the lower confidence bound in decibels of the SQNR over all other samples, see `lower_bound`.

        Of probabilities, what the errors would have done to rows that are as sure, and to one that is less sure than
        all, stands for what was seen; see `expected_noises` and `unseen_noise`.

        Args:
            risk: how often it may be wrong; see `risk_of_look`.
            files: of each sample, see `of_files`.
        """
        expected = self._expected
        if not (self.finite and self.same_shapes and math.isfinite(sum(map(sum, expected)))):
            return -math.inf
        unseen = 0.0
        if self._is_probable:
            # Without this term the bound still is one of what was seen.
            with tolerated("the error of probabilities that were not seen"):
                unseen = unseen_noise(self._rows, halves=self.halves)
        energies = [(signal, noise + unseen * bool(signal)) for signal, noise in expected]
        return lower_bound(of_files(energies, files), risk, self.spreads)

    @property
    def sqnr(self) -> float:
        """The SQNR in decibels over all elements of all samples."""
        return signal_to_noise(*total(self.energies))

    @property
    def noise(self) -> float:
        """The noise-to-signal ratio to be expected, by which candidates are told apart; infinite if unsound."""
        expected = total(self._expected)
        sound = self.finite and self.same_shapes and math.isfinite(sum(expected))
        return 10 ** (-signal_to_noise(*expected) / 10) if sound else math.inf

    def telling(self, files: Sequence[str]) -> float | None:
        """Return as how many independent ones those count that differ, see `telling`; None where each counts."""
        differing, compared = zip(*self.counts, strict=True)
        return telling(differing, compared, files) if files else None

    def labels(self, files: Sequence[str] = ()) -> float:
        """Return the decibels that stand for the labels that differ, see `decibels_of_labels`."""
        if not self.same_shapes:
            return -math.inf
        return decibels_of_labels(self.compared - self.equal, self.compared, self.telling(files))

    @property
    def _is_probable(self) -> bool:
        """Whether all that was compared are probabilities: where some samples are none, others are so by chance."""
        return 0 < len(self._rows) == self._arrays

    @property
    def _expected(self) -> Sequence[Energies]:
        """The energies of each sample, the noise of probabilities as the mean over errors that might have been."""
        if not (self._is_probable and self.finite and len(self._rows) == sum(1 for one in self.energies if one[0])):
            return self.energies
        with tolerated("the error that probabilities might have had"):
            noises = iter(expected_noises(self._rows, halves=self.halves))
            return [(signal, next(noises) if signal else noise) for signal, noise in self.energies]
        return self.energies

    def _add(self, expected: Any, found: Any, within: tuple[int, ...]) -> None:
        if isinstance(expected, list) and isinstance(found, list):
            self.same_shapes &= len(expected) == len(found)
            for place, (one, other) in enumerate(zip(expected, found, strict=False)):
                self._add(one, other, (*within, place))
            return
        if isinstance(expected, dict) and isinstance(found, dict):
            self.same_shapes &= expected.keys() == found.keys()
            both = [key for key in expected if key in found]
            self._add(np.array([expected[key] for key in both]), np.array([found[key] for key in both]), within)
            return
        if not isinstance(expected, np.ndarray) or not isinstance(found, np.ndarray):
            # Optionals: that one holds nothing where the other does is as wrong as another shape.
            self.compared += 1
            self.elements += 1
            self.equal += expected is found
            self.same_shapes &= (expected is None) == (found is None)
            return
        is_float = is_floating(expected.dtype)
        self.is_float |= is_float
        if expected.shape != found.shape or is_float != is_floating(found.dtype):
            self.same_shapes = False
        elif is_float:
            self.halves |= expected.dtype.itemsize < _FLOAT32.itemsize
            self._add_floats(widened(expected), widened(found), within)
        else:
            self.elements += expected.size
            self.compared += expected.size
            self.equal += int(np.count_nonzero(expected == found))

    def _add_floats(self, expected: Array, found: Array, within: tuple[int, ...]) -> None:
        if not expected.size:
            return
        self._arrays += 1
        self.spreads.append(spread_of_parts(expected, found))
        signal, noise = energies_of(expected, found)
        compared = expected.size
        if _FAINT < signal < math.inf and noise < math.inf and self._unit in (0.0, 1.0):
            self._unit = 1.0
        else:
            usable = np.isfinite(expected)
            compared = int(np.count_nonzero(usable))
            self.finite &= bool(np.isfinite(found[usable]).all())
            usable &= np.isfinite(found)
            signal, noise = self._scaled(expected[usable].astype(np.float64), found[usable].astype(np.float64))
        self.elements += compared
        self.skipped += expected.size - compared
        before = self.energies[-1]
        self.energies[-1] = before[0] + signal, before[1] + noise
        if are_probabilities(expected):
            self._rows.append(unsure_rows(expected, found, noise))

    def _scaled(self, expected: Array, found: Array) -> Energies:
        """Return energies in a unit that keeps them in range, the same for all samples."""
        largest = float(np.abs(expected).max(initial=0.0))
        if largest and (not self._unit or largest / self._unit >= _LARGE):
            self._use_unit(1.0 if _SMALL < largest < _LARGE else largest)
        unit = self._unit or 1.0
        return energies_of(expected / unit, found / unit)

    def _use_unit(self, unit: float) -> None:
        """Count energies in another unit, those that were counted before as well."""
        if self._unit:
            self.energies = [_in_unit(one, self._unit / unit) for one in self.energies]
        self._unit = unit


class DetailedTally(Tally):
    """What a report shows besides: the largest errors, shares of equal labels, and parts.

    Args:
        parts: that the output is joined of.
    """

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        super().__init__()
        self.parts = dict.fromkeys(parts, (0.0, 0.0))
        self.largest = 0.0
        self.places: list[list[Place]] = []

    def add_sample(self, expected: Any, found: Any) -> None:
        """Add what both models gave for a sample."""
        self.places.append([])
        super().add_sample(expected, found)

    def _use_unit(self, unit: float) -> None:
        if self._unit:
            self.parts = {part: _in_unit(one, self._unit / unit) for part, one in self.parts.items()}
        super()._use_unit(unit)

    def _add_floats(self, expected: Array, found: Array, within: tuple[int, ...]) -> None:
        super()._add_floats(expected, found, within)
        expected, found = expected.astype(np.float64), found.astype(np.float64)
        if (place := furthest(expected, found, within)) is not None:
            self.places[-1].append(place)
        unit = self._unit or 1.0
        for part, (signal, noise) in self.parts.items():
            among = [slice(None)] * part.axis + [slice(part.start, part.stop)]
            one, other = energies_of(expected[tuple(among)] / unit, found[tuple(among)] / unit)
            self.parts[part] = signal + one, noise + other
        usable = np.isfinite(expected) & np.isfinite(found)
        self.largest = max(self.largest, float(np.abs(found[usable] - expected[usable]).max(initial=0.0)))
        if expected.ndim in (2, 3) and expected.shape[-1] > 1 and expected.size:
            same = expected.argmax(axis=-1) == found.argmax(axis=-1)
            self.equal += int(np.count_nonzero(same))
            self.compared += same.size


def _in_unit(energies: Energies, factor: float) -> Energies:
    signal, noise = energies
    return signal * factor * factor, noise * factor * factor


def total(energies: Sequence[Energies]) -> Energies:
    """Return the energies of all samples together."""
    return math.fsum(signal for signal, _ in energies), math.fsum(noise for _, noise in energies)


def energies_of(expected: Array, found: Array) -> Energies:
    """Return the energies of the signal and of the noise on it, in the type of the arrays."""
    # What is not finite shows in the energies.
    with np.errstate(invalid="ignore", over="ignore"):
        error = found - expected
        return _signal(expected), float(np.vdot(error, error))


@remembered_of_array
def _signal(expected: Array) -> float:
    return float(np.vdot(expected, expected))


def widened(array: Array) -> Array:
    """Return float16 and bfloat16 as float32, in which energies do not overflow; anything else as it is."""
    return array.astype(_FLOAT32) if array.dtype.itemsize < _FLOAT32.itemsize else array
