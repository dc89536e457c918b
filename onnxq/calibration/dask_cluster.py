"""Run samples on a Dask cluster: workers observe shards and merge their statistics in a tree."""

from __future__ import annotations

import pickle
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from uuid import uuid4

import onnx

from onnxq.calibration.provenance import sample_digest
from onnxq.calibration.statistics import CalibrationStatistics, StatisticsSum
from onnxq.calibration.workers import (
    OBSERVED_BYTES,
    AdaptiveBatchSizer,
    InstrumentedModel,
    Shard,
    Work,
    carrying_weights,
    observe_samples,
)
from onnxq.data.dataset import is_stored, picked, reads_by_index
from onnxq.data.inputs import SampleSource
from onnxq.errors import DataError, OnnxqError, SchemeError
from onnxq.ir.protos import external_files

MOST_BYTES = 16 * 10**6
"""Most bytes of a pickled data set that is sent to every worker, unless its samples are in files.

A larger one holds its samples. Samples that are sent one by one go to one worker each.
"""

_SHARDS = 4
"""Shards of a lease: more would merge more often, fewer would leave workers idle at the end."""
_SENT_BYTES = 64 * 10**6
"""Bytes of samples that are sent at a time to a worker that cannot read them."""
_ATTEMPTS = 3
"""How often a sample may be lost."""
_OBSERVED_SHARE = 0.3
"""Share of a worker's memory limit that observed tensors may take."""
_POLL = 1.0
"""Seconds between two looks at the list of workers."""


def pickled(samples: SampleSource) -> bytes | None:
    """Return a pickled data set; None if it is a stream, cannot be pickled, or holds more than `MOST_BYTES`."""
    import cloudpickle

    if not reads_by_index(samples):
        return None

    most = float("inf") if is_stored(samples) else MOST_BYTES

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, given: Any) -> Any:
            # Checked before the array is copied.
            if isinstance(nbytes := getattr(given, "nbytes", 0), int) and nbytes > most:
                raise OverflowError
            return super().reducer_override(given)

    class Stream(bytearray):
        def write(self, data: Any) -> None:
            self.extend(data)
            if len(self) > most:
                raise OverflowError

    stream = Stream()
    # Pickling may raise anything.
    with suppress(Exception):
        Pickler(stream).dump(samples)
        return bytes(stream)
    return None


# What workers do.


@dataclass(frozen=True)
class _Proof:
    """The digest of a sample on the client; a worker that sees the same data reads the same digest."""

    index: int
    digest: str


def _observed(
    instrumented: InstrumentedModel,
    data: bytes | None,
    proof: _Proof | None,
    shard: Shard,
    before: CalibrationStatistics | None,
) -> CalibrationStatistics:
    """Run a shard in this thread of a worker, and add the statistics to `before`."""
    from distributed import get_worker

    limit = get_worker().memory_manager.memory_limit
    samples = [] if data is None or proof is None else _opened(data, proof)
    room = int(limit * _OBSERVED_SHARE) if limit else OBSERVED_BYTES
    found = observe_samples(instrumented, shard.numbered(samples), room=room)
    return found if before is None else before.plus(found)


def _opened(data: bytes, proof: _Proof) -> SampleSource:
    try:
        samples: SampleSource = pickle.loads(data)
    # A missing module, for example.
    except Exception as error:
        raise DataError(f"the samples do not open on this worker: {type(error).__name__}: {error}") from error
    (sample,) = picked(samples, [proof.index])
    if sample_digest(sample) != proof.digest:
        raise DataError(f"Sample {proof.index} is another one on this worker, expected that of the client; share it")
    return samples


def _merged(*parts: CalibrationStatistics) -> CalibrationStatistics:
    total = StatisticsSum(parts[0])
    for part in parts[1:]:
        total.add(part)
    return total.statistics


# What the client does.


@dataclass(frozen=True)
class _Running:
    """A shard on a worker, and the finished shards whose statistics it is added to.

    Attributes:
        began: Start of the first shard, on the monotonic clock.
        since: Start of this shard.
        indices: Indices of the samples of all shards.
        shard: This shard.
    """

    began: float
    since: float
    indices: tuple[int, ...]
    shard: Shard


class _Job:
    """One calibration on a cluster.

    Each thread of a worker adds up the statistics of several shards for `seconds`. Then workers merge them in a tree.
    """

    def __init__(self, client: Any, instrumented: InstrumentedModel, work: Work, seconds: float) -> None:
        self._client = client
        self._instrumented = instrumented
        self._work = work
        self._seconds = seconds
        self._data = pickled(work.source)
        self._proof: _Proof | None = None
        self._there: list[Any] = []
        self._pace = AdaptiveBatchSizer(seconds / _SHARDS)
        self._running: dict[Any, _Running] = {}
        self._parts: dict[Any, tuple[int, ...]] = {}
        self._roots: dict[Any, tuple[int, ...]] = {}
        self._lost: Counter[int] = Counter()

    def run(self) -> Iterator[CalibrationStatistics]:
        """Yield statistics each time that those of all threads are merged.

        Raises:
            DataError: A sample cannot be read or does not run, workers fail repeatedly, or all workers leave.
            ModelError: The model does not load.
        """
        seen = time.monotonic()
        while self._work.left or self._running or self._parts or self._roots:
            if threads := sum(self._client.nthreads().values()):
                seen = time.monotonic()
            elif time.monotonic() - seen > self._seconds:
                raise DataError(
                    f"All workers of {self._client.scheduler.address} have left and none has come for "
                    f"{self._seconds:.0f} seconds, expected some; start them and calibrate again"
                )
            while self._work.left and len(self._running) < threads and self._begin(threads):
                pass
            if self._parts and (len(self._parts) >= threads or not self._running):
                self._merge()
            self._wait()
            for future in [one for one in self._running if one.done()]:
                self._shard_done(future, threads)
            for future in [one for one in self._roots if one.done()]:
                yield from self._fetched(future)

    def close(self) -> None:
        """Cancel what runs. The sessions on the workers close with the last reference to the model."""
        with suppress(OSError):
            self._client.cancel([*self._running, *self._roots], force=True)
        self._there.clear()

    def _begin(self, threads: int, before: Any = None, done: _Running | None = None) -> bool:
        """Submit the next shard, to be added to the statistics `before` of the shards in `done`.

        Returns:
            Whether a worker was there to take it.
        """
        carried, now = self._data is None, time.monotonic()
        shard = self._work.take(self._pace.size(self._work.left, threads), carried=carried, nbytes=_SENT_BYTES)
        indices = (*(done.indices if done else ()), *shard.indices)
        if not carried and self._proof is None:
            (sample,) = picked(self._work.source, shard.indices[:1])
            self._proof = _Proof(shard.indices[0], sample_digest(sample))
        try:
            if not self._there or any(one.status != "finished" for one in self._there):
                self._there = self._client.scatter([self._instrumented, self._data], broadcast=True, hash=False)
            given = self._client.scatter(shard, hash=False) if carried else shard
            data = None if carried else self._there[1]
            future = self._submit(_observed, self._there[0], data, self._proof, given, before)
        except (OSError, KeyError):
            # The last worker has left in the meantime.
            self._work.give_back(indices)
            return False
        self._running[future] = _Running(done.began if done else now, now, indices, shard)
        return True

    def _submit(self, function: Any, *arguments: Any, priority: int = 0) -> Any:
        key = f"{function.__name__.strip('_')}-{uuid4().hex}"
        return self._client.submit(function, *arguments, key=key, pure=False, priority=priority)

    def _wait(self) -> None:
        import distributed

        wait: Any = distributed.wait
        futures = [*self._running, *self._roots]
        if not futures:
            time.sleep(_POLL)
        # A lost future raises here; the caller handles it.
        with suppress(Exception):
            wait(futures, timeout=_POLL, return_when="FIRST_COMPLETED")

    def _shard_done(self, future: Any, threads: int) -> None:
        done, now = self._running.pop(future), time.monotonic()
        if future.status != "finished":
            self._failed(future, done.indices, sighted=done.shard.samples is None)
            return
        self._pace.learn(len(done.shard), now - done.since)
        if not self._work.left or now - done.began >= self._seconds:
            self._parts[future] = done.indices
        else:
            self._begin(threads, future, done)

    def _merge(self) -> None:
        """Merge the parts of each worker there, and then those of all workers in pairs."""
        holders = self._client.who_has(list(self._parts))
        place = {future: min(holders.get(future.key, ()), default="") for future in self._parts}
        level = [
            self._sum(list(group)) for _, group in groupby(sorted(place, key=place.__getitem__), place.__getitem__)
        ]
        while len(level) > 1:
            level = [self._sum(level[start : start + 2]) for start in range(0, len(level), 2)]
        for root in level:
            self._roots[root] = tuple(index for indices in self._parts.values() for index in indices)
        self._parts.clear()

    def _sum(self, futures: Sequence[Any]) -> Any:
        return self._submit(_merged, *futures, priority=10) if len(futures) > 1 else futures[0]

    def _fetched(self, root: Any) -> Iterator[CalibrationStatistics]:
        indices = self._roots.pop(root)
        if found := self._client.gather([root], errors="skip"):
            # Drop the reference, since the statistics may be large.
            yield found.pop()
        else:
            self._failed(root, indices)

    def _failed(self, future: Any, indices: Sequence[int], *, sighted: bool = False) -> None:
        """Queue the samples again; `sighted` if the worker read them itself."""
        from distributed import KilledWorker

        error = future.exception() if future.status == "error" else None
        if sighted and isinstance(error, DataError):
            # The worker may see other files, or none. If the sample itself is wrong, reading it here raises.
            self._data = None
        elif isinstance(error, OnnxqError):
            raise error
        else:
            self._lost.update(indices)
            address = self._client.scheduler.address
            if isinstance(error, KilledWorker):
                raise DataError(
                    f"Workers of {address} died again and again, expected them to finish; they may lack memory"
                ) from error
            if max(self._lost[index] for index in indices) >= _ATTEMPTS:
                reason = "nothing came back" if error is None else f"{type(error).__name__}: {error}"
                raise DataError(
                    f"Sample {min(indices)} or its neighbours failed {_ATTEMPTS} times on {address} ({reason}), "
                    "expected statistics; check that the workers have the same onnxq"
                ) from error
        self._work.give_back(indices)


@dataclass(frozen=True)
class Cluster:
    """The workers of a Dask cluster; they need onnxq but no shared disk, and may join and leave at any time.

    Workers read samples themselves if all see the files, or can read the data set that is sent to them, see `pickled`.
    Otherwise samples are sent. Samples of a lost worker are run again. Security follows the configuration of Dask, or
    of the client.

    Args:
        address: Address of the scheduler, such as ``tcp://10.0.0.1:8786``, or a connected `distributed.Client`.
        patience: Seconds to wait for the scheduler, and for a first worker.
        lease: Seconds for which a thread of a worker keeps its statistics. A longer lease loses more with a worker, and
            sends statistics less often.
    """

    address: Any
    patience: float = 10.0
    lease: float = 60.0

    def run(self, instrumented: InstrumentedModel, work: Work) -> Iterator[CalibrationStatistics]:
        """Yield statistics about once a lease, each of all samples that the workers have run in it.

        Raises:
            DataError: A sample cannot be read or does not run, workers fail repeatedly, or the scheduler is lost.
            ModelError: The model does not load.
            SchemeError: Dask is not installed, no scheduler answers, or the cluster has no workers.
        """
        with self._connected() as client:
            self._check_workers(client)
            job = _Job(client, _travelling(instrumented), work, self.lease)
            try:
                yield from job.run()
            except OSError as error:
                raise DataError(
                    f"The scheduler at {client.scheduler.address} no longer answers ({error}); start it and calibrate "
                    "again, which continues from the last result"
                ) from error
            finally:
                job.close()

    def _check_workers(self, client: Any) -> None:
        try:
            client.wait_for_workers(1, timeout=self.patience)
        except TimeoutError as error:
            raise SchemeError(
                f"The cluster at {client.scheduler.address} has no workers, expected at least one; start some"
            ) from error

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        try:
            from distributed import Client
            from distributed.comm.addressing import get_address_host_port, normalize_address, parse_address
        except ImportError as error:
            raise SchemeError(
                "Dask is not installed, expected it for a cluster; run pip install 'onnxq[dask]'"
            ) from error
        if isinstance(self.address, Client):
            yield self.address
            return
        connect: Any = Client
        try:
            if parse_address(normalize_address(self.address))[0] in ("tcp", "tls"):
                # A client that cannot connect prints a traceback when it is collected, so try a plain connection first.
                place = get_address_host_port(normalize_address(self.address))
                socket.create_connection(place, self.patience).close()
            client = connect(self.address, timeout=self.patience, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise SchemeError(
                f"No Dask scheduler answers at {self.address}, expected one as in tcp://10.0.0.1:8786; start it first"
            ) from error
        with client:
            yield client


def _travelling(instrumented: InstrumentedModel) -> InstrumentedModel:
    if instrumented.folder is None:
        return instrumented
    parts = [onnx.ModelProto.FromString(segment.model) for segment in instrumented.segments]
    return carrying_weights(
        instrumented, sorted({path for part in parts for path in external_files(part, instrumented.folder)})
    )
