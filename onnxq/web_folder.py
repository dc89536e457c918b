"""Folders as transformers.js reads them: every session of a pipeline, in each dtype that its users may ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.budget import Budget
from onnxq.data import Data, SamplesLike
from onnxq.errors import DataError, ModelError, OnnxqError, SchemeError, nearest
from onnxq.judging.agreement import Agreement, agreement_of
from onnxq.judging.goal import MINIMUM_SQNR, Goal
from onnxq.modelfile.publish import publish, staging
from onnxq.pipeline import quantize
from onnxq.presets import preset_named
from onnxq.runtime import open_session, output_names, run, to_half
from onnxq.samples.data import evenly, open_samples
from onnxq.samples.inputs import Input, Sample, model_inputs, required
from onnxq.scheme import Granularity, Mode, Rule, Scheme, Spec

# What an output is called where another session reads it.
_READ_AS = MappingProxyType({"last_hidden_state": "encoder_hidden_states"})
# Captured outputs are in memory.
_MOST_SAMPLES = 64


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


_UINT8 = Spec("uint8", per=Granularity.CHANNEL, symmetric=False)
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


@dataclass(frozen=True, eq=False)
class _Session:
    """A model of the folder.

    Attributes:
        file: it.
        inputs: what it has to be given.
        outputs: names of what it makes.
    """

    file: Path
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]

    @property
    def made(self) -> Mapping[str, int]:
        """Where its outputs stand, by what other sessions call them."""
        return {_READ_AS.get(name, name): place for place, name in enumerate(self.outputs)}


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
            dictionary. They hold the inputs that no session in front makes, the same number for each.
        dtypes: names of DTYPES.
        target: the runtime.
        goal: SQNR in decibels that the worst output of each session and of the pipeline must have.
        budget: for each model; see `quantize`.

    Yields:
        What became of each dtype.

    Raises:
        ModelError: there is no float model, or its weights lie outside of it.
        DataError: the samples do not fit.
        SchemeError: there is no such dtype.
    """
    for name in dtypes:
        if name not in DTYPES:
            raise SchemeError(f"dtype {name!r} is not one of {', '.join(DTYPES)}{nearest(name, DTYPES)}")
    sessions = _in_order([_opened(file) for file in _float_models(folder)])
    samples = _given(sessions, data)
    floats = [session.file for session in sessions]
    expected = _outputs(sessions, floats, samples)

    def fed(session: _Session) -> list[Sample]:
        own = zip(samples[session.file], expected, strict=True)
        return [_fed(session, sample, sessions, outputs) for sample, outputs in own]

    for name in dtypes:
        with staging(floats[0]) as place:
            try:
                built = [
                    _built(session.file, DTYPES[name], fed(session), place, target, goal, budget)
                    for session in sessions
                ]
                agreement = _agreement(sessions, expected, _outputs(sessions, built, samples))
            except OnnxqError as error:
                yield Written(name, refused=str(error))
                continue
            if not (agreement.sound and agreement.worst_sqnr >= goal):
                told = f"all sessions together have {agreement.worst_sqnr:.1f} dB, expected {goal:g}"
                yield Written(name, sqnr=agreement.worst_sqnr, refused=f"{told}; lower the goal")
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


def _opened(file: Path) -> _Session:
    try:
        model = onnx.load(file, load_external_data=False)
    except (DecodeError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if any(tensor.external_data for tensor in model.graph.initializer):
        raise ModelError(f"{file} has weights outside, expected all in one file; quantize it by itself")
    outputs = tuple(output.name for output in model.graph.output)
    return _Session(file, required(model_inputs(model)), outputs)


def _in_order(sessions: Sequence[_Session]) -> list[_Session]:
    """Return sessions behind those that make what they read."""
    left, ordered = list(sessions), list[_Session]()
    while left:
        waiting = {name for session in left for name in session.made}
        ready = [one for one in left if not {entry.name for entry in one.inputs} & (waiting - one.made.keys())]
        # Of those that wait for one another, the first goes first.
        ordered += ready or left[:1]
        left = [one for one in left if one not in ordered]
    return ordered


def _given(
    sessions: Sequence[_Session], data: SamplesLike | Mapping[str, SamplesLike]
) -> Mapping[Path, Sequence[Sample]]:
    """Return the samples of each session, without what others make."""
    found: dict[Path, Sequence[Sample]] = {}
    made: set[str] = set()
    for session in sessions:
        wanted = tuple(entry for entry in session.inputs if entry.name not in made)
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


Outputs = Mapping[Path, Sequence[Any]]
"""What sessions made of one sample, by their float models."""


def _outputs(
    sessions: Sequence[_Session], models: Sequence[Path], samples: Mapping[Path, Sequence[Sample]]
) -> list[Outputs]:
    """Run sessions one behind the other."""
    loaded = [open_session(model) for model in models]
    found: list[Outputs] = []
    for place in range(len(next(iter(samples.values())))):
        outputs: dict[Path, Sequence[Any]] = {}
        for session, running in zip(sessions, loaded, strict=True):
            given = _fed(session, samples[session.file][place], sessions, outputs)
            outputs[session.file] = run(running, given, output_names(running), index=place)
        found.append(outputs)
    return found


def _fed(session: _Session, sample: Sample, sessions: Iterable[_Session], outputs: Outputs) -> Sample:
    """Return a sample with what the sessions in front have made."""
    wanted, fed = {entry.name for entry in session.inputs}, dict(sample)
    for other in sessions:
        if other is session:
            break
        made = {name: place for name, place in other.made.items() if name in wanted and name not in sample}
        fed |= {name: outputs[other.file][place] for name, place in made.items()}
    return fed


def _built(
    file: Path, dtype: Dtype, samples: Sequence[Sample], folder: Path, target: str, goal: float, budget: str | Budget
) -> Path:
    """Build a session's model in a folder, and return its file."""
    source, staged = file, folder / f"{file.stem}{dtype.suffix}.onnx"
    if dtype.half:
        source = staged if dtype.scheme is None else folder / f"{file.stem}.half.onnx"
        onnx.save(to_half(onnx.load(file)), source)
    if dtype.scheme is not None:
        quantize(source, Data(samples), staged, scheme=dtype.scheme, target=target, goal=Goal(goal), budget=budget)
    return staged


def _agreement(sessions: Sequence[_Session], expected: Sequence[Outputs], found: Sequence[Outputs]) -> Agreement:
    names = [f"{session.file.stem}/{name}" for session in sessions for name in session.outputs]

    def flat(outputs: Outputs) -> list[Any]:
        return [one for session in sessions for one in outputs[session.file]]

    return agreement_of(names, ((flat(one), flat(other)) for one, other in zip(expected, found, strict=True)))
