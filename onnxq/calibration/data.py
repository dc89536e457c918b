"""What the user gives to calibrate and judge by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from onnxq.calibration.evidence import Evidence
from onnxq.calibration.storage import load_statistics
from onnxq.data.dataset import RandomAccess, is_random_access
from onnxq.data.images import ImageOptions, images_named
from onnxq.data.sources import Source, source_for, source_named
from onnxq.errors import DataError, SchemeError, check_type, convert_numpy_numbers

SamplesLike: TypeAlias = str | Path | Iterable[Any] | RandomAccess
"""Samples: a file or folder, dictionaries from input name to array, or what a source takes; see `open_samples`."""


@dataclass(frozen=True, eq=False)
class Data:
    """Representative samples, and how they are read.

    Attributes:
        calibration: samples that set the ranges, and by which plans are chosen.
        validation: samples by which the result is judged, which nothing was chosen by; None keeps every fourth of the
            former for that where there are 8 or more and no function is the metric, else judges by the same.
        limit: most samples to use of each, from all over; None uses all.
        images: how image files become arrays, or the name of a preset such as ``imagenet``.
        chain: inputs by the output that they take from the sample before, for stateful models, or as a text such as
            ``stateN=state``, or several.
        batch: how many rows the model is run with; None runs several files with the rows of each, and else single rows.
        source: what reads the samples, or its name with options such as ``audio:rate=8000``; None finds it.
        statistics: from calibrate() on the same model and scheme, or their file; None runs the calibration.

    Raises:
        DataError: the samples are neither a path nor an iterable of dictionaries, or no preset of images is called so.
        SchemeError: the limit or batch is not positive, a text is no chain, a chain is given with a batch of several
            rows, or something else is of another type.

    >>> Data("recordings/", chain="stateN=state").chained
    {'stateN': 'state'}
    """

    calibration: SamplesLike
    validation: SamplesLike | None = None
    limit: int | None = None
    images: ImageOptions | str | None = None
    chain: Mapping[str, str] | str | Sequence[str] = ()
    statistics: Evidence | str | Path | None = None
    source: str | Source | None = None
    batch: int | None = None

    def __post_init__(self) -> None:
        convert_numpy_numbers(self, "limit", "batch")
        _check_source(self.calibration)
        if self.validation is not None:
            _check_source(self.validation)
        check_type(self.limit, (int, type(None)), "the limit of samples", "a whole number")
        if self.limit is not None and self.limit < 1:
            raise SchemeError(f"the limit of samples is {self.limit}, expected 1 or more")
        check_type(self.batch, (int, type(None)), "the batch", "a whole number of rows")
        if self.batch is not None and self.batch < 1:
            raise SchemeError(f"the batch is {self.batch}, expected 1 row or more")
        check_type(self.images, (ImageOptions, str, type(None)), "images", "a preset's name, or ImageOptions(...)")
        check_type(self.chain, (Mapping, str, list, tuple), "the chain", "'stateN=state' or {'stateN': 'state'}")
        check_type(self.source, (str, Source, type(None)), "the source", "a name such as audio:rate=8000, or a Source")
        if isinstance(self.source, str):
            source_named(self.source)
        check_type(self.statistics, (Evidence, str, Path, type(None)), "statistics", "what calibrate() returns")
        # Texts that name nothing are told here and not after minutes.
        _ = self.chained, self.image_options
        if self.chained and self.batch not in (None, 1):
            raise SchemeError(
                f"the batch is {self.batch} and inputs are chained, expected 1: a chain runs one row after the other"
            )

    @cached_property
    def image_options(self) -> ImageOptions | None:
        """How image files become arrays."""
        return images_named(self.images) if isinstance(self.images, str) else self.images

    @cached_property
    def chained(self) -> Mapping[str, str]:
        """Inputs by the output that they take from the sample before."""
        return self.chain if isinstance(self.chain, Mapping) else chain_of(self.chain)

    @property
    def rows(self) -> int | None:
        """How many rows the model is run with: one where states go from one to the next, see `open_samples`."""
        return 1 if self.chained and self.batch is None else self.batch

    @property
    def given(self) -> tuple[object, ...]:
        """What is read, as it was given: files, folders or anything else."""
        return self.calibration, self.validation, self.statistics

    @property
    def evidence(self) -> Evidence | None:
        """The statistics, read where they are a file's."""
        return load_statistics(Path(self.statistics)) if isinstance(self.statistics, str | Path) else self.statistics

    @classmethod
    def of(cls, given: SamplesLike | Data) -> Data:
        """Return data as it is; a path or samples alone stand for all of them, read as usual."""
        return given if isinstance(given, Data) else cls(given)


def chain_of(texts: str | Sequence[str]) -> dict[str, str]:
    """Return the inputs by output for texts such as ``stateN=state``: the output, and the input that it becomes.

    Raises:
        SchemeError: a text is none of that form, or names an input twice.

    >>> chain_of("stateN=state")
    {'stateN': 'state'}
    """
    chain: dict[str, str] = {}
    for text in [texts] if isinstance(texts, str) else texts:
        check_type(text, str, "a text of the chain", "two names such as 'stateN=state'")
        source, separator, target = text.partition("=")
        if not (source and separator and target):
            raise SchemeError(f"Chain {text!r} is not OUTPUT=INPUT, expected two names such as 'stateN=state'")
        if source in chain or target in chain.values():
            raise SchemeError(f"Chain {text!r} names an output or input again, expected each one once; leave it out")
        chain[source] = target
    return chain


def _check_source(source: object) -> None:
    if source_for(source) is not None:
        return
    if isinstance(source, Mapping):
        raise DataError("the samples are one dictionary, expected a list of them, one for each sample; write [sample]")
    known = isinstance(source, str | Path | Iterable) or is_random_access(source)
    if not known or isinstance(source, bytes):
        raise DataError(
            f"the samples are of type {type(source).__name__}, expected a path or dictionaries of arrays by input name"
        )
