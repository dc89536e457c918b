"""Where samples run: shards of samples, what a worker does with one, and threads and processes."""

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
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from onnxq.calibration.accumulators import Accumulator, Request
from onnxq.calibration.kinds import Observers
from onnxq.calibration.provenance import Provenance, instruction_set, sample_digest
from onnxq.calibration.segments import Segment
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.data.dataset import Subset, is_stored, picked, reads_by_index
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
"""A shard with this many bytes in memory takes no further samples."""

_FIRST = 8
"""Most samples of a shard before the time per sample is known."""
_GROWTH = 4.0
"""Largest growth from one shard to the next, since the last time may have been chance."""


@dataclass(frozen=True)
class Shard:
    """Samples that one worker runs before it returns statistics.

    Attributes:
        indices: Indices of the samples in the data set, in rising order.
        samples: The samples, if they are sent; None if the worker reads them.
    """

    indices: Sequence[int]
    samples: Sequence[Sample] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __sizeof__(self) -> int:
        """Return the size in bytes, which a Dask cluster uses for scheduling."""
        return sum(map(sample_bytes, self.samples or ()))

    def numbered(self, source: SampleSource) -> Iterator[tuple[int, Sample]]:
        """Yield each sample with its index, read from the data set unless it was sent."""
        return zip(self.indices, picked(source, self.indices) if self.samples is None else self.samples, strict=True)


class Work:
    """The samples that are still to be run.

    Args:
        source: All samples.
        indices: Indices of the samples to run, in rising order.
    """

    def __init__(self, source: SampleSource, indices: Sequence[int]) -> None:
        self.source = source
        self._left = indices
        # The remaining samples while they are read here. A stream is read once more if samples are given back.
        self._ahead: Iterator[Sample] | None = None

    @property
    def left(self) -> int:
        """The number of samples that no worker has."""
        return len(self._left)

    def take(self, most: int, *, carried: bool, nbytes: int = SHARD_BYTES) -> Shard:
        """Take at most `most` of the remaining samples.

        Args:
            most: Number of samples, at least 1.
            carried: Whether to read the samples now, for a worker that cannot read them.
            nbytes: Bytes of samples that are read now at which the shard is full.

        Raises:
            DataError: A sample that is read here cannot be read or does not fit the model.
        """
        samples: list[Sample] = []
        if carried:
            self._ahead = picked(self.source, self._left) if self._ahead is None else self._ahead
            size = 0
            for sample in islice(self._ahead, most):
                samples.append(sample)
                size += sample_bytes(sample)
                if size >= nbytes:
                    break
        else:
            self._ahead = None
        count = len(samples) if carried else most
        indices, self._left = self._left[:count], self._left[count:]
        return Shard(indices, samples if carried else None)

    def give_back(self, indices: Sequence[int]) -> None:
        """Queue the samples of a lost worker again."""
        self._left = sorted([*indices, *self._left])
        self._ahead = None


class AdaptiveBatchSizer:
    """Chooses how many samples a worker gets at a time, so that a shard takes about `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = 0
        self._rate = math.inf

    def size(self, left: int, workers: int) -> int:
        """Return the number of samples of the next shard, at least 1; at the end, workers share what is left."""
        fair = math.ceil(left / (2 * max(1, workers)))
        if not self._last:
            return max(1, min(_FIRST, left // (_FIRST * max(1, workers)), fair))
        wanted = min(self._rate * self._seconds, _GROWTH * self._last)
        return max(1, min(int(wanted), fair))

    def learn(self, samples: int, seconds: float) -> None:
        """Record how long a worker took for a shard."""
        self._last = samples
        self._rate = samples / max(seconds, 1e-6)


# Observing a shard: what a worker does with a model and a few samples.

OBSERVED_BYTES = 40 * 10**6
"""Bytes of observed tensors for each thread of this machine.

If they are larger, threads take turns, because more speed would cost too much memory.
"""


class InstrumentedRunError(RunError):
    """An instrumented model fails on a sample; the float model may run it.

    Attributes:
        index: Index of the sample; it survives pickling between processes.
        reason: The message of the runtime.
    """

    index: int
    reason: str

    @classmethod
    def at(cls, index: int, error: RunError) -> InstrumentedRunError:
        """Return the error for a sample."""
        found = cls(str(error))
        found.index, found.reason = index, str(error.__cause__ or error)
        return found


@dataclass(frozen=True, eq=False)
class InstrumentedModel:
    """A model with observed tensors as outputs, and all that a worker needs to observe them.

    Attributes:
        segments: The parts of the model, in the order in which they run.
        folder: Folder of the external data; None if there is none, or if `weights` holds it.
        requests: Requests for inputs and for outputs of segments.
        mapped: See `open_session`.
        model: Digest of the model; empty if it is not needed.
        weights: External data by file name, for workers that do not see the folder.
    """

    segments: tuple[Segment, ...]
    folder: Path | None
    requests: tuple[Request, ...]
    mapped: bool = False
    model: str = ""
    weights: tuple[tuple[str, bytes], ...] = ()

    def __sizeof__(self) -> int:
        """Return the size in bytes, which a Dask cluster uses for scheduling."""
        return sum(len(segment.model) for segment in self.segments) + sum(len(data) for _, data in self.weights)


def observe_samples(
    instrumented: InstrumentedModel, samples: Iterable[tuple[int, Sample]], *, room: int = OBSERVED_BYTES
) -> CalibrationStatistics:
    """Run numbered samples and return their statistics.

    The sessions stay open as long as the object `instrumented` lives, and threads share them. Several samples run at a
    time if their observed tensors fit into `room` bytes together.

    Raises:
        ModelError: The model does not load.
        DataError: A sample cannot be read or does not run, or a tensor is not float or has NaN or infinite values.
    """
    observers = Observers(instrumented.requests)
    digests = _show(_opened(instrumented), observers, samples, room)
    return _statistics(instrumented, digests, observers.statistics())


def observe_parts(
    instrumented: InstrumentedModel, parts: Iterable[Subset], apart: Iterable[Request], *, room: int = OBSERVED_BYTES
) -> tuple[CalibrationStatistics, tuple[CalibrationStatistics, ...]]:
    """Run the samples of some parts; return their common statistics, and those of each part for `apart`.

    Separate statistics take longer than common ones. See `observe_samples` for `room` and errors.
    """
    opened, observers, wanted = _opened(instrumented), Observers(instrumented.requests), tuple(apart)
    digests: list[str] = []
    each = []
    for part in parts:
        shown = _show(opened, observers, zip(part.places, part, strict=True), room)
        digests += shown
        each.append(_statistics(instrumented, shown, observers.taken(wanted)))
    rest = _statistics(instrumented, digests, observers.statistics())
    return reduce(CalibrationStatistics.plus, each).join(rest), tuple(each)


def _show(opened: _Opened, observers: Observers, samples: Iterable[tuple[int, Sample]], room: int) -> list[str]:
    digests = []
    for index, sample in samples:
        digests.append(sample_digest(sample))
        with opened.turn(room):
            opened.observe(sample, partial(observers.add, sample=digests[-1], index=index), index)
    return digests


def _statistics(
    instrumented: InstrumentedModel, digests: Iterable[str], statistics: Mapping[Request, Accumulator]
) -> CalibrationStatistics:
    # The worker may run another version of onnxruntime than the client.
    provenance = Provenance(instrumented.model, runtime_version(), (instruction_set(),))
    return CalibrationStatistics(tuple(sorted(digests)), statistics, provenance)


def forget_sessions(instrumented: InstrumentedModel) -> None:
    """Close the sessions that this process holds of a model."""
    with _LOCK:
        if _OPENED.pop(instrumented, None):
            release_shared_memory()


def carrying_weights(instrumented: InstrumentedModel, files: Iterable[Path]) -> InstrumentedModel:
    """Return the model with its external data in memory, for workers on other disks.

    Raises:
        ModelError: A file is not in the folder of the model or below.
    """
    if instrumented.folder is None:
        return instrumented
    weights = []
    for path in files:
        if not path.resolve().is_relative_to(instrumented.folder.resolve()):
            raise ModelError(
                f"External data {path} is not below {instrumented.folder}, expected it there; save the model anew"
            )
        weights.append((path.relative_to(instrumented.folder).as_posix(), path.read_bytes()))
    return replace(instrumented, folder=None, weights=tuple(weights))


class _Opened:
    """The sessions of a model, shared by threads, which take turns if not all observed tensors fit into memory."""

    def __init__(self, segments: Sequence[Segment], sessions: Sequence[Session]) -> None:
        self._segments = tuple(zip(segments, sessions, strict=True))
        self._largest: int | None = None
        self._running = 0
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, room: int) -> Iterator[None]:
        """Wait until the tensors of one more sample fit into `room` bytes; the first sample measures their size."""
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


def _opened(instrumented: InstrumentedModel) -> _Opened:
    with _LOCK:
        if instrumented not in _OPENED:
            _OPENED[instrumented] = _Opened(instrumented.segments, _sessions(instrumented))
        return _OPENED[instrumented]


def _sessions(instrumented: InstrumentedModel) -> list[Session]:
    def opened(folder: Path | None) -> list[Session]:
        # One thread per operator: results then do not depend on the number of cores or workers.
        return [
            open_session(
                segment.model,
                threads=1,
                memory=Memory.SHARED,
                external_folder=folder,
                mapped=instrumented.mapped,
            )
            for segment in instrumented.segments
        ]

    if not instrumented.weights:
        return opened(instrumented.folder)
    with staging(None) as folder:
        for name, data in instrumented.weights:
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        return opened(folder)


# Where samples run: threads of this process, processes of this machine, or a Dask cluster.

_MOST_THREADS = 8
"""Each thread holds the observed tensors of one sample in memory."""
_MOST_ROOM = 4
"""Observed tensors of at most this many threads are in memory, however many threads there are."""
_SECONDS = 2.0
"""Time for which a worker keeps the statistics of its samples; an interruption loses as much."""
_FRUITLESS = 3
"""How often workers may die before a shard is finished."""
_PATIENCE = 2.0
"""Seconds without a result before the processes are checked."""
_ENDING = 2.0
"""Seconds to wait for the executor's manager thread after its processes are dead; it takes milliseconds."""

Timed: TypeAlias = tuple[CalibrationStatistics, float]


@dataclass(frozen=True)
class Pool:
    """A running executor.

    Attributes:
        submit: Starts to run a shard.
        count: Number of shards that run at a time.
        carried: Whether samples are sent with a shard, because workers cannot read them.
        is_broken: Whether a worker is known to have died.
    """

    submit: Callable[[Shard], Future[Timed]]
    count: int
    carried: bool
    is_broken: Callable[[], bool] = lambda: False


class Workers(Protocol):
    """Where samples run; statistics are bit-identical for all implementations."""

    def run(self, instrumented: InstrumentedModel, work: Work) -> Iterator[CalibrationStatistics]:
        """Yield statistics of some samples at a time, until all have run."""
        ...


@dataclass(frozen=True)
class Threads:
    """Threads of this process, which share the sessions of the model.

    Args:
        count: None takes one for each core, at most 8.

    Raises:
        SchemeError: `count` is below 1.
    """

    count: int | None = None

    def __post_init__(self) -> None:
        _check_count(self.count, "threads")

    def run(self, instrumented: InstrumentedModel, work: Work) -> Iterator[CalibrationStatistics]:
        """Yield statistics of some samples at a time, until all have run; see `run_pool` for errors."""
        yield from run_pool(lambda: self._opened(instrumented, work.source), work)

    def run_parts(
        self, instrumented: InstrumentedModel, runs: Iterable[Sequence[Subset]], apart: Sequence[Request]
    ) -> Iterator[tuple[CalibrationStatistics, tuple[CalibrationStatistics, ...]]]:
        """Yield the result of `observe_parts` for each run, in order."""
        with self._started(instrumented) as (executor, room):
            begun = deque([executor.submit(observe_parts, instrumented, run, apart, room=room) for run in runs])
            while begun:
                yield begun.popleft().result()

    @contextmanager
    def _opened(self, instrumented: InstrumentedModel, source: SampleSource) -> Iterator[Pool]:
        carried = not reads_by_index(source)
        with self._started(instrumented) as (executor, room):
            yield Pool(lambda shard: executor.submit(_timed, instrumented, source, shard, room), self._threads, carried)

    @contextmanager
    def _started(self, instrumented: InstrumentedModel) -> Iterator[tuple[ThreadPoolExecutor, int]]:
        """Yield the threads and the bytes of observed tensors that they may hold together."""
        executor = ThreadPoolExecutor(self._threads)
        try:
            yield executor, min(self._threads, _MOST_ROOM) * OBSERVED_BYTES
        finally:
            # Running shards finish and pending ones are cancelled, so that an error is not delayed.
            executor.shutdown(wait=True, cancel_futures=True)
            forget_sessions(instrumented)

    @property
    def _threads(self) -> int:
        return self.count or min(available_cores(), _MOST_THREADS)


@dataclass(frozen=True)
class Processes:
    """Worker processes of this machine, each with one thread and its own sessions.

    Raises:
        SchemeError: `count` is below 1.

    >>> Processes(2)
    Processes(count=2)
    """

    count: int

    def __post_init__(self) -> None:
        _check_count(self.count, "jobs")

    def run(self, instrumented: InstrumentedModel, work: Work) -> Iterator[CalibrationStatistics]:
        """Yield statistics of some samples at a time, until all have run; see `run_pool` for errors."""
        yield from run_pool(lambda: self._open(instrumented, work.source), work)

    @contextmanager
    def _open(self, instrumented: InstrumentedModel, source: SampleSource) -> Iterator[Pool]:
        """Spawn processes: a fork would copy the threads of onnxruntime in a broken state."""
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        others, carried = set(multiprocessing.active_children()), not is_stored(source)
        given = instrumented, [] if carried else source
        executor = ProcessPoolExecutor(self.count, multiprocessing.get_context("spawn"), _begin, given)
        # Ctrl-C may interrupt the main thread anywhere, so another thread starts processes and always finishes.
        starter = ThreadPoolExecutor(1, initializer=_without_interrupts)
        try:
            started: frozenset[BaseProcess] = frozenset()

            def begin(shard: Shard) -> Future[Timed]:
                nonlocal started
                future = starter.submit(executor.submit, _here, shard).result()
                started |= set(multiprocessing.active_children()) - others
                return future

            yield Pool(begin, self.count, carried, lambda: any(not process.is_alive() for process in started))
            executor.shutdown(wait=True)
        except BaseException:
            # Do not wait for results after a failure, least of all after Ctrl-C.
            starter.shutdown(wait=True, cancel_futures=True)
            # A process that died while it sent a result leaves the reader of the pipe waiting for the rest.
            answers = executor._result_queue
            manager: Any = executor._executor_manager_thread
            # After a shutdown, the executor does not report the killed processes. It may be closed already.
            with suppress(OSError):
                executor.shutdown(wait=False, cancel_futures=True)
            left = set(multiprocessing.active_children()) - others
            for process in left:
                process.kill()
            for process in left:
                process.join(1)
            with suppress(OSError):
                answers._writer.close()  # type: ignore[attr-defined]
            # Join the manager thread: at exit, Python would wake it through a closed pipe and print an error.
            if manager is not None:
                manager.join(_ENDING)
            raise
        finally:
            starter.shutdown(wait=False)


def run_pool(opened: Callable[[], AbstractContextManager[Pool]], work: Work) -> Iterator[CalibrationStatistics]:
    """Yield the statistics of all samples, shard by shard, in the order in which shards finish.

    Only about one shard more than there are workers is in memory. If workers die, new ones start and run the lost
    shards.

    Raises:
        DataError: Workers died 3 times without finishing a shard, or `observe_samples` raised it.
        ModelError: `observe_samples` raised it.
    """
    pace, fruitless = AdaptiveBatchSizer(_SECONDS), 0
    pending: dict[Future[Timed], Shard] = {}
    while work.left:
        try:
            with opened() as pool:
                while work.left or pending:
                    while work.left and len(pending) <= pool.count:
                        shard = work.take(pace.size(work.left, pool.count), carried=pool.carried)
                        pending[_begun(pool, shard)] = shard
                    for shard, (statistics, seconds) in _finished(pending, pool.is_broken):
                        pace.learn(len(shard), seconds)
                        yield statistics
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
        # A process that is killed while it sends its result may keep the lock, and the executor does not notice.
        if is_broken() and not (done := wait(pending, _PATIENCE, FIRST_COMPLETED).done):
            raise BrokenExecutor("a process died while it sent its result")
        done = done or wait(pending, _PATIENCE, FIRST_COMPLETED).done
    # Take finished shards before raising the error of the first sample. A lost shard stays pending, and is run again.
    for future in sorted(done, key=lambda future: (future.exception() is not None, pending[future].indices[0])):
        found = future.result()
        yield pending.pop(future), found


_GIVEN: list[tuple[InstrumentedModel, SampleSource]] = []
"""The model and the data set of this worker process, sent once instead of with each shard."""


def _begin(instrumented: InstrumentedModel, source: SampleSource) -> None:
    # The terminal sends Ctrl-C to all processes; the parent process ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _GIVEN[:] = [(instrumented, source)]


def _here(shard: Shard) -> Timed:
    return _timed(*_GIVEN[0], shard, OBSERVED_BYTES)


def _timed(instrumented: InstrumentedModel, source: SampleSource, shard: Shard, room: int) -> Timed:
    start = time.perf_counter()
    statistics = observe_samples(instrumented, shard.numbered(source), room=room)
    return statistics, time.perf_counter() - start


def _without_interrupts() -> None:
    """Block SIGINT in this thread, so that the processes that it starts never receive it."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _check_count(count: int | None, what: str) -> None:
    check_type(count, (int, type(None)), f"the number of {what}", "a whole number")
    if count is not None and count < 1:
        raise SchemeError(f"Number of {what} is {count}, expected at least 1")
