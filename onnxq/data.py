"""What the user gives to calibrate and judge by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from onnxq.errors import DataError, SchemeError, check_type
from onnxq.evidence.evidence import Evidence
from onnxq.samples.images import ImageOptions
from onnxq.samples.sources.source import Source
from onnxq.samples.sources.table import source_for, source_named

SamplesLike: TypeAlias = str | Path | Iterable[Any]
"""Samples: a file or folder, dictionaries from input name to array, or what a source takes; see `open_samples`."""


@dataclass(frozen=True, eq=False)
class Data:
    """Representative samples, and how they are read.

    Attributes:
        calibration: samples that set the ranges, and by which plans are chosen.
        validation: samples by which the result is judged, which nothing was chosen by; None keeps every fourth of the
            former for that where there are 8 or more and no metric counts on their order, else judges by the same.
        limit: most samples to use of each, from all over; None uses all.
        images: how image files become arrays.
        chain: inputs by the output that they take from the sample before, for stateful models.
        source: what reads the samples, or its name with options such as ``audio:rate=8000``; None finds it.
        statistics: from calibrate() on the same model and scheme; None runs the calibration.

    Raises:
        DataError: the samples are neither a path nor an iterable of dictionaries.
        SchemeError: the limit is not positive, or something else is of another type.
    """

    calibration: SamplesLike
    validation: SamplesLike | None = None
    limit: int | None = None
    images: ImageOptions | None = None
    chain: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    statistics: Evidence | None = None
    source: str | Source | None = None

    def __post_init__(self) -> None:
        _check_source(self.calibration)
        if self.validation is not None:
            _check_source(self.validation)
        check_type(self.limit, (int, type(None)), "the limit of samples", "a whole number")
        if self.limit is not None and self.limit < 1:
            raise SchemeError(f"the limit of samples is {self.limit}, expected 1 or more")
        check_type(self.images, (ImageOptions, type(None)), "images", "ImageOptions(...)")
        check_type(self.chain, Mapping, "the chain", 'inputs by output such as {"stateN": "state"}')
        check_type(self.source, (str, Source, type(None)), "the source", "a name such as audio:rate=8000, or a Source")
        if isinstance(self.source, str):
            source_named(self.source)
        check_type(self.statistics, (Evidence, type(None)), "statistics", "what calibrate() returns")

    @classmethod
    def of(cls, given: SamplesLike | Data) -> Data:
        """Return data as it is; a path or samples alone stand for all of them, read as usual."""
        return given if isinstance(given, Data) else cls(given)


def _check_source(source: object) -> None:
    if source_for(source) is not None:
        return
    if isinstance(source, Mapping):
        raise DataError("the samples are one dictionary, expected a list of them, one for each sample; write [sample]")
    if not isinstance(source, str | Path | Iterable) or isinstance(source, bytes):
        raise DataError(
            f"the samples are of type {type(source).__name__}, expected a path or dictionaries of arrays by input name"
        )
