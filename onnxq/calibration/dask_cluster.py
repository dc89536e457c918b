"""Run samples on a Dask cluster."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn
from uuid import uuid4

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.calibration.accumulators import Accumulator, ChannelMeans, ChannelRanges, Range, Request, SampleExtremes
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.kinds import find_kind
from onnxq.calibration.provenance import sample_digest
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.calibration.workers import (
    TAPS_BYTES,
    AdaptiveBatchSizer,
    InstrumentedModel,
    Shard,
    Work,
    carrying_weights,
    observe_shard,
)
from onnxq.data.dataset import SampleSlice
from onnxq.data.inputs import Sample
from onnxq.data.samples import CachedDataset, Items
from onnxq.errors import DataError, OnnxqError, SchemeError
from onnxq.ir.protos import external_files

# The format of `sample_digest`.
_DIGEST = re.compile("[0-9a-f]{32}")


def fits(found: object, tapped: InstrumentedModel, count: int) -> bool:
    """Return whether a worker's result is plausible: statistics of `count` samples for all requests.

    Equal samples count as often as they were run, so digests may repeat.
    """
    try:
        return (
            isinstance(found, CalibrationStatistics)
            and len(found.samples) == count
            and set(found.statistics) == set(tapped.requests)
            and found.provenance.model == tapped.model
            and _are_sound(found)
            and _know_their_samples(found)
            and _agree(found)
        )
    # An invalid result may raise anything.
    except Exception:  # noqa: BLE001
        return False


def _are_sound(found: CalibrationStatistics) -> bool:
    """Return whether every statistic is of the requested kind. An inconsistent one raises."""
    for request, statistic in found.statistics.items():
        if not isinstance(statistic, find_kind(request.kind)):
            return False
        statistic.check()
    return True


def _agree(found: CalibrationStatistics) -> bool:
    said: dict[Hashable, Hashable] = {}
    return all(
        said.setdefault((request.tensor, what), value) == value
        for request, statistic in found.statistics.items()
        for what, value in _said(request, statistic)
    )


def _said(request: Request, statistic: Accumulator) -> Iterator[tuple[Hashable, Hashable]]:
    """Yield the extremes and the numbers of elements and channels that a statistic implies."""
    if isinstance(statistic, Range):
        yield "elements", statistic.count
        yield "ends", (statistic.minimum, statistic.maximum)
    elif isinstance(statistic, Histogram):
        yield "ends", (statistic.whole.minimum, statistic.whole.maximum)
    elif isinstance(statistic, ChannelMeans):
        yield "elements", statistic.count
        # If the sums are unknown, so is the number of channels.
        yield from _channels(request, len(statistic.sums))
    elif isinstance(statistic, ChannelRanges):
        yield "ends", _outermost(statistic.ends)
        yield from _channels(request, len(statistic.ends))
    elif isinstance(statistic, SampleExtremes):
        yield "ends", _outermost(statistic.ends)
    elif isinstance(statistic, HessianAccumulator):
        kernel = math.prod(int(extent) for extent in str(request.option("kernel", "") or "1").split(","))
        yield from _channels(request, statistic.sums.size / kernel)


def _channels(request: Request, count: float) -> Iterator[tuple[Hashable, Hashable]]:
    if count:
        yield ("channels", request.axis), count


def _outermost(ends: NDArray[np.float64]) -> tuple[float, float]:
    return float(ends[:, 0].min(initial=math.inf)), float(ends[:, 1].max(initial=-math.inf))


def _know_their_samples(found: CalibrationStatistics) -> bool:
    """Return whether all digests are valid and `SampleExtremes` names only samples of the result."""
    if not all(_DIGEST.fullmatch(digest) for digest in found.samples):
        return False
    known = {int(digest[:16], 16) for digest in found.samples}
    apart = (one for one in found.statistics.values() if isinstance(one, SampleExtremes))
    return all(known.issuperset(one.samples.tolist()) for one in apart)


# Pickled data sets, which are sent to all workers; each worker reads the samples that it needs.

MOST_BYTES = 16 * 10**6
"""Most bytes of a pickled data set; names of about 100,000 files take less.

A larger one holds its samples, and the scheduler would send all of them to every worker. Samples that are sent one by
one go to one worker each.
"""


class PickledDataset:
    """A pickled data set, which is unpickled once, at the first read.

    Args:
        data: The result of `pickled`.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._items: Items | None = None
        # The data set may not be thread-safe.
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[PickledDataset], tuple[bytes]]:
        return PickledDataset, (self._data,)

    def __sizeof__(self) -> int:
        """Return the size in bytes, which a Dask cluster uses for scheduling."""
        return len(self._data)

    def read(self, positions: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples at these positions.

        Raises:
            DataError: The data set cannot be unpickled here, or `Items.read` raised it.
        """
        for position in positions:
            with self._lock:
                (sample,) = self._opened().read([position])
            yield sample

    def _opened(self) -> Items:
        if self._items is None:
            import cloudpickle

            try:
                self._items = cloudpickle.loads(self._data)
            # A missing module, for example.
            except Exception as error:
                raise DataError(
                    f"the samples do not open on this worker: {type(error).__name__}: {error}; install there what they "
                    "need"
                ) from error
        return self._items


class Parcels:
    """The data sets of a job that are sent to all workers.

    Args:
        client: A `distributed.Client`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._data: dict[Items, bytes | None] = {}
        self._sent: list[tuple[Items, Any]] = []

    def reads(self, stretch: SampleSlice) -> bool:
        """Return whether a worker can read a slice itself, as far as is known here."""
        return stretch.stored or self._bytes(stretch) is not None

    def labelled(self, shard: Shard) -> Shard:
        """Return a shard with labels in place of data sets, to be sent; see `unpacked`."""
        return Shard(tuple(map(self._labelled, shard.stretches)))

    def handed(self, shard: Shard, worker: str | None) -> Any:
        """Return the argument to submit for a shard: the labelled shard, or its future if samples go to `worker`."""
        given = self.labelled(shard)
        return given if worker is None else self._client.scatter(given, workers=[worker], hash=False)

    def futures(self) -> list[Any]:
        """Return the futures of the data sets on the workers; send those again whose copies are lost."""
        self._sent = [(items, self._there(items, future)) for items, future in self._sent]
        return [future for _, future in self._sent]

    def forget(self) -> None:
        """Let workers drop the data sets."""
        self._sent.clear()

    def _labelled(self, stretch: SampleSlice) -> SampleSlice:
        if not isinstance(stretch.read, CachedDataset):
            return stretch
        items = stretch.read.items
        known = [one for one, _ in self._sent]
        if items not in known:
            self._sent.append((items, None))
            known.append(items)
        return replace(stretch, read=_Label(known.index(items)))

    def _there(self, items: Items, future: Any) -> Any:
        if future is not None and future.status == "finished":
            return future
        return self._client.scatter(PickledDataset(self._data[items] or b""), broadcast=True, hash=False)

    def _bytes(self, stretch: SampleSlice) -> bytes | None:
        if not isinstance(stretch.read, CachedDataset):
            return None
        items = stretch.read.items
        if items not in self._data:
            self._data[items] = pickled(items)
        return self._data[items]


def unpacked(shard: Shard, parcels: Sequence[PickledDataset]) -> Shard:
    """Return a labelled shard whose samples are read from these data sets."""
    return Shard(
        tuple(
            replace(stretch, read=parcels[stretch.read.place].read) if isinstance(stretch.read, _Label) else stretch
            for stretch in shard.stretches
        )
    )


def pickled(items: Items) -> bytes | None:
    """Return a pickled data set; None if it cannot be pickled, or takes more than `MOST_BYTES`."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, given: Any) -> Any:
            # Checked before the array is copied.
            if isinstance(nbytes := getattr(given, "nbytes", 0), int) and nbytes > MOST_BYTES:
                raise OverflowError
            return super().reducer_override(given)

    stream = _Bounded()
    # Pickling may raise anything.
    with suppress(Exception):
        Pickler(stream).dump(items)
        return bytes(stream.data)
    return None


@dataclass(frozen=True)
class _Label:
    """Stands for a data set in a shard that is sent; `place` is its index in `Parcels`."""

    place: int

    def __call__(self, positions: Sequence[int]) -> NoReturn:
        raise TypeError("a label holds no samples; see `unpacked`")


class _Bounded:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> int:
        self.data += data
        if len(self.data) > MOST_BYTES:
            raise OverflowError
        return memoryview(data).nbytes


# Leases: a worker runs and adds up several shards before its statistics are sent, and workers merge them.

_SHARDS = 4
"""Shards of a lease: more would merge more often, fewer would leave workers idle at the end."""
_SENT_BYTES = 64 * 10**6
"""Bytes of samples that are sent at a time to a worker that cannot read them."""
_ATTEMPTS = 3
"""How often a sample may be lost."""
_TAPS_SHARE = 0.3
"""Share of a worker's memory limit that observed tensors may take."""
_POLL = 1.0
"""Seconds between two looks at the list of workers."""


@dataclass
class _Lease:
    """The shards of a worker since it last handed over statistics.

    Attributes:
        began: Start of the lease, on the monotonic clock.
        finished: Indices of the samples in `head`.
        head: Future of the statistics on the worker; None before the first shard is finished.
        since: Start of the running shard, on the monotonic clock.
        sent: Whether the samples were sent with the shard.
    """

    worker: str
    began: float
    finished: list[int] = field(default_factory=list)
    head: Any = None
    shard: Shard = field(default_factory=lambda: Shard(()))
    since: float = 0.0
    sent: bool = False


class _Part(NamedTuple):
    future: Any
    indices: tuple[int, ...]
    leases: int


class Job:
    """One calibration on a cluster: running leases, and statistics that are merged before they are fetched.

    Args:
        client: A `distributed.Client`.
        seconds: Length of a lease.
    """

    def __init__(self, client: Any, tapped: InstrumentedModel, work: Work, seconds: float) -> None:
        self._client = client
        self._travelling = tapped
        self._tapped: Any = None
        self._work = work
        self._parcels = Parcels(client)
        self._seconds = seconds
        self._seen = time.monotonic()
        self._pace = AdaptiveBatchSizer(seconds / _SHARDS)
        self._leases: dict[Any, _Lease] = {}
        self._merging: dict[Any, _Part] = {}
        self._parts: list[_Part] = []
        self._blind: set[str] = set()
        self._proven: set[str] = set()
        self._first: tuple[Shard, str] | None = None
        self._lost: Counter[int] = Counter()

    def run(self) -> Iterator[CalibrationStatistics]:
        """Yield statistics each time that about as many leases are merged as there are workers.

        Raises:
            DataError: A sample cannot be read or does not run, workers fail repeatedly, or all workers leave.
            ModelError: The model does not load.
        """
        while self._work.left or self._leases or self._merging or self._parts:
            workers = self._client.nthreads()
            self._check_there(workers)
            self._hand_out(workers)
            self._merge(len(workers))
            self._wait()
            for future in [one for one in self._leases if one.done()]:
                self._shard_done(future, workers)
            for future in [one for one in self._merging if one.done()]:
                self._merge_done(future)
            for part in self._whole(len(workers)):
                yield from self._fetched(part)

    def close(self) -> None:
        """Cancel what runs. The sessions on the workers close with the last reference to the model."""
        with suppress(OSError):
            self._client.cancel([*self._leases, *self._merging], force=True)
        self._parcels.forget()
        self._tapped = None

    def _check_there(self, workers: Mapping[str, int]) -> None:
        if workers:
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > self._seconds:
            raise DataError(
                f"All workers of {self._client.scheduler.address} have left and none has come for {self._seconds:.0f} "
                "seconds, expected some; start them and calibrate again"
            )

    def _hand_out(self, workers: Mapping[str, int]) -> None:
        busy = {lease.worker for lease in self._leases.values()}
        for worker in workers:
            if worker not in busy and self._work.left:
                self._begin(_Lease(worker, time.monotonic()), len(workers))

    def _begin(self, lease: _Lease, workers: int, *, carried: bool = False) -> None:
        """Give a worker its next shard, whose statistics are added to those of its lease."""
        carried = carried or lease.worker in self._blind
        most, reads = self._pace.size(self._work.left, workers), self._parcels.reads
        shard = self._work.take(most, carried=carried, nbytes=_SENT_BYTES, reads=reads)
        lease.shard, lease.since, lease.sent = shard, time.monotonic(), carried or not all(map(reads, shard.stretches))
        try:
            proof = None if lease.sent or lease.worker in self._proven else self._proof(shard)
            given = self._parcels.handed(shard, lease.worker if lease.sent else None)
            needed = self._model(), given, lease.head, proof, self._parcels.futures()
            future = self._submit(_run_shard, *needed, worker=lease.worker)
        except (OSError, KeyError):
            # The worker has left in the meantime.
            self._work.give_back([*shard.indices, *lease.finished])
        else:
            self._leases[future] = lease

    def _proof(self, shard: Shard) -> tuple[Shard, str]:
        """Return a sample and its digest here; a worker that sees the same data reads the same digest."""
        if self._first is None:
            one = Shard((shard.stretches[0].split(1)[0],))
            (sample,) = one.stretches[0]
            self._first = self._parcels.labelled(one), sample_digest(sample)
        return self._first

    def _model(self) -> Any:
        if self._tapped is None or self._tapped.status != "finished":
            self._tapped = self._client.scatter(self._travelling, broadcast=True, hash=False)
        return self._tapped

    def _submit(self, function: Any, *arguments: Any, worker: str | None = None, priority: int = 0) -> Any:
        chosen = {} if worker is None else {"workers": [worker], "allow_other_workers": True}
        key = f"{function.__name__.strip('_')}-{uuid4().hex}"
        return self._client.submit(function, *arguments, key=key, pure=False, priority=priority, **chosen)

    def _wait(self) -> None:
        import distributed

        wait: Any = distributed.wait
        waited = [*self._leases, *self._merging, *(part.future for part in self._parts if not part.future.done())]
        if not waited and not self._parts:
            time.sleep(_POLL)
        # A lost future raises here; the caller handles it.
        with suppress(Exception):
            wait(waited, timeout=_POLL, return_when="FIRST_COMPLETED")

    def _shard_done(self, future: Any, workers: Mapping[str, int]) -> None:
        lease = self._leases.pop(future)
        if future.status == "finished":
            self._pace.learn(len(lease.shard), time.monotonic() - lease.since)
            lease.finished += lease.shard.indices
            lease.head = future
            self._proven.add(lease.worker)
            over = time.monotonic() - lease.began >= self._seconds or lease.worker not in workers
            if over or not self._work.left:
                self._parts.append(_Part(future, tuple(lease.finished), 1))
            else:
                self._begin(lease, len(workers))
            return
        error = future.exception() if future.status == "error" else None
        self._work.give_back(lease.shard.indices)
        if isinstance(error, DataError) and not lease.sent:
            # The worker may see other files, or none. If the sample itself is wrong, reading it here raises.
            self._blind.add(lease.worker)
            self._begin(lease, len(workers), carried=True)
            return
        if isinstance(error, OnnxqError):
            raise error
        self._count_lost(lease.shard.indices, error)
        self._work.give_back(lease.finished)

    def _merge(self, workers: int) -> None:
        """Merge in pairs, first those of equally many leases; at the end, any."""
        last = not (self._work.left or self._leases)
        waiting, self._parts = sorted(self._parts, key=lambda part: part.leases), []
        while waiting:
            one = waiting.pop(0)
            if waiting and one.leases < workers and (last or waiting[0].leases == one.leases):
                other = waiting.pop(0)
                merged = self._submit(_merged, one.future, other.future, priority=10)
                self._merging[merged] = _Part(merged, one.indices + other.indices, one.leases + other.leases)
            else:
                self._parts.append(one)

    def _merge_done(self, future: Any) -> None:
        part = self._merging.pop(future)
        error = future.exception() if future.status == "error" else None
        if future.status == "finished":
            self._parts.append(part)
        elif isinstance(error, OnnxqError):
            # Workers with different versions of onnxruntime, for example.
            raise error
        else:
            self._give_up(part, error)

    def _whole(self, workers: int) -> list[_Part]:
        """Take out the parts to fetch now; a lost part that is being computed again stays."""
        last = not (self._work.left or self._leases or self._merging) and len(self._parts) == 1
        found = [part for part in self._parts if (last or part.leases >= max(1, workers)) and part.future.done()]
        self._parts = [part for part in self._parts if part not in found]
        return found

    def _fetched(self, part: _Part) -> Iterator[CalibrationStatistics]:
        """Yield valid statistics; the samples of invalid ones are run again."""
        found = self._client.gather([part.future], errors="skip")
        if found and fits(found[0], self._travelling, len(part.indices)):
            # Drop the reference, since the statistics may be large.
            yield found.pop()
        else:
            self._give_up(part, None)

    def _give_up(self, part: _Part, error: BaseException | None) -> None:
        self._count_lost(part.indices, error)
        self._work.give_back(part.indices)

    def _count_lost(self, indices: Sequence[int], error: BaseException | None) -> None:
        from distributed import KilledWorker

        self._lost.update(indices)
        if isinstance(error, KilledWorker):
            raise DataError(
                f"Workers of {self._client.scheduler.address} died again and again, expected them to finish; they may "
                "lack memory"
            ) from error
        if max(self._lost[index] for index in indices) >= _ATTEMPTS:
            reason = "nothing came back, or no statistics" if error is None else f"{type(error).__name__}: {error}"
            raise DataError(
                f"Sample {min(indices)} or its neighbours failed {_ATTEMPTS} times on {self._client.scheduler.address} "
                f"({reason}), expected statistics; check that the workers have the same onnxq"
            ) from error


def _run_shard(
    tapped: InstrumentedModel,
    shard: Shard,
    before: CalibrationStatistics | None,
    proof: tuple[Shard, str] | None,
    parcels: Sequence[PickledDataset],
) -> CalibrationStatistics:
    """Run a shard with all threads of this worker, and add the statistics to `before`."""
    from distributed import get_worker

    if proof and [sample_digest(one) for part in unpacked(proof[0], parcels).stretches for one in part] != [proof[1]]:
        raise DataError(
            f"{proof[0].stretches[0].where} is another file on this worker, expected the one of the client; share it"
        )
    worker = get_worker()
    threads = worker.state.nthreads
    limit = worker.memory_manager.memory_limit
    room = int(limit * _TAPS_SHARE) if limit else threads * TAPS_BYTES
    found = observe_shard(tapped, unpacked(shard, parcels), threads=threads, room=room)
    if not fits(found, tapped, len(shard)):
        # Once added to `before`, invalid statistics could not be detected any more.
        raise ValueError("what came out are no statistics of the samples")
    return found if before is None else before.plus(found)


def _merged(one: CalibrationStatistics, other: CalibrationStatistics) -> CalibrationStatistics:
    return one.plus(other)


@dataclass(frozen=True)
class Cluster:
    """The workers of a Dask cluster; they need onnxq but no shared disk, and may join and leave at any time.

    A worker reads samples itself if it sees the files or got the pickled data set, see `PickledDataset`. Otherwise
    samples are sent. Samples of a lost worker are run again. Security follows the configuration of Dask, or of the
    client.

    Args:
        address: Address of the scheduler, such as ``tcp://10.0.0.1:8786``, or a connected `distributed.Client`.
        patience: Seconds to wait for the scheduler, and for a first worker.
        lease: Seconds for which a worker keeps its statistics. A longer lease loses more with a worker, and sends
            statistics less often.
    """

    address: Any
    patience: float = 10.0
    lease: float = 60.0

    def run(self, tapped: InstrumentedModel, work: Work) -> Iterator[CalibrationStatistics]:
        """Yield statistics about once a lease, each of all samples that the workers have run in it.

        Raises:
            DataError: A sample cannot be read or does not run, workers fail repeatedly, or the scheduler is lost.
            ModelError: The model does not load.
            SchemeError: Dask is not installed, no scheduler answers, or the cluster has no workers.
        """
        with self._connected() as client:
            self._check_workers(client)
            job = Job(client, _travelling(tapped), work, self.lease)
            try:
                yield from job.run()
            except OSError as error:
                raise DataError(
                    f"The scheduler at {client.scheduler.address} answers no more ({error}), expected it until the end "
                    "of calibration; start it and calibrate again, which goes on where it was"
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


def _travelling(tapped: InstrumentedModel) -> InstrumentedModel:
    if tapped.folder is None:
        return tapped
    parts = [onnx.ModelProto.FromString(segment.model) for segment in tapped.segments]
    return carrying_weights(tapped, sorted({path for part in parts for path in external_files(part, tapped.folder)}))
