"""Objects that are asked for their samples by place, such as map-style data sets: read where they are needed, once."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.data.files import spooled_part
from onnxq.data.inputs import Input, Sample, check_sample
from onnxq.data.rows import is_sample, samples_of
from onnxq.data.stretches import RandomAccess, even_places
from onnxq.errors import DataError, OutputError
from onnxq.system.extensions import blamed

# An augmentation that changes every second item goes unnoticed once in 256 times.
_TWICE = 8


@dataclass(frozen=True, eq=False)
class Items:
    """Items of an object, each of which is a sample; whoever is sent them reads them as well.

    Attributes:
        given: the object.
        places: of the items in it, by position.
        inputs: what samples have to fit.
        where: what errors call the object.
        as_given: whether dictionaries of arrays are samples as they are.
    """

    given: RandomAccess
    places: Sequence[int]
    inputs: tuple[Input, ...]
    where: str
    as_given: bool = False

    def __len__(self) -> int:
        return len(self.places)

    def read(self, positions: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples at these positions.

        Raises:
            DataError: an item cannot be read, does not fit, or is not one sample as the others are.
        """
        for position in positions:
            found = self.samples(position)
            if len(found) != 1:
                raise DataError(
                    f"{self.where}, row {position} holds {len(found)} samples, expected one as in other rows; give "
                    "an iterator of the rows instead"
                )
            yield found[0]

    def samples(self, position: int) -> list[Sample]:
        """Read an item, which may turn out to be a batch of samples."""
        where = f"{self.where}, row {position}"
        with blamed(where, DataError):
            row = self.given[self.places[position]]
        found = [row] if self.as_given and is_sample(row) else list(samples_of(row, self.inputs, where))
        for sample in found:
            check_sample(sample, self.inputs, f"{self.where}, sample {position}")
        return [{name: plain(value) for name, value in sample.items()} for sample in found]


class Kept:
    """Items, each of which this process reads when it is first asked for and keeps in a folder, for all later passes.

    Args:
        items: the items.
        folder: an empty one.
    """

    def __init__(self, items: Items, folder: Path) -> None:
        self.items = items
        self._folder = folder
        self._there: set[int] = set()
        # An object may not be made for several threads.
        self._lock = threading.Lock()

    def __call__(self, positions: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples at these positions; see `Items.read` for errors.

        Raises:
            OutputError: there is no room to keep one.
        """
        for position in positions:
            with self._lock:
                sample = self._sample(position)
            yield sample

    def stays(self) -> bool:
        """Read some items twice, and return whether each is one sample, and the same both times."""
        for position in even_places(len(self.items), _TWICE):
            once, again = self.items.samples(position), self.items.samples(position)
            if len(once) != 1 or len(again) != 1 or not _equal(once[0], again[0]):
                return False
            self._keep(position, once[0])
        return True

    def _sample(self, position: int) -> Sample:
        if position in self._there:
            path = self._path(position)
            (sample,) = spooled_part(path, self.items.where, self.items.where, self.items.inputs).read([0])
            return sample
        (sample,) = self.items.read([position])
        self._keep(position, sample)
        return sample

    def _keep(self, position: int, sample: Sample) -> None:
        path = self._path(position)
        try:
            write_sample(path, sample)
        except OSError as error:
            raise OutputError(
                f"samples cannot be kept in {path.parent}: {error.strerror}; make room there, or set TMPDIR"
            ) from error
        self._there.add(position)

    def _path(self, position: int) -> Path:
        return self._folder / f"{position}.npz"


def plain(value: NDArray[Any] | np.generic) -> NDArray[Any]:
    """Return an array as files keep it: texts are no Python objects."""
    return np.asarray(value.astype(str) if value.dtype.hasobject else value)


def write_sample(path: Path, sample: Mapping[str, NDArray[Any]]) -> None:
    """Write a sample to an ``.npz`` file, array by array."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in sample.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, plain(value), allow_pickle=False)


def _equal(one: Sample, other: Sample) -> bool:
    return one.keys() == other.keys() and all(
        (value.dtype, value.shape, value.tobytes()) == (other[name].dtype, other[name].shape, other[name].tobytes())
        for name, value in one.items()
    )
