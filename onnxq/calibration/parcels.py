"""Parcels: objects whose items are samples, sent to the workers of a cluster, which read what they need of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from onnxq.calibration.work import Shard
from onnxq.data.dataset import Stretch
from onnxq.data.inputs import Sample
from onnxq.data.samples import Items, Kept
from onnxq.errors import DataError

MOST_BYTES = 16 * 10**6
"""Bytes that an object may have. Names of some 100,000 files take less; what takes more holds its samples, of which
every worker would get all by way of the scheduler, while samples that are sent go to one worker each."""


class Parcel:
    """An object in bytes; whoever reads a sample of it opens it, once.

    Args:
        data: What `pickled` gives.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._items: Items | None = None
        # An object may not be made for several threads.
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Parcel], tuple[bytes]]:
        return Parcel, (self._data,)

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

    def reads(self, stretch: Stretch) -> bool:
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

    def _labelled(self, stretch: Stretch) -> Stretch:
        if not isinstance(stretch.read, Kept):
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
        return self._client.scatter(Parcel(self._data[items] or b""), broadcast=True, hash=False)

    def _bytes(self, stretch: Stretch) -> bytes | None:
        if not isinstance(stretch.read, Kept):
            return None
        items = stretch.read.items
        if items not in self._data:
            self._data[items] = pickled(items)
        return self._data[items]


def unpacked(shard: Shard, parcels: Sequence[Parcel]) -> Shard:
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
