"""Evidence: what samples have shown of tensors, by request, which merges; and where it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

from onnxq.calibration.provenance import Provenance
from onnxq.calibration.requests import Request
from onnxq.calibration.statistic import Statistic
from onnxq.errors import DataError
from onnxq.system.records import html_table

Wanted = TypeVar("Wanted", bound=Statistic)


@dataclass(frozen=True)
class TensorEvidence:
    """What is known of one tensor.

    Args:
        tensor: Its name.
        statistics: By request.
    """

    tensor: str
    statistics: Mapping[Request, Statistic]

    def find(self, kind: type[Wanted], axis: int | None = None) -> Wanted | None:
        """Return the statistic of a kind, along an axis where the kind has one; None where it was not requested."""
        for request, statistic in self.statistics.items():
            if isinstance(statistic, kind) and request.axis == axis:
                return statistic
        return None

    def need(self, kind: type[Wanted], axis: int | None = None) -> Wanted:
        """Return the statistic of a kind.

        Raises:
            DataError: It was not requested.
        """
        found = self.find(kind, axis)
        if found is None:
            raise DataError(
                f"The statistics of tensor {self.tensor!r} hold no {kind.kind}, expected one; calibrate again for it"
            )
        return found


@dataclass(frozen=True)
class Evidence:
    """What samples have shown of tensors.

    Args:
        samples: The digest of each sample, see `sample_digest`, in rising order; equal samples are there as often as
            they were run.
        statistics: By request.
        provenance: What ran which model, where that is known; evidence is equal without it.
    """

    samples: tuple[str, ...] = ()
    statistics: Mapping[Request, Statistic] = field(default_factory=lambda: MappingProxyType({}))
    provenance: Provenance = field(default_factory=Provenance, compare=False)

    def __sizeof__(self) -> int:
        """Return the bytes that it takes, by which a cluster decides what to move."""
        kept = (array.nbytes for one in self.statistics.values() for array in one.arrays().values())
        return sum(kept) + sum(map(len, self.samples))

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(request.kind for request in self.statistics))
        return f"Evidence({len(self.samples)} samples, {len(self.by_tensor)} tensors: {kinds or 'nothing'})"

    def _repr_html_(self) -> str:
        """Return what notebooks show: of each tensor the kinds of statistics that are known."""
        rows = [(tensor, ", ".join(request.kind for request in known)) for tensor, known in self.by_tensor.items()]
        return html_table(f"{len(self.samples)} samples, {len(rows)} tensors", ("tensor", "statistics"), rows)

    def of(self, tensor: str) -> TensorEvidence:
        """Return what is known of a tensor."""
        return TensorEvidence(tensor, self.by_tensor.get(tensor, {}))

    @cached_property
    def by_tensor(self) -> Mapping[str, Mapping[Request, Statistic]]:
        """The statistics by tensor, and of each by request."""
        found: dict[str, dict[Request, Statistic]] = {}
        for request, statistic in self.statistics.items():
            found.setdefault(request.tensor, {})[request] = statistic
        return found

    @cached_property
    def ranges(self) -> dict[Hashable, tuple[float, float]]:
        """The ranges that were found from it so far, by what they were asked for: every candidate asks again."""
        return {}

    def merge(self, other: Evidence) -> Evidence:
        """Return the evidence of the samples of both; statistics that only one has are kept.

        Raises:
            DataError: Both are known to be of different models or runtimes, or hold the same sample.
        """
        if twice := set(self.samples) & set(other.samples):
            raise DataError(
                f"Both hold the same {len(twice)} samples, such as {min(twice)[:12]!r}, expected each sample once; "
                "merge statistics of different samples"
            )
        return self.plus(other)

    def plus(self, other: Evidence) -> Evidence:
        """Return the evidence of the samples of both, of which some may be equal.

        Raises:
            DataError: Both are known to be of different models or runtimes.
        """
        total = EvidenceTotal(self)
        total.add(other)
        return total.evidence

    def select(self, requests: Iterable[Request]) -> Evidence:
        """Return the statistics of these requests only, in that order."""
        return replace(self, statistics=MappingProxyType({one: self.statistics[one] for one in requests}))

    def join(self, other: Evidence) -> Evidence:
        """Return the statistics of both, which saw the same samples; what both have is taken from `self`."""
        assert self.samples == other.samples, "only evidence of the same samples can be joined"
        return replace(self, statistics=MappingProxyType({**other.statistics, **self.statistics}))

    def lacks(self, samples: Iterable[str]) -> int:
        """Return how many of these samples, equal ones counted as often as they are given, it does not hold."""
        return (Counter(samples) - Counter(self.samples)).total()


class EvidenceTotal:
    """Evidence that that of further samples is added to; what a sum takes the place of is let go at once.

    So it takes no more memory than it has and what is added, where `Evidence.plus` takes that of the sum besides.

    Args:
        first: what there is to begin with.
    """

    def __init__(self, first: Evidence) -> None:
        self._samples, self._provenance = first.samples, first.provenance
        self._statistics = dict(first.statistics)

    def add(self, other: Evidence) -> None:
        """Add the evidence of further samples, of which some may be equal.

        Raises:
            DataError: Both are known to be of different models or runtimes.
        """
        self._provenance = self._provenance.merge(other.provenance)
        self._samples = tuple(sorted((*self._samples, *other.samples)))
        for request, statistic in other.statistics.items():
            known = self._statistics.get(request)
            self._statistics[request] = statistic if known is None else known.merge(statistic)

    @property
    def evidence(self) -> Evidence:
        """All that was added so far."""
        return Evidence(self._samples, MappingProxyType(dict(self._statistics)), self._provenance)
