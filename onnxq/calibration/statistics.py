"""Calibration statistics: what samples have shown of tensors, by request; they merge, and lie in a file."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.accumulators import Accumulator, Arrays, Request
from onnxq.calibration.kinds import Observers, find_kind
from onnxq.calibration.provenance import Provenance
from onnxq.data.arrays import StoredArray, npz_arrays
from onnxq.errors import DataError, check_path
from onnxq.system.publish import replace_file
from onnxq.system.records import html_table

Wanted = TypeVar("Wanted", bound=Accumulator)


@dataclass(frozen=True)
class TensorStatistics:
    """What is known of one tensor.

    Args:
        tensor: Its name.
        statistics: By request.
    """

    tensor: str
    statistics: Mapping[Request, Accumulator]

    def find(self, kind: type[Wanted], axis: int | None = None) -> Wanted | None:
        """Return the statistic of a kind, along an axis where the kind has one; None where it was not requested."""
        for request, statistic in self.statistics.items():
            if isinstance(statistic, kind) and request.axis == axis:
                return statistic
        return None

    def need(self, kind: type[Wanted], axis: int | None = None) -> Wanted:
        """Return the statistic of a kind.

        Raises:
            DataError: It was not requested.
        """
        found = self.find(kind, axis)
        if found is None:
            raise DataError(
                f"The statistics of tensor {self.tensor!r} hold no {kind.kind}, expected one; calibrate again for it"
            )
        return found


@dataclass(frozen=True)
class CalibrationStatistics:
    """What samples have shown of tensors.

    Args:
        samples: The digest of each sample, see `sample_digest`, in rising order; equal samples are there as often as
            they were run.
        statistics: By request.
        provenance: What ran which model, where that is known; evidence is equal without it.
    """

    samples: tuple[str, ...] = ()
    statistics: Mapping[Request, Accumulator] = field(default_factory=lambda: MappingProxyType({}))
    provenance: Provenance = field(default_factory=Provenance, compare=False)

    def __sizeof__(self) -> int:
        """Return the bytes that it takes, by which a cluster decides what to move."""
        kept = (array.nbytes for one in self.statistics.values() for array in one.arrays().values())
        return sum(kept) + sum(map(len, self.samples))

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(request.kind for request in self.statistics))
        return (
            f"CalibrationStatistics({len(self.samples)} samples, {len(self.by_tensor)} tensors: {kinds or 'nothing'})"
        )

    def _repr_html_(self) -> str:
        """Return what notebooks show: of each tensor the kinds of statistics that are known."""
        rows = [(tensor, ", ".join(request.kind for request in known)) for tensor, known in self.by_tensor.items()]
        return html_table(f"{len(self.samples)} samples, {len(rows)} tensors", ("tensor", "statistics"), rows)

    def of(self, tensor: str) -> TensorStatistics:
        """Return what is known of a tensor."""
        return TensorStatistics(tensor, self.by_tensor.get(tensor, {}))

    @cached_property
    def by_tensor(self) -> Mapping[str, Mapping[Request, Accumulator]]:
        """The statistics by tensor, and of each by request."""
        found: dict[str, dict[Request, Accumulator]] = {}
        for request, statistic in self.statistics.items():
            found.setdefault(request.tensor, {})[request] = statistic
        return found

    @cached_property
    def ranges(self) -> dict[Hashable, tuple[float, float]]:
        """The ranges that were found from it so far, by what they were asked for: every candidate asks again."""
        return {}

    def merge(self, other: CalibrationStatistics) -> CalibrationStatistics:
        """Return the evidence of the samples of both; statistics that only one has are kept.

        Raises:
            DataError: Both are known to be of different models or runtimes, or hold the same sample.
        """
        if twice := set(self.samples) & set(other.samples):
            raise DataError(
                f"Both hold the same {len(twice)} samples, such as {min(twice)[:12]!r}, expected each sample once; "
                "merge statistics of different samples"
            )
        return self.plus(other)

    def plus(self, other: CalibrationStatistics) -> CalibrationStatistics:
        """Return the evidence of the samples of both, of which some may be equal.

        Raises:
            DataError: Both are known to be of different models or runtimes.
        """
        total = StatisticsSum(self)
        total.add(other)
        return total.evidence

    def select(self, requests: Iterable[Request]) -> CalibrationStatistics:
        """Return the statistics of these requests only, in that order."""
        return replace(self, statistics=MappingProxyType({one: self.statistics[one] for one in requests}))

    def join(self, other: CalibrationStatistics) -> CalibrationStatistics:
        """Return the statistics of both, which saw the same samples; what both have is taken from `self`."""
        assert self.samples == other.samples, "only evidence of the same samples can be joined"
        return replace(self, statistics=MappingProxyType({**other.statistics, **self.statistics}))

    def lacks(self, samples: Iterable[str]) -> int:
        """Return how many of these samples, equal ones counted as often as they are given, it does not hold."""
        return (Counter(samples) - Counter(self.samples)).total()


class StatisticsSum:
    """Statistics that that of further samples is added to; what a sum takes the place of is let go at once.

    So it takes no more memory than it has and what is added, where `CalibrationStatistics.plus` takes that of the sum
    besides.

    Args:
        first: what there is to begin with.
    """

    def __init__(self, first: CalibrationStatistics) -> None:
        self._samples, self._provenance = first.samples, first.provenance
        self._statistics = dict(first.statistics)

    def add(self, other: CalibrationStatistics) -> None:
        """Add the evidence of further samples, of which some may be equal.

        Raises:
            DataError: Both are known to be of different models or runtimes.
        """
        self._provenance = self._provenance.merge(other.provenance)
        self._samples = tuple(sorted((*self._samples, *other.samples)))
        for request, statistic in other.statistics.items():
            known = self._statistics.get(request)
            self._statistics[request] = statistic if known is None else known.merge(statistic)

    @property
    def evidence(self) -> CalibrationStatistics:
        """All that was added so far."""
        return CalibrationStatistics(self._samples, MappingProxyType(dict(self._statistics)), self._provenance)


# Calibration statistics in a file: one .npz archive without pickles, and a JSON header; equal evidence is equal bytes.

_FORMAT = "onnxq statistics 8"
# Histograms are mostly small numbers, which the fastest level already packs well.
_COMPRESSION = 1
_BUFFER = 1 << 25


def observe(arrays: Mapping[str, NDArray[Any]], requests: Iterable[Request], sample: str = "") -> CalibrationStatistics:
    """Return the evidence of one sample.

    Args:
        arrays: By tensor.
        requests: What is wanted of them.
        sample: The digest of the sample.

    Raises:
        DataError: An array is not what a kind that is wanted is for.
        SchemeError: A kind is unknown.
    """
    observers = Observers(requests)
    for tensor, array in arrays.items():
        observers.add(tensor, array, sample)
    return CalibrationStatistics((sample,), observers.statistics())


def save_statistics(statistics: CalibrationStatistics, path: str | Path) -> None:
    """Write evidence to `path`: at any moment it holds the old content or the new one, never a part.

    Raises:
        OutputError: The file cannot be written; nothing is left behind.
    """
    path = Path(path)
    with replace_file(path, "file of statistics") as fresh:
        with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as archive:
            _write(statistics, archive)
        _synchronize(fresh)
    _synchronize(path.parent)


def load_statistics(path: str | Path) -> CalibrationStatistics:
    """Read what `save_statistics` wrote.

    Raises:
        DataError: The file cannot be read, or is not what `save_statistics` wrote.
        SchemeError: It holds a kind of statistic that no installed package has.
    """
    check_path(path, "the file of statistics")
    path = Path(path)
    stored = npz_arrays(path)
    try:
        header = json.loads(stored["header"].read().tobytes())
        if header["format"] != _FORMAT:
            raise DataError(
                f"{path} has format {header['format']!r}, in which statistics have other names, expected {_FORMAT!r}; "
                "calibrate again"
            )
        origin = header["provenance"]
        machines = tuple(str(machine) for machine in origin["machines"])
        provenance = Provenance(str(origin["model"]), str(origin["runtime"]), machines)
        samples = tuple(str(digest) for digest in header["samples"])
        return CalibrationStatistics(
            tuple(sorted(samples)), MappingProxyType(dict(_restored(header["statistics"], stored))), provenance
        )
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} does not hold calibration statistics ({error}), expected a file of onnxq; calibrate again"
        ) from error


def merge_files(paths: Sequence[Path]) -> CalibrationStatistics:
    """Return the evidence of the samples of all files.

    Raises:
        DataError: A file cannot be read, or two do not belong together: other models, other tensors, the same sample.
    """
    total = load_statistics(paths[0])
    for path in paths[1:]:
        found = load_statistics(path)
        if other := sorted(set(found.statistics) ^ set(total.statistics)):
            raise DataError(
                f"{path} and the files before it differ in {len(other)} statistics, such as {other[0]}, expected the "
                "same ones; calibrate them with one scheme"
            )
        try:
            total = total.merge(found)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    return total


def discard(path: Path) -> None:
    """Remove a file if it is there and the folder allows it."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # What is wrong with the folder has been told, or does not keep the result from being whole.
        return


def _synchronize(path: Path) -> None:
    """Wait until a file or folder is on the disk, where the system can tell."""
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError:
        # Some systems open no folders.
        return
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _write(evidence: CalibrationStatistics, archive: zipfile.ZipFile) -> None:
    entries = [(request, evidence.statistics[request].arrays()) for request in sorted(evidence.statistics)]
    header = {
        "format": _FORMAT,
        "provenance": asdict(evidence.provenance),
        "samples": evidence.samples,
        "statistics": [
            {
                "tensor": request.tensor,
                "kind": request.kind,
                "axis": request.axis,
                "options": request.options,
                "shapes": {name: array.shape for name, array in arrays.items()},
            }
            for request, arrays in entries
        ],
    }
    _write_array(archive, "header", [np.frombuffer(json.dumps(header).encode(), np.uint8)])
    columns: dict[str, list[NDArray[Any]]] = {}
    for request, arrays in entries:
        for name, array in arrays.items():
            columns.setdefault(_column(request.kind, name), []).append(array)
    for column, pieces in columns.items():
        _write_array(archive, column, pieces)


def _column(kind: str, name: str) -> str:
    """Return the name of the array that holds the arrays of one name of all statistics of a kind."""
    return f"{kind}.{name}"


def _write_array(archive: zipfile.ZipFile, name: str, pieces: Sequence[NDArray[Any]]) -> None:
    """Write arrays, one behind the other, as a flat one, without a copy of all."""
    size = sum(piece.size for piece in pieces)
    # Opened by name, a member has the earliest date of all, so that equal evidence is equal bytes.
    with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
        described = {"descr": np.lib.format.dtype_to_descr(pieces[0].dtype), "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(stream, described)
        flat = (np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in pieces)
        if size * pieces[0].itemsize < _BUFFER:
            # Thousands of small ones are packed much faster at once.
            stream.write(np.concatenate([*flat]).data)
        else:
            for piece in flat:
                stream.write(piece.data)


def _restored(
    described: Iterable[Mapping[str, Any]], stored: Mapping[str, StoredArray]
) -> Iterator[tuple[Request, Accumulator]]:
    columns: dict[str, NDArray[Any]] = {}
    taken: dict[str, int] = {}

    def take(column: str, shape: Sequence[int]) -> NDArray[Any]:
        if column not in columns:
            columns[column], taken[column] = stored[column].read(), 0
        start = taken[column]
        taken[column] = end = start + math.prod(shape)
        return columns[column][start:end].reshape(shape)

    for one in described:
        options = tuple((str(name), value) for name, value in one["options"])
        axis = None if one["axis"] is None else int(one["axis"])
        request = Request(str(one["tensor"]), str(one["kind"]), axis, options)
        arrays: Arrays = {name: take(_column(request.kind, name), shape) for name, shape in one["shapes"].items()}
        kind = find_kind(request.kind)
        if any(arrays[name].dtype != array.dtype for name, array in kind().arrays().items()):
            raise ValueError(f"the arrays of {request.kind} have other types than theirs")
        yield request, kind.restored(arrays)
    if any(taken[column] != len(columns[column]) for column in columns):
        raise ValueError("arrays are longer than what they hold")
