"""The sources there are, by name: ours and those of installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import get_type_hints

from onnxq.data.sources.audio import Audio
from onnxq.data.sources.data_reader import DataReader
from onnxq.data.sources.hugging_face import HuggingFace
from onnxq.data.sources.shards import Shards
from onnxq.data.sources.source import Source
from onnxq.data.sources.tables import DataFrames, Parquet
from onnxq.data.sources.tensorflow_data import TensorFlowData
from onnxq.data.sources.text import Text
from onnxq.errors import DataError, nearest, unknown
from onnxq.system.extensions import blamed, registered, registered_names
from onnxq.system.option_values import value_of

SOURCES: Mapping[str, type] = MappingProxyType(
    {
        "audio": Audio,
        "data-reader": DataReader,
        "hugging-face": HuggingFace,
        "pandas": DataFrames,
        "parquet": Parquet,
        "tar": Shards,
        "tf-data": TensorFlowData,
        "text": Text,
    }
)
"""Our sources by name."""

ENTRY_POINTS = "onnxq.sources"
"""The group in which packages register sources."""


def source_named(text: str) -> Source:
    """Return the source that a text names.

    Args:
        text: a name, and behind it any number of ``:option=value``.

    Raises:
        DataError: there is no such source or option, or a value is none.

    >>> source_named("audio:rate=8000")
    Audio(rate=8000, seconds=0.0)
    """
    name, *given = text.split(":")
    found = SOURCES.get(name) or registered(ENTRY_POINTS, name, "Source")
    if found is None:
        raise DataError(unknown("source", name, _names()))
    kinds = get_type_hints(found)
    options = [option.name for option in fields(found)] if is_dataclass(found) else []
    values = {}
    for part in given:
        option, separator, value = part.partition("=")
        if not separator or option not in options:
            expected = ", ".join(f"{one}=VALUE" for one in options) or "none"
            raise DataError(f"source {name!r} has no option {part!r}, expected {expected}{nearest(option, options)}")
        try:
            values[option] = value_of(value, kinds[option])
        except ValueError as error:
            raise DataError(f"option {option!r} of source {name!r} is {value!r}, {error}") from error
    with blamed(f"source {name!r}"):
        made = found(**values)
        if not isinstance(made, Source):
            raise TypeError(f"it is {made!r}, which has no takes and rows")
    return made


def source_for(given: object) -> Source | None:
    """Return the first source that takes a file or object; None where none does."""
    return next((one for one in map(source_named, _names()) if does_take(one, given)), None)


def does_take(source: Source, given: object) -> bool:
    """Return whether a source, which may be a user's, takes a file or object.

    Raises:
        DataError: it fails.
    """
    with blamed(f"source {type(source).__name__}", DataError):
        return bool(source.takes(given))


def _names() -> list[str]:
    return [*SOURCES, *registered_names(ENTRY_POINTS)]
