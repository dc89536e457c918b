"""Running the model on samples: statistics of tapped tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.calibration.inputs import Sample, sample_bytes
from onnxq.calibration.provenance import Provenance, sample_digest
from onnxq.calibration.shards import Shard, Tapped, Workers, run_shards
from onnxq.calibration.statistics import Accumulation, Statistics
from onnxq.calibration.taps import tap_outputs, tapped_bytes
from onnxq.calibration.workers import Threads
from onnxq.errors import DataError, ModelError
from onnxq.runtime import serialized

HISTOGRAM_ELEMENTS = 1 << 13
"""Counting every element of a convolutional network costs several times its inference; extremes cost little."""

SHARD_SAMPLES = 8
"""Most samples of a shard."""
SHARD_BYTES = 2 * 10**6
"""A shard of so many bytes takes no further samples."""


class SampleSource(Protocol):
    """A sized stream of samples: `onnxq.calibration.data.Samples`, or a list."""

    def __len__(self) -> int:
        """Return how many samples an iteration yields."""
        ...

    def __iter__(self) -> Iterator[Sample]:
        """Start again at the first sample."""
        ...


@dataclass(frozen=True)
class Ledger:
    """What makes statistics fit to be kept and continued.

    Attributes:
        model: digest of the model, see `onnxq.calibration.provenance.model_digest`.
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
    ledger: Ledger | None = None,
) -> Statistics:
    """Run every sample once and return the statistics of the named tensors: the same bits whatever the workers.

    Each worker holds the taps of one sample in memory. Nothing is written beside the model.

    Args:
        model: The float model; a path for models whose weights are in external files.
        samples: Checked samples, see `onnxq.calibration.data.open_samples`.
        tensors: Float tensors of the main graph: node outputs, graph inputs or initializers.
        progress: Called with (samples done, samples in all) after each sample.
        workers: Where samples run; None runs them in threads of this process, one for each core.
        histogram_elements: How many evenly spaced elements of a larger tensor its histogram counts in each sample;
            None counts all. Minimum and maximum are always exact.
        first: The index of the first sample, when these are a part of the samples.
        others: Tensors that are not observed, but computed as if they were: with them, the statistics are the same bits
            as those of one run for all tensors.
        ledger: Continues earlier statistics, and gives the returned ones a provenance; None does neither.

    Raises:
        ModelError: The model does not load, or a name is no tensor of the main graph.
        DataError: A sample does not run or is not the one that the earlier statistics have under its index, or a tensor
            is not float, or holds NaN or infinite values.
        SchemeError: The workers cannot be had.
    """
    tapped = tap(model, tensors, histogram_elements, others)
    shards = _Shards(samples, first, ledger)
    total = Accumulation()
    if shards.done:
        assert ledger is not None, "samples are done only where earlier statistics say so"
        total.add(ledger.earlier)
    reported = 0
    for shard, statistics in run_shards(tapped, shards, workers or Threads()):
        total.add(replace(statistics, provenance=shards.provenance(shard, histogram_elements)))
        for _ in shard.samples:
            reported += 1
            if progress:
                progress(len(shards.done) + reported, len(samples))
        if ledger:
            ledger.keep(total.total)
    names = dict.fromkeys(tensors)
    found = total.total()
    return found.select(name for name in names if name in found.tensors)


def tap(
    model: onnx.ModelProto | Path, tensors: Sequence[str], histogram_elements: int | None, others: Sequence[str] = ()
) -> Tapped:
    """Return a model with the named tensors as outputs, ready for workers; see `collect`.

    Raises:
        ModelError: The model cannot be read, or a name is no tensor of the main graph.
    """
    proto = _read(model) if isinstance(model, Path) else model
    names = list(dict.fromkeys(tensors))
    fed = {value.name for value in proto.graph.input} - {tensor.name for tensor in proto.graph.initializer}
    own = {value.name for value in proto.graph.output}
    data = tapped_bytes(
        model.read_bytes() if isinstance(model, Path) else serialized(model),
        [output for output in tap_outputs(proto, names) if output.name not in fed],
        [name for name in dict.fromkeys(others) if name not in fed and name not in own and name not in names],
    )
    return Tapped(
        key=hashlib.blake2b(data).hexdigest() + (str(model.resolve()) if isinstance(model, Path) else ""),
        model=data,
        folder=model.parent if isinstance(model, Path) else None,
        computed=tuple(name for name in names if name not in fed),
        fed=tuple(name for name in names if name in fed),
        histogram_elements=histogram_elements,
    )


class _Shards:
    """The samples that are still to be run, in shards; iterating finds out which ones were done before."""

    def __init__(self, samples: SampleSource, first: int, ledger: Ledger | None) -> None:
        self._samples = samples
        self._first = first
        self._ledger = ledger
        self._digests: dict[int, str] = {}
        self.done = dict(ledger.earlier.provenance.samples) if ledger else {}

    def __iter__(self) -> Iterator[Shard]:
        size = max(1, min(SHARD_SAMPLES, len(self._samples) // SHARD_SAMPLES))
        held: dict[int, Sample] = {}
        nbytes = 0
        for index, sample in enumerate(self._samples, self._first):
            if self._ledger:
                digest = sample_digest(sample)
                if self.done.get(index, digest) != digest:
                    raise DataError(
                        f"Sample {index} has changed, expected samples to stay as they are; calibrate again"
                    )
                if index in self.done:
                    continue
                self._digests[index] = digest
            held[index] = sample
            nbytes += sample_bytes(sample)
            if len(held) == size or nbytes >= SHARD_BYTES:
                yield Shard(held)
                held, nbytes = {}, 0
        if held:
            yield Shard(held)

    def provenance(self, shard: Shard, histogram_elements: int | None) -> Provenance:
        if not self._ledger:
            return Provenance()
        seen = tuple((index, self._digests.pop(index)) for index in shard.samples)
        return Provenance(self._ledger.model, seen, histogram_elements)


def _read(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; expected an .onnx file") from error
    except DecodeError as error:
        raise ModelError(f"{path} is no ONNX model: {error}; expected an .onnx file") from error
