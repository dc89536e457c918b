"""Shards: a few samples that one worker runs; any executor runs them, and one that loses workers runs them again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from onnxq.errors import DataError
from onnxq.evidence.evidence import Evidence
from onnxq.evidence.observing import Observers
from onnxq.evidence.provenance import Provenance, instruction_set, sample_digest
from onnxq.evidence.requests import Request
from onnxq.execution.segments import Segment
from onnxq.modelfile.publish import staging
from onnxq.runtime import Array, Session, open_session, release_shared_memory, run, runtime_version
from onnxq.samples.inputs import Sample, StoredSample, loaded

_FRUITLESS = 3
"""How often workers may die without a shard having been finished in between."""
_LARGE = 40 * 10**6
"""Bytes of taps above which threads take turns, since speed is then bought with much memory."""


@dataclass(frozen=True)
class Tapped:
    """A model with taps, and all that a worker must know to observe them.

    Attributes:
        key: unequal for unequal models and taps.
        segments: the model, in the order in which its parts run.
        folder: where its external data lies; None when it has none, or brings it along.
        requests: what is observed, of inputs and of outputs of segments.
        mapped: see `open_session`.
        model: the digest of the model; empty where nobody asked.
        weights: the external data by file name, where a worker may not see the folder.
    """

    key: str
    segments: tuple[Segment, ...]
    folder: Path | None
    requests: tuple[Request, ...]
    mapped: bool = False
    model: str = ""
    weights: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class Shard:
    """Samples by their index, read or still to be read."""

    samples: Mapping[int, Sample | StoredSample]


@dataclass(frozen=True)
class Pool:
    """An executor at work.

    Attributes:
        executor: runs shards.
        tapped: what to hand over with each shard: a `Tapped`, or what the executor turns into one.
        count: how many shards it runs at a time.
        sees_files: whether it can read samples from their files.
    """

    executor: Executor
    tapped: object
    count: int
    sees_files: bool = True


class Workers(Protocol):
    """Where shards run; statistics are the same bits wherever that is."""

    def open(self, tapped: Tapped) -> AbstractContextManager[Pool]:
        """Start workers, or connect to them, until the context is left."""
        ...


def observe_shard(tapped: Tapped, shard: Shard) -> Evidence:
    """Run the samples of a shard and return what they show. This is what a worker does.

    Raises:
        ModelError: The model does not load.
        DataError: A sample cannot be read or does not run, or a tensor is not float, or holds NaN or infinite values.
    """
    opened = _opened(tapped)
    observers = Observers(tapped.requests)
    digests = []
    for index in sorted(shard.samples):
        sample = loaded(shard.samples[index])
        digests.append(sample_digest(sample))
        with opened.turn():
            opened.observe(sample, partial(observers.add, sample=digests[-1], index=index), index)
    provenance = Provenance(tapped.model, runtime_version(), (instruction_set(),))
    return Evidence(tuple(sorted(digests)), observers.statistics(), provenance)


def run_shards(tapped: Tapped, shards: Iterable[Shard], workers: Workers) -> Iterator[tuple[Shard, Evidence]]:
    """Yield each shard with what it shows, in the order in which they are finished.

    Few more shards than there are workers are in memory at a time. When workers die, new ones are started and run the
    shards that were lost.

    Raises:
        DataError: Workers died again and again without finishing a shard, or what `observe_shard` raises.
        ModelError: What `observe_shard` raises.
    """
    source, waiting, fruitless = iter(shards), deque[Shard](), 0
    pending: dict[Future[Evidence], Shard] = {}
    waiting.extend(islice(source, 1))
    while waiting:
        try:
            with workers.open(tapped) as pool:
                while waiting or pending:
                    while waiting and len(pending) <= pool.count:
                        future = _submitted(pool, waiting[0])
                        pending[future] = waiting.popleft()
                        waiting.extend(islice(source, 0 if waiting else 1))
                    yield from _finished(pending)
                    fruitless = 0
        except BrokenExecutor as error:
            fruitless += 1
            waiting.extendleft(pending.values())
            pending.clear()
            if fruitless == _FRUITLESS:
                first = min(min(shard.samples) for shard in waiting)
                raise DataError(
                    f"Workers died {fruitless} times while running sample {first} or its neighbours, expected them to "
                    "finish; they may lack memory: use fewer of them"
                ) from error


def forget_session() -> None:
    """Close the session that this process holds for its next shard."""
    with _LOCK:
        if _OPENED:
            _OPENED.clear()
            release_shared_memory()


def carrying_weights(tapped: Tapped, files: Iterable[Path]) -> Tapped:
    """Return the same with its external data inside, for workers that see other disks."""
    return replace(tapped, folder=None, weights=tuple((path.name, path.read_bytes()) for path in files))


def _submitted(pool: Pool, shard: Shard) -> Future[Evidence]:
    if not pool.sees_files:
        shard = Shard({index: loaded(sample) for index, sample in shard.samples.items()})
    # Some executors replace their own references to values by the values.
    return pool.executor.submit(observe_shard, cast("Tapped", pool.tapped), shard)


def _finished(pending: dict[Future[Evidence], Shard]) -> Iterator[tuple[Shard, Evidence]]:
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    # What is finished is taken before an error is raised; a lost shard stays pending, so that it is known.
    for future in sorted(done, key=lambda future: future.exception() is not None):
        evidence = future.result()
        yield pending.pop(future), evidence


class _Opened:
    """The sessions of a model that threads share, in turns while the taps of one run are large or not yet known."""

    def __init__(self, segments: Sequence[Segment], sessions: Sequence[Session]) -> None:
        self._segments = tuple(zip(segments, sessions, strict=True))
        self._alone = True
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until it is this thread's turn to run a sample."""
        # The first sample tells, so its turn is waited for and then no longer needed.
        with self._lock if self._alone else nullcontext():
            yield

    def observe(self, sample: Sample, show: Callable[[str, Array], None], index: int) -> None:
        """Run one sample and show each tensor as soon as its segment has run."""
        live = {name: np.asarray(array) for name, array in sample.items()}
        for name, array in live.items():
            show(name, array)
        largest = 0
        for segment, session in self._segments:
            live, taken = _run_segment(segment, session, live, show, index)
            largest = max(largest, taken)
        self._alone = largest > _LARGE


def _run_segment(
    segment: Segment, session: Session, live: Mapping[str, Array], show: Callable[[str, Array], None], index: int
) -> tuple[dict[str, Array], int]:
    """Return what later segments are fed, and the bytes of all outputs; the others are given back at once."""
    feeds = {name: live[name] for name in segment.inputs if name in live}
    arrays = dict(zip(segment.outputs, run(session, feeds, segment.outputs, index=index), strict=True))
    for name, array in arrays.items():
        show(name, array)
    kept = {name: array for name, array in (*live.items(), *arrays.items()) if name in segment.kept}
    return kept, sum(array.nbytes for array in arrays.values())


_LOCK = threading.Lock()
_OPENED: dict[str, _Opened] = {}


def _opened(tapped: Tapped) -> _Opened:
    """Return the sessions of this process, opened once however many threads ask."""
    with _LOCK:
        if tapped.key not in _OPENED:
            _OPENED.clear()
            _OPENED[tapped.key] = _Opened(tapped.segments, _sessions(tapped))
        return _OPENED[tapped.key]


def _sessions(tapped: Tapped) -> list[Session]:
    def opened(folder: Path | None) -> list[Session]:
        # One thread an operator: results then depend on neither the number of cores nor that of workers.
        return [
            open_session(
                segment.model,
                threads=1,
                memory_plan=False,
                shared_memory=True,
                external_folder=folder,
                mapped=tapped.mapped,
            )
            for segment in tapped.segments
        ]

    if not tapped.weights:
        return opened(tapped.folder)
    with staging(None) as folder:
        for name, data in tapped.weights:
            (folder / name).write_bytes(data)
        return opened(folder)
