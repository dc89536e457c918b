"""Where samples run: threads of this process, processes of this machine, or a Dask cluster."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from onnxq.calibration.evidence import Evidence
from onnxq.calibration.requests import Request
from onnxq.calibration.shards import TAPS_BYTES, Tapped, forget_sessions, observe_parts, observe_shard
from onnxq.calibration.work import Pace, Shard, Work
from onnxq.errors import DataError, SchemeError, check_type
from onnxq.system.resources import available_cores

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from onnxq.calibration.cluster import Cluster

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

Workers: TypeAlias = "Threads | Processes | Cluster"
"""Where samples run; statistics are the same bits wherever that is."""
Timed: TypeAlias = tuple[Evidence, float]


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


@dataclass(frozen=True)
class Threads:
    """Threads of this process, which share one session.

    Raises:
        SchemeError: `count` is below 1.
    """

    count: int | None = None

    def __post_init__(self) -> None:
        _check_count(self.count, "threads")

    def run(self, tapped: Tapped, work: Work) -> Iterator[Evidence]:
        """Yield the statistics of some samples after the other, until all have run; see `run_pool` for errors."""
        yield from run_pool(lambda: self._opened(tapped), work)

    def run_parts(
        self, tapped: Tapped, runs: Iterable[Sequence[Shard]], apart: Sequence[Request]
    ) -> Iterator[tuple[Evidence, tuple[Evidence, ...]]]:
        """Yield in order what the shards of each run show together, and of some requests each; see `observe_parts`."""
        with self._started(tapped) as (executor, room):
            begun = deque([executor.submit(observe_parts, tapped, run, apart, room=room) for run in runs])
            while begun:
                yield begun.popleft().result()

    @contextmanager
    def _opened(self, tapped: Tapped) -> Iterator[Pool]:
        with self._started(tapped) as (executor, room):
            yield Pool(lambda shard: executor.submit(_timed, tapped, shard, room), self._threads)

    @contextmanager
    def _started(self, tapped: Tapped) -> Iterator[tuple[ThreadPoolExecutor, int]]:
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

    def run(self, tapped: Tapped, work: Work) -> Iterator[Evidence]:
        """Yield the statistics of some samples after the other, until all have run; see `run_pool` for errors."""
        yield from run_pool(lambda: self._open(tapped), work)

    @contextmanager
    def _open(self, tapped: Tapped) -> Iterator[Pool]:
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


def run_pool(opened: Callable[[], AbstractContextManager[Pool]], work: Work) -> Iterator[Evidence]:
    """Yield statistics of samples in the order in which they are finished; together they are those of all the work.

    Few more shards than there are workers are in memory at a time. When workers die, new ones are started and run the
    shards that were lost.

    Raises:
        DataError: Workers died again and again without finishing a shard, or what `observe_shard` raises.
        ModelError: What `observe_shard` raises.
    """
    pace, fruitless = Pace(_SECONDS), 0
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


def workers_for(*, jobs: int | None = None, cluster: str | None = None) -> Workers:
    """Return the workers that a user asked for: threads of this process unless told otherwise.

    Raises:
        SchemeError: Both were asked for, `jobs` is below 1, or the cluster is a number.
    """
    if jobs is not None and cluster is not None:
        raise SchemeError("Jobs and a cluster are both given, expected one; the cluster decides on its own workers")
    if cluster is not None:
        if cluster.isdigit():
            raise SchemeError(
                f"the cluster is {cluster!r}, expected an address such as tcp://host:8786; jobs are no text"
            )
        from onnxq.calibration.cluster import Cluster

        return Cluster(cluster)
    return Threads() if jobs is None else Processes(jobs)


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


_TAPPED: list[Tapped] = []
"""What this process runs, where it is a worker of `Processes`: it is handed over once and not with each shard."""


def _begin(tapped: Tapped) -> None:
    # The terminal tells all processes of Ctrl-C; the one that started this one decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _TAPPED[:] = [tapped]


def _here(shard: Shard) -> Timed:
    return _timed(_TAPPED[0], shard, TAPS_BYTES)


def _timed(tapped: Tapped, shard: Shard, room: int) -> Timed:
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
