"""Sources read samples of one kind with one library; packages may register their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol, get_type_hints, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from onnxq.data.images import ImageOptions
from onnxq.data.inputs import Input, is_floating, required
from onnxq.data.stores import Location
from onnxq.errors import DataError, did_you_mean, unknown_name
from onnxq.system.option_text import parse_option
from onnxq.system.plugins import load_registered, registered_names, wrap_plugin_errors


@runtime_checkable
class Source(Protocol):
    """Reads files with some suffixes, or objects of a library. The fields of a dataclass are its options.

    >>> class Lines:
    ...     def takes(self, samples):
    ...         return has_suffix(samples, ".lines")
    ...     def rows(self, samples, inputs, images):
    ...         return [{"text": np.array(line)} for line in samples.read_text().splitlines()]
    """

    def takes(self, samples: object) -> bool:
        """Return whether the source reads a file or object; files are recognised by name and not opened."""
        ...

    def rows(self, samples: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the rows of a file or object, see `onnxq.data.rows.samples_of_row`.

        Args:
            samples: a file, as a path with ``open``, or an object that the source takes.
            inputs: the inputs of the model.
            images: how pixels become an input.

        Returns:
            Rows in their order, not held in memory. If they have a length, samples can be chosen evenly spaced.

        Raises:
            DataError: the rows cannot be read, or the library is not installed.
        """
        ...


def has_suffix(place: object, *suffixes: str) -> bool:
    """Return whether an object is a path with one of these suffixes.

    >>> from pathlib import Path
    >>> has_suffix(Path("a/B.WAV"), ".wav"), has_suffix("text", ".wav")
    (True, False)
    """
    return isinstance(place, Location) and place.suffix.lower() in suffixes


def library(name: str, extra: str, where: object) -> Any:
    """Import a library that reads samples.

    Args:
        name: its module.
        extra: the argument of ``pip install`` in the error.
        where: the file that needs the library, for the error.

    Raises:
        DataError: the library is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(
            f"{where} needs {name.partition('.')[0]}, expected it to be installed; run pip install {extra!r}"
        ) from error


# Audio files: one channel, at the model's rate, in windows.

_EXTRA = "onnxq[audio]"


@dataclass(frozen=True)
class Audio:
    """``.wav``, ``.flac``, ``.ogg`` and ``.mp3`` files as floats from -1 to 1, averaged over channels.

    The first float input takes the audio along its last axis. A scalar integer input takes the rate.

    Attributes:
        rate: audio samples a second that the model expects; other rates are resampled.
        seconds: length of a window; 0 takes the model's fixed length, or else the whole file. Windows do not overlap.
            The last window of a file is left out if it is not full, unless it is the only one.

    >>> Audio(rate=8000, seconds=1)
    Audio(rate=8000, seconds=1)
    """

    rate: int = 16_000
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.rate < 1 or not 0 <= self.seconds < np.inf:
            raise DataError(f"audio has rate {self.rate} and seconds {self.seconds}, expected 1 or more, and 0 or more")

    def takes(self, samples: object) -> bool:
        return has_suffix(samples, ".wav", ".flac", ".ogg", ".mp3")

    def rows(self, recording_file: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the windows of a file."""
        entry = next((item for item in required(inputs) if is_floating(item.dtype) and item.shape), None)
        if entry is None or not entry.shape:
            raise DataError(
                f"{recording_file} is audio, and no input of the model takes floats along an axis; save .npz instead"
            )
        last, rank = entry.shape[-1], len(entry.shape)
        window = round(self.seconds * self.rate) or (last if isinstance(last, int) and last > 1 else 0)
        rates = {
            entry.name: np.array(self.rate, entry.dtype)
            for entry in inputs
            if entry.shape == () and entry.dtype.kind in "iu"
        }
        for samples in _windows(self._decoded(recording_file), window):
            yield {entry.name: samples.reshape(*[1] * (rank - 1), -1).astype(entry.dtype), **rates}

    def _decoded(self, recording: Any) -> NDArray[np.float32]:
        soundfile = library("soundfile", _EXTRA, recording)
        try:
            with recording.open("rb") as stream:
                channels, rate = soundfile.read(stream, dtype="float32", always_2d=True)
        except (soundfile.LibsndfileError, OSError, RuntimeError) as error:
            raise DataError(f"{recording} cannot be read as audio: {error}; save it again") from error
        samples: NDArray[np.float32] = channels.mean(axis=1)
        return samples if rate == self.rate else library("soxr", _EXTRA, recording).resample(samples, rate, self.rate)


def _windows(samples: NDArray[np.float32], size: int) -> Iterator[NDArray[np.float32]]:
    if not size:
        yield samples
        return
    if len(samples) < size:
        yield np.pad(samples, (0, size - len(samples)))
    for start in range(0, len(samples) - size + 1, size):
        yield samples[start : start + size]


# Data readers of onnxruntime's quantizer.


@dataclass(frozen=True)
class DataReader:
    """``onnxruntime.quantization.CalibrationDataReader``: ``get_next()`` returns a feed, or None at the end."""

    def takes(self, samples: object) -> bool:
        return hasattr(samples, "get_next")

    def rows(self, samples: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the remaining feeds, or all of them if the reader has ``rewind``."""
        if hasattr(samples, "rewind"):
            samples.rewind()
        # At the end, readers return None or an empty feed.
        return iter(lambda: samples.get_next() or None, None)


# Hugging Face's datasets, in memory or streamed.


@dataclass(frozen=True)
class HuggingFace:
    """``datasets.Dataset`` and ``IterableDataset``: columns are matched to inputs by name, others are left out."""

    def takes(self, samples: object) -> bool:
        return hasattr(samples, "with_format") and hasattr(samples, "select_columns")

    def rows(self, samples: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the records as arrays; if the columns are known, only those of inputs are read."""
        names = samples.column_names or ()
        columns = [entry.name for entry in inputs if entry.name in names]
        labels = [name for name in ("labels", "label") if name in names and name not in columns]
        rows: Iterable[object] = (samples.select_columns([*columns, *labels]) if columns else samples).with_format(
            "numpy"
        )
        return rows


# Texts, as the tokens of a tokenizer.json.

# Input names of Hugging Face's models, and the matching attributes of an encoding.
_FIELDS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


@dataclass(frozen=True)
class Text:
    """``.txt`` files whose lines are texts, read with a ``tokenizer.json``.

    The tokens go to the inputs ``input_ids``, ``attention_mask`` and ``token_type_ids``.

    Attributes:
        tokenizer: the ``tokenizer.json`` of the model, read by the library tokenizers.
        length: tokens that texts are truncated or padded to; 0 takes the model's fixed length, or else each text's own.
            Lengths in the tokenizer's file are not used.

    >>> Text("tokenizer.json", length=128)
    Text(tokenizer='tokenizer.json', length=128)
    """

    tokenizer: str = ""
    length: int = 0

    def __post_init__(self) -> None:
        if self.length < 0:
            raise DataError(f"texts have length {self.length}, expected 0 or more tokens")

    def takes(self, samples: object) -> bool:
        return bool(self.tokenizer) and has_suffix(samples, ".txt")

    def rows(self, samples: Any, inputs: Sequence[Input], images: ImageOptions) -> Iterable[object]:
        """Return the tokens of each line that is not empty."""
        fixed = (entry.shape[-1] for entry in inputs if entry.name in _FIELDS and entry.shape)
        length = self.length or next((extent for extent in fixed if isinstance(extent, int)), 0)
        wanted = [entry for entry in inputs if entry.name in _FIELDS]
        tokenizer, padding, side = self._loaded
        if length:
            tokenizer.enable_truncation(length, direction=side)
        else:
            tokenizer.no_truncation()
        for line in _lines(samples):
            encoding = tokenizer.encode(line)
            if length:
                # The tokenizer keeps its special tokens even where they exceed the length.
                encoding.truncate(length, direction=side)
                encoding.pad(length, **padding)
            yield {entry.name: _tokens(getattr(encoding, _FIELDS[entry.name]), entry) for entry in wanted}

    @cached_property
    def _loaded(self) -> tuple[Any, dict[str, Any], str]:
        """The tokenizer without padding, and from its file the token and side of padding and the side of truncation."""
        tokenizers = library("tokenizers", "onnxq[text]", self.tokenizer)
        try:
            tokenizer = tokenizers.Tokenizer.from_file(self.tokenizer)
        # The library raises plain exceptions.
        except Exception as error:
            raise DataError(f"{self.tokenizer} cannot be read as a tokenizer: {str(error)[:200]}") from error
        names = {"direction", "pad_id", "pad_type_id", "pad_token"}
        padding = {name: value for name, value in (tokenizer.padding or {}).items() if name in names}
        tokenizer.no_padding()
        return tokenizer, padding, (tokenizer.truncation or {}).get("direction", "right")


def _tokens(values: Sequence[int], entry: Input) -> NDArray[Any]:
    return np.array(values, entry.dtype)[None]


def _lines(place: Any) -> Iterator[str]:
    try:
        with place.open("rb") as stream:
            for line in stream:
                if text := line.decode("utf-8").strip():
                    yield text
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{place} cannot be read as text: {error}; save it as UTF-8") from error


# Sources by name: built-in ones and those of installed packages.

SOURCES: Mapping[str, type] = MappingProxyType(
    {
        "audio": Audio,
        "data-reader": DataReader,
        "hugging-face": HuggingFace,
        "text": Text,
    }
)
"""Built-in sources by name."""

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "pandas": "the rows of the frame, such as frame.to_dict('records')",
        "parquet": "a data set of Hugging Face, such as datasets.Dataset.from_parquet(path)",
        "tar": "any iterable of dictionaries of arrays, such as webdataset's",
        "tf-data": "the data set itself, as any iterable",
    }
)
"""Removed sources, and what to give in Python instead."""

_REMOVED_SUFFIXES = {".parquet": "parquet", ".tar": "tar", ".tgz": "tar"}


def check_not_removed(place: object) -> None:
    """Check that no removed source would have read a file or object.

    Raises:
        DataError: one would have.
    """
    name = _REMOVED_SUFFIXES.get(place.suffix.lower(), "") if isinstance(place, Location) else ""
    if isinstance(place, Location) and place.name.lower().endswith(".tar.gz"):
        name = "tar"
    if hasattr(place, "iloc") and hasattr(place, "columns"):
        name = "pandas"
    if name:
        what = f"{place}" if isinstance(place, Location) else f"a {type(place).__name__}"
        raise DataError(f"{what} is no longer read, expected files or an iterable; give {REMOVED[name]} in Python")


ENTRY_POINTS = "onnxq.sources"
"""The entry point group in which packages register sources."""


def find_source(text: str) -> Source:
    """Return the source that a text names.

    Args:
        text: a name, then any number of ``:option=value``.

    Raises:
        DataError: the source or an option is unknown, or a value is invalid.

    >>> find_source("audio:rate=8000")
    Audio(rate=8000, seconds=0.0)
    """
    name, *arguments = text.split(":")
    if name in REMOVED:
        raise DataError(f"source {name!r} was removed, expected an object; give {REMOVED[name]} in Python")
    kind = SOURCES.get(name) or load_registered(ENTRY_POINTS, name, "Source")
    if kind is None:
        raise DataError(unknown_name("source", name, _names()))
    kinds = get_type_hints(kind)
    options = [option.name for option in fields(kind)] if is_dataclass(kind) else []
    values = {}
    for part in arguments:
        option, separator, value = part.partition("=")
        if not separator or option not in options:
            expected = ", ".join(f"{option}=VALUE" for option in options) or "none"
            raise DataError(
                f"source {name!r} has no option {part!r}, expected {expected}{did_you_mean(option, options)}"
            )
        try:
            values[option] = parse_option(value, kinds[option])
        except ValueError as error:
            raise DataError(f"option {option!r} of source {name!r} is {value!r}, {error}") from error
    with wrap_plugin_errors(f"source {name!r}"):
        source = kind(**values)
        if not isinstance(source, Source):
            raise TypeError(f"it is {source!r}, which has no takes and rows")
    return source


def source_for(samples: object) -> Source | None:
    """Return the first source that takes a file or object, or None."""
    return next((source for source in map(find_source, _names()) if does_take(source, samples)), None)


def does_take(source: Source, samples: object) -> bool:
    """Return whether a source, which may be a plugin, takes a file or object.

    Raises:
        DataError: the source fails.
    """
    with wrap_plugin_errors(f"source {type(source).__name__}", DataError):
        return bool(source.takes(samples))


def _names() -> list[str]:
    return [*SOURCES, *registered_names(ENTRY_POINTS)]
