"""Observing a shard: what a worker does with a model and a few samples, wherever it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from onnxq.calibration.evidence import Evidence
from onnxq.calibration.observing import Observers
from onnxq.calibration.provenance import Provenance, instruction_set, sample_digest
from onnxq.calibration.requests import Request
from onnxq.calibration.segments import Segment
from onnxq.calibration.statistic import Statistic
from onnxq.calibration.work import Shard
from onnxq.data.inputs import Sample
from onnxq.errors import ModelError, RunError
from onnxq.runtime.sessions import (
    Array,
    Memory,
    Session,
    open_session,
    release_shared_memory,
    run,
    runtime_version,
)
from onnxq.system.publish import staging

TAPS_BYTES = 40 * 10**6
"""Bytes of taps for each thread of this machine; threads with larger ones take turns, since speed is then bought with
much memory."""


class InstrumentedRunError(RunError):
    """An instrumented model fails on a sample, which the float model may run.

    Attributes:
        index: the number of the sample; it stays with the error on its way from other processes.
        reason: what the runtime says.
    """

    index: int
    reason: str

    @classmethod
    def at(cls, index: int, error: RunError) -> InstrumentedRunError:
        """Return an error that knows its sample."""
        found = cls(str(error))
        found.index, found.reason = index, str(error.__cause__ or error)
        return found


@dataclass(frozen=True, eq=False)
class Tapped:
    """A model with taps, and all that a worker must know to observe them.

    Attributes:
        segments: the model, in the order in which its parts run.
        folder: where its external data lies; None when it has none, or brings it along.
        requests: what is observed, of inputs and of outputs of segments.
        mapped: see `open_session`.
        model: the digest of the model; empty where nobody asked.
        weights: the external data by file name, where a worker may not see the folder.
    """

    segments: tuple[Segment, ...]
    folder: Path | None
    requests: tuple[Request, ...]
    mapped: bool = False
    model: str = ""
    weights: tuple[tuple[str, bytes], ...] = ()

    def __sizeof__(self) -> int:
        """Return the bytes that it takes, by which a cluster decides what to move."""
        return sum(len(segment.model) for segment in self.segments) + sum(len(data) for _, data in self.weights)


def observe_shard(tapped: Tapped, shard: Shard, *, threads: int = 1, room: int = TAPS_BYTES) -> Evidence:
    """Run the samples of a shard and return what they show. This is what a worker does.

    Args:
        tapped: The model; its sessions stay open as long as this very object lives.
        shard: The samples.
        threads: How many samples run at a time.
        room: Bytes of taps that those may hold together; one sample runs however many it needs.

    Raises:
        ModelError: The model does not load.
        DataError: A sample cannot be read or does not run, or a tensor is not float, or holds NaN or infinite values.
    """
    opened, queue = _opened(tapped), _Queue(shard)
    if threads == 1:
        return _observe(tapped, opened, queue, room)
    with ThreadPoolExecutor(threads) as executor:
        parts = [executor.submit(_observe, tapped, opened, queue, room) for _ in range(threads)]
    return reduce(Evidence.plus, (part.result() for part in parts))


def observe_parts(
    tapped: Tapped, parts: Iterable[Shard], apart: Iterable[Request], *, room: int = TAPS_BYTES
) -> tuple[Evidence, tuple[Evidence, ...]]:
    """Run the samples of some shards, and return what all of them show, and what each does of some requests.

    To keep what samples show apart takes longer than to let it add up.

    Args:
        tapped: see `observe_shard`, as for what is raised.
        parts: the shards.
        apart: what is wanted of each, among the requests of the model.
        room: see `observe_shard`.
    """
    opened, observers, wanted = _opened(tapped), Observers(tapped.requests), tuple(apart)
    digests: list[str] = []
    each = []
    for part in parts:
        shown = _show(opened, observers, _Queue(part), room)
        digests += shown
        each.append(_evidence(tapped, shown, observers.taken(wanted)))
    rest = _evidence(tapped, digests, observers.statistics())
    return reduce(Evidence.plus, each).join(rest), tuple(each)


def _observe(tapped: Tapped, opened: _Opened, queue: _Queue, room: int) -> Evidence:
    observers = Observers(tapped.requests)
    digests = _show(opened, observers, queue, room)
    return _evidence(tapped, digests, observers.statistics())


def _show(opened: _Opened, observers: Observers, queue: _Queue, room: int) -> list[str]:
    """Show observers the samples of a queue, and return the digests of these."""
    digests = []
    try:
        for index, sample in queue:
            digests.append(sample_digest(sample))
            with opened.turn(room):
                opened.observe(sample, partial(observers.add, sample=digests[-1], index=index), index)
    except BaseException:
        queue.stop()
        raise
    return digests


def _evidence(tapped: Tapped, digests: Iterable[str], statistics: Mapping[Request, Statistic]) -> Evidence:
    # What runs here may be another version than where the samples are handed out.
    provenance = Provenance(tapped.model, runtime_version(), (instruction_set(),))
    return Evidence(tuple(sorted(digests)), statistics, provenance)


class _Queue:
    """The samples of a shard, which threads take one by one; what only one thread can read is read in turns."""

    def __init__(self, shard: Shard) -> None:
        self._ahead = self._each(shard)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, Sample]]:
        while True:
            with self._lock:
                found = next(self._ahead, None)
            if found is None:
                return
            index, (sample,) = found
            yield index, sample

    def stop(self) -> None:
        """Keep other threads from going on with what fails."""
        with self._lock:
            self._ahead = iter(())

    def _each(self, shard: Shard) -> Iterator[tuple[int, Iterable[Sample]]]:
        for stretch in shard.stretches:
            if len(stretch) == 1:
                yield stretch.indices[0], stretch
            else:
                yield from ((index, [sample]) for index, sample in zip(stretch.indices, stretch, strict=True))


def forget_sessions(tapped: Tapped) -> None:
    """Close the sessions that this process holds of a model."""
    with _LOCK:
        if _OPENED.pop(tapped, None):
            release_shared_memory()


def carrying_weights(tapped: Tapped, files: Iterable[Path]) -> Tapped:
    """Return the same with its external data inside, for workers that see other disks.

    Raises:
        ModelError: A file does not lie in the model's folder or below.
    """
    if tapped.folder is None:
        return tapped
    weights = []
    for path in files:
        if not path.resolve().is_relative_to(tapped.folder.resolve()):
            raise ModelError(
                f"External data {path} is not below {tapped.folder}, expected it there; save the model anew"
            )
        weights.append((path.relative_to(tapped.folder).as_posix(), path.read_bytes()))
    return replace(tapped, folder=None, weights=tuple(weights))


class _Opened:
    """The sessions of a model that threads share, in turns where the taps of all would not fit into memory."""

    def __init__(self, segments: Sequence[Segment], sessions: Sequence[Session]) -> None:
        self._segments = tuple(zip(segments, sessions, strict=True))
        self._largest: int | None = None
        self._running = 0
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, room: int) -> Iterator[None]:
        """Wait until the taps of one more sample fit into `room` bytes; the first sample tells how many they are."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self._fits(room))
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _fits(self, room: int) -> bool:
        return self._largest is not None and self._largest * (self._running + 1) <= room

    def observe(self, sample: Sample, show: Callable[[str, Array], None], index: int) -> None:
        """Run one sample and show each tensor as soon as its segment has run."""
        live = {name: np.asarray(array) for name, array in sample.items()}
        for name, array in live.items():
            show(name, array)
        largest = 0
        for segment, session in self._segments:
            live, taken = _run_segment(segment, session, live, show, index)
            largest = max(largest, taken)
        self._largest = max(largest, self._largest or 0)


def _run_segment(
    segment: Segment, session: Session, live: Mapping[str, Array], show: Callable[[str, Array], None], index: int
) -> tuple[dict[str, Array], int]:
    """Return what later segments are fed, and the bytes of all outputs; the others are given back at once."""
    feeds = {name: live[name] for name in segment.inputs if name in live}
    try:
        values = run(session, feeds, segment.outputs, index=index)
    except RunError as error:
        raise InstrumentedRunError.at(index, error) from error
    arrays = dict(zip(segment.outputs, values, strict=True))
    for name, array in arrays.items():
        show(name, array)
    kept = {name: array for name, array in (*live.items(), *arrays.items()) if name in segment.kept}
    return kept, sum(array.nbytes for array in arrays.values())


_LOCK = threading.Lock()
_OPENED: WeakKeyDictionary[Tapped, _Opened] = WeakKeyDictionary()


def _opened(tapped: Tapped) -> _Opened:
    """Return the sessions of this process, opened once however many threads ask."""
    with _LOCK:
        if tapped not in _OPENED:
            _OPENED[tapped] = _Opened(tapped.segments, _sessions(tapped))
        return _OPENED[tapped]


def _sessions(tapped: Tapped) -> list[Session]:
    def opened(folder: Path | None) -> list[Session]:
        # One thread an operator: results then depend on neither the number of cores nor that of workers.
        return [
            open_session(
                segment.model,
                threads=1,
                memory=Memory.SHARED,
                external_folder=folder,
                mapped=tapped.mapped,
            )
            for segment in tapped.segments
        ]

    if not tapped.weights:
        return opened(tapped.folder)
    with staging(None) as folder:
        for name, data in tapped.weights:
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        return opened(folder)
