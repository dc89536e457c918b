"""Where samples run: the shards that they are handed out in, what a worker does, threads and processes."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from onnxq.calibration.accumulators import Accumulator, Request
from onnxq.calibration.kinds import Observers
from onnxq.calibration.provenance import Provenance, instruction_set, sample_digest
from onnxq.calibration.segments import Segment
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.dataset import SampleSlice, held, stretches
from onnxq.data.inputs import Sample, SampleSource, sample_bytes
from onnxq.errors import DataError, ModelError, RunError, SchemeError, check_type
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
from onnxq.system.resources import available_cores

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


SHARD_BYTES = 8 * 10**6
"""A shard of so many bytes in memory takes no further samples."""

_FIRST = 8
"""Most samples of a shard while nobody knows how long they take."""
_GROWTH = 4.0
"""Most times as many samples as the last shard had, since its time may have been chance."""


@dataclass(frozen=True)
class Shard:
    """Samples that one worker runs before anybody hears of it again."""

    stretches: tuple[SampleSlice, ...]

    def __len__(self) -> int:
        return sum(map(len, self.stretches))

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of the samples, rising."""
        return tuple(sorted(chain.from_iterable(stretch.indices for stretch in self.stretches)))

    @property
    def stored(self) -> bool:
        """Whether another process that sees the same files can read it."""
        return all(stretch.stored for stretch in self.stretches)


class Work:
    """The samples that are still to be run.

    Args:
        source: All samples. One that can be asked by index is read by whoever runs a sample; a stream is read here, as
            far as shards are taken, and once more for those that are given back.
        indices: Of the samples to run, rising.
    """

    def __init__(self, source: SampleSource, indices: Sequence[int]) -> None:
        self._source = source
        self._ahead = stretches(source, indices)
        self.left = len(indices)

    def take(
        self,
        most: int,
        *,
        carried: bool = False,
        nbytes: int = SHARD_BYTES,
        reads: Callable[[SampleSlice], bool] = attrgetter("stored"),
    ) -> Shard:
        """Return at most so many of the samples that are left.

        Args:
            most: How many samples, at least 1.
            carried: Whether to read them now, for a worker that cannot.
            nbytes: When those that are in memory take so much, no more are added.
            reads: Which stretches whoever runs them reads, unless they are carried.

        Raises:
            DataError: A sample that is read here cannot be read or does not fit.
        """
        taken: list[SampleSlice] = []
        size = 0
        while most and size < nbytes and (stretch := next(self._ahead, None)):
            head, rest = stretch.split(most)
            if rest:
                self._ahead = chain([rest], self._ahead)
            if carried or not reads(head):
                head, more = _read(head, nbytes - size)
                if more:
                    self._ahead = chain([more], self._ahead)
                size += sum(sample_bytes(sample) for sample in head)
            most -= len(head)
            taken.append(head)
        shard = Shard(tuple(taken))
        self.left -= len(shard)
        return shard

    def give_back(self, indices: Sequence[int]) -> None:
        """Let samples that were taken, and whose worker was lost, be taken again."""
        again = stretches(self._source, sorted(indices))
        self._ahead = chain(again, self._ahead)
        self.left += len(indices)


class AdaptiveBatchSizer:
    """How many samples a worker is given at a time, so that it comes back after about so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = 0
        self._rate = math.inf

    def size(self, left: int, workers: int) -> int:
        """Return the number of samples of the next shard, at least 1; at the end the workers share what is left."""
        fair = math.ceil(left / (2 * max(1, workers)))
        if not self._last:
            return max(1, min(_FIRST, left // (_FIRST * max(1, workers)), fair))
        wanted = min(self._rate * self._seconds, _GROWTH * self._last)
        return max(1, min(int(wanted), fair))

    def learn(self, samples: int, seconds: float) -> None:
        """Take in how long a worker took for so many samples."""
        self._last = samples
        self._rate = samples / max(seconds, 1e-6)


def _read(stretch: SampleSlice, nbytes: int) -> tuple[SampleSlice, SampleSlice]:
    """Return the first samples, read into memory, that take so many bytes, and the stretch of the others."""
    samples, size = [], 0
    for sample in stretch:
        samples.append(sample)
        size += sample_bytes(sample)
        if size >= nbytes:
            break
    head, rest = stretch.split(len(samples))
    return held(head.indices, samples), rest


# Observing a shard: what a worker does with a model and a few samples, wherever it is.

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
class InstrumentedModel:
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


def observe_shard(
    tapped: InstrumentedModel, shard: Shard, *, threads: int = 1, room: int = TAPS_BYTES
) -> CalibrationStatistics:
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
    return reduce(CalibrationStatistics.plus, (part.result() for part in parts))


def observe_parts(
    tapped: InstrumentedModel, parts: Iterable[Shard], apart: Iterable[Request], *, room: int = TAPS_BYTES
) -> tuple[CalibrationStatistics, tuple[CalibrationStatistics, ...]]:
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
    return reduce(CalibrationStatistics.plus, each).join(rest), tuple(each)


def _observe(tapped: InstrumentedModel, opened: _Opened, queue: _Queue, room: int) -> CalibrationStatistics:
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


def _evidence(
    tapped: InstrumentedModel, digests: Iterable[str], statistics: Mapping[Request, Accumulator]
) -> CalibrationStatistics:
    # What runs here may be another version than where the samples are handed out.
    provenance = Provenance(tapped.model, runtime_version(), (instruction_set(),))
    return CalibrationStatistics(tuple(sorted(digests)), statistics, provenance)


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


def forget_sessions(tapped: InstrumentedModel) -> None:
    """Close the sessions that this process holds of a model."""
    with _LOCK:
        if _OPENED.pop(tapped, None):
            release_shared_memory()


def carrying_weights(tapped: InstrumentedModel, files: Iterable[Path]) -> InstrumentedModel:
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
_OPENED: WeakKeyDictionary[InstrumentedModel, _Opened] = WeakKeyDictionary()


def _opened(tapped: InstrumentedModel) -> _Opened:
    """Return the sessions of this process, opened once however many threads ask."""
    with _LOCK:
        if tapped not in _OPENED:
            _OPENED[tapped] = _Opened(tapped.segments, _sessions(tapped))
        return _OPENED[tapped]


def _sessions(tapped: InstrumentedModel) -> list[Session]:
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


# Where samples run: threads of this process, processes of this machine, or a Dask cluster.

_MOST_THREADS = 8
"""Each thread holds the taps of one sample in memory."""
_MOST_ROOM = 4
"""So many times the taps of a thread are in memory at most, however many threads there are."""
_SECONDS = 2.0
"""How long a thread or process keeps the statistics of its samples to itself; an interruption costs as much."""
_FRUITLESS = 3
"""How often workers may die without a shard having been finished in between."""
_PATIENCE = 2.0
"""Seconds without a result after which one looks whether all processes are alive."""
_ENDING = 2.0
"""Seconds for which the thread that manages processes is waited for once these are dead; it takes some thousandths."""

Timed: TypeAlias = tuple[CalibrationStatistics, float]


@dataclass(frozen=True)
class Pool:
    """An executor at work.

    Attributes:
        submit: starts to run a shard.
        count: how many shards run at a time.
        is_broken: whether a worker has died, as far as that can be told here.
    """

    submit: Callable[[Shard], Future[Timed]]
    count: int
    is_broken: Callable[[], bool] = lambda: False


class Workers(Protocol):
    """Where samples run; statistics are the same bits wherever that is."""

    def run(self, tapped: InstrumentedModel, work: Work) -> Iterator[CalibrationStatistics]:
        """Yield the statistics of some samples after the other, until all have run."""
        ...


@dataclass(frozen=True)
class Threads:
    """Threads of this process, which share one session.

    Raises:
        SchemeError: `count` is below 1.
    """

    count: int | None = None

    def __post_init__(self) -> None:
        _check_count(self.count, "threads")

    def run(self, tapped: InstrumentedModel, work: Work) -> Iterator[CalibrationStatistics]:
        """Yield the statistics of some samples after the other, until all have run; see `run_pool` for errors."""
        yield from run_pool(lambda: self._opened(tapped), work)

    def run_parts(
        self, tapped: InstrumentedModel, runs: Iterable[Sequence[Shard]], apart: Sequence[Request]
    ) -> Iterator[tuple[CalibrationStatistics, tuple[CalibrationStatistics, ...]]]:
        """Yield in order what the shards of each run show together, and of some requests each; see `observe_parts`."""
        with self._started(tapped) as (executor, room):
            begun = deque([executor.submit(observe_parts, tapped, run, apart, room=room) for run in runs])
            while begun:
                yield begun.popleft().result()

    @contextmanager
    def _opened(self, tapped: InstrumentedModel) -> Iterator[Pool]:
        with self._started(tapped) as (executor, room):
            yield Pool(lambda shard: executor.submit(_timed, tapped, shard, room), self._threads)

    @contextmanager
    def _started(self, tapped: InstrumentedModel) -> Iterator[tuple[ThreadPoolExecutor, int]]:
        """Start the threads, and end them when whoever gives them work is done; they hold so many bytes of taps."""
        executor = ThreadPoolExecutor(self._threads)
        try:
            yield executor, min(self._threads, _MOST_ROOM) * TAPS_BYTES
        finally:
            # What runs is waited for, and what has not begun forgotten, so that an error is not held up.
            executor.shutdown(wait=True, cancel_futures=True)
            forget_sessions(tapped)

    @property
    def _threads(self) -> int:
        return self.count or min(available_cores(), _MOST_THREADS)


@dataclass(frozen=True)
class Processes:
    """Worker processes of this machine, each with one thread and a session of its own.

    Raises:
        SchemeError: `count` is below 1.
    """

    count: int

    def __post_init__(self) -> None:
        _check_count(self.count, "jobs")

    def run(self, tapped: InstrumentedModel, work: Work) -> Iterator[CalibrationStatistics]:
        """Yield the statistics of some samples after the other, until all have run; see `run_pool` for errors."""
        yield from run_pool(lambda: self._open(tapped), work)

    @contextmanager
    def _open(self, tapped: InstrumentedModel) -> Iterator[Pool]:
        """Start processes; they import onnxq anew, since a fork would copy the threads of onnxruntime half-alive."""
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        others = set(multiprocessing.active_children())
        executor = ProcessPoolExecutor(self.count, multiprocessing.get_context("spawn"), _begin, (tapped,))
        # Ctrl-C interrupts the main thread wherever it is, and half a process must not be left.
        starter = ThreadPoolExecutor(1, initializer=_without_interrupts)
        try:
            started: frozenset[BaseProcess] = frozenset()

            def begin(shard: Shard) -> Future[Timed]:
                nonlocal started
                future = starter.submit(executor.submit, _here, shard).result()
                started |= set(multiprocessing.active_children()) - others
                return future

            yield Pool(begin, self.count, lambda: any(not process.is_alive() for process in started))
            executor.shutdown(wait=True)
        except BaseException:
            # Nobody waits for what is not wanted any more, least of all after Ctrl-C.
            starter.shutdown(wait=True, cancel_futures=True)
            # A process that died while it sent something leaves the reader of the other end waiting for the rest.
            answers = executor._result_queue
            manager: Any = executor._executor_manager_thread
            # Told first, the executor does not wonder who killed its processes; it may be at its end already.
            with suppress(OSError):
                executor.shutdown(wait=False, cancel_futures=True)
            left = set(multiprocessing.active_children()) - others
            for process in left:
                process.kill()
            for process in left:
                process.join(1)
            with suppress(OSError):
                answers._writer.close()  # type: ignore[attr-defined]
            # A Python that ends wakes it by a pipe which it closes just then, and prints that this failed.
            if manager is not None:
                manager.join(_ENDING)
            raise
        finally:
            starter.shutdown(wait=False)


def run_pool(opened: Callable[[], AbstractContextManager[Pool]], work: Work) -> Iterator[CalibrationStatistics]:
    """Yield statistics of samples in the order in which they are finished; together they are those of all the work.

    Few more shards than there are workers are in memory at a time. When workers die, new ones are started and run the
    shards that were lost.

    Raises:
        DataError: Workers died again and again without finishing a shard, or what `observe_shard` raises.
        ModelError: What `observe_shard` raises.
    """
    pace, fruitless = AdaptiveBatchSizer(_SECONDS), 0
    pending: dict[Future[Timed], Shard] = {}
    while work.left:
        try:
            with opened() as pool:
                while work.left or pending:
                    while work.left and len(pending) <= pool.count:
                        shard = work.take(pace.size(work.left, pool.count))
                        pending[_begun(pool, shard)] = shard
                    for shard, (evidence, seconds) in _finished(pending, pool.is_broken):
                        pace.learn(len(shard), seconds)
                        yield evidence
                    fruitless = 0
        except BrokenExecutor as error:
            fruitless += 1
            lost = [index for shard in pending.values() for index in shard.indices]
            pending.clear()
            work.give_back(lost)
            if fruitless == _FRUITLESS:
                raise DataError(
                    f"Workers died {fruitless} times while running sample {min(lost)} or its neighbours, expected "
                    "them to finish; they may lack memory: use fewer of them"
                ) from error


def _begun(pool: Pool, shard: Shard) -> Future[Timed]:
    try:
        return pool.submit(shard)
    except BrokenExecutor as error:
        lost: Future[Timed] = Future()
        lost.set_exception(error)
        return lost


def _finished(pending: dict[Future[Timed], Shard], is_broken: Callable[[], bool]) -> Iterator[tuple[Shard, Timed]]:
    done = wait(pending, _PATIENCE, FIRST_COMPLETED).done
    while not done:
        # A process that is killed while it sends its result may leave the others locked out, and nobody told.
        if is_broken() and not (done := wait(pending, _PATIENCE, FIRST_COMPLETED).done):
            raise BrokenExecutor("a process died while it sent its result")
        done = done or wait(pending, _PATIENCE, FIRST_COMPLETED).done
    # What is finished is taken before an error is raised; a lost shard stays pending, so that it is known.
    for future in sorted(done, key=lambda future: future.exception() is not None):
        found = future.result()
        yield pending.pop(future), found


_TAPPED: list[InstrumentedModel] = []
"""What this process runs, where it is a worker of `Processes`: it is handed over once and not with each shard."""


def _begin(tapped: InstrumentedModel) -> None:
    # The terminal tells all processes of Ctrl-C; the one that started this one decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _TAPPED[:] = [tapped]


def _here(shard: Shard) -> Timed:
    return _timed(_TAPPED[0], shard, TAPS_BYTES)


def _timed(tapped: InstrumentedModel, shard: Shard, room: int) -> Timed:
    start = time.perf_counter()
    evidence = observe_shard(tapped, shard, room=room)
    return evidence, time.perf_counter() - start


def _without_interrupts() -> None:
    """Let processes that this thread starts never hear of Ctrl-C, not even before they can ignore it."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _check_count(count: int | None, what: str) -> None:
    check_type(count, (int, type(None)), f"the number of {what}", "a whole number")
    if count is not None and count < 1:
        raise SchemeError(f"Number of {what} is {count}, expected at least 1")
