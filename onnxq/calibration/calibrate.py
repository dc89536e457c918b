"""Calibration within a memory budget, which reuses statistics of an earlier or interrupted run."""

from __future__ import annotations

import hashlib
import logging
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path

import onnx

from onnxq.calibration.accumulators import Request
from onnxq.calibration.collect import CalibrationCheckpoint, collect
from onnxq.calibration.dask_cluster import Cluster
from onnxq.calibration.instrument import added_outputs, append_outputs, expose_body_sizes
from onnxq.calibration.kinds import find_kind
from onnxq.calibration.provenance import model_digest, sample_digest
from onnxq.calibration.segments import Segment, segments
from onnxq.calibration.statistics import CalibrationStatistics, discard, load_statistics, save_statistics
from onnxq.calibration.workers import SHARD_BYTES, Processes, Threads, Workers
from onnxq.data.inputs import Sample, SampleSource, sample_bytes
from onnxq.data.samples import evenly
from onnxq.errors import CandidateError, DataError, RunError, SchemeError
from onnxq.runtime.sessions import open_session, run, runtime_version, serialized
from onnxq.system.records import parse_size
from onnxq.system.resources import available_cores

# Bytes of a value of a body: only float32 tensors are exposed.
_BODY_WIDTH = 4
# Bytes of an element of nearly all tensors.
_WIDTH = 4


def measure_tensor_bytes(model: Path, sample: Sample, tensors: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each tensor in one sample; the model returns only sizes, not the tensors.

    The sample fixes the dimensions that the model leaves open. Inputs, which are in memory anyway, count as 0.

    Raises:
        ModelError: The model does not load, or a name is not a tensor that can be observed.
        DataError: The sample does not run.
        CandidateError: The float model runs the sample, but the instrumented model does not.
    """
    proto, inner = expose_body_sizes(onnx.load(model, load_external_data=False), tensors)
    own = {value.name for value in proto.graph.output}
    computed = [name for name in tensors if name not in sample and name not in inner]
    declared = {value.name: value for value in (*proto.graph.output, *added_outputs(proto, computed))}
    widths = dict.fromkeys(inner, _BODY_WIDTH) | {
        name: onnx.helper.tensor_dtype_to_np_dtype(declared[name].type.tensor_type.elem_type).itemsize
        for name in computed
    }
    counts = [onnx.helper.make_tensor_value_info(f"{name}/size", onnx.TensorProto.INT64, []) for name in inner]
    session = open_session(append_outputs(serialized(proto), counts, computed), threads=1, external_folder=model.parent)
    try:
        sizes = run(session, sample, [f"{name}/size" for name in widths])
    except RunError as error:
        run(open_session(model, threads=1), sample)
        raise CandidateError(
            f"the float model runs a sample, but not with the sizes of its tensors as further outputs "
            f"({error.__cause__ or error}); leave out --memory, or report the model"
        ) from error
    found = {name: int(size) * widths[name] for name, size in zip(widths, sizes, strict=True)}
    # Outputs of the model are computed in any case.
    return dict.fromkeys(tensors, 0) | {name: 0 if name in own else size for name, size in found.items()}


def group_by_bytes(sizes: Mapping[str, int], limit: int) -> tuple[tuple[str, ...], ...]:
    """Split tensors, in their order, into groups of at most `limit` bytes.

    Raises:
        DataError: A single tensor is larger.

    >>> group_by_bytes({"a": 3, "b": 2, "c": 4}, 5)
    (('a', 'b'), ('c',))
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if size > limit:
            raise DataError(
                f"Tensor {name!r} takes {size} bytes, expected at most the {max(limit, 0)} that the memory budget "
                "leaves beside the model and its samples; raise the budget"
            )
        if used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return tuple(tuple(group) for group in groups)


def plan_passes(
    parts: Sequence[Segment], sizes: Mapping[str, int], names: Sequence[str], limit: int
) -> tuple[tuple[str, ...], ...]:
    """Split tensors into passes over the samples, so that no segment holds more than `limit` bytes in a pass.

    Args:
        parts: The model with all tensors observed; a segment's tensors are freed before the next segment runs.
        sizes: Bytes of all observed tensors, see `measure_tensor_bytes`.
        names: The tensors to observe.
        limit: Bytes for the tensors of a segment and the tensors that cross its bounds.

    Raises:
        DataError: A single tensor is larger than the bytes that crossing tensors leave.
    """
    computed = {name for part in parts for name in part.outputs}
    passes = [[name for name in names if name not in computed]]
    for part in parts:
        given = {name: sizes[name] for name in part.outputs if name in names}
        for index, group in enumerate(group_by_bytes(given, limit - _crossing(part, sizes))):
            if index == len(passes):
                passes.append([])
            passes[index] += group
    return tuple(tuple(group) for group in passes)


def hungriest(parts: Sequence[Segment], sizes: Mapping[str, int], names: Sequence[str]) -> tuple[str, int]:
    """Return the tensor with the most bytes, including those that cross its segment, and these bytes.

    `plan_passes`, with the same arguments, needs at least this limit. The name is empty if nothing is computed.
    """
    taken = {name: _crossing(part, sizes) + sizes[name] for part in parts for name in part.outputs if name in names}
    return max(taken.items(), key=lambda item: item[1], default=("", 0))


def statistics_bytes(requests: Iterable[Request], sizes: Mapping[str, int], samples: int) -> dict[str, int]:
    """Return about how many bytes the statistics of each tensor take; for `sizes` see `measure_tensor_bytes`."""
    found: dict[str, int] = {}
    for request in requests:
        kept = find_kind(request.kind).bytes_kept(request, sizes[request.tensor] // _WIDTH, samples)
        found[request.tensor] = found.get(request.tensor, 0) + kept
    return found


def largest_segment(parts: Sequence[Segment], sizes: Mapping[str, int]) -> int:
    """Return the most bytes that a segment holds in a single pass over all tensors."""
    return max(_crossing(part, sizes) + sum(sizes.get(name, 0) for name in part.outputs) for part in parts)


def _crossing(part: Segment, sizes: Mapping[str, int]) -> int:
    return sum(sizes.get(name, 0) for name in part.kept.union(part.inputs))


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes.

    Raises:
        SchemeError: The system does not report it.
    """
    try:
        import resource
    except ImportError as error:
        raise SchemeError(
            "this system does not report memory use, which a memory budget needs; leave the budget out"
        ) from error
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


# Calibration that reuses statistics.

Notice = Callable[[str], None]

_SIZED_SAMPLES = 8
"""The largest of this many samples decides the memory per sample."""
_COPIES = 3
"""Copies of one thread's statistics in memory: observed, summed up, and in the next sum."""


@dataclass(frozen=True)
class Collection:
    """How statistics are collected; the choices here do not change their bits.

    Attributes:
        workers: A number of processes, or the address of a Dask cluster; None runs samples in threads of this process.
        reuse: A file of statistics; those that fit the model, samples and tensors are not computed again.
        checkpoint: The file that statistics will be written to; partial files beside it keep finished samples.
        seconds: Time between two writes of a partial file.
        memory: Bytes that this process may take, or a text such as ``4GB``. If tensors of a segment do not fit at once,
            they are observed in several passes. Weights whose Gram matrices do not fit are rounded without them.
        notice: Called with a sentence about unused parts of a file; the default logs it.

    Raises:
        SchemeError: The memory is not a size, the number of processes is below 1, or the cluster is a number.

    >>> Collection(memory="4GB").most_bytes
    4000000000
    """

    workers: Workers | int | str | None = None
    reuse: str | Path | None = None
    checkpoint: Path | None = None
    seconds: float = 2.0
    memory: int | str | None = None
    notice: Notice = logging.getLogger(__name__).info

    def __post_init__(self) -> None:
        # Errors in them are raised here, not after minutes.
        _ = self.most_bytes, self.run_by

    @property
    def most_bytes(self) -> int | None:
        """The memory in bytes; None if there is no limit."""
        if not isinstance(self.memory, str):
            return self.memory
        try:
            return parse_size(self.memory)
        except ValueError as reason:
            raise SchemeError(f"the memory for calibration is wrong: {reason}") from None

    @property
    def run_by(self) -> Workers | None:
        """The workers; None for threads of this process, as many as fit into memory."""
        if isinstance(self.workers, int):
            return workers_for(jobs=self.workers)
        return workers_for(cluster=self.workers) if isinstance(self.workers, str) else self.workers


def workers_for(*, jobs: int | None = None, cluster: str | None = None) -> Workers:
    """Return the workers that a user requested; the default is threads of this process.

    Raises:
        SchemeError: Both are given, `jobs` is below 1, or `cluster` is a number.
    """
    if jobs is not None and cluster is not None:
        raise SchemeError("Jobs and a cluster are both given, expected one; the cluster decides on its own workers")
    if cluster is not None:
        if cluster.isdigit():
            raise SchemeError(
                f"the cluster is {cluster!r}, expected an address such as tcp://host:8786; jobs are no text"
            )
        return Cluster(cluster)
    return Threads() if jobs is None else Processes(jobs)


def calibrate_tensors(
    model: Path,
    samples: SampleSource,
    requests: Sequence[Request],
    collection: Collection,
    *,
    progress: Callable[[int, int], None] | None = None,
    digest: str = "",
    others: Sequence[str] = (),
) -> CalibrationStatistics:
    """Return the requested statistics of all samples, with their provenance, running only what is missing.

    Args:
        model: The float model.
        samples: Checked samples.
        requests: See `collect`.
        collection: Workers, memory budget, and files to reuse.
        progress: Called with (samples done, samples in all) after each sample, in each pass.
        digest: Digest of the model, see `model_digest`; computed if empty.
        others: See `collect`.

    Raises:
        ModelError: The model does not load, or a name is not a tensor of the model.
        DataError: A sample does not run, a tensor is not finite, the file to reuse is damaged, or a single tensor
            exceeds the memory budget.
        OutputError: A partial file cannot be written.
        SchemeError: The workers are not available, or a kind of statistic is unknown.
    """
    requests = tuple(dict.fromkeys(requests))
    names = tuple(dict.fromkeys((*others, *(request.tensor for request in requests))))
    digest = digest or model_digest(model)
    known = _Known(digest, samples, collection.notice)
    earlier = known.fitting(Path(collection.reuse), requests) if collection.reuse else CalibrationStatistics()
    if len(earlier.samples) > len(samples):
        return earlier
    workers, passes = _passes(model, samples, requests, earlier, collection)
    groups = [(tuple(earlier.statistics), earlier), *((group, CalibrationStatistics()) for group in passes)]
    found = []
    for group, base in groups:
        if not group:
            continue
        partial = _partial(collection.checkpoint, group, requests)
        if partial and partial.exists():
            base = known.continued(partial, group, base)
        if len(base.samples) < len(samples):
            # The digests of all samples were computed to compare them, so `collect` need not read the samples for that.
            digests = known.digests if base.samples else ()
            ledger = CalibrationCheckpoint(digest, base, _keeper(partial, base, collection.seconds), digests)
            base = collect(model, samples, group, progress=progress, workers=workers, others=names, ledger=ledger)
            if partial:
                save_statistics(base, partial)
        found.append(base)
    return reduce(CalibrationStatistics.join, found).select(requests) if found else CalibrationStatistics()


def discard_checkpoints(checkpoint: Path) -> None:
    """Remove the partial files of `calibrate_tensors`, after the statistics are written to `checkpoint`."""
    for path in _beside(checkpoint):
        discard(path)


def _passes(
    model: Path,
    samples: SampleSource,
    requests: Sequence[Request],
    earlier: CalibrationStatistics,
    collection: Collection,
) -> tuple[Workers | None, tuple[tuple[Request, ...], ...]]:
    workers, most_bytes = collection.run_by, collection.most_bytes
    names = tuple(dict.fromkeys(request.tensor for request in requests))
    missing = tuple(request for request in requests if request not in earlier.statistics)
    if most_bytes is None or not missing:
        return workers, (missing,)
    sample = max(evenly(samples, _SIZED_SAMPLES), key=sample_bytes)
    sizes = measure_tensor_bytes(model, sample, names)
    parts = segments(onnx.load(model, load_external_data=False), [name for name in names if name not in sample])
    kept = statistics_bytes(missing, sizes, len(samples))
    result = sum(kept.values())
    # Up to two shards of samples per worker are in memory before they run.
    cores = available_cores()
    used, ahead = peak_memory(), 2 * cores * (SHARD_BYTES + sample_bytes(sample))
    left = most_bytes - used - ahead - result
    # Each thread has statistics in its observers and in its last result; another copy is in the sum.
    if workers is None and largest_segment(parts, sizes) * cores + result * (2 * cores + 1) <= left:
        return Threads(cores), (missing,)
    statistics = max(0, min(_COPIES * result, left // 2))
    # A power of two, so that a continued run splits the tensors as the interrupted one did.
    limit = 1 << ((left - statistics).bit_length() - 1) if left > statistics else 0
    wanted = tuple(dict.fromkeys(request.tensor for request in missing))
    name, needed = hungriest(parts, sizes, wanted)
    most = max(needed, _COPIES * max(kept.values()))
    if limit < needed or statistics < _COPIES * max(kept.values()):
        tensors = 1 << (most - 1).bit_length()
        raise DataError(
            f"--memory is {_megabytes(most_bytes)}, expected at least "
            f"{_megabytes(used + ahead + result + 2 * tensors)}: process {_megabytes(used)}, samples "
            f"{_megabytes(ahead)}, statistics {_megabytes(result + tensors)} and tensor {name!r} "
            f"{_megabytes(tensors)}; raise it"
        )
    copies = {tensor: _COPIES * size for tensor, size in kept.items()}
    passes = [
        frozenset(group)
        for names in plan_passes(parts, sizes, wanted, limit)
        for group in group_by_bytes({name: copies[name] for name in names}, statistics)
    ]
    return workers or Threads(1), tuple(
        tuple(request for request in missing if request.tensor in group) for group in passes
    )


def _megabytes(size: int) -> str:
    return f"{math.ceil(size / 1e6)} MB"


def _keeper(
    partial: Path | None, base: CalibrationStatistics, seconds: float
) -> Callable[[CalibrationStatistics], None]:
    """Return a function that writes statistics every `seconds`; an unwritable place raises at once."""
    if partial is None:
        return lambda total: None
    save_statistics(base, partial)
    written = time.monotonic()

    def keep(total: CalibrationStatistics) -> None:
        nonlocal written
        if time.monotonic() - written >= seconds:
            save_statistics(total, partial)
            written = time.monotonic()

    return keep


def _partial(checkpoint: Path | None, observed: Sequence[Request], computed: Sequence[Request]) -> Path | None:
    if checkpoint is None:
        return None
    tag = hashlib.blake2b(repr((observed, computed)).encode(), digest_size=4).hexdigest()
    return checkpoint.with_name(f"{checkpoint.name}.{tag}.partial")


def _beside(checkpoint: Path) -> Iterator[Path]:
    """Yield the partial files, and temporary files that a killed run left."""
    name = re.escape(checkpoint.name)
    ours = re.compile(rf"{name}\.[0-9a-f]{{8}}\.partial|\.{name}(\.[0-9a-f]{{8}}\.partial)?\.\d+\.tmp")
    yield from (path for path in checkpoint.parent.iterdir() if ours.fullmatch(path.name))


class _Known:
    """Checks whether stored statistics can be used; samples are only read if there is a file to compare."""

    def __init__(self, model: str, samples: SampleSource, notice: Notice) -> None:
        self._model = model
        self._source = samples
        self._notice = notice

    @cached_property
    def digests(self) -> tuple[str, ...]:
        return tuple(sample_digest(sample) for sample in self._source)

    def fitting(self, path: Path, requests: Sequence[Request]) -> CalibrationStatistics:
        """Return the statistics of a file for these requests; empty if the file does not fit."""
        found = load_statistics(path)
        there = [request for request in requests if request in found.statistics]
        if problem := self._misfit(found, whole=len(there) == len(requests)):
            self._notice(f"{path} {problem}; nothing of it is used")
            return CalibrationStatistics()
        missing = tuple(dict.fromkeys(request.tensor for request in requests if request not in found.statistics))
        if missing:
            tensors = len({request.tensor for request in requests})
            shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            self._notice(f"{path} lacks {len(missing)} of {tensors} tensors ({shown}); they are calibrated now")
        if lacking := found.lacks(self.digests):
            self._notice(f"{path} lacks {lacking} of {len(self.digests)} samples; they are run now")
        if more := len(found.samples) - len(self.digests) + lacking:
            self._notice(f"{path} holds {more} samples besides these; it is used as it is")
        return found.select(there) if there else CalibrationStatistics()

    def continued(self, path: Path, requests: Sequence[Request], base: CalibrationStatistics) -> CalibrationStatistics:
        """Return the statistics of an interrupted run, or `base` if it has more samples or the file does not fit."""
        try:
            found = load_statistics(path)
        except DataError as error:
            self._notice(str(error))
            return base
        fewer = (count := len(found.samples)) <= len(base.samples)
        if fewer or self._misfit(found, whole=False) or not set(requests) <= set(found.statistics):
            return base
        self._notice(f"{path} holds {count} of {len(self._source)} samples of an interrupted run; it goes on")
        return found.select(requests)

    def _misfit(self, found: CalibrationStatistics, *, whole: bool) -> str:
        """Return why statistics do not fit; empty if they do.

        Statistics with samples that are not among these cannot be completed, so they must be complete already.
        """
        provenance = found.provenance
        if not provenance.model:
            return "does not say which model it is of"
        if provenance.model != self._model:
            return "is of another model, or of one prepared by another version of onnxq"
        if provenance.runtime != runtime_version():
            return f"is of {provenance.runtime} and not {runtime_version()}"
        others = (Counter(found.samples) - Counter(self.digests)).total()
        if others and (found.lacks(self.digests) or not whole):
            return f"has {others} of {len(found.samples)} samples that are not among these"
        return ""
