"""The kind ``sample-extremes``: minimum and maximum of each sample, for what depends on how samples differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.requests import Request
from onnxq.calibration.statistic import Arrays, Seen, Statistic, restored_from


@dataclass(frozen=True, eq=False)
class SampleExtremes(Statistic):
    """The least and the greatest element of each sample; equal samples count as one.

    Args:
        samples: The first 64 bits of each sample's digest, uint64 of shape (samples,), rising: an order of samples that
            does not depend on how they were run, split or merged.
        ends: float64 of shape (samples, 2).
    """

    kind: ClassVar[str] = "sample-extremes"

    samples: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    ends: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 2)))

    @classmethod
    def observed(cls, seen: Seen, request: Request) -> SampleExtremes:
        """Return the extremes of one array.

        Raises:
            DataError: The dtype is no float type, or an element is NaN or infinite.
        """
        return cls(np.array([int(seen.sample[:16] or "0", 16)], np.uint64), np.array([seen.ends]))

    @classmethod
    def bytes_kept(cls, request: Request, elements: int, samples: int) -> int:
        """Return about how much memory it takes; see `Statistic.bytes_kept`."""
        return 3 * np.dtype(np.float64).itemsize * samples

    def merge(self, other: SampleExtremes) -> SampleExtremes:
        """Return the extremes of the samples of both; a sample that both saw a part of keeps the wider ones."""
        if not len(self.samples) or not len(other.samples):
            return self if len(self.samples) else other
        together = np.concatenate([self.samples, other.samples])
        ends = np.concatenate([self.ends, other.ends])
        samples, places = np.unique(together, return_inverse=True)
        widest = np.tile([np.inf, -np.inf], (len(samples), 1))
        np.minimum.at(widest[:, 0], places, ends[:, 0])
        np.maximum.at(widest[:, 1], places, ends[:, 1])
        return SampleExtremes(samples, widest)

    def arrays(self) -> Arrays:
        """Return samples and ends."""
        return {"samples": self.samples, "ends": self.ends}

    @classmethod
    def restored(cls, arrays: Arrays) -> SampleExtremes:
        """Return the extremes of which these are the arrays."""
        samples, ends = restored_from(arrays, ("samples", "ends"))
        if ends.shape != (len(samples), 2) or not (samples[1:] > samples[:-1]).all():
            raise ValueError("the extremes of samples are out of order")
        if not (np.isfinite(ends).all() and (ends[:, 0] <= ends[:, 1]).all()):
            raise ValueError("the extremes of samples are out of order or not finite")
        return cls(samples, ends)

    @property
    def note(self) -> str:
        """How many samples there are."""
        return f"extremes of {len(self.samples)} samples" if len(self.samples) else ""
