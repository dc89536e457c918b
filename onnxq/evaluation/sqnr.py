"""SQNR of outputs: exact energies, the samples and elements of the largest error, and estimates for unseen samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.data.dataset import origin_of
from onnxq.data.inputs import SampleSource, is_floating
from onnxq.evaluation.bounds import (
    RISK,
    Energies,
    decibels_of_labels,
    effective_sample_size,
    lower_bound,
    of_files,
    spread_of_parts,
)
from onnxq.evaluation.outputs import OutputPart
from onnxq.evaluation.probabilities import (
    UnsureAnswers,
    are_probabilities,
    are_shares,
    energies_of_logarithms,
    expected_noises,
    unseen_noise,
    unsure_answers,
)
from onnxq.numerics.affine import ratio_of_sqnr, sqnr_db
from onnxq.runtime.sessions import Array
from onnxq.system.failures import tolerate
from onnxq.system.resources import cached_by_array

# Number of worst samples that are reported of each output.
_WORST = 3


@dataclass(frozen=True)
class Place:
    """An element of an output on one sample.

    Attributes:
        index: along each axis; for an output that is a sequence, the index of the array comes first.
        reference: value of the float model.
        candidate: value of the quantized model.
    """

    index: tuple[int, ...]
    reference: float
    candidate: float

    @property
    def error(self) -> float:
        """The absolute error; infinite if only the float model's value is finite."""
        error = abs(self.candidate - self.reference)
        return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class WorstPlace:
    """One of the samples with the lowest SQNR, and its element with the largest error.

    Attributes:
        sample: its index among the compared samples; after `traced`, among all samples of the user.
        sqnr: SQNR in decibels of the output on this sample alone.
        place: the element with the largest error.
        file: the file or folder that holds the sample; empty if it came from memory.
    """

    sample: int
    sqnr: float
    place: Place
    file: str = ""


def furthest(expected: Array, actual: Array, within: tuple[int, ...] = ()) -> Place | None:
    """Return the element of the largest error; None if there is no error.

    Args:
        expected: of the float model, in float64; elements that are not finite do not count.
        actual: of the quantized model, of the same shape.
        within: indices in the sequences that hold the arrays.

    >>> furthest(np.array([[1.0, 2.0]]), np.array([[1.5, 4.0]]))
    Place(index=(0, 1), reference=2.0, candidate=4.0)
    """
    with np.errstate(invalid="ignore"):
        errors = np.asarray(np.abs(actual - expected))
    errors[np.isnan(errors)] = math.inf
    errors[~np.isfinite(expected)] = 0.0
    if not errors.any():
        return None
    index = np.unravel_index(int(errors.argmax()), errors.shape)
    return Place((*within, *map(int, index)), float(expected[index]), float(actual[index]))


def worst_places(energies: Sequence[tuple[float, float]], places: Sequence[Sequence[Place]]) -> tuple[WorstPlace, ...]:
    """Return the three samples of the lowest SQNR with their elements of the largest error, the lowest first.

    Args:
        energies: of signal and error, by sample.
        places: by sample, the element of the largest error in each array; empty without error.
    """
    entries = [
        WorstPlace(sample, sqnr_db(*energies[sample]), max(held, key=lambda place: place.error))
        for sample, held in enumerate(places)
        if held
    ]
    return tuple(sorted(entries, key=lambda entry: (math.isfinite(entry.place.error), entry.sqnr))[:_WORST])


def traced(worst: Sequence[WorstPlace], samples: SampleSource) -> tuple[WorstPlace, ...]:
    """Return worst places with the user's indices of their samples, and their files.

    Args:
        worst: with indices into `samples`.
        samples: the compared ones.
    """
    origins = (origin_of(samples, entry.sample) for entry in worst)
    return tuple(
        replace(entry, sample=origin.place, file=origin.file) for entry, origin in zip(worst, origins, strict=True)
    )


# Energies and counts of one output, accumulated sample by sample.

_FLOAT32 = np.dtype(np.float32)
# A smaller energy is summed in float64, as squares of its errors may be too small for float32.
_FAINT = 1e-12
# Squares of larger or smaller numbers overflow or underflow in float64.
_LARGE, _SMALL = 1e140, 1e-140
# Decibels. Labels of another shape must not make the ratio infinite.
_LOWEST_SQNR = -300.0


class ErrorAccumulator:
    """Energies and counts of one output.

    Attributes:
        is_float: whether any array of it is.
        same_shapes: whether every shape is the reference's.
        finite: whether the candidate is finite wherever the reference is.
        elements: number of compared elements.
        skipped: number of elements that were not compared, as the reference is NaN or infinite there.
        energies: of signal and error, by sample.
    """

    def __init__(self) -> None:
        self.is_float = False
        self.same_shapes = self.finite = True
        self.equal = self.compared = self.elements = self.skipped = 0
        self.energies: list[Energies] = []
        self.counts: list[tuple[int, int]] = []
        self.spreads: list[float | None] = []
        self._unit = 0.0
        self._arrays = 0
        self._answers: list[UnsureAnswers] = []

    def add_sample(self, expected: Any, actual: Any) -> None:
        """Add the outputs of both models for a sample."""
        equal, compared = self.equal, self.compared
        self.energies.append((0.0, 0.0))
        self._add(expected, actual, ())
        self.counts.append((self.compared - compared - (self.equal - equal), self.compared - compared))

    def bound(self, risk: float = RISK, files: Sequence[str] = ()) -> float:
        """Return the lower confidence bound in decibels of the SQNR over all other samples, see `lower_bound`.

        For probabilities and scores, `expected_noises` replaces the measured error, and an unseen sample has at least
        `unseen_noise`. A single label is right or wrong, so all labels together get the decibels of
        `decibels_of_labels`, which allow for chance in the candidate's favour and are no lower bound.

        Args:
            risk: probability that the bound of floats is wrong; see `alpha_spending`.
            files: of each sample, see `of_files`.
        """
        if not self.is_float:
            differing = self.compared - self.equal
            decibels = decibels_of_labels(differing, self.compared, self.effective_labels(files))
            return decibels if self.same_shapes else -math.inf
        expected, unseen = self._expected, 0.0
        if not (self.finite and self.same_shapes and math.isfinite(sum(map(sum, expected)))):
            return -math.inf
        if self._is_certain_by_sample:
            # Without this term the bound still holds for answers like the measured ones.
            with tolerate("the error of answers that were not seen"):
                unseen = unseen_noise(self._answers) / self._unit**2
        return lower_bound(of_files(expected, files), risk, self.spreads, unseen)

    @property
    def sqnr(self) -> float:
        """The SQNR in decibels over all elements of all samples."""
        return sqnr_db(*total(self.energies))

    @property
    def nsr(self) -> float:
        """The expected noise-to-signal ratio, to compare candidates.

        It is infinite for floats that are not finite or of another shape.
        """
        if not self.is_float:
            return ratio_of_sqnr(max(self.bound(), _LOWEST_SQNR))
        expected = total(self._expected)
        sound = self.finite and self.same_shapes and math.isfinite(sum(expected))
        return ratio_of_sqnr(sqnr_db(*expected)) if sound else math.inf

    def effective_labels(self, files: Sequence[str] = ()) -> float | None:
        """Return the `effective_sample_size` of the labels that differ, which differ together in a sample or file.

        None for one sample without a file, whose labels each count by themselves.
        """
        if len(self.counts) < 2 and not files:
            return None
        differing, compared = zip(*self.counts, strict=True)
        return effective_sample_size(differing, compared, files or [""] * len(self.counts))

    @property
    def _is_certain_by_sample(self) -> bool:
        """Whether each sample with a signal has one array, all of them probabilities or scores.

        If only some are, it is by chance.
        """
        signals = sum(1 for signal, _ in self.energies if signal)
        return self.finite and 0 < len(self._answers) == self._arrays == signals

    @property
    def _expected(self) -> Sequence[Energies]:
        """The energies of each sample, with the expected error of probabilities and scores."""
        if self._is_certain_by_sample:
            with tolerate("the error that answers might have had"):
                noises = iter(expected_noises(self._answers))
                return [(signal, next(noises) / self._unit**2 if signal else noise) for signal, noise in self.energies]
        return self.energies

    def _add(self, expected: Any, actual: Any, within: tuple[int, ...]) -> None:
        if isinstance(expected, list) and isinstance(actual, list):
            self.same_shapes &= len(expected) == len(actual)
            for place, (first, second) in enumerate(zip(expected, actual, strict=False)):
                self._add(first, second, (*within, place))
            return
        if isinstance(expected, dict) and isinstance(actual, dict):
            self.same_shapes &= expected.keys() == actual.keys()
            both = [key for key in expected if key in actual]
            self._add(np.array([expected[key] for key in both]), np.array([actual[key] for key in both]), within)
            return
        if not isinstance(expected, np.ndarray) or not isinstance(actual, np.ndarray):
            # Optionals: if only one of them is empty, that is as wrong as another shape.
            self.compared += 1
            self.elements += 1
            self.equal += expected is actual
            self.same_shapes &= (expected is None) == (actual is None)
            return
        is_float = is_floating(expected.dtype)
        self.is_float |= is_float
        if expected.shape != actual.shape or is_float != is_floating(actual.dtype):
            self.same_shapes = False
        elif is_float:
            self._add_floats(widened(expected), widened(actual), within)
        else:
            self.elements += expected.size
            self.compared += expected.size
            self.equal += int(np.count_nonzero(expected == actual))

    def _add_floats(self, expected: Array, actual: Array, within: tuple[int, ...]) -> None:
        if not expected.size:
            return
        self._arrays += 1
        self.spreads.append(spread_of_parts(expected, actual))
        signal, noise = energies_of(expected, actual)
        if math.isfinite(noise) and (answers := unsure_answers(expected, actual, noise)) is not None:
            self._answers.append(answers)
        compared = expected.size
        if _FAINT < signal < math.inf and noise < math.inf and self._unit in (0.0, 1.0):
            self._unit = 1.0
        else:
            usable = np.isfinite(expected)
            compared = int(np.count_nonzero(usable))
            self.finite &= bool(np.isfinite(actual[usable]).all())
            usable &= np.isfinite(actual)
            signal, noise = self._scaled(expected[usable].astype(np.float64), actual[usable].astype(np.float64))
        self.elements += compared
        self.skipped += expected.size - compared
        before = self.energies[-1]
        self.energies[-1] = before[0] + signal, before[1] + noise

    def _scaled(self, expected: Array, actual: Array) -> Energies:
        """Return energies in a unit that keeps them in range, the same for all samples."""
        largest = float(np.abs(expected).max(initial=0.0))
        if largest and (not self._unit or largest / self._unit >= _LARGE):
            self._use_unit(1.0 if _SMALL < largest < _LARGE else largest)
        unit = self._unit or 1.0
        return energies_of(expected / unit, actual / unit)

    def _use_unit(self, unit: float) -> None:
        """Change the unit of all energies, the earlier ones included."""
        if self._unit:
            self.energies = [_in_unit(energy, self._unit / unit) for energy in self.energies]
        self._unit = unit


class DetailedErrorAccumulator(ErrorAccumulator):
    """Energies and counts for a report: also the largest errors, shares of equal labels, and parts.

    Args:
        parts: the parts that the output is concatenated from.
    """

    def __init__(self, parts: Sequence[OutputPart] = ()) -> None:
        super().__init__()
        self.parts = dict.fromkeys(parts, (0.0, 0.0))
        self.largest = 0.0
        self.places: list[list[Place]] = []

    def add_sample(self, expected: Any, actual: Any) -> None:
        """Add the outputs of both models for a sample."""
        self.places.append([])
        super().add_sample(expected, actual)

    def _use_unit(self, unit: float) -> None:
        if self._unit:
            self.parts = {part: _in_unit(energy, self._unit / unit) for part, energy in self.parts.items()}
        super()._use_unit(unit)

    def _add_floats(self, expected: Array, actual: Array, within: tuple[int, ...]) -> None:
        super()._add_floats(expected, actual, within)
        expected, actual = expected.astype(np.float64), actual.astype(np.float64)
        if (place := furthest(expected, actual, within)) is not None:
            self.places[-1].append(place)
        unit = self._unit or 1.0
        for part, (signal, noise) in self.parts.items():
            among = [slice(None)] * part.axis + [slice(part.start, part.stop)]
            of_signal, of_noise = energies_of(expected[tuple(among)] / unit, actual[tuple(among)] / unit)
            self.parts[part] = signal + of_signal, noise + of_noise
        usable = np.isfinite(expected) & np.isfinite(actual)
        self.largest = max(self.largest, float(np.abs(actual[usable] - expected[usable]).max(initial=0.0)))
        if _has_classes(expected):
            same = expected.argmax(axis=-1) == actual.argmax(axis=-1)
            self.equal += int(np.count_nonzero(same))
            self.compared += same.size


def _has_classes(array: Array) -> bool:
    """Whether the last axis is taken for classes: scores of rank 2, or rows of rank 3 that add up to one."""
    if array.ndim not in (2, 3) or not array.size or array.shape[-1] == 1:
        return False
    return array.ndim == 2 or are_shares(array)


def _in_unit(energies: Energies, factor: float) -> Energies:
    signal, noise = energies
    return signal * factor * factor, noise * factor * factor


def total(energies: Sequence[Energies]) -> Energies:
    """Return the energies of all samples together."""
    return math.fsum(signal for signal, _ in energies), math.fsum(noise for _, noise in energies)


def energies_of(expected: Array, actual: Array) -> Energies:
    """Return the energies of the signal and of the error, in the type of the arrays."""
    # Values that are not finite show in the energies.
    with np.errstate(invalid="ignore", over="ignore"):
        error = actual - expected
        return _signal(expected), float(np.vdot(error, error))


@cached_by_array
def _signal(expected: Array) -> float:
    return float(np.vdot(expected, expected))


def widened(array: Array) -> Array:
    """Return float16 and bfloat16 as float32, in which energies do not overflow; other types unchanged."""
    return array.astype(_FLOAT32) if array.dtype.itemsize < _FLOAT32.itemsize else array


# Estimates of the SQNR on unseen samples.

Pair = tuple[Sequence[Any], Sequence[Any]]
"""The reference's outputs for a sample, and the candidate's."""


def estimate_sqnr(pairs: Sequence[Pair], files: Sequence[str] = ()) -> float:
    """Estimate the SQNR over all samples from the outputs of both models for a few.

    The estimate is the lowest of the 95 % confidence bounds of the outputs, see `ErrorAccumulator.bound`. Samples of
    one file count as one, see `of_files`. Several outputs need no correction: the lowest bound is wrong only if the
    bound of the truly worst output is (intersection-union test; Berger, Technometrics 1982).

    Args:
        pairs: for each sample, the outputs of both models.
        files: of each sample, see `list_shared_files`; empty if each counts by itself.

    Returns:
        Decibels; infinite without outputs, -inf if an output is not finite.
    """
    tallies = (_tally(_output(pairs, place)) for place in range(len(pairs[0][0])))
    return min((tally.bound(files=files) for tally in tallies), default=math.inf)


def nsr_by_sample(pairs: Sequence[Pair]) -> NDArray[np.float64]:
    """Return each sample's share of the noise-to-signal ratio of each output, to compare candidates.

    Probabilities are compared by their logarithms less the mean of each row: the inputs of the Softmax. Behind it most
    errors vanish, and luck decides which few answers turn over. Labels and sequences are judged all together, so each
    sample gets the same share.

    Args:
        pairs: for each sample, the outputs of both models.

    Returns:
        float64 of shape (samples, outputs), NaN or infinite if an output is not finite.
    """
    columns = [_noises(_output(pairs, place)) for place in range(len(pairs[0][0]))]
    return np.stack(columns, 1) if columns else np.zeros((len(pairs), 0))


def _noises(pairs: Sequence[tuple[Any, Any]]) -> NDArray[np.float64]:
    arrays = all(isinstance(expected, np.ndarray) and isinstance(actual, np.ndarray) for expected, actual in pairs)
    if not arrays or not all(
        is_floating(expected.dtype) and expected.shape == actual.shape for expected, actual in pairs
    ):
        return np.full(len(pairs), _tally(pairs).nsr / len(pairs))
    wide = [(widened(expected), widened(actual)) for expected, actual in pairs]
    if all(are_probabilities(expected) for expected, _ in wide):
        energies = [energies_of_logarithms(*pair) for pair in wide]
    else:
        energies = [energies_of(*pair) for pair in wide]
        if not 0 < sum(map(sum, energies)) < math.inf:
            energies = [energies_of(*pair) for pair in _in_range(wide)]
    signal, noises = total(energies)[0], np.array([noise for _, noise in energies])
    return np.asarray(noises / signal) if signal else np.where(noises > 0, np.inf, 0.0)


def _in_range(pairs: Sequence[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """Return the pairs where the reference is finite, divided by its largest value to keep energies in range."""
    usable = [np.isfinite(expected) for expected, _ in pairs]
    kept = [(expected[where], actual[where]) for (expected, actual), where in zip(pairs, usable, strict=True)]
    unit = max((float(np.abs(expected).max(initial=0.0)) for expected, _ in kept), default=0.0) or 1.0
    return [(expected.astype(np.float64) / unit, actual.astype(np.float64) / unit) for expected, actual in kept]


def _tally(pairs: Sequence[tuple[Any, Any]]) -> ErrorAccumulator:
    tally = ErrorAccumulator()
    for pair in pairs:
        tally.add_sample(*pair)
    return tally


def _output(pairs: Sequence[Pair], place: int) -> list[tuple[Any, Any]]:
    return [(expected[place], actual[place]) for expected, actual in pairs]
