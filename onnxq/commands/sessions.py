"""Models that run one behind another, as an encoder and a decoder do: what each is given, and what it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.calibration.data import SamplesLike
from onnxq.data.inputs import Input, Sample, model_inputs, required
from onnxq.data.samples import evenly, open_samples
from onnxq.errors import DataError, ModelError
from onnxq.runtime.sessions import open_session, output_names, run

# What an output is called where another session reads it, and how the names of a past begin.
_READ_AS = {"last_hidden_state": "encoder_hidden_states"}
_PRESENT, _PAST = "present", "past_key_values"
# Says to a decoder that is two in one whether there is a past.
_BRANCH = "use_cache_branch"
# Inputs that are of the new tokens alone, and one that is of all so far.
_OF_NEW = frozenset({"input_ids", "decoder_input_ids", "inputs_embeds", "position_ids"})
_OF_ALL = "attention_mask"
# What sessions make is in memory.
_MOST_SAMPLES = 64


@dataclass(frozen=True, eq=False)
class Session:
    """A model of a pipeline.

    Attributes:
        file: it.
        inputs: what it has to be given.
        outputs: names of what it makes.
        external: whether it has weights outside of the file.
        remembers: whether it reads as its past what it makes itself.
    """

    file: Path
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    external: bool = False
    remembers: bool = False

    @cached_property
    def made(self) -> Mapping[str, int]:
        """Where its outputs stand, by what sessions call them that read them."""
        return {_name_where_read(name): place for place, name in enumerate(self.outputs)}

    @cached_property
    def past(self) -> frozenset[str]:
        """Names of the inputs that it makes itself, and of the one that says whether there are any."""
        own = (entry.name for entry in self.inputs if entry.name in self.made or entry.name == _BRANCH)
        return frozenset(own) if self.remembers else frozenset()

    def read_by(self, names: Iterable[str]) -> set[str]:
        """Return which of some names it reads."""
        return {entry.name for entry in self.inputs} & set(names)


@dataclass(frozen=True, eq=False)
class Step:
    """One run of a session: what it was given, and what it made, in the order of its outputs."""

    given: Sample
    made: Sequence[Any]


Steps = Mapping[Path, Sequence[Step]]
"""What sessions did for one sample, by their float models: one step, or also one that reads the past of the first."""


def open_sessions(files: Sequence[Path]) -> list[Session]:
    """Return the sessions of a pipeline, each behind those that make what it reads.

    Raises:
        ModelError: a file cannot be read.
    """
    sessions = [_opened(file) for file in files]
    made_first = {name for one in sessions for name in one.made if not one.read_by([name])}
    left = [replace(one, remembers=_remembers(one, made_first)) for one in sessions]
    ordered = list[Session]()
    while left:
        waiting = {name for one in left for name in one.made if not one.read_by([name])}
        # Of those that wait for one another, the first goes first.
        ordered += [one for one in left if not one.read_by(waiting) - one.past] or left[:1]
        left = [one for one in left if one not in ordered]
    return ordered


def samples_of(
    sessions: Sequence[Session], data: SamplesLike | Mapping[str, SamplesLike]
) -> Mapping[Path, Sequence[Sample]]:
    """Return the samples of each session, without what it or others make.

    Args:
        sessions: of a pipeline, in order.
        data: samples of the one session; of several, a folder with one folder or file for each, called after it, or a
            dictionary.

    Raises:
        DataError: the samples do not fit, or are not as many for each session.
    """
    found: dict[Path, Sequence[Sample]] = {}
    made: set[str] = set()
    for session in sessions:
        wanted = tuple(entry for entry in session.inputs if entry.name not in made | session.past)
        made |= session.made.keys()
        if wanted:
            own = _own(session.file.stem, data) if len(sessions) > 1 or isinstance(data, Mapping) else data
            found[session.file] = list(evenly(open_samples(own, wanted), _MOST_SAMPLES))
    counts = {file.stem: len(samples) for file, samples in found.items()}
    if len(set(counts.values())) != 1:
        told = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise DataError(f"there are samples: {told or 'none'}; expected as many for each session")
    count = next(iter(counts.values()))
    return {session.file: found.get(session.file, [{}] * count) for session in sessions}


def run_sessions(
    sessions: Sequence[Session], models: Sequence[Path], samples: Mapping[Path, Sequence[Sample]]
) -> list[Steps]:
    """Run the models of sessions one behind the other, for each sample.

    Args:
        sessions: in order.
        models: of each session the float one, or one made from it.
        samples: see `samples_of`.
    """
    loaded = [open_session(model) for model in models]
    found: list[Steps] = []
    for place in range(len(next(iter(samples.values())))):
        steps: dict[Path, Sequence[Step]] = {}
        for session, running in zip(sessions, loaded, strict=True):

            def make(given: Sample, running: Any = running, place: int = place) -> Sequence[Any]:
                return run(running, given, output_names(running), index=place)

            given = _fed(session, samples[session.file][place], sessions, steps)
            steps[session.file] = list(_steps(session, given, make))
        found.append(steps)
    return found


def _opened(file: Path) -> Session:
    try:
        model = onnx.load(file, load_external_data=False)
    except (DecodeError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    outputs = tuple(output.name for output in model.graph.output)
    external = any(tensor.external_data for tensor in model.graph.initializer)
    return Session(file, required(model_inputs(model)), outputs, external)


def _name_where_read(output: str) -> str:
    name = _PAST + output.removeprefix(_PRESENT) if output.startswith(_PRESENT) else output
    return _READ_AS.get(name, name)


def _remembers(session: Session, made_first: set[str]) -> bool:
    """Return whether a session begins without a past, rather than with that of another session."""
    past = {entry.name for entry in session.inputs if entry.name.startswith(_PAST)}
    both = bool(session.read_by([_BRANCH]))
    return bool(past) and past <= session.made.keys() and (both or not past & made_first)


def _fed(session: Session, sample: Sample, sessions: Iterable[Session], steps: Steps) -> Sample:
    """Return a sample with what the sessions in front have made."""
    fed = dict(sample)
    for other in sessions:
        if other is session:
            break
        wanted = session.read_by(other.made) - session.past - sample.keys()
        fed |= {name: steps[other.file][0].made[other.made[name]] for name in wanted}
    return fed


def _steps(session: Session, given: Sample, make: Callable[[Sample], Sequence[Any]]) -> Iterator[Step]:
    """Run a session at once, or where it remembers, first all tokens but the last, and then the last behind them."""
    if not session.remembers:
        yield Step(given, make(given))
        return
    for name in _OF_NEW & given.keys():
        if given[name].shape[1] < 2:
            raise DataError(f"a sample of {session.file.stem} has one token as {name!r}, expected two or more")
    cut = {name: array[:, :-1] for name, array in given.items() if name in _OF_NEW or name == _OF_ALL}
    last = {name: array[:, -1:] for name, array in given.items() if name in _OF_NEW}
    before = {**given, **cut, **{entry.name: _none(entry) for entry in session.inputs if entry.name in session.past}}
    first = Step(before, make(before))
    yield first
    past = {name: first.made[session.made[name]] for name in session.past & session.made.keys()}
    behind = {**given, **last, **past, **({_BRANCH: np.array([True])} if _BRANCH in session.past else {})}
    yield Step(behind, make(behind))


def _none(entry: Input) -> Any:
    """Return the past of no tokens, of one sample: all other lengths that are open are 0."""
    shape = entry.shape or ()
    return np.zeros([dim if isinstance(dim, int) else int(place == 0) for place, dim in enumerate(shape)], entry.dtype)


def _own(name: str, data: SamplesLike | Mapping[str, SamplesLike]) -> SamplesLike:
    if isinstance(data, Mapping):
        if name not in data:
            raise DataError(f"there are no samples for {name}, expected some under its name")
        own: SamplesLike = data[name]
        return own
    if not isinstance(data, str | Path):
        raise DataError("the samples are of one session, expected a dictionary with some for each")
    for place in (Path(data) / name, Path(data) / f"{name}.npz"):
        if place.exists():
            return place
    raise DataError(f"{data} holds no samples for {name}, expected a folder {name} or a file {name}.npz")
