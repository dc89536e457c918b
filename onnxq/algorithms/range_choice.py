"""A range method for each tensor, chosen by what it does to the noise of the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxq.numerics.affine import largest

Method = TypeVar("Method")
Range = tuple[float, float]
Noise = NDArray[np.float64]
"""Each sample's part of the noise-to-signal ratio of each output, float64 of shape (samples, outputs)."""

# Ranges whose ends are nearer than this share of the width make the same noise, or as good as.
_ALIKE = 0.02
# A method must take off this share of the noise; less is not worth a difference between tensors.
_WORTH = 0.02
# So many standard errors over the samples must the noise taken off be away from none. Of many tensors some gain more by
# luck.
_CERTAIN, _CERTAIN_OF_MANY = 1.0, 2.0


@dataclass(frozen=True)
class RangeChoice(Generic[Method]):
    """The range method of each tensor.

    Attributes:
        default: of every tensor that has none of its own.
        own: by tensor.
    """

    default: Method
    own: Mapping[str, Method] = field(default_factory=dict)

    def of(self, tensor: str) -> Method:
        """Return the method of a tensor."""
        return self.own.get(tensor, self.default)

    def with_own(self, tensor: str, method: Method) -> RangeChoice[Method]:
        """Return this choice with another method for one tensor."""
        return RangeChoice(self.default, {**self.own, tensor: method})


def choose_ranges(
    ranges: Mapping[str, Mapping[Method, Range]],
    measure: Callable[[RangeChoice[Method]], Noise],
    *,
    most: int,
    methods: Sequence[Method],
    patience: int = 2,
) -> RangeChoice[Method]:
    """Return the range methods with which a model has the least noise, as far as that can be told from chance.

    First the one method that is best for all tensors: where some in a row are no better than one before them, those
    that clip yet more are not tried. Then one tensor after the other, the noisiest first, is given each other method
    that would give it another range, until as many in a row are no better as well. Kept is what takes off noise at the
    worst output: 2 % at least, and more than one standard error of the difference over the samples, for single tensors
    more than two. A method that is lucky on one sample does not pass.

    Args:
        ranges: of each method by tensor, tensors with the largest part in the noise first.
        measure: a choice to the noise of its model.
        most: measurements to make at most, those of single methods included.
        methods: to choose from, those that clip more behind others; the first is taken where nothing is better.
        patience: so many in a row that are no better leave none to be tried.

    >>> ranges = {"a": {"wide": (0.0, 9.0), "narrow": (0.0, 1.0)}, "b": {"wide": (0.0, 9.0), "narrow": (0.0, 1.0)}}
    >>> def measure(choice):
    ...     return np.full((2, 1), (choice.of("a") == "wide") + 3 * (choice.of("b") == "narrow"), float)
    >>> choose_ranges(ranges, measure, most=9, methods=["wide", "narrow"])
    RangeChoice(default='wide', own={'a': 'narrow'})
    """
    best, measured, no_better = RangeChoice(methods[0]), 1, 0
    first = noise = measure(best)
    for method in methods[1:most]:
        found, measured = measure(RangeChoice(method)), measured + 1
        no_better = 0 if pooled(found) < pooled(noise) else no_better + 1
        if no_better == patience:
            break
        if not no_better and takes_off(first, found):
            best, noise = RangeChoice(method), found
    for tensor, known in ranges.items():
        no_better = 0
        for method in _unlike(known, best.of(tensor)):
            if measured >= most:
                return best
            other, measured = best.with_own(tensor, method), measured + 1
            found = measure(other)
            no_better = 0 if pooled(found) < pooled(noise) else no_better + 1
            if takes_off(noise, found, _CERTAIN_OF_MANY):
                best, noise = other, found
            if no_better == patience:
                break
    return best


def takes_off(noise: Noise, found: Noise, certain: float = _CERTAIN) -> bool:
    """Return whether noise has become less at the worst output by more than chance, on the same samples.

    Args:
        noise: before.
        found: after.
        certain: by how many standard errors at least.
    """
    output = int(np.argmax(noise.sum(0)))
    if not pooled(found) < (1 - _WORTH) * pooled(noise):
        return False
    taken = noise[:, output] - found[:, output]
    if len(taken) < 2 or not np.isfinite(taken).all():
        return True
    return float(taken.sum()) > certain * float(taken.std(ddof=1)) * math.sqrt(len(taken))


def pooled(noise: Noise) -> float:
    """Return the noise-to-signal ratio of the worst output over all samples; infinite where one is not finite."""
    return largest(noise.sum(0))


def _unlike(known: Mapping[Method, Range], now: Method) -> Iterator[Method]:
    """Yield the methods whose ranges are unlike the one of now and those of methods before them."""
    seen = [known[now]]
    width = max(known[now][1] - known[now][0], np.finfo(np.float64).tiny)
    for method, (low, high) in known.items():
        if all(max(abs(low - one[0]), abs(high - one[1])) >= _ALIKE * width for one in seen):
            seen.append((low, high))
            yield method
