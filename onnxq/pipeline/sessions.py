"""Models that run in sequence, as an encoder and a decoder do: what each is given, and what it outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.calibration.data import Data, SamplesLike
from onnxq.data.inputs import Input, Sample, model_inputs, required
from onnxq.data.samples import evenly, open_samples
from onnxq.errors import DataError, ModelError
from onnxq.ir.stored_tensors import stored_tensors
from onnxq.runtime.sessions import open_session, output_names, run

# What an output is called where another session reads it, and how the names of a past begin.
_READ_AS = {"last_hidden_state": "encoder_hidden_states"}
_PRESENT, _PAST = "present", "past_key_values"
# Tells a decoder that is two in one whether there is a past.
_BRANCH = "use_cache_branch"
TOKENS = ("input_ids", "decoder_input_ids")
_MASK, _POSITIONS = "attention_mask", "position_ids"
# Inputs of the new tokens alone; the mask is of all tokens so far.
_OF_NEW = frozenset({*TOKENS, "inputs_embeds", _POSITIONS})
# Options of reading; its samples are not read.
READ_AS_THEY_ARE = Data([])
# Samples are held in memory; a few that run with a KV cache show the ranges of keys and values.
_MOST_SAMPLES, _BEHIND_A_PAST = 64, 8

FolderSamples: TypeAlias = SamplesLike | Mapping[str, SamplesLike]
"""Samples of the one session; of several, a folder with a folder or file named after each, or a dictionary."""


@dataclass(frozen=True, eq=False)
class Session:
    """A model of a pipeline.

    Attributes:
        file: the model.
        inputs: what it must be given.
        outputs: names of its outputs.
        data: files of its weights, relative to the folder of the model.
        reads: names of inputs by the names of outputs that are given to them, where no convention tells.
        remembers: whether it reads its own outputs as its past.
        widths: extents of the last axes of outputs that have a fixed one.
    """

    file: Path
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    data: frozenset[str] = frozenset()
    reads: Mapping[str, str] = field(default_factory=dict)
    remembers: bool = False
    widths: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def feeds(self) -> Mapping[str, int]:
        """Places of its outputs, by the names of the inputs that they are given to."""
        return {self.reads.get(name) or _name_where_read(name): place for place, name in enumerate(self.outputs)}

    @cached_property
    def past(self) -> frozenset[str]:
        """Names of the inputs that it computes itself, and of the one that tells whether there are any."""
        own = (entry.name for entry in self.inputs if entry.name in self.feeds or entry.name == _BRANCH)
        return frozenset(own) if self.remembers else frozenset()

    def read_by(self, names: Iterable[str]) -> set[str]:
        """Return which of some names it reads."""
        return {entry.name for entry in self.inputs} & set(names)


class Step(NamedTuple):
    """One run of a session: what it was given, and its outputs in order."""

    inputs: Sample
    outputs: Sequence[Any]


Steps = Mapping[Path, Sequence[Step]]
"""Runs of sessions for one sample, by their float models: one run, or also one that reads the past of the first."""


def open_sessions(files: Iterable[Path], reads: Mapping[str, str] | None = None) -> list[Session]:
    """Return the sessions of a pipeline, each after those that compute its inputs.

    Args:
        files: of the float models.
        reads: see `Session`.

    Raises:
        ModelError: a file cannot be read.
    """
    sessions = [_opened(file, reads or {}) for file in files]
    made_first = {name for session in sessions for name in session.feeds if not session.read_by([name])}
    left = [replace(session, remembers=_remembers(session, made_first)) for session in sessions]
    ordered = list[Session]()
    while left:
        waiting = {name for session in left for name in session.feeds if not session.read_by([name])}
        # Of those that wait for one another, the first goes first.
        ordered += [session for session in left if not session.read_by(waiting) - session.past] or left[:1]
        left = [session for session in left if session not in ordered]
    return ordered


def samples_of(
    sessions: Sequence[Session], samples: FolderSamples, data: Data = READ_AS_THEY_ARE
) -> Mapping[Path, Sequence[Sample]]:
    """Return the samples of each session, without what sessions compute. Masks of ones and positions are added.

    Args:
        sessions: of a pipeline, in order.
        samples: of as many texts for each session.
        data: how they are read.

    Raises:
        DataError: the samples do not fit, or are not as many for each session.
    """
    by_file: dict[Path, Sequence[Sample]] = {}
    made: set[str] = set()
    for session in sessions:
        wanted = [
            replace(entry, optional=entry.name in (_MASK, _POSITIONS))
            for entry in session.inputs
            if entry.name not in made | session.past
        ]
        made |= session.feeds.keys()
        if wanted:
            own = _own(session.file.stem, samples) if len(sessions) > 1 or isinstance(samples, Mapping) else samples
            read = open_samples(
                own, wanted, images=data.image_options, limit=data.limit, source=data.source, batch=data.rows
            )
            by_file[session.file] = [_with_mask(sample, wanted) for sample in evenly(read, _MOST_SAMPLES)]
    counts = {file.stem: len(samples) for file, samples in by_file.items()}
    if len(set(counts.values())) != 1:
        message = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise DataError(f"there are samples: {message or 'none'}; expected as many for each session")
    count = next(iter(counts.values()))
    return {session.file: by_file.get(session.file, [{}] * count) for session in sessions}


def run_sessions(
    sessions: Sequence[Session], models: Sequence[Path], samples: Mapping[Path, Sequence[Sample]]
) -> Iterator[Steps]:
    """Run the models of sessions in sequence, and yield the steps of each sample.

    Args:
        sessions: in order.
        models: of each session the float model, or one made from it.
        samples: see `samples_of`.
    """
    loaded = [open_session(model) for model in models]
    for place in range(len(next(iter(samples.values())))):
        steps: dict[Path, Sequence[Step]] = {}
        for session, model in zip(sessions, loaded, strict=True):

            def make(inputs: Sample, model: Any = model, place: int = place) -> Sequence[Any]:
                return run(model, inputs, output_names(model), index=place)

            inputs = _fed(session, samples[session.file][place], sessions, steps)
            steps[session.file] = list(_steps(session, inputs, make))
        yield steps


def calibration_samples(
    sessions: Sequence[Session], samples: Mapping[Path, Sequence[Sample]]
) -> Mapping[Path, list[Sample]]:
    """Return the complete inputs of each session. The float models run where one computes the inputs of another.

    A single decoder runs with a KV cache for a few samples only; the others begin with none.
    """
    rest = list[Sample]()
    if len(sessions) == 1:
        [session] = sessions
        count = _BEHIND_A_PAST if session.remembers else 0
        rest = [{**sample, **_no_past(session, sample)} for sample in samples[session.file][count:]]
        samples = {session.file: samples[session.file][:count]}
    by_file: dict[Path, list[Sample]] = {session.file: [] for session in sessions}
    runs = run_sessions(sessions, [*by_file], samples) if any(samples.values()) else ()
    for steps in runs:
        for file, session_steps in steps.items():
            by_file[file] += [step.inputs for step in session_steps]
    return {file: [*samples, *rest] for file, samples in by_file.items()}


def _opened(file: Path, reads: Mapping[str, str]) -> Session:
    try:
        model = onnx.load(file, load_external_data=False)
    except (DecodeError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}; export the folder again") from error
    if not model.graph.output:
        raise ModelError(f"{file} holds no model, it is empty or cut short; export the folder again")
    entries = (entry for tensor in stored_tensors(model) for entry in tensor.external_data)
    data = frozenset(entry.value for entry in entries if entry.key == "location")
    for name in data:
        if not (file.parent / name).exists():
            raise ModelError(f"{file.parent / name} cannot be found, and holds weights of {file.name}; put it there")
    outputs = tuple(output.name for output in model.graph.output)
    shapes = {output.name: output.type.tensor_type.shape.dim for output in model.graph.output}
    widths = {name: dims[-1].dim_value for name, dims in shapes.items() if dims and dims[-1].dim_value}
    return Session(file, required(model_inputs(model)), outputs, data, reads, widths=widths)


def _name_where_read(output: str) -> str:
    name = _PAST + output.removeprefix(_PRESENT) if output.startswith(_PRESENT) else output
    return _READ_AS.get(name, name)


def _remembers(session: Session, made_first: set[str]) -> bool:
    """Return whether a session begins without a past, rather than with that of another session."""
    past = {entry.name for entry in session.inputs if entry.name.startswith(_PAST)}
    past |= session.read_by(session.reads.values())
    both = bool(session.read_by([_BRANCH]))
    return bool(past) and past <= session.feeds.keys() and (both or not past & made_first)


def _fed(session: Session, sample: Sample, sessions: Iterable[Session], steps: Steps) -> Sample:
    """Return a sample with what earlier sessions have computed."""
    fed = dict(sample)
    for source in sessions:
        if source is session:
            break
        wanted = session.read_by(source.feeds) - session.past - sample.keys()
        fed |= {name: steps[source.file][0].outputs[source.feeds[name]] for name in wanted}
    return fed


def _steps(session: Session, sample: Sample, make: Callable[[Sample], Sequence[Any]]) -> Iterator[Step]:
    """Run a session once; where it remembers, first on all tokens but the last, and then on the last."""
    if not session.remembers:
        yield Step(sample, make(sample))
        return
    for name in _OF_NEW & sample.keys():
        if sample[name].shape[1] < 2:
            raise DataError(
                f"a sample of {session.file.stem} has one token as {name!r}, expected two or more; leave it out"
            )
    cut = {name: array[:, :-1] for name, array in sample.items() if name in _OF_NEW or name == _MASK}
    last = {name: array[:, -1:] for name, array in sample.items() if name in _OF_NEW}
    before = {**sample, **cut, **_no_past(session, sample)}
    first = Step(before, make(before))
    yield first
    past = {name: first.outputs[session.feeds[name]] for name in session.past & session.feeds.keys()}
    behind = {**sample, **last, **past, **({_BRANCH: np.array([True])} if _BRANCH in session.past else {})}
    yield Step(behind, make(behind))


def _no_past(session: Session, sample: Sample) -> Sample:
    """Return the past of no tokens, for the rows of a sample: all other open dimensions are 0."""
    rows = next((len(array) for name, array in sample.items() if name in _OF_NEW), 1)
    past = {}
    for entry in session.inputs:
        if entry.name in session.past:
            shape = [
                dim if isinstance(dim, int) else 0 if place else rows for place, dim in enumerate(entry.shape or ())
            ]
            past[entry.name] = np.zeros(shape, entry.dtype)
    return past


def _with_mask(sample: Sample, wanted: Iterable[Input]) -> Sample:
    """Return a sample of tokens with a mask of ones and with positions, if the session reads them."""
    tokens = next((sample[name] for name in TOKENS if name in sample), None)
    if tokens is None:
        return sample
    mask = sample.get(_MASK, np.ones(tokens.shape, np.int64))
    added = {_MASK: mask, _POSITIONS: np.maximum(np.cumsum(mask, -1) - 1, 0)}
    types = {entry.name: entry.dtype for entry in wanted}
    return {**{name: added[name].astype(types[name]) for name in added.keys() & types.keys()}, **sample}


def _own(name: str, samples: FolderSamples) -> SamplesLike:
    if isinstance(samples, Mapping):
        if name not in samples:
            raise DataError(f"there are no samples for {name}, expected some under its name")
        own: SamplesLike = samples[name]
        return own
    if not isinstance(samples, str | Path):
        raise DataError("the samples are of one session, expected a dictionary with some for each")
    for place in (Path(samples) / name, Path(samples) / f"{name}.npz"):
        if place.exists():
            return place
    raise DataError(f"{samples} holds no samples for {name}, expected a folder {name} or a file {name}.npz in it")
