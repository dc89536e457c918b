"""Evidence in a file: one .npz archive without pickles, and a JSON header; equal evidence is equal bytes."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.evidence import Evidence
from onnxq.calibration.kinds import kind_named
from onnxq.calibration.provenance import Provenance
from onnxq.calibration.requests import Request
from onnxq.calibration.statistic import Arrays, Statistic
from onnxq.data.arrays import StoredArray, npz_arrays
from onnxq.errors import DataError, check_path
from onnxq.system.publish import replace_file

_FORMAT = "onnxq statistics 7"
# Histograms are mostly small numbers, which the fastest level already packs well.
_COMPRESSION = 1
_BUFFER = 1 << 25


def save_statistics(statistics: Evidence, path: str | Path) -> None:
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


def load_statistics(path: str | Path) -> Evidence:
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
            raise DataError(f"{path} has format {header['format']!r}, expected {_FORMAT!r}; calibrate again")
        origin = header["provenance"]
        machines = tuple(str(machine) for machine in origin["machines"])
        provenance = Provenance(str(origin["model"]), str(origin["runtime"]), machines)
        samples = tuple(str(digest) for digest in header["samples"])
        return Evidence(
            tuple(sorted(samples)), MappingProxyType(dict(_restored(header["statistics"], stored))), provenance
        )
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} does not hold calibration statistics ({error}), expected a file of onnxq; calibrate again"
        ) from error


def merged_files(paths: Sequence[Path]) -> Evidence:
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


def _write(evidence: Evidence, archive: zipfile.ZipFile) -> None:
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
) -> Iterator[tuple[Request, Statistic]]:
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
        kind = kind_named(request.kind)
        if any(arrays[name].dtype != array.dtype for name, array in kind().arrays().items()):
            raise ValueError(f"the arrays of {request.kind} have other types than theirs")
        yield request, kind.restored(arrays)
    if any(taken[column] != len(columns[column]) for column in columns):
        raise ValueError("arrays are longer than what they hold")
