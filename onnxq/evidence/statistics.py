"""What calibration saw: the statistics of each tensor by name, which merge, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType

from onnxq.evidence.provenance import Provenance
from onnxq.evidence.tensor_statistics import EMPTY, TensorStatistics, merge

# Up to so many samples, what grows with them is small beside the histograms.
_LEVEL = 1024


@dataclass(frozen=True)
class Statistics:
    """What calibration saw: the number of samples, and the statistics of each tensor by name.

    Args:
        samples: How many samples were run.
        tensors: Statistics by tensor name.
        provenance: Which model and samples these are of, where that is known; two statistics are equal without it.
    """

    samples: int = 0
    tensors: Mapping[str, TensorStatistics] = field(default_factory=lambda: MappingProxyType({}))
    provenance: Provenance = field(default_factory=Provenance, compare=False)

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of the samples of both; tensors that only one has are kept.

        Raises:
            DataError: Both are known to be of different models, or to hold the same sample.
        """
        names = dict.fromkeys([*self.tensors, *other.tensors])
        merged = {name: merge(self.tensors.get(name, EMPTY), other.tensors.get(name, EMPTY)) for name in names}
        provenance = self.provenance.merge(other.provenance)
        return Statistics(self.samples + other.samples, MappingProxyType(merged), provenance)

    def select(self, names: Iterable[str]) -> Statistics:
        """Return the statistics of the named tensors only, in that order."""
        return replace(self, tensors=MappingProxyType({name: self.tensors[name] for name in names}))

    def join(self, other: Statistics) -> Statistics:
        """Return the tensors of both, which were seen in the same samples; a tensor of both is taken from `self`."""
        assert self.samples == other.samples, "only statistics of the same samples can be joined"
        return replace(self, tensors=MappingProxyType({**other.tensors, **self.tensors}))


class Accumulation:
    """A sum of statistics that grows; merging equals in size keeps the work close to linear in the samples."""

    def __init__(self) -> None:
        self._latest = Statistics()
        self._levels: list[Statistics | None] = []

    def add(self, part: Statistics) -> None:
        """Add the statistics of further samples."""
        self._latest = self._latest.merge(part)
        if self._latest.samples < _LEVEL:
            return
        carried, self._latest = self._latest, Statistics()
        for level, held in enumerate(self._levels):
            if held is None:
                self._levels[level] = carried
                return
            carried, self._levels[level] = held.merge(carried), None
        self._levels.append(carried)

    def total(self) -> Statistics:
        """Return the statistics of all that was added."""
        held = (level for level in self._levels if level is not None)
        return reduce(Statistics.merge, held, self._latest)
