"""What ``--calib`` and ``--data`` accept, as one re-iterable stream of checked samples."""

from __future__ import annotations

import weakref
import zipfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import DataError
from onnxq.modelfile.publish import staging
from onnxq.samples.files import Part, spooled_part, suffixes, walk
from onnxq.samples.images import ImageOptions
from onnxq.samples.inputs import Input, Sample, SampleSource, check_sample, model_inputs
from onnxq.samples.stores import Location, check_there, location
from onnxq.samples.stretches import Stretch, picked

__all__ = ["ImageOptions", "Input", "Sample", "Samples", "even_places", "evenly", "model_inputs", "open_samples"]

MOST_SAMPLES = 1_000_000
"""How many samples are taken for meant; more would run for hours, and most often mean that an axis is not the batch."""


class Samples:
    """A re-iterable stream of checked samples; each iteration reads the same ones again, in the same order."""

    def __init__(self, parts: Sequence[Part], inputs: Sequence[Input], limit: int | None) -> None:
        self._parts = tuple(parts)
        self._inputs = tuple(inputs)
        total = sum(part.count for part in parts)
        self._count = total if limit is None else min(limit, total)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sample]:
        return chain.from_iterable(self.stretches(range(len(self))))

    def __getitem__(self, index: int) -> Sample:
        """Read one sample and no other.

        Raises:
            IndexError: There is none with this index.
            DataError: It cannot be read, or does not fit.
        """
        (stretch,) = self.stretches([range(len(self))[index]])
        (sample,) = stretch
        return sample

    def stretches(self, indices: Sequence[int]) -> Iterator[Stretch]:
        """Yield the samples with these indices, which rise, in a stretch for each origin; nothing is read yet."""
        first = 0
        for part in self._parts:
            inside = indices[bisect_left(indices, first) : bisect_left(indices, first + part.count)]
            if inside:
                yield Stretch(inside, first, part.read, self._inputs, part.where, part.stacked, part.stored)
            first += part.count

    def sequences(self) -> Iterator[str]:
        """Yield for each sample what it continues: the file it shares with others, else the folder its file lies in."""
        counted = (repeat(part.sequence, part.count) for part in self._parts)
        return islice(chain.from_iterable(counted), self._count)


def evenly(samples: SampleSource, most: int) -> Iterator[Sample]:
    """Yield at most `most` samples, evenly spaced, without holding them; no others are read where that can be.

    >>> [int(sample["x"]) for sample in evenly([{"x": np.array(index)} for index in range(10)], 4)]
    [0, 3, 6, 9]
    """
    return picked(samples, even_places(len(samples), most))


def even_places(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` places, evenly spaced.

    >>> even_places(10, 4)
    [0, 3, 6, 9]
    """
    return [int(index) for index in np.linspace(0, count - 1, min(count, most)).round()]


def open_samples(
    source: str | Path | Iterable[Mapping[str, NDArray[Any]]],
    inputs: Sequence[Input],
    *,
    images: ImageOptions | None = None,
    limit: int | None = None,
) -> Samples:
    """Open calibration or evaluation samples for a model with `inputs`.

    A source with a protocol, such as ``s3://bucket/calib``, is read by fsspec. Accepted files:

    - ``.npz``: keys are input names. One sample; or N stacked samples when every array has one axis more than its
      input, or when the first dimension of every input counts samples and every array has the same N > 1 there. It does
      where it is 1, or is called ``batch``, ``batch_size`` or ``N``, or says nothing (``?``, ``s0``, ``unk__12``) and
      all inputs and outputs of the model begin with an open dimension; see `onnxq.samples.batches.open_batch`. Where
      that is a length instead, store ``array[None]``: an axis more always counts samples.
    - ``.npy``: for models with one input; stacked in the same way.
    - ``.png``, ``.jpg``, ``.jpeg``, ``.bmp``: for models with one image input; needs Pillow.

    Accepted folders, nested at will, read in natural order of the names (``2`` before ``10``), other files ignored:

    - a folder of such files, each holding whole samples;
    - a folder with ``input_0.pb``, ``input_1.pb``, ... is one sample in ONNX's test data layout: matched by tensor
      name where all names are inputs of the model, else by position;
    - for models with several inputs, a folder with ``NAME.npy`` or image files ``NAME.png`` is one sample, one file
      per input.

    An iterable yields one sample per dict. A list or tuple stays as it is; anything else, which may shuffle, draw at
    random or end after one pass, is iterated once, into a temporary folder that is removed with the returned object.

    Args:
        source: A file, a folder or an iterable of dicts from input name to array.
        inputs: See `model_inputs`.
        images: How pixels become the input; None takes the defaults.
        limit: Use only the first `limit` samples.

    Raises:
        DataError: Nothing usable was found, or more than `MOST_SAMPLES`, or names, dtypes or shapes in a header do not
            fit. Values are checked, and samples without headers too, when they are iterated.
        OutputError: There is no room for the temporary folder.
    """
    if limit is not None and limit < 1:
        raise DataError(f"Sample limit is {limit}, expected at least 1")
    if not inputs:
        raise DataError("The model has no inputs, expected at least one; there is nothing to feed samples to")
    with ExitStack() as held:
        if isinstance(source, str | Path):
            where, parts = str(source), _file_parts(location(source), inputs, images or ImageOptions(), limit)
        elif isinstance(source, Mapping) or not isinstance(source, Iterable):
            raise DataError(
                f"Samples are {type(source).__name__}, expected a path or an iterable of dicts; "
                "wrap a single sample as [sample]"
            )
        # A subclass may iterate as it likes.
        elif type(source) in (list, tuple):
            where, parts = "The list of samples", [_given(cast(Sequence[Sample], source))]
        else:
            where, parts = "The iterable of samples", _spool(source, inputs, held.enter_context(staging(None)), limit)
        samples = Samples(parts, inputs, limit)
        if not len(samples):
            raise DataError(f"{where} holds no samples, expected at least one; add samples")
        if len(samples) > MOST_SAMPLES:
            raise DataError(
                f"{where} holds {len(samples)} samples, expected at most {MOST_SAMPLES}; check which axis counts the "
                "samples, or use the first ones, such as --limit 500"
            )
        weakref.finalize(samples, held.pop_all().close)
    return samples


def _given(samples: Sequence[Sample]) -> Part:
    return Part("samples", "samples", len(samples), partial(_read_list, samples, len(samples)), stored=False)


def _read_list(samples: Sequence[Sample], count: int, indices: Sequence[int]) -> Iterator[Sample]:
    if len(samples) != count:
        raise DataError(f"The list of samples now has {len(samples)}, expected {count} as when opened; keep it so")
    return (samples[index] for index in indices)


def _spool(
    source: Iterable[Mapping[str, NDArray[Any]]], inputs: Sequence[Input], folder: Path, limit: int | None
) -> list[Part]:
    parts = []
    # One more than there may be is enough to say so, where there is no end.
    for index, sample in enumerate(islice(source, limit or MOST_SAMPLES + 1)):
        check_sample(sample, inputs, f"samples, sample {index}")
        path = folder / f"{index}.npz"
        with zipfile.ZipFile(path, "w") as archive:
            for name, value in sample.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    plain = value.astype(str) if value.dtype.hasobject else value
                    np.lib.format.write_array(stream, np.asarray(plain), allow_pickle=False)
        parts.append(spooled_part(path, index, inputs))
    return parts


def _file_parts(path: Location, inputs: Sequence[Input], images: ImageOptions, limit: int | None) -> list[Part]:
    check_there(path)
    parts: list[Part] = []
    total = 0
    for part in walk(path, inputs, images):
        parts.append(part)
        total += part.count
        if limit is not None and total >= limit:
            break
    if not parts:
        raise DataError(
            f"{path} has {suffixes(path)}, expected .npz, .npy, image or input_N.pb files; add samples for the inputs "
            + ", ".join(str(entry) for entry in inputs)
        )
    return parts
