"""Running the model on samples: what is requested of its tensors."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.errors import DataError, ModelError
from onnxq.evidence.evidence import Accumulation, Evidence
from onnxq.evidence.kinds import kind_named
from onnxq.evidence.provenance import sample_digest
from onnxq.evidence.requests import Request
from onnxq.execution.segments import segments
from onnxq.execution.shards import Shard, Tapped, Workers, run_shards
from onnxq.execution.workers import Threads
from onnxq.runtime import is_large
from onnxq.samples.data import Samples
from onnxq.samples.inputs import Sample, SampleSource, StoredSample, loaded, sample_bytes

SHARD_SAMPLES = 8
"""Most samples of a shard."""
SHARD_BYTES = 2 * 10**6
"""A shard of so many bytes takes no further samples."""


@dataclass(frozen=True)
class Ledger:
    """What makes evidence fit to be kept and continued.

    Attributes:
        model: digest of the model, see `onnxq.evidence.provenance.model_digest`.
        earlier: evidence for the same requests from some of the samples, which are not run again.
        keep: called after each shard with a function that returns the evidence of all finished samples.
    """

    model: str
    earlier: Evidence
    keep: Callable[[Callable[[], Evidence]], None]


def collect(
    model: onnx.ModelProto | Path,
    samples: SampleSource,
    requests: Sequence[Request],
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: Workers | None = None,
    others: Sequence[str] = (),
    ledger: Ledger | None = None,
) -> Evidence:
    """Run every sample once and return what is requested: the same bits whatever the workers.

    Each worker holds the taps of one sample in memory. Nothing is written beside the model.

    Args:
        model: The float model; a path for models whose weights are in external files.
        samples: Checked samples, see `onnxq.samples.data.open_samples`.
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
        kind_named(request.kind)
    tapped = replace(tap(model, requests, others), model=ledger.model if ledger else "")
    shards = _Shards(samples, ledger.earlier if ledger else Evidence())
    total = Accumulation()
    reported = len(ledger.earlier.samples) if ledger else 0
    if reported:
        assert ledger is not None, "samples are done only where earlier evidence says so"
        total.add(ledger.earlier)
    for shard, evidence in run_shards(tapped, shards, workers or Threads()):
        total.add(evidence)
        for _ in shard.samples:
            reported += 1
            if progress:
                progress(reported, len(samples))
        if ledger:
            ledger.keep(total.total)
    found = total.total()
    return found.select(request for request in dict.fromkeys(requests) if request in found.statistics)


def tap(model: onnx.ModelProto | Path, requests: Sequence[Request], others: Sequence[str] = ()) -> Tapped:
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
    content = hashlib.blake2b(repr(requests).encode())
    for part in parts:
        content.update(part.model)
    return Tapped(
        key=content.hexdigest() + (str(model.resolve()) if isinstance(model, Path) else ""),
        segments=parts,
        folder=model.parent if isinstance(model, Path) else None,
        requests=tuple(dict.fromkeys(requests)),
        mapped=is_large(proto),
    )


class _Shards:
    """The samples that are still to be run, in shards; iterating finds out which ones were done before."""

    def __init__(self, samples: SampleSource, earlier: Evidence) -> None:
        self._samples = samples
        self._done = Counter(earlier.samples)

    def __iter__(self) -> Iterator[Shard]:
        size = max(1, min(SHARD_SAMPLES, len(self._samples) // SHARD_SAMPLES))
        held: dict[int, Sample | StoredSample] = {}
        nbytes = 0
        done = self._done.copy()
        samples = self._samples.stored() if isinstance(self._samples, Samples) else iter(self._samples)
        for index, sample in enumerate(samples):
            if done and done[digest := sample_digest(loaded(sample))]:
                done[digest] -= 1
                continue
            held[index] = sample
            nbytes += 0 if isinstance(sample, StoredSample) else sample_bytes(sample)
            if len(held) == size or nbytes >= SHARD_BYTES:
                yield Shard(held)
                held, nbytes = {}, 0
        if gone := done.total():
            raise DataError(
                f"{gone} samples of the earlier statistics are not there, expected samples to stay as they are; "
                "calibrate again"
            )
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
