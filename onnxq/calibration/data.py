"""Samples and statistics that a user gives for calibration and evaluation, and the states of stateful models."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx

from onnxq.calibration.statistics import CalibrationStatistics, load_statistics
from onnxq.data.dataset import Origin, RandomAccess, is_random_access, labels_of, origin_of
from onnxq.data.images import ImageOptions, find_image_preset
from onnxq.data.inputs import Input, Sample, SampleSource, inputs_of, is_floating, model_inputs
from onnxq.data.samples import Samples, is_truncated, open_samples
from onnxq.data.sources import Source, find_source, source_for
from onnxq.errors import DataError, SchemeError, check_type, convert_numpy_numbers, did_you_mean
from onnxq.ir import load
from onnxq.runtime.sessions import Array, open_session, run

_LOG = logging.getLogger(__name__)

SamplesLike: TypeAlias = str | Path | Iterable[Any] | RandomAccess
"""A file or folder, dictionaries from input name to array, or an object that a source reads; see `open_samples`."""


@dataclass(frozen=True, eq=False)
class Data:
    """Representative samples, and how to read them.

    Attributes:
        calibration: Samples that set the calibration ranges, and by which plans are chosen.
        validation: Holdout set on which the result is evaluated. None takes a quarter of the calibration samples, 64 at
            most, if there are 8 or more and the metric is not a function. Otherwise all calibration samples are used
            for both.
        limit: Most samples of each set, see `open_samples`; None uses all.
        images: How image files become arrays, or the name of a preset such as ``imagenet``.
        chain: Inputs of stateful models by the output of the sample before, or texts such as ``stateN=state``.
        batch: Number of rows that the model is run with. None keeps the rows of each file if there are several files,
            and takes single rows otherwise.
        source: Reader of the samples, or its name with options such as ``audio:rate=8000``; None detects it.
        statistics: Result of calibrate() on the same model and scheme, or its file; None runs the calibration.
        generated: Whether the samples are generated inputs, on which no accuracy is required.

    Raises:
        DataError: The samples are neither a path nor an iterable of dictionaries, or the image preset is unknown.
        SchemeError: The limit or batch is not positive, a chain is malformed or given with a batch of several rows, or
            an attribute has the wrong type.

    >>> Data("recordings/", chain="stateN=state").chained
    {'stateN': 'state'}
    """

    calibration: SamplesLike
    validation: SamplesLike | None = None
    limit: int | None = None
    images: ImageOptions | str | None = None
    chain: Mapping[str, str] | str | Sequence[str] = ()
    statistics: CalibrationStatistics | str | Path | None = None
    source: str | Source | None = None
    batch: int | None = None
    generated: bool = False

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
            find_source(self.source)
        check_type(
            self.statistics, (CalibrationStatistics, str, Path, type(None)), "statistics", "what calibrate() returns"
        )
        # Errors in texts are raised here, not after minutes.
        _ = self.chained, self.image_options
        if self.chained and self.batch not in (None, 1):
            raise SchemeError(
                f"the batch is {self.batch} and inputs are chained, expected 1: a chain runs one row after the other"
            )

    @cached_property
    def image_options(self) -> ImageOptions | None:
        """How image files become arrays."""
        return find_image_preset(self.images) if isinstance(self.images, str) else self.images

    @cached_property
    def chained(self) -> Mapping[str, str]:
        """Inputs by the output of the sample before."""
        return self.chain if isinstance(self.chain, Mapping) else parse_chain(self.chain)

    @property
    def rows(self) -> int | None:
        """Number of rows that the model is run with; 1 if states pass from row to row, see `open_samples`."""
        return 1 if self.chained and self.batch is None else self.batch

    @property
    def given(self) -> tuple[object, ...]:
        """The calibration and validation samples and the statistics, as given."""
        return self.calibration, self.validation, self.statistics

    @property
    def loaded_statistics(self) -> CalibrationStatistics | None:
        """The statistics, read from their file if a path is given."""
        return load_statistics(Path(self.statistics)) if isinstance(self.statistics, str | Path) else self.statistics

    @classmethod
    def of(cls, given: SamplesLike | Data) -> Data:
        """Return data as it is; wrap a path or samples with the default options."""
        return given if isinstance(given, Data) else cls(given)


def parse_chain(texts: str | Sequence[str]) -> dict[str, str]:
    """Return the inputs by output for texts OUTPUT=INPUT such as ``stateN=state``.

    Raises:
        SchemeError: A text has another form, or a name occurs twice.

    >>> parse_chain("stateN=state")
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


# Stateful models: an output of one sample is an input of the next, as in a stream.

Chain = Mapping[str, str]
"""Input by the output that it is taken from."""


def with_optional(inputs: Sequence[Input], chain: Chain) -> tuple[Input, ...]:
    """Return the inputs, with chained inputs marked as optional in samples.

    Raises:
        SchemeError: The chain names an input that does not exist, or every input is chained.
    """
    names = [entry.name for entry in inputs]
    for target in chain.values():
        if target not in names:
            known = did_you_mean(target, names) or f": {names}"
            raise SchemeError(f"Chain ends in {target!r}, expected an input of the model{known}")
    if chain and set(names) <= set(chain.values()):
        raise SchemeError("Every input is chained, expected one that samples feed; leave a chain out")
    return tuple(replace(entry, optional=entry.name in chain.values()) for entry in inputs)


class ChainedSamples:
    """Samples completed by the states that the float model outputs, in the order of the samples.

    The first sample of a sequence starts from the state that it contains, otherwise from zeros. A sequence is the
    samples of a file that has several, or the files of a folder.

    An open dimension of a zero state takes the size of the sample's dimension of the same name. Other open dimensions
    are 0, an empty past. They are 1 if the model does not run on an empty state, or outputs an empty or NaN array.

    Each iteration runs the model again. It raises SchemeError if zeros are needed for a state of unknown rank or of a
    type that is not numeric.

    Args:
        samples: Samples without the chained states.
        model: The float model.
        chain: Input by the output that it is taken from.

    Raises:
        SchemeError: The chain begins with a name that is not an output of the model.
    """

    def __init__(
        self,
        samples: SampleSource,
        model: onnx.ModelProto | Path,
        chain: Chain,
    ) -> None:
        self._samples = samples
        self._session = open_session(model, threads=1)
        self._chain = dict(chain)
        outputs = [value.name for value in self._session.get_outputs()]
        for source in chain:
            if source not in outputs:
                raise SchemeError(
                    f"Chain begins with {source!r}, expected an output of the model{did_you_mean(source, outputs)}"
                )
        proto = onnx.load(model, load_external_data=False) if isinstance(model, Path) else model
        self._inputs = model_inputs(proto)
        self._start: _Start | None = None

    @property
    def truncated(self) -> bool:
        """Whether a limit left out samples after these."""
        return is_truncated(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def origin(self, index: int) -> Origin:
        """Return where a sample comes from."""
        return origin_of(self._samples, index)

    def labels(self, index: int) -> tuple[int, ...]:
        """Return the class numbers of a sample."""
        return labels_of(self._samples, index)

    def __iter__(self) -> Iterator[Sample]:
        states: dict[str, Array] = {}
        sequences = self._samples.sequences() if isinstance(self._samples, Samples) else repeat("")
        previous = None
        for index, (sample, sequence) in enumerate(zip(self._samples, sequences, strict=False)):
            if sequence != previous:
                previous = sequence
                states = {}
            complete = self._with_zeros({**sample, **states})
            yield complete
            values = run(self._session, complete, list(self._chain), index=index)
            states = dict(zip(self._chain.values(), values, strict=True))

    def _with_zeros(self, sample: Sample) -> Sample:
        missing = [entry for entry in self._inputs if entry.name in self._chain.values() and entry.name not in sample]
        if not missing:
            return sample
        sizes = self._sizes(sample)
        if self._start is None:
            self._start = self._found(sample, missing, sizes)
        return {**sample, **_zeros(missing, sizes, self._start)}

    def _sizes(self, sample: Sample) -> dict[str, int]:
        """Return the sizes of the named dimensions of a sample."""
        entries = [entry for entry in self._inputs if entry.name in sample]
        pairs = (pair for entry in entries for pair in zip(entry.shape or (), sample[entry.name].shape, strict=False))
        return {dim: extent for dim, extent in pairs if isinstance(dim, str)}

    def _found(self, sample: Sample, missing: Sequence[Input], sizes: Mapping[str, int]) -> _Start:
        """Return the first empty start that the model runs from; otherwise the last start, with a warning."""
        open_states = [entry for entry in missing if any(_is_open(dim, sizes) for dim in entry.shape or ())]
        if not open_states:
            return _STARTS[-1]
        start = _STARTS[-1]
        for candidate in _STARTS[:-1]:
            zeros = _zeros(missing, sizes, candidate)
            if not any(zeros[entry.name].size for entry in open_states) and self._runs({**sample, **zeros}):
                start = candidate
                break
        for name, state in _zeros(open_states, sizes, start).items():
            if state.size:
                _LOG.warning(
                    "chained input %r starts from zeros of shape %s, because the model rejects an empty array; if that "
                    "is wrong, add it to the first sample",
                    name,
                    list(state.shape),
                )
        return start

    def _runs(self, sample: Sample) -> bool:
        try:
            values = run(self._session, sample)
        except DataError:
            return False
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        return all(value.size and not (is_floating(value.dtype) and np.isnan(value).any()) for value in arrays)


def samples_of(reference: Path, data: SamplesLike | Data, *, in_order: bool = False) -> SampleSource:
    """Open samples for a model file, as quantize() does.

    Args:
        reference: The model file, whose model also computes chained inputs.
        data: The samples; of `Data`, the calibration samples.
        in_order: Whether a limit takes the first samples, as labels require, and not evenly spaced ones.

    Raises:
        ModelError: The file cannot be read.
        DataError: The samples do not fit.
        SchemeError: The chain names an unknown output or input of the model.
    """
    data = Data.of(data)
    inputs = with_optional(inputs_of(load(reference)), data.chained)
    samples = open_samples(
        data.calibration,
        inputs,
        images=data.image_options,
        limit=data.limit,
        source=data.source,
        in_order=in_order or bool(data.chained),
        batch=data.rows,
    )
    return ChainedSamples(samples, reference, data.chained) if data.chained else samples


class _Start(NamedTuple):
    """Sizes of the open dimensions of a state: of the first, often a batch, and of the others."""

    first: int
    others: int


_STARTS = (_Start(1, 0), _Start(0, 0), _Start(1, 1))


def _is_open(dim: int | str | None, sizes: Mapping[str, int]) -> bool:
    return not isinstance(dim, int) and dim not in sizes


def _zeros(states: Sequence[Input], sizes: Mapping[str, int], start: _Start) -> Sample:
    zeros = {}
    for entry in states:
        if entry.shape is None or entry.dtype.hasobject:
            raise SchemeError(
                f"Chained input {entry} cannot start from zeros, expected a numeric tensor of known rank; give its "
                "first value in the samples"
            )
        shape = [
            dim if isinstance(dim, int) else sizes.get(dim or "", start.others if axis else start.first)
            for axis, dim in enumerate(entry.shape)
        ]
        zeros[entry.name] = np.zeros(shape, entry.dtype)
    return zeros
