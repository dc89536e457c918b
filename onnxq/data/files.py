"""Find the files and folders that are samples, in a fixed order, and open them by their headers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxq.data.arrays import StoredArray, npy_array, npz_arrays, read_tensor
from onnxq.data.images import IMAGE_SUFFIXES, ImageOptions, read_image
from onnxq.data.inputs import Input, Sample, Shape, cast_type, check_signature, checked, required
from onnxq.data.stores import Location
from onnxq.errors import DataError, did_you_mean

OF_SOURCES = "audio, or .txt with --source text:tokenizer=FILE"
"""The files that built-in sources read, for errors."""


def stack_size(shapes: Mapping[str, Shape], inputs: Sequence[Input]) -> int | None:
    """Return the number of samples stacked in arrays of these shapes; None for a single sample."""
    entries = [entry for entry in inputs if entry.name in shapes or not entry.optional]
    if {entry.name for entry in entries} != set(shapes) or any(entry.shape is None for entry in entries):
        return None
    pairs = [(shapes[entry.name], entry) for entry in entries]
    leading = {shape[0] if shape else None for shape, _ in pairs}
    if len(leading) != 1 or None in leading:
        return None
    size = leading.pop()
    if all(len(shape) == len(entry.shape or ()) + 1 for shape, entry in pairs):
        return size
    batched = all(len(shape) == len(entry.shape or ()) and entry.batched for shape, entry in pairs)
    return size if batched and size != 1 else None


def is_batch(shapes: Mapping[str, Shape], inputs: Sequence[Input]) -> bool:
    """Return whether the model accepts arrays of these shapes unchanged, with all their rows as one batch.

    >>> import numpy as np
    >>> from onnxq.data.inputs import Input
    >>> row, one = (Input("x", np.dtype(np.float32), (first, 3)) for first in ("batch", 1))
    >>> is_batch({"x": (1024, 3)}, [row]), is_batch({"x": (1024, 3)}, [one]), is_batch({"x": (9, 1024, 3)}, [row])
    (True, False, False)
    """
    shaped = [entry.shape for entry in inputs if entry.name in shapes and entry.shape]
    return all(not isinstance(shape[0], int) for shape in shaped) and all(
        len(shapes[entry.name]) == len(entry.shape or ()) for entry in inputs if entry.name in shapes
    )


def sample_shape(shape: Shape, entry: Input | None, count: int | None) -> Shape:
    """Return the shape of one sample in an array that stacks `count` samples; None counts the array as one sample."""
    if count is None or entry is None or entry.shape is None:
        return shape
    return shape[1:] if len(shape) > len(entry.shape) else (1, *shape[1:])


def as_sample(row: NDArray[Any], entry: Input) -> NDArray[Any]:
    """Return a row of a stack, with a batch axis if the input has one."""
    return row if entry.shape is None or row.ndim == len(entry.shape) else row[None]


# Files and folders of samples.

_ONE_ARRAY = frozenset({".npy"}) | IMAGE_SUFFIXES
_WHOLE = frozenset({".npz"}) | _ONE_ARRAY
_READ = _WHOLE | {".pb"}
_TEST_INPUT = re.compile(r"input_([0-9]+)\.pb")


Labels: TypeAlias = tuple[int, ...]
"""The class numbers of a sample, one for each of its rows; empty if there are none."""


@dataclass(frozen=True)
class SampleFile:
    """Samples from one origin: a file, a folder that is one sample, or the caller's list.

    Attributes:
        where: the name of the origin in errors.
        sequence: the samples continue others of the same sequence, see `onnxq.data.samples.Samples.sequences`.
        count: the number of samples.
        read: yields the samples at ascending indices.
        stacked: whether errors name the index in the origin.
        file: the file or folder that holds the samples; empty if they came from memory.
        labels: returns the class numbers of the sample at an index.
    """

    where: str
    sequence: str
    count: int
    read: Callable[[Sequence[int]], Iterator[Sample]]
    stacked: bool = True
    file: str = ""
    labels: Callable[[int], Labels] = lambda index: ()

    @classmethod
    def of_one(cls, where: str, sequence: str, read: Callable[[], Sample], file: str) -> SampleFile:
        """Return an origin of one sample."""
        return cls(where, sequence, 1, lambda indices: (read() for _ in indices), stacked=False, file=file)

    @classmethod
    def of_path(cls, path: Location, read: Callable[[], Sample]) -> SampleFile:
        """Return a file or folder that is one sample, and continues others of its folder."""
        return cls.of_one(str(path), str(Path(str(path)).parent), read, str(path))

    def labelled(self, labels: Labels) -> SampleFile:
        """Return one sample with its class numbers."""
        return replace(self, labels=lambda index: labels)

    def checked(self, positions: Sequence[int], inputs: Sequence[Input]) -> Iterator[Sample]:
        """Read and check the samples at rising positions; see `onnxq.data.samples.Samples.read_samples` for errors."""
        read = 0
        for position, sample in zip(positions, self.read(positions), strict=False):
            yield checked(sample, inputs, f"{self.where}, sample {position}" if self.stacked else self.where)
            read += 1
        if read < len(positions):
            raise DataError(f"{self.where} lacks sample {positions[read]}, which it had when opened; keep it unchanged")


LARGEST_BATCH = 256 * 10**6
"""Bytes above which an array file is a data set: its rows never form one batch."""


def walk(source: Location, inputs: Sequence[Input], images: ImageOptions) -> Iterator[Location | SampleFile]:
    """Yield the files and the folders of one sample below `source`, in natural order; `open_samples` lists the rules.

    Raises:
        DataError: A path cannot be listed, or a folder mixes kinds of files.
    """
    if not source.is_dir():
        yield source
        return
    pending, visited = [source], set[Path]()
    while pending:
        path = pending.pop()
        if not path.is_dir():
            yield path
            continue
        real = path.resolve()
        # A link back to a parent would otherwise repeat its samples for ever.
        if real in visited:
            continue
        visited.add(real)
        entries = _entries(path)
        sample = _sample_folder(path, entries, inputs, images)
        if sample:
            yield sample
        else:
            pending.extend(e for e in reversed(entries) if e.is_dir() or (e.is_file() and _suffix(e) in _WHOLE))


def is_read(file: Location) -> bool:
    """Return whether a file can be read without a source."""
    return _suffix(file) in _READ


def suffixes(folder: Location) -> str:
    """Return the kinds of files in a folder for an error message: ``.json, .txt``, or ``no files``."""
    names = sorted({_suffix(path) or path.name for path in folder.rglob("*") if path.is_file()})
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "no files"


def spooled_part(path: Location, where: str, sequence: str, inputs: Sequence[Input], file: str = "") -> SampleFile:
    """Return one sample from an ``.npz`` file that was written for it."""
    return SampleFile.of_one(where, sequence, lambda: _whole(_typed(npz_arrays(path), inputs)), file)


def class_numbers(folder: Location, files: Sequence[Location | SampleFile]) -> Mapping[str, int]:
    """Return the class numbers of the subfolders of a folder of images, by name; empty if they are no classes.

    Images lie in two subfolders or more, and nowhere else. Names of digits are class numbers; other names count in
    alphabetical order, as in torchvision's ImageFolder.
    """
    images = [file for file in files if not isinstance(file, SampleFile) and _suffix(file) in IMAGE_SUFFIXES]
    parents = {Path(str(file)).parent for file in images}
    if len(images) < len(files) or len(parents) < 2 or any(parent.parent != Path(str(folder)) for parent in parents):
        return {}
    names = sorted(parent.name for parent in parents)
    return {name: int(name) if all(map(str.isdecimal, names)) else place for place, name in enumerate(names)}


def _entries(folder: Location) -> list[Location]:
    try:
        return sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=_natural)
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror or error}; check its permissions") from error


def _natural(path: Location) -> tuple[list[str | int], str]:
    pieces = re.split(r"([0-9]+)", path.name)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)], path.name


def _suffix(path: Location) -> str:
    return path.suffix.lower()


def open_file(path: Location, inputs: Sequence[Input], images: ImageOptions, *, together: bool) -> SampleFile:
    """Open a file by its header; `together` keeps the rows of an array file as one batch for the model.

    Raises:
        DataError: The file cannot be read, or does not fit the inputs.
    """
    suffix = _suffix(path)
    if suffix == ".npz":
        return _arrays_part(path, npz_arrays(path), inputs, together)
    if suffix not in _READ:
        raise DataError(
            f"{path} has suffix {suffix!r}, expected .pb or one of {', '.join(sorted(_WHOLE))}, {OF_SOURCES}"
        )
    needed = required(inputs)
    if len(needed) > 1:
        names = ", ".join(repr(entry.name) for entry in needed)
        raise DataError(
            f"{path} holds one array, expected arrays for {names}; save them in one .npz file or in a folder per sample"
        )
    (entry,) = needed
    if suffix == ".npy":
        return _arrays_part(path, {entry.name: npy_array(path)}, inputs, together)
    if suffix == ".pb":
        return SampleFile.of_path(path, lambda: {entry.name: read_tensor(path)[1]})
    return SampleFile.of_path(path, lambda: {entry.name: read_image(path, entry, images)})


def _sample_folder(
    folder: Location, entries: Sequence[Location], inputs: Sequence[Input], images: ImageOptions
) -> SampleFile | None:
    files = [entry for entry in entries if entry.is_file()]
    tensors = {int(match[1]): path for path in files if (match := _TEST_INPUT.fullmatch(path.name))}
    if tensors:
        return SampleFile.of_path(folder, partial(_read_tensors, folder, tensors, inputs))
    arrays = {path.stem: path for path in files if _suffix(path) in _ONE_ARRAY}
    if len(required(inputs)) == 1 or not arrays:
        return None
    if mixed := next((path for path in files if _suffix(path) == ".npz"), None):
        raise DataError(
            f"{folder} mixes {mixed.name} with files of one input, expected only one kind; move one of them"
        )
    return SampleFile.of_path(folder, partial(_read_arrays, folder, arrays, inputs, images))


def _read_tensors(folder: Location, tensors: Mapping[int, Location], inputs: Sequence[Input]) -> Sample:
    named = {position: read_tensor(path) for position, path in tensors.items()}
    names = [name for name, _ in named.values()]
    if len(set(names)) == len(names) and set(names) <= {entry.name for entry in inputs}:
        return dict(named.values())
    if extra := [position for position in named if position >= len(inputs)]:
        raise DataError(f"{tensors[extra[0]]} is one input too many, expected {len(inputs)} in {folder}; remove it")
    return {inputs[position].name: array for position, (_, array) in sorted(named.items())}


def _read_arrays(
    folder: Location, arrays: Mapping[str, Location], inputs: Sequence[Input], images: ImageOptions
) -> Sample:
    wanted = {entry.name: entry for entry in inputs}
    for name, path in arrays.items():
        if name not in wanted:
            raise DataError(
                f"{path} matches no input of the model, expected {', '.join(wanted)}{did_you_mean(name, wanted)}"
            )
    return {
        name: npy_array(path).read() if _suffix(path) == ".npy" else read_image(path, wanted[name], images)
        for name, path in arrays.items()
    }


def _arrays_part(
    path: Location, arrays: Mapping[str, StoredArray], inputs: Sequence[Input], together: bool
) -> SampleFile:
    typed = _typed(arrays, inputs)
    shapes = {name: array.shape for name, array in typed.items()}
    count, wanted = stack_size(shapes, inputs), {entry.name: entry for entry in inputs}
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in typed.values())
    if count and together and is_batch(shapes, inputs) and size <= LARGEST_BATCH:
        count = None
    signature = {
        name: (cast_type(array.dtype, wanted.get(name)), sample_shape(array.shape, wanted.get(name), count))
        for name, array in typed.items()
    }
    check_signature(signature, inputs, str(path))
    if count is None:
        return SampleFile.of_path(path, lambda: _whole(typed))

    def read(indices: Sequence[int]) -> Iterator[Sample]:
        for rows in zip(*(array.rows(indices) for array in typed.values()), strict=True):
            yield {name: as_sample(row, wanted[name]) for name, row in zip(typed, rows, strict=True)}

    return SampleFile(str(path), str(path), count, read, file=str(path))


def _whole(arrays: Mapping[str, StoredArray]) -> Sample:
    return {name: array.read() for name, array in arrays.items()}


def _typed(arrays: Mapping[str, StoredArray], inputs: Sequence[Input]) -> dict[str, StoredArray]:
    """Return the arrays as the types of the inputs where numpy saved these, bfloat16 and float8, as plain bytes."""
    wanted = {entry.name: entry.dtype for entry in inputs}

    def is_plain(stored: np.dtype[Any], dtype: np.dtype[Any] | None) -> bool:
        both = dtype is not None and stored.kind == dtype.kind == "V" and stored.itemsize == dtype.itemsize
        return both and stored.names is None

    return {
        name: replace(array, stored=wanted[name]) if is_plain(array.stored, wanted.get(name)) else array
        for name, array in arrays.items()
    }


def files_below(place: Location) -> Iterator[Location]:
    """Yield the files of a folder and its subfolders in natural order of names; yield a file itself."""
    if not place.is_dir():
        yield place
        return
    for entry in _entries(place):
        # A link back to a parent would otherwise repeat its files for ever.
        if not (isinstance(entry, Path) and entry.is_symlink() and entry.is_dir()):
            yield from files_below(entry)
