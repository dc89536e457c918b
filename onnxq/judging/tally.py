"""What is counted and summed of one output while two models are compared, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxq.judging.bounds import Energies, lower_bound, of_files, spread_of_parts
from onnxq.judging.joined import Part
from onnxq.judging.labels import telling
from onnxq.judging.probabilities import are_probabilities, least_sure, unseen_noise
from onnxq.judging.worst_places import Place, furthest
from onnxq.runtime import Array


class Tally:
    """Running energies and counts of one output.

    Args:
        parts: that the output is joined of.
    """

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        """Begin with nothing."""
        self.parts = dict.fromkeys(parts, (0.0, 0.0))
        self.signal = self.noise = self.largest = 0.0
        self.rows = self.equal = self.compared = 0
        self.is_float = self.halves = False
        self.same_shapes = self.finite = True
        self.energies: list[Energies] = []
        self.counts: list[tuple[int, int]] = []
        self.spreads: list[float | None] = []
        self.places: list[list[Place]] = []
        self.unsure: list[tuple[Array, Array]] = []

    def add_sample(self, expected: Any, found: Any) -> None:
        """Add what both models gave for a sample."""
        signal, noise = self.signal, self.noise
        equal, compared = self.equal, self.compared
        self.signal = self.noise = 0.0
        self.places.append([])
        self._add(expected, found)
        self.energies.append((self.signal, self.noise))
        self.counts.append((self.compared - compared - (self.equal - equal), self.compared - compared))
        self.signal += signal
        self.noise += noise

    def _add(self, expected: Any, found: Any, within: tuple[int, ...] = ()) -> None:
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
            self.equal += expected is found
            self.same_shapes &= (expected is None) == (found is None)
            return
        if expected.shape != found.shape:
            self.same_shapes = False
            return
        if expected.dtype.kind in "fV" or expected.dtype.name == "bfloat16":
            self.halves |= expected.dtype.itemsize < np.dtype(np.float32).itemsize
            self._add_floats(expected.astype(np.float64), found.astype(np.float64), within)
        else:
            self.compared += expected.size
            self.equal += int(np.count_nonzero(expected == found))

    def _add_floats(self, expected: Array, found: Array, within: tuple[int, ...]) -> None:
        self.is_float = True
        if (place := furthest(expected, found, within)) is not None:
            self.places[-1].append(place)
        for part, (signal, noise) in self.parts.items():
            among = [slice(None)] * part.axis + [slice(part.start, part.stop)]
            one, other = expected[tuple(among)], found[tuple(among)]
            self.parts[part] = signal + float(np.square(one).sum()), noise + float(np.square(other - one).sum())
        usable = np.isfinite(expected)
        self.finite &= bool(np.isfinite(found[usable]).all())
        usable &= np.isfinite(found)
        difference = found[usable] - expected[usable]
        self.signal += float(np.square(expected[usable]).sum())
        self.noise += float(np.square(difference).sum())
        self.spreads.append(spread_of_parts(expected, found))
        self.largest = max(self.largest, float(np.abs(difference).max(initial=0.0)))
        if are_probabilities(expected):
            self.rows += expected.size // expected.shape[-1]
            self.unsure.append(least_sure(expected, found))
        if expected.ndim in (2, 3) and expected.shape[-1] > 1 and expected.size:
            same = expected.argmax(axis=-1) == found.argmax(axis=-1)
            self.equal += int(np.count_nonzero(same))
            self.compared += same.size

    def telling(self, files: Sequence[str]) -> float | None:
        """Return as how many independent ones those count that differ, see `telling`; None where each counts."""
        differing, compared = zip(*self.counts, strict=True)
        return telling(differing, compared, files) if files else None

    def bound(self, risk: float, files: Sequence[str] = ()) -> float:
        """Return the lower confidence bound of the SQNR over all other samples, see `lower_bound` and `of_files`."""
        if not (self.finite and math.isfinite(self.signal + self.noise)):
            return -math.inf
        # Where some samples are no probabilities, others are so by chance.
        told = len(self.unsure) == len(self.energies)
        unseen = unseen_noise(self.unsure, self.rows, halves=self.halves) if told else 0.0
        expected = [(signal, noise + unseen) for signal, noise in self.energies]
        return lower_bound(of_files(expected, files), risk, self.spreads)
