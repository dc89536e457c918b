"""Shards: a few samples that one worker runs; any executor runs them, and one that loses workers runs them again."""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

from onnxq.calibration.inputs import Sample
from onnxq.calibration.statistics import EMPTY, Statistics, TensorStatistics, merge, observe
from onnxq.errors import DataError
from onnxq.runtime import Session, open_session, run

_FRUITLESS = 3
"""How often workers may die without a shard having been finished in between."""
_LARGE = 40 * 10**6
"""Bytes of taps above which threads take turns, since speed is then bought with much memory."""


@dataclass(frozen=True)
class Tapped:
    """A model with taps, and all that a worker must know to observe them.

    Attributes:
        key: unequal for unequal models and taps.
        model: the serialized model.
        folder: where its external data lies; None when it has none, or brings it along.
        weights: the external data by file name, where a worker may not see the folder.
        computed: names of the observed tensors that are outputs of the model.
        fed: names of the observed tensors that are inputs.
        histogram_elements: see `observe`.
    """

    key: str
    model: bytes
    folder: Path | None
    computed: tuple[str, ...]
    fed: tuple[str, ...]
    histogram_elements: int | None
    weights: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class Shard:
    """Samples by their index."""

    samples: Mapping[int, Sample]


@dataclass(frozen=True)
class Pool:
    """An executor at work.

    Attributes:
        executor: runs shards.
        tapped: what to hand over with each shard: a `Tapped`, or what the executor turns into one.
        count: how many shards it runs at a time.
    """

    executor: Executor
    tapped: object
    count: int


class Workers(Protocol):
    """Where shards run; statistics are the same bits wherever that is."""

    def open(self, tapped: Tapped) -> AbstractContextManager[Pool]:
        """Start workers, or connect to them, until the context is left."""
        ...


def observe_shard(tapped: Tapped, shard: Shard) -> Statistics:
    """Run the samples of a shard and return their statistics, without provenance. This is what a worker does.

    Raises:
        ModelError: The model does not load.
        DataError: A sample does not run, or a tensor is not float, or holds NaN or infinite values.
    """
    opened = _session(tapped)
    seen = []
    for index, sample in shard.samples.items():
        with opened.turn():
            seen.append(_observe_sample(opened, tapped, index, sample))
    names = (*tapped.computed, *tapped.fed)
    tensors = {name: reduce(merge, (one[name] for one in seen), EMPTY) for name in names}
    return Statistics(len(seen), tensors)


def run_shards(tapped: Tapped, shards: Iterable[Shard], workers: Workers) -> Iterator[tuple[Shard, Statistics]]:
    """Yield each shard with its statistics, in the order in which they are finished.

    Few more shards than there are workers are in memory at a time. When workers die, new ones are started and run the
    shards that were lost.

    Raises:
        DataError: Workers died again and again without finishing a shard, or what `observe_shard` raises.
        ModelError: What `observe_shard` raises.
    """
    source, waiting, fruitless = iter(shards), deque[Shard](), 0
    pending: dict[Future[Statistics], Shard] = {}
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
        _SESSIONS.clear()


def carrying_weights(tapped: Tapped, files: Iterable[Path]) -> Tapped:
    """Return the same with its external data inside, for workers that see other disks."""
    return replace(tapped, folder=None, weights=tuple((path.name, path.read_bytes()) for path in files))


def _submitted(pool: Pool, shard: Shard) -> Future[Statistics]:
    # Some executors replace their own references to values by the values.
    return pool.executor.submit(observe_shard, cast("Tapped", pool.tapped), shard)


def _finished(pending: dict[Future[Statistics], Shard]) -> Iterator[tuple[Shard, Statistics]]:
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    # What is finished is taken before an error is raised; a lost shard stays pending, so that it is known.
    for future in sorted(done, key=lambda future: future.exception() is not None):
        statistics = future.result()
        yield pending.pop(future), statistics


def _observe_sample(opened: _Opened, tapped: Tapped, index: int, sample: Sample) -> dict[str, TensorStatistics]:
    arrays = dict(zip(tapped.computed, run(opened.session, sample, tapped.computed, index=index), strict=True))
    opened.alone = sum(array.nbytes for array in arrays.values()) > _LARGE
    return {
        name: observe(array, name=name, sample=index, histogram_elements=tapped.histogram_elements)
        for name, array in (*arrays.items(), *((name, sample[name]) for name in tapped.fed))
    }


class _Opened:
    """A session that threads share, in turns while the taps of one run are large or not known to be small."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.alone = True
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until it is this thread's turn to run a sample."""
        # The first sample tells, so its turn is waited for and then no longer needed.
        with self._lock if self.alone else nullcontext():
            yield


_LOCK = threading.Lock()
_SESSIONS: dict[str, _Opened] = {}


def _session(tapped: Tapped) -> _Opened:
    """Return the session of this process, opened once however many threads ask."""
    with _LOCK:
        if tapped.key not in _SESSIONS:
            _SESSIONS.clear()
            _SESSIONS[tapped.key] = _Opened(_opened(tapped))
        return _SESSIONS[tapped.key]


def _opened(tapped: Tapped) -> Session:
    # One thread an operator: results then depend on neither the number of cores nor that of workers.
    if not tapped.weights:
        return open_session(tapped.model, threads=1, memory_plan=False, external_folder=tapped.folder)
    with tempfile.TemporaryDirectory(prefix="onnxq-weights-") as folder:
        for name, data in tapped.weights:
            (Path(folder) / name).write_bytes(data)
        return open_session(tapped.model, threads=1, memory_plan=False, external_folder=Path(folder))
