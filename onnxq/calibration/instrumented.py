"""An instrumented model: it runs samples segment by segment and shows every requested tensor to its observers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from onnxq.calibration.accumulators import Request
from onnxq.calibration.kinds import Observers
from onnxq.calibration.provenance import Provenance, instruction_set, sample_digest
from onnxq.calibration.segments import Segment, Stage, read_without_data, segments
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.inputs import Sample
from onnxq.errors import ModelError, RunError
from onnxq.ir.stored_tensors import external_files, is_large
from onnxq.runtime.sessions import Memory, release_shared_memory, runtime_version
from onnxq.system.publish import staging

OBSERVED_BYTES = 160 * 10**6
"""Observed tensors of this many bytes are in memory; threads take turns if those of one more sample do not fit."""


class InstrumentedRunError(RunError):
    """An instrumented model fails on a sample; the float model may run it.

    Attributes:
        index: Index of the sample; it survives pickling between processes.
        reason: The message of the runtime.
    """

    index: int
    reason: str


@dataclass(frozen=True, eq=False)
class InstrumentedModel:
    """A model with the requested tensors as outputs.

    Attributes:
        segments: The parts of the model, in the order in which they run.
        folder: Folder of the external data; None if there is none, or if `weights` holds it.
        requests: Requests for inputs and for outputs of segments.
        mapped: See `open_session`.
        weights: External data by file name, for machines that do not see the folder.
    """

    segments: tuple[Segment, ...]
    folder: Path | None
    requests: tuple[Request, ...]
    mapped: bool = False
    weights: tuple[tuple[str, bytes], ...] = ()

    def with_weights(self) -> InstrumentedModel:
        """Return the model with its external data in memory.

        Raises:
            ModelError: A file is not in the folder of the model or below.
        """
        if self.folder is None:
            return self
        parts = [onnx.ModelProto.FromString(segment.model) for segment in self.segments]
        weights = []
        for path in sorted({path for part in parts for path in external_files(part, self.folder)}):
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise ModelError(
                    f"External data {path} is not below {self.folder}, expected it there; save the model anew"
                )
            weights.append((path.relative_to(self.folder).as_posix(), path.read_bytes()))
        return replace(self, folder=None, weights=tuple(weights))


def instrument(
    model: onnx.ModelProto | Path, requests: Sequence[Request], others: Sequence[str] = ()
) -> InstrumentedModel:
    """Return a model with the requested tensors as outputs; see `onnxq.calibration.collect.collect`.

    Raises:
        ModelError: The model cannot be read, or a name is not a tensor of the model.
    """
    proto = read_without_data(model) if isinstance(model, Path) else model
    parts = segments(proto, [request.tensor for request in requests], others)
    folder = model.parent if isinstance(model, Path) else None
    return InstrumentedModel(parts, folder, tuple(dict.fromkeys(requests)), is_large(proto))


@dataclass(frozen=True)
class Chunk:
    """Samples that one thread runs.

    Attributes:
        indices: Index of each sample, for error messages.
        samples: As many samples.
    """

    indices: Sequence[int]
    samples: Iterable[Sample]


class OpenedModel:
    """The sessions of an instrumented model, which threads share.

    Raises:
        ModelError: The model does not load.
    """

    def __init__(self, instrumented: InstrumentedModel) -> None:
        self._requests = instrumented.requests
        self._stages = _opened(instrumented)
        self._largest: int | None = None
        self._running = 0
        self._changed = threading.Condition()

    def observe(self, chunk: Chunk) -> CalibrationStatistics:
        """Run the samples of a chunk in their order and return their statistics.

        Raises:
            DataError: A sample cannot be read or does not run, or a tensor is not float or has NaN or infinite values.
        """
        observers = Observers(self._requests)
        digests = [
            self._show(observers, index, sample) for index, sample in zip(chunk.indices, chunk.samples, strict=True)
        ]
        # A worker of a cluster may run another version of onnxruntime than the client.
        provenance = Provenance(runtime=runtime_version(), machines=(instruction_set(),))
        return CalibrationStatistics(tuple(sorted(digests)), observers.statistics(), provenance)

    def close(self) -> None:
        """Close the sessions and release their memory."""
        self._stages = ()
        release_shared_memory()

    def _show(self, observers: Observers, index: int, sample: Sample) -> str:
        """Show the observers each tensor as soon as its segment has run; return the digest of the sample."""
        digest = sample_digest(sample)
        with self._turn():
            live = {name: np.asarray(array) for name, array in sample.items()}
            for name, array in live.items():
                observers.add(name, array, digest, index)
            for stage in self._stages:
                try:
                    arrays = stage.run(live, index)
                except RunError as error:
                    failure = InstrumentedRunError(str(error))
                    failure.index, failure.reason = index, str(error.__cause__ or error)
                    raise failure from error
                for name, array in arrays.items():
                    observers.add(name, array, digest, index)
                self._largest = max(self._largest or 0, sum(array.nbytes for array in arrays.values()))
                live = {name: array for name, array in (live | arrays).items() if name in stage.kept}
        return digest

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until the tensors of one more sample fit into memory; the first sample measures their size."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not self._running
                    or (self._largest is not None and self._largest * (self._running + 1) <= OBSERVED_BYTES)
                )
            )
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


def _opened(instrumented: InstrumentedModel, folder: Path | None = None) -> tuple[Stage, ...]:
    """Open the segments of a model, with its external data in a folder."""
    if instrumented.weights and folder is None:
        with staging(None) as unpacked:
            for name, data in instrumented.weights:
                path = unpacked / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            return _opened(instrumented, unpacked)
    # One thread per operator: results then do not depend on the number of cores.
    return tuple(
        Stage.of(part, folder or instrumented.folder, mapped=instrumented.mapped, memory=Memory.SHARED, threads=1)
        for part in instrumented.segments
    )
