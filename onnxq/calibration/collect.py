"""Running the model on samples, and collecting what is requested of its tensors."""

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
from onnxq.calibration.workers import InstrumentedModel, InstrumentedRunError, Shard, Threads, Work, Workers
from onnxq.data.dataset import Subset, picked, stretches
from onnxq.data.inputs import SampleSource
from onnxq.errors import CandidateError, DataError
from onnxq.ir.protos import is_large
from onnxq.runtime.sessions import open_session, run


@dataclass(frozen=True)
class CalibrationCheckpoint:
    """What makes evidence fit to be kept and continued.

    Attributes:
        model: digest of the model, see `onnxq.calibration.provenance.model_digest`.
        earlier: evidence for the same requests from some of the samples, which are not run again.
        keep: called with the evidence of all finished samples, whenever there are more of them.
        digests: of the samples, in their order, see `sample_digest`; empty where nobody has found them out yet.
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
    """Run every sample once and return what is requested: the same bits whatever the workers.

    Each worker holds the taps of one sample in memory. Nothing is written beside the model.

    Args:
        model: The float model; a path for models whose weights are in external files.
        samples: Checked samples, see `onnxq.data.samples.open_samples`.
        requests: What is wanted of float tensors: node outputs, graph inputs, or initializers of the main graph. Those
            of bodies have names of their own, and all their values of a sample count as one array of one axis.
        progress: Called with (samples done, samples in all) after each sample.
        workers: Where samples run; None runs them in threads of this process, one for each core.
        others: Tensors that are not observed, but computed as if they were: with them, the evidence is the same bits as
            that of one run for all tensors.
        ledger: Continues earlier evidence, and says which model it is of; None does neither.

    Raises:
        ModelError: The model does not load, or a name is no tensor of the main graph.
        DataError: A sample does not run or is not among those that the earlier evidence has, or an array is not what a
            kind of statistic is for, such as one with NaN or infinite values of which a range is wanted.
        SchemeError: The workers or a kind of statistic cannot be had.
    """
    for request in requests:
        find_kind(request.kind)
    tapped = replace(tap(model, requests, others), model=ledger.model if ledger else "")
    earlier = ledger.earlier if ledger else CalibrationStatistics()
    left, total = _left(samples, earlier, ledger.digests if ledger else ()), StatisticsSum(earlier)
    done = len(samples) - len(left)
    with _float_model_blamed_first(model, samples):
        for evidence in (workers or Threads()).run(tapped, Work(samples, left)):
            total.add(evidence)
            further = len(evidence.samples)
            # Before the next comes, this one is let go.
            del evidence
            done = _told(progress, done, further, len(samples))
            if ledger:
                ledger.keep(total.evidence)
    found = total.evidence
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
    """Run every sample once, in threads of this process, and yield in order what the parts of each run show together.

    Args:
        model: see `collect`, as for what is raised.
        runs: parts of the samples.
        requests: what is wanted of tensors.
        apart: what is wanted of each part besides, which comes second.
        progress: see `collect`.
        others: see `collect`.
    """
    shards = [[Shard(tuple(stretches(part.samples, part.places))) for part in parts] for parts in runs]
    done, count = 0, sum(len(shard) for parts in shards for shard in parts)
    tapped = tap(model, (*requests, *apart), others)
    source = runs[0][0].samples if count else []
    with _float_model_blamed_first(model, source):
        for found in Threads().run_parts(tapped, shards, tuple(apart)):
            yield found
            done = _told(progress, done, len(found[0].samples), count)


@contextmanager
def _float_model_blamed_first(model: onnx.ModelProto | Path, samples: SampleSource) -> Iterator[None]:
    """If the float model runs the sample that fails, say that the fault is the instrumented model's.

    Raises:
        CandidateError: the float model runs the sample.
        RunError: the float model fails as well; its own reason is told.
    """
    try:
        yield
    except InstrumentedRunError as error:
        (sample,) = picked(samples, [error.index])
        run(open_session(model, threads=1), sample, index=error.index)
        raise CandidateError(
            f"the float model runs sample {error.index}, but not with the observed tensors as further outputs "
            f"({error.reason}); observe fewer tensors, or report the model"
        ) from error


def _told(progress: Callable[[int, int], None] | None, done: int, further: int, count: int) -> int:
    """Tell of each of some further samples, and return how many are done with them."""
    if progress:
        for one in range(done + 1, done + further + 1):
            progress(one, count)
    return done + further


def tap(model: onnx.ModelProto | Path, requests: Sequence[Request], others: Sequence[str] = ()) -> InstrumentedModel:
    """Return a model with the tensors of the requests as outputs, ready for workers; see `collect`.

    Raises:
        ModelError: The model cannot be read, or a name is no tensor of the main graph.
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
    """Return the indices of the samples that are still to be run; they are read only where digests are not known.

    Raises:
        DataError: A sample that was run before is not there any more.
    """
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


# Groups of samples that run once: what each has shown, and what some of them have shown together.

# Parts of a group of samples, whose differences tell how far new samples may go beyond them.
_PARTS = 6
# To add up what a few samples of a small model show takes as long as to run as many.
_ENOUGH = 4


def parts_of(samples: Subset) -> list[Subset]:
    """Return parts of some samples, none of them empty."""
    return [replace(samples, places=samples.places[at::_PARTS]) for at in range(min(_PARTS, len(samples)))]


def _runs(parts: Sequence[Subset]) -> list[Sequence[Subset]]:
    """Return parts of one group in stretches of enough samples that adding up what these show takes little."""
    each = math.ceil(_ENOUGH / max(map(len, parts), default=1))
    return [parts[start : start + each] for start in range(0, len(parts), each)]


class _Group(NamedTuple):
    """What a group of samples has shown, and of what was wanted apart, what each of its parts has."""

    samples: Subset
    seen: CalibrationStatistics
    parts: tuple[CalibrationStatistics, ...]


class Grouped:
    """What groups of the samples of a model have shown, so that whoever asks for some of them need not run these again.

    Samples are known by their places in the very source that was given.
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
        """Run every sample of some groups once, whose evidence takes the place of what there was.

        Args:
            model: the file of the float model.
            groups: of one source, with no sample in common.
            requests: what is wanted of all samples.
            apart: what is wanted of each part of each group, see `parts_of`.
            progress: see `collect`.
        """
        runs = [(place, run) for place, group in enumerate(groups) for run in _runs(parts_of(group))]
        totals = [StatisticsSum(CalibrationStatistics()) for _ in groups]
        kept: list[list[CalibrationStatistics]] = [[] for _ in groups]
        shown = collect_apart(model, [run for _, run in runs], requests, apart, progress=progress)
        for (place, _), (together, each) in zip(runs, shown, strict=True):
            totals[place].add(together.select(requests))
            kept[place] += each
        self._groups = tuple(
            _Group(group, total.evidence, tuple(own)) for group, total, own in zip(groups, totals, kept, strict=True)
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
        """Return what samples show, see `collect`, from groups of which they are made up where that is known."""
        within = self._made_up_of(samples)
        if within and all(request in one.seen.statistics for one in within for request in requests):
            return reduce(CalibrationStatistics.plus, (one.seen for one in within)).select(dict.fromkeys(requests))
        return collect(model, samples, requests, progress=progress, others=others)

    def parts(
        self, groups: Sequence[Subset], requests: Sequence[Request]
    ) -> dict[int, tuple[CalibrationStatistics, ...]]:
        """Return what each part of some groups has shown, by the place of the group, of those where that is known."""
        within = {place: self._made_up_of(samples) for place, samples in enumerate(groups) if samples.places}
        known = {place: found[0].parts for place, found in within.items() if len(found) == 1}
        return {
            place: parts
            for place, parts in known.items()
            if all(one in part.statistics for part in parts for one in requests)
        }

    def _made_up_of(self, samples: SampleSource) -> list[_Group]:
        """Return the groups that some samples consist of; none where they consist of others."""
        source = self._groups[0].samples.samples if self._groups else None
        if samples is source:
            places = set(range(len(samples)))
        elif isinstance(samples, Subset) and samples.samples is source:
            places = set(samples.places)
        else:
            return []
        within = [one for one in self._groups if one.samples.places and places.issuperset(one.samples.places)]
        return within if sum(len(one.samples) for one in within) == len(places) else []
