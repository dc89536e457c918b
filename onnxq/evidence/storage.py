"""Statistics in a file: one .npz archive without pickles, and a JSON header; equal statistics are equal bytes."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import DataError, OutputError
from onnxq.evidence.provenance import Provenance
from onnxq.evidence.ranges import Percentile, has_histogram
from onnxq.evidence.sentinels import sentinels
from onnxq.evidence.statistics import Statistics
from onnxq.evidence.tensor_statistics import EMPTY, TensorStatistics, restored
from onnxq.samples.arrays import npz_arrays

_FORMAT = "onnxq statistics 5"
# Histograms are mostly small numbers, which the fastest level already packs well.
_COMPRESSION = 1
# The earliest date that a zip archive can hold; the time of writing would make equal statistics unequal bytes.
_DATE = (1980, 1, 1, 0, 0, 0)


def save_statistics(statistics: Statistics, path: Path) -> None:
    """Write statistics to `path`: at any moment it holds the old content or the new one, never a part.

    Raises:
        OutputError: The file cannot be written; nothing is left behind.
    """
    data = _packed(statistics)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror}; free space or choose another place with -o"
        ) from error
    finally:
        discard(temporary)


def load_statistics(path: Path) -> Statistics:
    """Read what `save_statistics` wrote.

    Raises:
        DataError: The file cannot be read, or is not what `save_statistics` wrote.
    """
    arrays = npz_arrays(path)
    try:
        header = json.loads(arrays["header"].read().tobytes())
        if header["format"] != _FORMAT:
            raise DataError(f"{path} has format {header['format']!r}, expected {_FORMAT!r}; calibrate again")
        values = {name: arrays[name].read() for name in ("counts", "samples", "extremes", "channels", "sums")}
        return _unpacked(header, values)
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} does not hold calibration statistics ({error}), expected a file of onnxq; calibrate again"
        ) from error


def merged_files(paths: Sequence[Path]) -> Statistics:
    """Return the statistics of the samples of all files.

    Raises:
        DataError: A file cannot be read, or two do not belong together: other models, other tensors, the same sample.
    """
    total = load_statistics(paths[0])
    for path in paths[1:]:
        found = load_statistics(path)
        if other := sorted(set(found.tensors) ^ set(total.tensors)):
            raise DataError(
                f"{path} and the files before it differ in {len(other)} tensors, such as {other[0]!r}, expected the "
                "same ones; calibrate them with one scheme"
            )
        try:
            total = total.merge(found)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    return total


def described(statistics: Statistics) -> dict[str, Any]:
    """Return what statistics say, as plain values for people and JSON."""
    return {
        "model": statistics.provenance.model,
        "samples": statistics.samples,
        "tensors": {name: _described(tensor) for name, tensor in statistics.tensors.items()},
    }


def _described(tensor: TensorStatistics) -> dict[str, Any]:
    if not tensor.count:
        return {"elements": 0, "minimum": None, "maximum": None, "percentile": [None, None], "note": "empty"}
    if not tensor.has_range:
        what = f"only the means of {len(tensor.sums)} channels" if len(tensor.sums) else "no mean, which is not finite"
        return {
            "elements": tensor.count,
            "minimum": None,
            "maximum": None,
            "percentile": [None, None],
            "note": what,
        }
    note = ""
    if masks := sentinels(tensor):
        note = "masked with " + ", ".join(f"{value:g}" for value in masks)
    elif tensor.minimum == tensor.maximum:
        note = "all zero" if tensor.minimum == 0 else "constant"
    return {
        "elements": tensor.count,
        "minimum": tensor.minimum,
        "maximum": tensor.maximum,
        "percentile": list(Percentile(99.99)(tensor)) if has_histogram(tensor) else [None, None],
        "note": note,
    }


def _packed(statistics: Statistics) -> bytes:
    tensors = {name: _parts(statistics.tensors[name]) for name in sorted(statistics.tensors)}
    parts = [EMPTY, *(part for chain in tensors.values() for part in chain)]
    provenance = statistics.provenance
    header = {
        "format": _FORMAT,
        "model": provenance.model,
        "histogram_elements": provenance.histogram_elements,
        "runtime": provenance.runtime,
        "observer": provenance.observer,
        "data": provenance.samples,
        "samples": statistics.samples,
        "tensors": {
            name: [
                [
                    one.count,
                    one.minimum,
                    one.maximum,
                    len(one.counts),
                    len(one.samples),
                    len(one.channels),
                    len(one.sums),
                    one.axis,
                ]
                for one in chain
            ]
            for name, chain in tensors.items()
        },
    }
    return _archive(
        {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "counts": np.concatenate([part.counts for part in parts]),
            "samples": np.concatenate([part.samples for part in parts]),
            "extremes": np.concatenate([part.extremes for part in parts]),
            "channels": np.concatenate([part.channels for part in parts]),
            "sums": np.concatenate([part.sums for part in parts]),
        }
    )


def _archive(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", _DATE)
            archive.writestr(info, member.getbuffer(), zipfile.ZIP_DEFLATED, _COMPRESSION)
    return stream.getvalue()


def _parts(tensor: TensorStatistics) -> tuple[TensorStatistics, ...]:
    return (tensor,) if tensor.core is None else (tensor, tensor.core)


def _unpacked(header: Mapping[str, Any], values: Mapping[str, NDArray[Any]]) -> Statistics:
    described = [numbers for chain in header["tensors"].values() for numbers in chain]
    bins, samples, channels, sums = (
        np.cumsum([one[field] for one in described], dtype=np.int64) for field in (3, 4, 5, 6)
    )
    pieces = zip(
        np.split(values["counts"].astype(np.int64, casting="safe"), bins),
        np.split(values["samples"].astype(np.int64, casting="safe"), samples),
        np.split(values["extremes"].astype(np.float64, casting="safe").reshape(-1, 2), samples),
        np.split(values["channels"].astype(np.float64, casting="safe").reshape(-1, 2), channels),
        np.split(values["sums"].astype(np.int64, casting="safe").reshape(-1, 2), sums),
        strict=True,
    )
    tensors = {name: _restored_chain(chain, pieces) for name, chain in header["tensors"].items()}
    data = tuple((int(index), str(digest)) for index, digest in header["data"])
    elements = header["histogram_elements"]
    provenance = Provenance(
        str(header["model"]),
        data,
        None if elements is None else int(elements),
        str(header["runtime"]),
        str(header["observer"]),
    )
    return Statistics(int(header["samples"]), MappingProxyType(tensors), provenance)


def _restored_chain(chain: list[list[Any]], pieces: Iterator[tuple[NDArray[Any], ...]]) -> TensorStatistics:
    parts = []
    for count, minimum, maximum, *_, axis in chain:
        kept = None if axis is None else int(axis)
        parts.append(restored(int(count), float(minimum), float(maximum), kept, *next(pieces)))
    return parts[0] if len(parts) == 1 else replace(parts[0], core=parts[1])


def discard(path: Path) -> None:
    """Remove a file if it is there and the folder allows it."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # What is wrong with the folder has been told, or does not keep the result from being whole.
        return
