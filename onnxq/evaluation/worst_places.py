"""Where an output is furthest from the float model's: on which samples, and at which element of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxq.data.dataset import origin_of
from onnxq.data.inputs import SampleSource
from onnxq.numerics.numerics import signal_to_noise
from onnxq.runtime.sessions import Array

# Samples that are told of each output.
_WORST = 3


@dataclass(frozen=True)
class Place:
    """An element of an output on one sample.

    Attributes:
        index: along each axis; before these, of an element of a sequence, its place there.
        reference: value of the float model.
        candidate: value of the quantized one.
    """

    index: tuple[int, ...]
    reference: float
    candidate: float

    @property
    def error(self) -> float:
        """How far the values are apart; infinite where only the float model's is finite."""
        error = abs(self.candidate - self.reference)
        return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class WorstPlace:
    """A sample on which an output is among the least faithful, and where it has its largest error.

    Attributes:
        sample: its index among those that were given; of some that are compared by themselves, among these.
        sqnr: SQNR in decibels of the output on it alone.
        place: the element with the largest error.
        file: the file or folder that holds the sample; empty where it came from memory.
    """

    sample: int
    sqnr: float
    place: Place
    file: str = ""


def furthest(expected: Array, found: Array, within: tuple[int, ...] = ()) -> Place | None:
    """Return the element of the largest error, or None where there is none.

    Args:
        expected: of the float model, in float64; what is not finite there does not count.
        found: of the quantized model, of the same shape.
        within: places in the sequences that hold the arrays.

    >>> furthest(np.array([[1.0, 2.0]]), np.array([[1.5, 4.0]]))
    Place(index=(0, 1), reference=2.0, candidate=4.0)
    """
    with np.errstate(invalid="ignore"):
        errors = np.asarray(np.abs(found - expected))
    errors[np.isnan(errors)] = math.inf
    errors[~np.isfinite(expected)] = 0.0
    if not errors.any():
        return None
    index = np.unravel_index(int(errors.argmax()), errors.shape)
    return Place((*within, *map(int, index)), float(expected[index]), float(found[index]))


def worst_places(energies: Sequence[tuple[float, float]], places: Sequence[Sequence[Place]]) -> tuple[WorstPlace, ...]:
    """Return the samples of the lowest SQNR with their places of the largest error, the lowest first.

    Args:
        energies: of signal and noise, by sample.
        places: of the largest error in each array of a sample, by sample; none where there is no error.
    """
    found = [
        WorstPlace(sample, signal_to_noise(*energies[sample]), max(held, key=lambda place: place.error))
        for sample, held in enumerate(places)
        if held
    ]
    return tuple(sorted(found, key=lambda one: (math.isfinite(one.place.error), one.sqnr))[:_WORST])


def traced(worst: Sequence[WorstPlace], samples: SampleSource, compared: Sequence[int]) -> tuple[WorstPlace, ...]:
    """Return worst places with the numbers of their samples among those that were given, and their files.

    Args:
        worst: with numbers among those that were compared.
        samples: all that could have been.
        compared: which of them were.
    """
    origins = (origin_of(samples, compared[one.sample]) for one in worst)
    return tuple(
        replace(one, sample=origin.place, file=origin.file) for one, origin in zip(worst, origins, strict=True)
    )
