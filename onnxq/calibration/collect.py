"""Run the model on samples and collect the requested statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import onnx

from onnxq.calibration.accumulators import Request
from onnxq.calibration.kinds import find_kind
from onnxq.calibration.provenance import sample_digest
from onnxq.calibration.segments import read_without_data, segments
from onnxq.calibration.statistics import CalibrationStatistics, StatisticsSum
from onnxq.calibration.workers import InstrumentedModel, InstrumentedRunError, Threads, Work, Workers
from onnxq.data.dataset import Subset, picked
from onnxq.data.inputs import SampleSource
from onnxq.errors import CandidateError, DataError
from onnxq.ir.protos import is_large
from onnxq.runtime.sessions import open_session, run


@dataclass(frozen=True)
class CalibrationCheckpoint:
    """Earlier statistics to continue, and where to keep new ones.

    Attributes:
        model: Digest of the model, see `onnxq.calibration.provenance.model_digest`.
        earlier: Statistics for the same requests from some of the samples, which are not run again.
        keep: Called with the statistics of all finished samples, after each increase.
        digests: Digest of each sample in order, see `sample_digest`; empty if not computed yet.
    """

    model: str
    earlier: CalibrationStatistics
    keep: Callable[[CalibrationStatistics], None]
    digests: tuple[str, ...] = ()


def collect(
    model: onnx.ModelProto | Path,
    samples: SampleSource,
    requests: Sequence[Request],
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: Workers | None = None,
    others: Sequence[str] = (),
    ledger: CalibrationCheckpoint | None = None,
) -> CalibrationStatistics:
    """Run every sample once and return the requested statistics, bit-identical for all workers.

    Each worker holds the observed tensors of one sample in memory. No files are written beside the model.

    Args:
        model: The float model; a path if its weights are in external files.
        samples: Checked samples, see `onnxq.data.samples.open_samples`.
        requests: Requests for float tensors: node outputs, graph inputs, or initializers of the main graph, and tensors
            of bodies. Names of body tensors are unique; their values in a sample form one array with one axis.
        progress: Called with (samples done, samples in all) after each sample.
        workers: Where samples run; None takes threads of this process.
        others: Tensors that are computed as if they were observed. With them, the statistics are bit-identical to one
            run for all tensors.
        ledger: Earlier statistics to continue, and the digest of the model; None starts anew.

    Raises:
        ModelError: The model does not load, or a name is not a tensor of the model.
        DataError: A sample does not run, a sample of the earlier statistics is missing, or a requested kind does not
            apply to an array, for example because of NaN or infinite values.
        CandidateError: The float model runs a sample, but the instrumented model does not.
        SchemeError: The workers are not available, or a kind of statistic is unknown.
    """
    for request in requests:
        find_kind(request.kind)
    instrumented = replace(instrument(model, requests, others), model=ledger.model if ledger else "")
    earlier = ledger.earlier if ledger else CalibrationStatistics()
    left, total = _left(samples, earlier, ledger.digests if ledger else ()), StatisticsSum(earlier)
    done = len(samples) - len(left)
    with _float_model_blamed_first(model, samples):
        for statistics in (workers or Threads()).run(instrumented, Work(samples, left)):
            total.add(statistics)
            further = len(statistics.samples)
            # Free these statistics before the next ones arrive.
            del statistics
            done = _report(progress, done, further, len(samples))
            if ledger:
                ledger.keep(total.statistics)
    found = total.statistics
    return found.select(request for request in dict.fromkeys(requests) if request in found.statistics)


def collect_apart(
    model: onnx.ModelProto | Path,
    runs: Sequence[Sequence[Subset]],
    requests: Sequence[Request],
    apart: Sequence[Request] = (),
    *,
    progress: Callable[[int, int], None] | None = None,
    others: Sequence[str] = (),
) -> Iterator[tuple[CalibrationStatistics, tuple[CalibrationStatistics, ...]]]:
    """Run every sample once in threads; yield in order the statistics of each run, and those of its parts for `apart`.

    `runs` holds the parts of each run. See `collect` for the other arguments and for errors.
    """
    done, count = 0, sum(len(part) for parts in runs for part in parts)
    instrumented = instrument(model, (*requests, *apart), others)
    source = runs[0][0].samples if count else []
    with _float_model_blamed_first(model, source):
        for found in Threads().run_parts(instrumented, runs, tuple(apart)):
            yield found
            done = _report(progress, done, len(found[0].samples), count)


@contextmanager
def _float_model_blamed_first(model: onnx.ModelProto | Path, samples: SampleSource) -> Iterator[None]:
    """If an instrumented model fails on a sample, raise CandidateError if the float model runs it."""
    try:
        yield
    except InstrumentedRunError as error:
        (sample,) = picked(samples, [error.index])
        run(open_session(model, threads=1), sample, index=error.index)
        raise CandidateError(
            f"the float model runs sample {error.index}, but not with the observed tensors as further outputs "
            f"({error.reason}); observe fewer tensors, or report the model"
        ) from error


def _report(progress: Callable[[int, int], None] | None, done: int, further: int, count: int) -> int:
    if progress:
        for one in range(done + 1, done + further + 1):
            progress(one, count)
    return done + further


def instrument(
    model: onnx.ModelProto | Path, requests: Sequence[Request], others: Sequence[str] = ()
) -> InstrumentedModel:
    """Return a model with the requested tensors as outputs, ready for workers; see `collect`.

    Raises:
        ModelError: The model cannot be read, or a name is not a tensor of the model.
    """
    proto = read_without_data(model) if isinstance(model, Path) else model
    names = tuple(dict.fromkeys(request.tensor for request in requests))
    fed = {value.name for value in proto.graph.input} - {tensor.name for tensor in proto.graph.initializer}
    parts = segments(
        proto, [name for name in names if name not in fed], [name for name in others if name not in fed | set(names)]
    )
    return InstrumentedModel(
        segments=parts,
        folder=model.parent if isinstance(model, Path) else None,
        requests=tuple(dict.fromkeys(requests)),
        mapped=is_large(proto),
    )


def _left(samples: SampleSource, earlier: CalibrationStatistics, digests: Sequence[str]) -> list[int]:
    """Return the indices of the samples to run; samples are read only if their digests are unknown."""
    if not earlier.samples:
        return list(range(len(samples)))
    done = Counter(earlier.samples)
    left = []
    for index, digest in enumerate(digests or map(sample_digest, samples)):
        if done[digest]:
            done[digest] -= 1
        else:
            left.append(index)
    if gone := done.total():
        raise DataError(
            f"{gone} samples of the earlier statistics are not there, expected samples to stay as they are; "
            "calibrate again"
        )
    return left


# Groups of samples that run once: statistics of each group, and of groups together.

# Parts of a group of samples, whose differences show how far new samples may exceed the ranges.
_PARTS = 6
# For a small model, adding up the statistics of this many samples takes as long as running them.
_ENOUGH = 4


def parts_of(samples: Subset) -> list[Subset]:
    """Split samples into at most 6 parts, none of them empty."""
    return [replace(samples, places=samples.places[at::_PARTS]) for at in range(min(_PARTS, len(samples)))]


def _runs(parts: Sequence[Subset]) -> list[Sequence[Subset]]:
    """Return parts of one group in runs of enough samples that adding up their statistics takes little time."""
    each = math.ceil(_ENOUGH / max(map(len, parts), default=1))
    return [parts[start : start + each] for start in range(0, len(parts), each)]


class _Group(NamedTuple):
    samples: Subset
    seen: CalibrationStatistics
    parts: tuple[CalibrationStatistics, ...]


class Grouped:
    """Statistics of groups of samples, which later requests reuse instead of running the samples again.

    Samples are identified by their positions in the given source object.
    """

    def __init__(self) -> None:
        self._groups: tuple[_Group, ...] = ()

    def observe(
        self,
        model: Path,
        groups: Sequence[Subset],
        requests: Sequence[Request],
        apart: Sequence[Request],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Run every sample of some groups once, and replace the statistics.

        Groups are disjoint and of one source. `requests` applies to each group, and `apart` to each of its parts, see
        `parts_of`.
        """
        runs = [(place, run) for place, group in enumerate(groups) for run in _runs(parts_of(group))]
        totals = [StatisticsSum(CalibrationStatistics()) for _ in groups]
        kept: list[list[CalibrationStatistics]] = [[] for _ in groups]
        shown = collect_apart(model, [run for _, run in runs], requests, apart, progress=progress)
        for (place, _), (together, each) in zip(runs, shown, strict=True):
            totals[place].add(together.select(requests))
            kept[place] += each
        self._groups = tuple(
            _Group(group, total.statistics, tuple(own)) for group, total, own in zip(groups, totals, kept, strict=True)
        )

    def collected(
        self,
        model: Path,
        samples: SampleSource,
        requests: Sequence[Request],
        *,
        progress: Callable[[int, int], None] | None = None,
        others: Sequence[str] = (),
    ) -> CalibrationStatistics:
        """Return the statistics of samples, see `collect`; from groups if the samples consist of known ones."""
        within = self._made_up_of(samples)
        if within and all(request in one.seen.statistics for one in within for request in requests):
            return reduce(CalibrationStatistics.plus, (one.seen for one in within)).select(dict.fromkeys(requests))
        return collect(model, samples, requests, progress=progress, others=others)

    def parts(
        self, groups: Sequence[Subset], requests: Sequence[Request]
    ) -> dict[int, tuple[CalibrationStatistics, ...]]:
        """Return the statistics of the parts of some groups, by index of the group; unknown groups are left out."""
        within = {place: self._made_up_of(samples) for place, samples in enumerate(groups) if samples.places}
        known = {place: found[0].parts for place, found in within.items() if len(found) == 1}
        return {
            place: parts
            for place, parts in known.items()
            if all(one in part.statistics for part in parts for one in requests)
        }

    def _made_up_of(self, samples: SampleSource) -> list[_Group]:
        """Return the groups that samples consist of; empty if they do not."""
        source = self._groups[0].samples.samples if self._groups else None
        if samples is source:
            places = set(range(len(samples)))
        elif isinstance(samples, Subset) and samples.samples is source:
            places = set(samples.places)
        else:
            return []
        within = [one for one in self._groups if one.samples.places and places.issuperset(one.samples.places)]
        return within if sum(len(one.samples) for one in within) == len(places) else []
