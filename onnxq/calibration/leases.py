"""Leases: what a worker of a cluster runs and sums up before its evidence travels, and how workers merge it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

from onnxq.calibration.answers import fits
from onnxq.calibration.evidence import Evidence
from onnxq.calibration.parcels import Parcel, Parcels, unpacked
from onnxq.calibration.provenance import sample_digest
from onnxq.calibration.shards import TAPS_BYTES, Tapped, observe_shard
from onnxq.calibration.work import Pace, Shard, Work
from onnxq.errors import DataError, OnnxqError

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
    """Evidence at a worker, of so many leases.

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

    def __init__(self, client: Any, tapped: Tapped, work: Work, seconds: float) -> None:
        self._client = client
        self._travelling = tapped
        self._tapped: Any = None
        self._work = work
        self._parcels = Parcels(client)
        self._seconds = seconds
        self._seen = time.monotonic()
        self._pace = Pace(seconds / _SHARDS)
        self._leases: dict[Any, _Lease] = {}
        self._merging: dict[Any, _Part] = {}
        self._parts: list[_Part] = []
        self._blind: set[str] = set()
        self._proven: set[str] = set()
        self._first: tuple[Shard, str] | None = None
        self._lost: Counter[int] = Counter()

    def run(self) -> Iterator[Evidence]:
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

    def _fetched(self, part: _Part) -> Iterator[Evidence]:
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
    tapped: Tapped, shard: Shard, before: Evidence | None, proof: tuple[Shard, str] | None, parcels: Sequence[Parcel]
) -> Evidence:
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


def _merged(one: Evidence, other: Evidence) -> Evidence:
    return one.plus(other)
