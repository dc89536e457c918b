"""Calibration statistics of tensors by request; they merge, and are saved to a file."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.accumulators import Accumulator, Arrays, Request
from onnxq.calibration.kinds import find_kind
from onnxq.calibration.provenance import Provenance
from onnxq.data.arrays import StoredArray, npz_arrays
from onnxq.errors import DataError, check_path
from onnxq.system.html_table import html_table
from onnxq.system.publish import replace_file

Wanted = TypeVar("Wanted", bound=Accumulator)


@dataclass(frozen=True)
class TensorStatistics:
    """The statistics of one tensor by request."""

    tensor: str
    statistics: Mapping[Request, Accumulator]

    def find(self, kind: type[Wanted], axis: int | None = None) -> Wanted | None:
        """Return the statistic of a kind and axis; None if it was not requested."""
        for request, statistic in self.statistics.items():
            if isinstance(statistic, kind) and request.axis == axis:
                return statistic
        return None

    def need(self, kind: type[Wanted]) -> Wanted:
        """Return the statistic of a kind.

        Raises:
            DataError: It was not requested.
        """
        found = self.find(kind)
        if found is None:
            raise DataError(
                f"The statistics of tensor {self.tensor!r} hold no {kind.kind}, expected one; calibrate again for it"
            )
        return found


@dataclass(frozen=True)
class CalibrationStatistics:
    """Statistics of tensors over samples.

    Args:
        statistics: an accumulator for each request: tensor, kind and axis.
        samples: Digest of each sample, see `sample_digest`, in rising order. Equal samples are repeated as often as
            they were run.
        provenance: The model and what ran it, if known; ignored by equality.

    >>> import onnxq
    >>> onnxq.calibrate("models/gru.onnx", onnxq.Data("models/data/calib.npz", limit=8))
    CalibrationStatistics(8 samples, 1 tensors: ...)
    """

    samples: tuple[str, ...] = ()
    statistics: Mapping[Request, Accumulator] = field(default_factory=lambda: MappingProxyType({}))
    provenance: Provenance = field(default_factory=Provenance, compare=False)

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(request.kind for request in self.statistics))
        return (
            f"CalibrationStatistics({len(self.samples)} samples, {len(self.by_tensor)} tensors: {kinds or 'nothing'})"
        )

    def _repr_html_(self) -> str:
        """Return an HTML table for notebooks: the kinds of statistics of each tensor."""
        rows = [(tensor, ", ".join(request.kind for request in known)) for tensor, known in self.by_tensor.items()]
        return html_table(f"{len(self.samples)} samples, {len(rows)} tensors", ("tensor", "statistics"), rows)

    def of(self, tensor: str) -> TensorStatistics:
        """Return the statistics of a tensor."""
        return TensorStatistics(tensor, self.by_tensor.get(tensor, {}))

    @cached_property
    def by_tensor(self) -> Mapping[str, Mapping[Request, Accumulator]]:
        """The statistics by tensor and request."""
        found: dict[str, dict[Request, Accumulator]] = {}
        for request, statistic in self.statistics.items():
            found.setdefault(request.tensor, {})[request] = statistic
        return found

    @cached_property
    def ranges(self) -> dict[Hashable, tuple[float, float]]:
        """A cache of ranges that were found from these statistics, since every candidate asks again."""
        return {}

    def merge(self, other: CalibrationStatistics) -> CalibrationStatistics:
        """Return the statistics of the samples of both; statistics that only one has are kept.

        Raises:
            DataError: The models or runtimes differ, or both have the same sample.
        """
        if twice := set(self.samples) & set(other.samples):
            raise DataError(
                f"Both hold the same {len(twice)} samples, such as {min(twice)[:12]!r}, expected each sample once; "
                "merge statistics of different samples"
            )
        return self.plus(other)

    def plus(self, other: CalibrationStatistics) -> CalibrationStatistics:
        """Return the statistics of the samples of both, some of which may be equal.

        Raises:
            DataError: The models or runtimes differ.
        """
        return sum_statistics([self, other])

    def select(self, requests: Iterable[Request]) -> CalibrationStatistics:
        """Return the statistics of these requests only, in that order."""
        return replace(self, statistics=MappingProxyType({request: self.statistics[request] for request in requests}))


def sum_statistics(parts: Iterable[CalibrationStatistics]) -> CalibrationStatistics:
    """Return the statistics of the samples of all parts, some of which may be equal.

    Memory is needed for the sum and one part, because each part is freed before the next is asked for.

    Raises:
        DataError: The models or runtimes differ.
    """
    samples: list[str] = []
    total: dict[Request, Accumulator] = {}
    provenance = Provenance()
    for part in parts:
        provenance = provenance.merge(part.provenance)
        samples += part.samples
        for request in part.statistics:
            known, added = total.get(request), part.statistics[request]
            total[request] = added if known is None else known.merge(added)
            del known, added
        del part
    return CalibrationStatistics(tuple(sorted(samples)), MappingProxyType(total), provenance)


# The file: an .npz archive without pickles, with a JSON header. Equal statistics give equal bytes.

_FORMAT = "onnxq statistics 9"
# Histograms are mostly small numbers, which the fastest level already compresses well.
_COMPRESSION = 1
_BUFFER = 1 << 25


def save_statistics(statistics: CalibrationStatistics, path: str | Path) -> None:
    """Write statistics to `path` atomically: it always holds the old or the new content.

    Args:
        statistics: of one model.
        path: file with suffix .npz.

    Raises:
        OutputError: The file cannot be written; no partial file is left.

    >>> save_statistics(onnxq.calibrate("model.onnx", "data/"), "stats.npz")  # doctest: +SKIP
    """
    path = Path(path)
    with replace_file(path, "file of statistics") as fresh:
        with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as archive:
            _write(statistics, archive)
        _synchronize(fresh)
    _synchronize(path.parent)


def load_statistics(path: str | Path) -> CalibrationStatistics:
    """Read a file of `save_statistics`.

    Args:
        path: file with suffix .npz.

    Raises:
        DataError: The file cannot be read, is damaged, or has another format version.
        SchemeError: It has a kind of statistic that no installed package provides.

    >>> load_statistics("stats.npz")  # doctest: +SKIP
    CalibrationStatistics(8 samples, 1 tensors: range, channel-means, histogram)
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
    """Return the statistics of the samples of all files.

    Raises:
        DataError: A file cannot be read, or two differ in model, runtime or requests, or have the same sample.
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


def _synchronize(path: Path) -> None:
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError:
        # Some systems cannot open folders.
        return
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _write(statistics: CalibrationStatistics, archive: zipfile.ZipFile) -> None:
    entries = [(request, statistics.statistics[request].arrays()) for request in sorted(statistics.statistics)]
    header = {
        "format": _FORMAT,
        "provenance": asdict(statistics.provenance),
        "samples": statistics.samples,
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
    return f"{kind}.{name}"


def _write_array(archive: zipfile.ZipFile, name: str, pieces: Sequence[NDArray[Any]]) -> None:
    """Write arrays one after the other as a flat array, without a copy of all."""
    size = sum(piece.size for piece in pieces)
    # A member opened by name has a fixed date, so that equal statistics give equal bytes.
    with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
        described = {"descr": np.lib.format.dtype_to_descr(pieces[0].dtype), "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(stream, described)
        flat = (np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in pieces)
        if size * pieces[0].itemsize < _BUFFER:
            # Thousands of small arrays are compressed much faster in one write.
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

    for entry in described:
        options = tuple((str(name), value) for name, value in entry["options"])
        axis = None if entry["axis"] is None else int(entry["axis"])
        request = Request(str(entry["tensor"]), str(entry["kind"]), axis, options)
        arrays: Arrays = {name: take(_column(request.kind, name), shape) for name, shape in entry["shapes"].items()}
        kind = find_kind(request.kind)
        if any(arrays[name].dtype != array.dtype for name, array in kind().arrays().items()):
            raise ValueError(f"the arrays of {request.kind} have other types than theirs")
        yield request, kind.restored(arrays)
    if any(taken[column] != len(columns[column]) for column in columns):
        raise ValueError("arrays are longer than their statistics")
