"""More samples to learn from where there are few: images shifted and mirrored, and inputs beside those of others.

What a network of many weights learns from a dozen samples is how their values happen to be rounded, and nothing of it
holds for others. The float model says what is expected of any values, so that variations need no labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.data.inputs import Sample, SampleSource
from onnxq.data.selection import Selection

# So many samples are no longer few; pairs of what was seen say less.
_ENOUGH, _ENOUGH_PAIRED = 64, 192
# Along shorter axes stand channels, not places.
_LONG = 16
_IMAGE, _SPREAD = 4, 2
_FARTHEST = 4
_Shapes = tuple[tuple[int, ...], ...]


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
                yield {name: _moved(np.asarray(array), own) for name, array in sample.items()}


@dataclass(frozen=True)
class Paired(Varied):
    """Samples, and behind them each with some inputs of floats from another of its shapes.

    >>> [one["x"].tolist() for one in Paired([{"x": np.array([0.5])}], 1, 0)]
    [[0.5], [0.5]]
    """

    def __iter__(self) -> Iterator[Sample]:
        yield from self.samples
        alike: dict[_Shapes, list[int]] = {}
        for place, sample in enumerate(self.samples):
            alike.setdefault(_shapes(sample), []).append(place)
        for turn in range(self.times):
            random = np.random.default_rng((self.seed, turn))
            for sample in self.samples:
                (other,) = Selection(self.samples, [int(random.choice(alike[_shapes(sample)]))])
                from_other = {name for name in sample if _is_float(sample[name]) and random.integers(2)}
                yield {name: other[name] if name in from_other else one for name, one in sample.items()}


def varied(samples: SampleSource, seed: int) -> SampleSource:
    """Return samples with as many variations of each as there are too few of them; as they are where none vary.

    Images are shifted and mirrored. Of several shapes they stay: where their extents differ, places along them mean
    something, as those of letters in lines of text do, and mirrored letters are none that a model meets. Of several
    inputs, such as a sound and the state before it, each was met as it is, and few of all pairs of them.

    Args:
        samples: whose arrays of four axes are images, in which places lie along the two longest axes.
        seed: of what is chosen at random.
    """
    count, arrays = len(samples), [np.asarray(array) for array in next(iter(samples)).values()]
    if count >= _ENOUGH_PAIRED:
        return samples
    shapes = {_shapes(sample) for sample in samples}
    if any(array.ndim == _IMAGE for array in arrays):
        varies = count < _ENOUGH and len(shapes) == 1 and any(_places(array) for array in arrays)
        return Varied(samples, _times(count, _ENOUGH), seed) if varies else samples
    pairs = len(shapes) < count and sum(_is_float(array) for array in arrays) > 1
    return Paired(samples, _times(count, _ENOUGH_PAIRED), seed) if pairs else samples


def _shapes(sample: Sample) -> _Shapes:
    return tuple(tuple(np.shape(array)) for array in sample.values())


def _is_float(array: object) -> bool:
    return np.asarray(array).dtype.kind == "f"


def _times(count: int, enough: int) -> int:
    return math.ceil(enough / count) - 1


def _places(array: NDArray[Any]) -> tuple[int, ...]:
    """Return the axes along which an image extends; none where it is no image."""
    if array.ndim != _IMAGE:
        return ()
    longest = sorted(range(1, _IMAGE), key=lambda axis: -array.shape[axis])[:_SPREAD]
    return tuple(axis for axis in sorted(longest) if array.shape[axis] >= _LONG)


def _moved(array: NDArray[Any], seed: tuple[int, ...]) -> NDArray[Any]:
    """Return a variation; images of one sample that lie on each other stay so."""
    random, axes = np.random.default_rng(seed), _places(array)
    if not axes:
        return array
    far = [array.shape[axis] // _FARTHEST for axis in axes]
    shifted = np.roll(array, [int(random.integers(-most, most + 1)) for most in far], axes)
    return np.ascontiguousarray(np.flip(shifted, axes[-1])) if random.integers(2) else shifted
