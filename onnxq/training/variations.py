"""More samples to learn from where there are few: images, shifted and mirrored.

What a network of many weights learns from a dozen images is how their values happen to be rounded, and nothing of it
holds for others. The float model says what is expected of any image, so that variations need no labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.samples.inputs import Sample, SampleSource

# So many samples are no longer few.
_ENOUGH = 64
# Along shorter axes stand channels, not places.
_LONG = 16
_IMAGE, _SPREAD = 4, 2
_FARTHEST = 4


@dataclass(frozen=True)
class Varied:
    """Samples, and behind them so many variations of each.

    Attributes:
        samples: as they are.
        times: how many variations each has.
        seed: of what is chosen at random.

    >>> [one["x"].tolist() for one in Varied([{"x": np.array([3])}], 1, 0)]
    [[3], [3]]
    """

    samples: SampleSource
    times: int
    seed: int

    def __len__(self) -> int:
        return len(self.samples) * (1 + self.times)

    def __iter__(self) -> Iterator[Sample]:
        yield from self.samples
        for turn in range(self.times):
            for place, sample in enumerate(self.samples):
                own = (self.seed, turn, place)
                yield {name: _varied(np.asarray(array), own) for name, array in sample.items()}


def varied(samples: SampleSource, seed: int) -> SampleSource:
    """Return samples with as many variations of each as there are too few of them; as they are where none vary.

    Images of several shapes stay as well: where their extents differ, places along them mean something, as those of
    letters in lines of text do, and mirrored letters are none that a model meets.

    Args:
        samples: whose arrays of four axes are images, in which places lie along the two longest axes.
        seed: of what is chosen at random.
    """
    times = math.ceil(_ENOUGH / len(samples)) - 1
    if not times:
        return samples
    shapes = {tuple(np.shape(array) for array in sample.values()) for sample in samples}
    vary = len(shapes) == 1 and any(_places(np.asarray(array)) for array in next(iter(samples)).values())
    return Varied(samples, times, seed) if vary else samples


def _places(array: NDArray[Any]) -> tuple[int, ...]:
    """Return the axes along which an image extends; none where it is no image."""
    if array.ndim != _IMAGE:
        return ()
    longest = sorted(range(1, _IMAGE), key=lambda axis: -array.shape[axis])[:_SPREAD]
    return tuple(axis for axis in sorted(longest) if array.shape[axis] >= _LONG)


def _varied(array: NDArray[Any], seed: tuple[int, ...]) -> NDArray[Any]:
    """Return a variation; images of one sample that lie on each other stay so."""
    random, axes = np.random.default_rng(seed), _places(array)
    if not axes:
        return array
    far = [array.shape[axis] // _FARTHEST for axis in axes]
    shifted = np.roll(array, [int(random.integers(-most, most + 1)) for most in far], axes)
    return np.ascontiguousarray(np.flip(shifted, axes[-1])) if random.integers(2) else shifted
