"""Models that run one behind another, as an encoder and a decoder do: what each is given, and what it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.calibration.data import Data, SamplesLike
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme
from onnxq.data.inputs import Input, Sample, model_inputs, required
from onnxq.data.samples import evenly, open_samples
from onnxq.errors import DataError, ModelError, OnnxqError, check_name
from onnxq.evaluation.agreement import Agreement, agreement_of
from onnxq.evaluation.goal import MINIMUM_SQNR, Goal
from onnxq.ir import as_graph, to_model
from onnxq.ir.order import toposort
from onnxq.pipeline import quantize
from onnxq.runtime.sessions import open_session, output_names, run, serialized, to_half
from onnxq.steps.request import Budget
from onnxq.system.publish import data_file, publish, staging

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
        message = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise DataError(f"there are samples: {message or 'none'}; expected as many for each session")
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


# Folders as transformers.js reads them: every session of a pipeline, in each dtype that its users may ask for.


@dataclass(frozen=True)
class Dtype:
    """What transformers.js knows models of a kind by.

    Attributes:
        suffix: of the file's name.
        scheme: how weights and data are quantized; None leaves all in float.
        half: whether floats have 16 bits.
    """

    suffix: str
    scheme: Scheme | None
    half: bool = False


_UINT8 = QuantSpec("uint8", granularity=Granularity.CHANNEL, symmetric=False)
DTYPES: Mapping[str, Dtype] = MappingProxyType(
    {
        "q8": Dtype("_quantized", preset_named("int8")),
        "int8": Dtype("_int8", preset_named("int8-storage")),
        "uint8": Dtype("_uint8", Scheme((Rule(Mode.STORAGE, weight=_UINT8),), name="uint8-storage")),
        "q4": Dtype("_q4", preset_named("int4-block32")),
        "q4f16": Dtype("_q4f16", preset_named("int4-block32"), half=True),
        "fp16": Dtype("_fp16", None, half=True),
        "bnb4": Dtype("_bnb4", preset_named("nf4-block64")),
    }
)
"""What can be written, by the name that ``dtype`` has in JavaScript."""


@dataclass(frozen=True)
class Written:
    """What became of one dtype.

    Attributes:
        dtype: its name.
        files: what was written; nothing where it was refused.
        bytes: of all files.
        sqnr: in decibels, of the worst output when all sessions run one behind the other; None where none was built.
        refused: why nothing was written, in a sentence; empty where something was.
    """

    dtype: str
    files: tuple[Path, ...] = ()
    bytes: int = 0
    sqnr: float | None = None
    refused: str = ""


def write_web_folder(
    folder: Path,
    data: SamplesLike | Mapping[str, SamplesLike],
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    target: str = "onnxruntime-web",
    goal: float = MINIMUM_SQNR,
    budget: str | Budget = "fast",
) -> Iterator[Written]:
    """Write the models of a folder in other dtypes, beside the float ones in its folder ``onnx``.

    Sessions are calibrated together: what one makes, those behind it are given. A dtype is written when its sessions,
    running one behind the other, reach the goal; otherwise none of its files are.

    Args:
        folder: holds ``onnx/model.onnx``, or ``onnx/encoder_model.onnx`` and what else belongs to a pipeline.
        data: samples of the one session; of several, a folder with one folder or file for each, called after it, or a
            dictionary. They hold the inputs that no session makes, the same number for each. A decoder that reads the
            past that it makes is run twice for each: with all tokens but the last, and with that one behind them.
        dtypes: names of DTYPES.
        target: the runtime.
        goal: SQNR in decibels that the worst output of each session and of the pipeline must have.
        budget: for each model; see `quantize`.

    Yields:
        What became of each dtype.

    Raises:
        ModelError: there is no float model, or one that cannot be read.
        DataError: the samples do not fit.
        SchemeError: there is no such dtype.
    """
    for name in dtypes:
        check_name("dtype", name, DTYPES)
    sessions = open_sessions(_float_models(folder))
    samples = samples_of(sessions, data)
    floats = [session.file for session in sessions]
    expected = run_sessions(sessions, floats, samples)

    def fed(session: Session) -> list[Sample]:
        return [step.given for steps in expected for step in steps[session.file]]

    for name in dtypes:
        with staging(floats[0]) as place:
            try:
                built = [
                    _built(session.file, DTYPES[name], fed(session), place, target, goal, budget)
                    for session in sessions
                ]
                agreement = _agreement(sessions, expected, run_sessions(sessions, built, samples))
            except OnnxqError as error:
                yield Written(name, refused=str(error))
                continue
            if not (agreement.sound and agreement.worst_sqnr >= goal):
                message = f"all sessions together have {agreement.worst_sqnr:.1f} dB, expected {goal:g}"
                yield Written(name, sqnr=agreement.worst_sqnr, refused=f"{message}; lower the goal")
                continue
            size = sum(file.stat().st_size for file in built)
            files = tuple(file.with_name(f"{file.stem}{DTYPES[name].suffix}.onnx") for file in floats)
            for staged, file in zip(built, files, strict=True):
                publish(staged, file)
        yield Written(name, files, size, agreement.worst_sqnr)


def _float_models(folder: Path) -> list[Path]:
    suffixes = tuple(dtype.suffix for dtype in DTYPES.values())
    found = [file for file in sorted((folder / "onnx").glob("*.onnx")) if not file.stem.endswith(suffixes)]
    if not found:
        raise ModelError(f"{folder} holds no float model, expected onnx/model.onnx or alike; name another folder")
    return found


def _built(
    file: Path, dtype: Dtype, samples: Sequence[Sample], folder: Path, target: str, goal: float, budget: str | Budget
) -> Path:
    """Build a session's model in a folder, and return its file."""
    source, staged = file, folder / f"{file.stem}{dtype.suffix}.onnx"
    if dtype.half:
        source = staged if dtype.scheme is None else folder / f"{file.stem}.half.onnx"
        graph = as_graph(to_half(onnx.load(file)))
        # Its casts stand behind what reads them.
        toposort(graph)
        source.write_bytes(serialized(to_model(graph)))
    if dtype.scheme is not None:
        quantize(source, Data(samples), staged, scheme=dtype.scheme, target=target, goal=Goal(goal), budget=budget)
    if data_file(staged).exists():
        # One file is found without being named in the folder's configuration.
        staged.write_bytes(serialized(onnx.load(staged)))
        data_file(staged).unlink()
    return staged


def _agreement(sessions: Sequence[Session], expected: Sequence[Steps], found: Sequence[Steps]) -> Agreement:
    # A second step, which has a past, makes the same outputs once more.
    places = [(session.file, place) for session in sessions for place in range(2 if session.remembers else 1)]
    outputs = {session.file: session.outputs for session in sessions}
    names = [f"{file.stem}/{name}{' behind a past' * place}" for file, place in places for name in outputs[file]]

    def flat(steps: Steps) -> list[Any]:
        return [one for file, place in places for one in steps[file][place].made]

    return agreement_of(names, ((flat(one), flat(other)) for one, other in zip(expected, found, strict=True)))
