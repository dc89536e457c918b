"""Running the model on samples: statistics of tapped tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.errors import DataError, ModelError
from onnxq.evidence.observer import observer_named
from onnxq.evidence.provenance import Provenance, sample_digest
from onnxq.evidence.statistics import Accumulation, Statistics
from onnxq.execution.segments import segments
from onnxq.execution.shards import Shard, Tapped, Workers, run_shards
from onnxq.execution.workers import Threads
from onnxq.runtime import is_large, runtime_version
from onnxq.samples.data import Samples
from onnxq.samples.inputs import Sample, SampleSource, StoredSample, loaded, sample_bytes

HISTOGRAM_ELEMENTS = 1 << 13
"""Counting every element of a convolutional network costs several times its inference; extremes cost little."""

SHARD_SAMPLES = 8
"""Most samples of a shard."""
SHARD_BYTES = 2 * 10**6
"""A shard of so many bytes takes no further samples."""


@dataclass(frozen=True)
class Ledger:
    """What makes statistics fit to be kept and continued.

    Attributes:
        model: digest of the model, see `onnxq.evidence.provenance.model_digest`.
        earlier: statistics of the same tensors in some of the samples, which are not run again.
        keep: called after each shard with a function that returns the statistics of all finished samples.
    """

    model: str
    earlier: Statistics
    keep: Callable[[Callable[[], Statistics]], None]


def collect(
    model: onnx.ModelProto | Path,
    samples: SampleSource,
    tensors: Sequence[str],
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: Workers | None = None,
    histogram_elements: int | None = HISTOGRAM_ELEMENTS,
    first: int = 0,
    others: Sequence[str] = (),
    observer: str = "",
    axes: Mapping[str, int] | None = None,
    means: Mapping[str, int] | None = None,
    ledger: Ledger | None = None,
) -> Statistics:
    """Run every sample once and return the statistics of the named tensors: the same bits whatever the workers.

    Each worker holds the taps of one sample in memory. Nothing is written beside the model.

    Args:
        model: The float model; a path for models whose weights are in external files.
        samples: Checked samples, see `onnxq.samples.data.open_samples`.
        tensors: Float tensors whose range is wanted: node outputs, graph inputs, or initializers of the main graph.
            Those of bodies have names of their own, and all their values of a sample count as one array of one axis.
        progress: Called with (samples done, samples in all) after each sample.
        workers: Where samples run; None runs them in threads of this process, one for each core.
        histogram_elements: How many evenly spaced elements of a larger tensor its histogram counts in each sample;
            None counts all, 0 none, which is enough for some range methods. Minimum and maximum are always exact.
        first: The index of the first sample, when these are a part of the samples.
        others: Tensors that are not observed, but computed as if they were: with them, the statistics are the same bits
            as those of one run for all tensors.
        observer: Name of an observer that a package registers, see `observer_named`; the empty name is our own.
        axes: For tensors whose channels are told apart, the axis of the channels; their extremes are kept too.
        means: For tensors whose channels' means are wanted, the axis of the channels. Of those that are not among
            `tensors` nothing else is kept, and not even that where they hold NaN or infinite values.
        ledger: Continues earlier statistics, and gives the returned ones a provenance; None does neither.

    Raises:
        ModelError: The model does not load, or a name is no tensor of the main graph.
        DataError: A sample does not run or is not the one that the earlier statistics have under its index, or a tensor
            whose range is wanted is not float, or holds NaN or infinite values.
        SchemeError: The workers or the observer cannot be had.
    """
    means = dict(means or {})
    names = tuple(dict.fromkeys((*tensors, *means)))
    tapped = tap(model, names, histogram_elements, others)
    observer_named(observer)
    only_means = frozenset(means) - frozenset(tensors)
    tapped = replace(tapped, observer=observer, axes=dict(axes or {}), means=means, only_means=only_means)
    if ledger:
        origin = Provenance(ledger.model, (), histogram_elements, runtime_version(), observer)
        tapped = replace(tapped, origin=origin)
    shards = _Shards(samples, first, ledger)
    total = Accumulation()
    if shards.done:
        assert ledger is not None, "samples are done only where earlier statistics say so"
        total.add(ledger.earlier)
    reported = 0
    for shard, statistics in run_shards(tapped, shards, workers or Threads()):
        total.add(statistics)
        for _ in shard.samples:
            reported += 1
            if progress:
                progress(len(shards.done) + reported, len(samples))
        if ledger:
            ledger.keep(total.total)
    found = total.total()
    return found.select(name for name in names if name in found.tensors)


def tap(
    model: onnx.ModelProto | Path, tensors: Sequence[str], histogram_elements: int | None, others: Sequence[str] = ()
) -> Tapped:
    """Return a model with the named tensors as outputs, ready for workers; see `collect`.

    Raises:
        ModelError: The model cannot be read, or a name is no tensor of the main graph.
    """
    proto = read_without_data(model) if isinstance(model, Path) else model
    names = tuple(dict.fromkeys(tensors))
    fed = {value.name for value in proto.graph.input} - {tensor.name for tensor in proto.graph.initializer}
    parts = segments(
        proto, [name for name in names if name not in fed], [name for name in others if name not in fed | set(names)]
    )
    content = hashlib.blake2b(repr((names, histogram_elements)).encode())
    for part in parts:
        content.update(part.model)
    return Tapped(
        key=content.hexdigest() + (str(model.resolve()) if isinstance(model, Path) else ""),
        segments=parts,
        folder=model.parent if isinstance(model, Path) else None,
        observed=names,
        histogram_elements=histogram_elements,
        mapped=is_large(proto),
    )


class _Shards:
    """The samples that are still to be run, in shards; iterating finds out which ones were done before."""

    def __init__(self, samples: SampleSource, first: int, ledger: Ledger | None) -> None:
        self._samples = samples
        self._first = first
        self.done = dict(ledger.earlier.provenance.samples) if ledger else {}

    def __iter__(self) -> Iterator[Shard]:
        size = max(1, min(SHARD_SAMPLES, len(self._samples) // SHARD_SAMPLES))
        held: dict[int, Sample | StoredSample] = {}
        nbytes = 0
        samples = self._samples.stored() if isinstance(self._samples, Samples) else iter(self._samples)
        for index, sample in enumerate(samples, self._first):
            if index in self.done:
                if sample_digest(loaded(sample)) != self.done[index]:
                    raise DataError(
                        f"Sample {index} has changed, expected samples to stay as they are; calibrate again"
                    )
                continue
            held[index] = sample
            nbytes += 0 if isinstance(sample, StoredSample) else sample_bytes(sample)
            if len(held) == size or nbytes >= SHARD_BYTES:
                yield Shard(held)
                held, nbytes = {}, 0
        if held:
            yield Shard(held)


def read_without_data(path: Path) -> onnx.ModelProto:
    """Return the model of a file, its external data left where it is.

    Raises:
        ModelError: The file cannot be read, or is no model.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; expected an .onnx file") from error
    except DecodeError as error:
        raise ModelError(f"{path} is no ONNX model: {error}; expected an .onnx file") from error
