"""Calibration that starts from what is known: statistics of an earlier run, or of one that was interrupted."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import onnx

from onnxq.errors import DataError
from onnxq.evidence.provenance import model_digest, sample_digest
from onnxq.evidence.statistics import Statistics
from onnxq.evidence.storage import discard, load_statistics, save_statistics
from onnxq.execution.budget import hungriest, largest_segment, peak_memory, tap_passes, tap_sizes
from onnxq.execution.runner import HISTOGRAM_ELEMENTS, SHARD_BYTES, Ledger, collect
from onnxq.execution.segments import segments
from onnxq.execution.shards import Workers
from onnxq.execution.workers import Threads, available_cores
from onnxq.runtime import runtime_version
from onnxq.samples.inputs import SampleSource, sample_bytes

Notice = Callable[[str], None]


@dataclass(frozen=True)
class Collection:
    """How statistics are collected; they are the same bits whatever workers, memory and files are chosen here.

    Attributes:
        workers: where samples run; None runs them in threads of this process.
        reuse: a file of statistics; what fits the model, the samples and the tensors is not run again.
        checkpoint: the file that statistics are going to be written to; files beside it keep what is finished.
        seconds: time between two writes of a checkpoint.
        memory: bytes that this process may take; tensors of a segment that do not fit at once are tapped in several
            passes.
        notice: told in a sentence what of a file was not used.
        histogram_elements: see `collect`. With 0, statistics that have a histogram fit too, and what they lack is
            counted as they were.
        observer: see `collect`; the empty name takes that of the statistics to reuse.
    """

    workers: Workers | None = None
    reuse: Path | None = None
    checkpoint: Path | None = None
    seconds: float = 2.0
    memory: int | None = None
    notice: Notice = lambda sentence: None
    histogram_elements: int | None = HISTOGRAM_ELEMENTS
    observer: str = ""


def calibrate_tensors(
    model: Path,
    samples: SampleSource,
    tensors: Sequence[str],
    collection: Collection,
    *,
    progress: Callable[[int, int], None] | None = None,
    axes: Mapping[str, int] | None = None,
    means: Mapping[str, int] | None = None,
) -> Statistics:
    """Return the statistics of the named tensors in all samples, with their provenance, running only what is missing.

    Args:
        model: The float model.
        samples: Checked samples.
        tensors: Float tensors of the main graph whose range is wanted.
        collection: Where and from what it starts.
        progress: Called with (samples done, samples in all) after each sample, in each pass.
        axes: See `collect`.
        means: See `collect`.

    Raises:
        ModelError: The model does not load, or a name is no tensor of the main graph.
        DataError: A sample does not run, a tensor is not finite, the file to reuse is damaged, or one tensor alone is
            beyond the memory budget.
        OutputError: A checkpoint cannot be written.
        SchemeError: The workers cannot be had.
    """
    axes, means = axes or {}, means or {}
    names = tuple(dict.fromkeys((*tensors, *means)))
    digest = model_digest(model)
    known = _Known(digest, collection, samples, frozenset(tensors), axes, means)
    earlier = known.fitting(collection.reuse, names) if collection.reuse else Statistics()
    workers, passes = _passes(model, samples, names, earlier, collection)
    kept = tuple(name for name in names if name in earlier.tensors)
    groups = [(kept, earlier), *((group, Statistics()) for group in passes)]
    found = []
    for group, base in groups:
        if not group:
            continue
        computed = names, sorted(set(tensors)), sorted(axes.items()), sorted(means.items())
        partial = _partial(collection.checkpoint, group, computed)
        if partial and partial.exists():
            base = known.continued(partial, group, base)
        if base.samples < len(samples):
            ledger = Ledger(digest, base, _keeper(partial, base, collection.seconds))
            base = collect(
                model,
                samples,
                [name for name in group if name in known.ranges],
                progress=progress,
                workers=workers,
                histogram_elements=known.elements,
                observer=known.observer,
                axes=axes,
                means={name: means[name] for name in group if name in means},
                others=names,
                ledger=ledger,
            )
            if partial:
                save_statistics(base, partial)
        found.append(base)
    return reduce(Statistics.join, found).select(names) if found else Statistics()


def discard_checkpoints(checkpoint: Path) -> None:
    """Remove what `calibrate_tensors` kept beside the file that statistics have now been written to."""
    for path in _beside(checkpoint):
        discard(path)


def _passes(
    model: Path, samples: SampleSource, names: Sequence[str], earlier: Statistics, collection: Collection
) -> tuple[Workers | None, tuple[tuple[str, ...], ...]]:
    """Return the workers to use and the tensors of each pass."""
    missing = tuple(name for name in names if name not in earlier.tensors)
    if collection.memory is None or not missing:
        return collection.workers, (missing,)
    sample = next(iter(samples))
    sizes = tap_sizes(model, sample, names)
    parts = segments(onnx.load(model, load_external_data=False), [name for name in names if name not in sample])
    # Between reading and running, each worker has up to two shards of samples before it.
    cores = available_cores()
    used, ahead = peak_memory(), 2 * cores * (SHARD_BYTES + sample_bytes(sample))
    left = collection.memory - used - ahead
    if collection.workers is None and largest_segment(parts, sizes) * cores <= left:
        return Threads(cores), (missing,)
    # Rounded, so that a run that is continued splits the tensors as the interrupted one did.
    limit = 1 << (left.bit_length() - 1) if left > 0 else 0
    name, needed = hungriest(parts, sizes, missing)
    if limit < needed:
        tensors = 1 << (needed - 1).bit_length()
        raise DataError(
            f"--memory is {_megabytes(collection.memory)}, expected at least {_megabytes(used + ahead + tensors)}: "
            f"{_megabytes(used)} of the process, {_megabytes(ahead)} of samples on their way and {_megabytes(tensors)} "
            f"of tensor {name!r} with what is computed beside it; raise it"
        )
    return collection.workers or Threads(1), tap_passes(parts, sizes, missing, limit)


def _megabytes(size: int) -> str:
    return f"{math.ceil(size / 1e6)} MB"


def _keeper(partial: Path | None, base: Statistics, seconds: float) -> Callable[[Callable[[], Statistics]], None]:
    """Return a function that writes statistics when it is time to; a place that cannot be written shows at once."""
    if partial is None:
        return lambda total: None
    save_statistics(base, partial)
    written = time.monotonic()

    def keep(total: Callable[[], Statistics]) -> None:
        nonlocal written
        if time.monotonic() - written >= seconds:
            save_statistics(total(), partial)
            written = time.monotonic()

    return keep


def _partial(checkpoint: Path | None, observed: Sequence[str], computed: object) -> Path | None:
    if checkpoint is None:
        return None
    tag = hashlib.blake2b(repr((observed, computed)).encode(), digest_size=4).hexdigest()
    return checkpoint.with_name(f"{checkpoint.name}.{tag}.partial")


def _beside(checkpoint: Path) -> Iterator[Path]:
    prefix = checkpoint.name
    for path in checkpoint.parent.iterdir():
        ours = path.name.removeprefix(".").startswith(f"{prefix}.")
        if ours and path.suffix in (".partial", ".tmp"):
            yield path


class _Known:
    """What statistics must be of to be used; the samples are only read for it when there is a file to compare."""

    def __init__(
        self,
        model: str,
        collection: Collection,
        samples: SampleSource,
        ranges: frozenset[str],
        axes: Mapping[str, int],
        means: Mapping[str, int],
    ) -> None:
        self.elements = collection.histogram_elements
        self.observer = collection.observer
        self.ranges = ranges
        self._model = model
        self._source = samples
        self._notice = collection.notice
        self._axes, self._means = axes, means
        self._digests: frozenset[tuple[int, str]] | None = None

    def fitting(self, path: Path, names: Sequence[str]) -> Statistics:
        """Return what a file holds of the named tensors in these samples; nothing when it is of anything else."""
        found = load_statistics(path)
        if self.elements == 0 and found.provenance.samples:
            self.elements = found.provenance.histogram_elements
        self.observer = self.observer or found.provenance.observer
        if problem := self._misfit(found):
            self._notice(f"{path} {problem}; nothing of it is used")
            return Statistics()
        there = [name for name in names if self._has(found, name)]
        if missing := [name for name in names if name not in there]:
            shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            self._notice(f"{path} lacks {len(missing)} of {len(names)} tensors ({shown}); they are calibrated now")
        if found.samples < len(self._source):
            self._notice(
                f"{path} lacks {len(self._source) - found.samples} of {len(self._source)} samples; they are run now"
            )
        return found.select(there) if there else Statistics()

    def continued(self, path: Path, names: Sequence[str], base: Statistics) -> Statistics:
        """Return what an interrupted run kept, or `base` where that is more or all that can be used."""
        try:
            found = load_statistics(path)
        except DataError as error:
            self._notice(str(error))
            return base
        if found.samples <= base.samples or self._misfit(found) or not set(names) <= set(found.tensors):
            return base
        self._notice(f"{path} holds {found.samples} of {len(self._source)} samples of an interrupted run; it goes on")
        return found.select(names)

    def _has(self, found: Statistics, name: str) -> bool:
        tensor = found.tensors.get(name)
        if tensor is None or not tensor.count:
            return tensor is not None
        return not (
            (name in self.ranges and not tensor.has_range)
            or (name in self._axes and not len(tensor.channels))
            or (name in self._means and tensor.axis != self._means[name])
        )

    def _misfit(self, found: Statistics) -> str:
        """Say what statistics are not of, or nothing when they fit."""
        provenance = found.provenance
        if not provenance.samples:
            return "does not say which samples it is of"
        if provenance.model != self._model:
            return "is of another model, or of one prepared by another version of onnxq"
        if provenance.runtime != runtime_version():
            return f"is of {provenance.runtime} and not {runtime_version()}"
        if provenance.observer != self.observer:
            return f"is of observer {provenance.observer!r} and not {self.observer!r}"
        if provenance.histogram_elements == 0 and self.elements != 0:
            return "holds extremes and no histogram, which is wanted"
        if provenance.histogram_elements != self.elements:
            return f"counts {provenance.histogram_elements} elements of a tensor and not {self.elements}"
        if self._digests is None:
            self._digests = frozenset((index, sample_digest(sample)) for index, sample in enumerate(self._source))
        if other := set(provenance.samples) - self._digests:
            return f"has {len(other)} of {len(provenance.samples)} samples that are not among these"
        return ""
