"""A Dask cluster as the place where samples run."""

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

# As `sample_digest` gives them.
_DIGEST = re.compile("[0-9a-f]{32}")


def fits(found: object, tapped: InstrumentedModel, count: int) -> bool:
    """Return whether a worker gave back evidence of so many samples of what is requested, which may be true.

    Equal samples are there as often as they were run, so digests need not differ.
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
    # What is no evidence fails in any way when it is looked at.
    except Exception:  # noqa: BLE001
        return False


def _are_sound(found: CalibrationStatistics) -> bool:
    """Return whether every statistic is of the kind that was asked for; one that contradicts itself raises."""
    for request, statistic in found.statistics.items():
        if not isinstance(statistic, find_kind(request.kind)):
            return False
        statistic.check()
    return True


def _agree(found: CalibrationStatistics) -> bool:
    """Return whether statistics of one tensor say the same of it: all were shown the same arrays."""
    said: dict[Hashable, Hashable] = {}
    return all(
        said.setdefault((request.tensor, what), value) == value
        for request, statistic in found.statistics.items()
        for what, value in _said(request, statistic)
    )


def _said(request: Request, statistic: Accumulator) -> Iterator[tuple[Hashable, Hashable]]:
    """Yield what a statistic says of its tensor: the ends, how many elements there are, how many channels."""
    if isinstance(statistic, Range):
        yield "elements", statistic.count
        yield "ends", (statistic.minimum, statistic.maximum)
    elif isinstance(statistic, Histogram):
        yield "ends", (statistic.whole.minimum, statistic.whole.maximum)
    elif isinstance(statistic, ChannelMeans):
        yield "elements", statistic.count
        # Where they are not known, nobody knows of how many channels.
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
    """Return whether the digests of samples are such, and what is kept of each sample is of one of them."""
    if not all(_DIGEST.fullmatch(digest) for digest in found.samples):
        return False
    known = {int(digest[:16], 16) for digest in found.samples}
    apart = (one for one in found.statistics.values() if isinstance(one, SampleExtremes))
    return all(known.issuperset(one.samples.tolist()) for one in apart)


# Parcels: objects whose items are samples, sent to the workers of a cluster, which read what they need of them.

MOST_BYTES = 16 * 10**6
"""Bytes that an object may have. Names of some 100,000 files take less; what takes more holds its samples, of which
every worker would get all by way of the scheduler, while samples that are sent go to one worker each."""


class PickledDataset:
    """An object in bytes; whoever reads a sample of it opens it, once.

    Args:
        data: What `pickled` gives.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._items: Items | None = None
        # An object may not be made for several threads.
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[PickledDataset], tuple[bytes]]:
        return PickledDataset, (self._data,)

    def __sizeof__(self) -> int:
        """Return the bytes that it takes, by which a cluster decides what to move."""
        return len(self._data)

    def read(self, positions: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples at these positions.

        Raises:
            DataError: The object does not open here, or what `Items.read` raises.
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
            # Such as a module that is not installed here.
            except Exception as error:
                raise DataError(
                    f"the samples do not open on this worker: {type(error).__name__}: {error}; install there what they "
                    "need"
                ) from error
        return self._items


class Parcels:
    """The objects of a job that were sent to all workers.

    Args:
        client: A `distributed.Client`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._data: dict[Items, bytes | None] = {}
        self._sent: list[tuple[Items, Any]] = []

    def reads(self, stretch: SampleSlice) -> bool:
        """Return whether a worker reads a stretch itself, as far as that can be told here."""
        return stretch.stored or self._bytes(stretch) is not None

    def labelled(self, shard: Shard) -> Shard:
        """Return a shard as it is sent, in which the place of a parcel stands for an object; see `unpacked`."""
        return Shard(tuple(map(self._labelled, shard.stretches)))

    def handed(self, shard: Shard, worker: str | None) -> Any:
        """Return what is submitted for a shard: itself, labelled, or where samples travel, what a worker was sent."""
        given = self.labelled(shard)
        return given if worker is None else self._client.scatter(given, workers=[worker], hash=False)

    def futures(self) -> list[Any]:
        """Return the parcels at the workers, which are sent again where all copies were lost."""
        self._sent = [(items, self._there(items, future)) for items, future in self._sent]
        return [future for _, future in self._sent]

    def forget(self) -> None:
        """Let workers forget them."""
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
    """Return a shard that was labelled, whose samples are read of these parcels."""
    return Shard(
        tuple(
            replace(stretch, read=parcels[stretch.read.place].read) if isinstance(stretch.read, _Label) else stretch
            for stretch in shard.stretches
        )
    )


def pickled(items: Items) -> bytes | None:
    """Return items in bytes; None where they cannot be had so, or are more than `MOST_BYTES`."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, given: Any) -> Any:
            # Known before they are copied.
            if isinstance(nbytes := getattr(given, "nbytes", 0), int) and nbytes > MOST_BYTES:
                raise OverflowError
            return super().reducer_override(given)

    stream = _Bounded()
    # An object fails in any way.
    with suppress(Exception):
        Pickler(stream).dump(items)
        return bytes(stream.data)
    return None


@dataclass(frozen=True)
class _Label:
    """Stands for an object in a shard that travels.

    Attributes:
        place: of its parcel.
    """

    place: int

    def __call__(self, positions: Sequence[int]) -> NoReturn:
        raise TypeError("a label holds no samples; see `unpacked`")


class _Bounded:
    """Bytes that are written, until they are too many."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> int:
        self.data += data
        if len(self.data) > MOST_BYTES:
            raise OverflowError
        return memoryview(data).nbytes


# Leases: what a worker of a cluster runs and sums up before its evidence travels, and how workers merge it.

_SHARDS = 4
"""Shards of a lease: more would merge more often, fewer would leave workers idle at the end."""
_SENT_BYTES = 64 * 10**6
"""Bytes of samples that are sent to a worker at a time when it cannot read them itself."""
_ATTEMPTS = 3
"""How often a sample may be among those that were lost."""
_TAPS_SHARE = 0.3
"""The part of a worker's memory limit that taps may take."""
_POLL = 1.0
"""Seconds between two looks at which workers there are."""


@dataclass
class _Lease:
    """What a worker has run, and runs, since it last handed over statistics.

    Attributes:
        worker: its address.
        began: when, on the monotonic clock.
        finished: indices of the samples whose statistics `head` holds.
        head: the statistics, at the worker; None before the first shard is finished.
        shard: what runs now.
        since: when that began.
        sent: whether the samples were sent along.
    """

    worker: str
    began: float
    finished: list[int] = field(default_factory=list)
    head: Any = None
    shard: Shard = field(default_factory=lambda: Shard(()))
    since: float = 0.0
    sent: bool = False


class _Part(NamedTuple):
    """Statistics at a worker, of so many leases.

    Attributes:
        future: of the statistics.
        indices: of the samples that they are of.
        leases: how many leases they sum up.
    """

    future: Any
    indices: tuple[int, ...]
    leases: int


class Job:
    """One calibration on a cluster: leases that run, and evidence that is merged on the way back.

    Args:
        client: A `distributed.Client`.
        tapped: The model, with all that workers need of it.
        work: The samples.
        seconds: How long a lease lasts.
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
        """Yield evidence whenever about as many leases are merged as there are workers.

        Raises:
            DataError: A sample cannot be read or does not run, or workers fail again and again, or all leave.
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
        """Forget what runs; the model's sessions end on the workers with the last reference to it."""
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
        """Give each worker that has nothing to do a shard."""
        busy = {lease.worker for lease in self._leases.values()}
        for worker in workers:
            if worker not in busy and self._work.left:
                self._begin(_Lease(worker, time.monotonic()), len(workers))

    def _begin(self, lease: _Lease, workers: int, *, carried: bool = False) -> None:
        """Give a worker a shard, which goes on with what its lease has so far."""
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
            # The worker has left meanwhile.
            self._work.give_back([*shard.indices, *lease.finished])
        else:
            self._leases[future] = lease

    def _proof(self, shard: Shard) -> tuple[Shard, str]:
        """Return a sample as it is read here, which a worker that sees the same files, or items, reads alike."""
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
        # What is lost is raised here, and looked at by the caller.
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
            # Perhaps it sees other files, or none; what is wrong with the sample itself shows when it is read here.
            self._blind.add(lease.worker)
            self._begin(lease, len(workers), carried=True)
            return
        if isinstance(error, OnnxqError):
            raise error
        self._count_lost(lease.shard.indices, error)
        self._work.give_back(lease.finished)

    def _merge(self, workers: int) -> None:
        """Merge two by two, those of as many leases first; at the end, whatever there is."""
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
            # Such as workers with different versions of onnxruntime.
            raise error
        else:
            self._give_up(part, error)

    def _whole(self, workers: int) -> list[_Part]:
        """Take out what is to be fetched now; what was lost and is being made again is waited for."""
        last = not (self._work.left or self._leases or self._merging) and len(self._parts) == 1
        found = [part for part in self._parts if (last or part.leases >= max(1, workers)) and part.future.done()]
        self._parts = [part for part in self._parts if part not in found]
        return found

    def _fetched(self, part: _Part) -> Iterator[CalibrationStatistics]:
        """Yield evidence that came back as it should; the samples of any other are run again."""
        found = self._client.gather([part.future], errors="skip")
        if found and fits(found[0], self._travelling, len(part.indices)):
            # Nothing here holds it any longer, since it may be large.
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
    """Run a shard with all threads of this worker, and add it to what the worker has run before.

    Raises:
        DataError: This worker does not see the files that the client sees, or what `observe_shard` raises.
        ModelError: What `observe_shard` raises.
        ValueError: What came out is no evidence of the shard.
    """
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
        # In the sum with what was run before, nobody could tell any longer.
        raise ValueError("what came out are no statistics of the samples")
    return found if before is None else before.plus(found)


def _merged(one: CalibrationStatistics, other: CalibrationStatistics) -> CalibrationStatistics:
    return one.plus(other)


# A Dask cluster as the place where samples run.


@dataclass(frozen=True)
class Cluster:
    """The workers of a Dask cluster, which need onnxq but no shared disk; they may join and leave at any time.

    Workers read samples themselves where they see the files, or were sent the object whose items these are, see
    `PickledDataset`, else they are sent. What a lost worker had not handed over is run again. Security is what Dask's
    configuration, or the client, says.

    Args:
        address: Of the scheduler, such as ``tcp://10.0.0.1:8786``, or a connected `distributed.Client`.
        patience: Seconds to wait for the scheduler's answer, and for a first worker.
        lease: Seconds for which a worker keeps its statistics to itself; what a lost worker costs, and how often
            statistics travel, are decided by it.

    Raises:
        SchemeError: Dask is not installed, or no scheduler answers.
    """

    address: Any
    patience: float = 10.0
    lease: float = 60.0

    def run(self, tapped: InstrumentedModel, work: Work) -> Iterator[CalibrationStatistics]:
        """Yield statistics about once a lease, each of all that the workers have run in it.

        Raises:
            DataError: A sample cannot be read or does not run, or workers fail again and again.
            ModelError: The model does not load.
            SchemeError: The cluster is not there, or has no workers.
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
                # A client that cannot connect prints a traceback when it is collected: a plain connection goes first.
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
