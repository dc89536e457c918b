"""Work: the samples that are still to be run, handed out shard by shard as large as workers are fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from onnxq.data.dataset import Stretch, held, stretches
from onnxq.data.inputs import SampleSource, sample_bytes

SHARD_BYTES = 8 * 10**6
"""A shard of so many bytes in memory takes no further samples."""

_FIRST = 8
"""Most samples of a shard while nobody knows how long they take."""
_GROWTH = 4.0
"""Most times as many samples as the last shard had, since its time may have been chance."""


@dataclass(frozen=True)
class Shard:
    """Samples that one worker runs before anybody hears of it again."""

    stretches: tuple[Stretch, ...]

    def __len__(self) -> int:
        return sum(map(len, self.stretches))

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of the samples, rising."""
        return tuple(sorted(chain.from_iterable(stretch.indices for stretch in self.stretches)))

    @property
    def stored(self) -> bool:
        """Whether another process that sees the same files can read it."""
        return all(stretch.stored for stretch in self.stretches)


class Work:
    """The samples that are still to be run.

    Args:
        source: All samples. One that can be asked by index is read by whoever runs a sample; a stream is read here, as
            far as shards are taken, and once more for those that are given back.
        indices: Of the samples to run, rising.
    """

    def __init__(self, source: SampleSource, indices: Sequence[int]) -> None:
        self._source = source
        self._ahead = stretches(source, indices)
        self.left = len(indices)

    def take(
        self,
        most: int,
        *,
        carried: bool = False,
        nbytes: int = SHARD_BYTES,
        reads: Callable[[Stretch], bool] = attrgetter("stored"),
    ) -> Shard:
        """Return at most so many of the samples that are left.

        Args:
            most: How many samples, at least 1.
            carried: Whether to read them now, for a worker that cannot.
            nbytes: When those that are in memory take so much, no more are added.
            reads: Which stretches whoever runs them reads, unless they are carried.

        Raises:
            DataError: A sample that is read here cannot be read or does not fit.
        """
        taken: list[Stretch] = []
        size = 0
        while most and size < nbytes and (stretch := next(self._ahead, None)):
            head, rest = stretch.split(most)
            if rest:
                self._ahead = chain([rest], self._ahead)
            if carried or not reads(head):
                head, more = _read(head, nbytes - size)
                if more:
                    self._ahead = chain([more], self._ahead)
                size += sum(sample_bytes(sample) for sample in head)
            most -= len(head)
            taken.append(head)
        shard = Shard(tuple(taken))
        self.left -= len(shard)
        return shard

    def give_back(self, indices: Sequence[int]) -> None:
        """Let samples that were taken, and whose worker was lost, be taken again."""
        again = stretches(self._source, sorted(indices))
        self._ahead = chain(again, self._ahead)
        self.left += len(indices)


class Pace:
    """How many samples a worker is given at a time, so that it comes back after about so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = 0
        self._rate = math.inf

    def size(self, left: int, workers: int) -> int:
        """Return the number of samples of the next shard, at least 1; at the end the workers share what is left."""
        fair = math.ceil(left / (2 * max(1, workers)))
        if not self._last:
            return max(1, min(_FIRST, left // (_FIRST * max(1, workers)), fair))
        wanted = min(self._rate * self._seconds, _GROWTH * self._last)
        return max(1, min(int(wanted), fair))

    def learn(self, samples: int, seconds: float) -> None:
        """Take in how long a worker took for so many samples."""
        self._last = samples
        self._rate = samples / max(seconds, 1e-6)


def _read(stretch: Stretch, nbytes: int) -> tuple[Stretch, Stretch]:
    """Return the first samples, read into memory, that take so many bytes, and the stretch of the others."""
    samples, size = [], 0
    for sample in stretch:
        samples.append(sample)
        size += sample_bytes(sample)
        if size >= nbytes:
            break
    head, rest = stretch.split(len(samples))
    return held(head.indices, samples), rest
