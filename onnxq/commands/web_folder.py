"""Folders as transformers.js reads them: every session of a pipeline, in each dtype that its users may ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx

from onnxq.calibration.data import Data, SamplesLike
from onnxq.commands.sessions import Session, Steps, open_sessions, run_sessions, samples_of
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Granularity, Mode, Rule, Scheme, Spec
from onnxq.data.inputs import Sample
from onnxq.errors import ModelError, OnnxqError, check_name
from onnxq.evaluation.agreement import Agreement, agreement_of
from onnxq.evaluation.goal import MINIMUM_SQNR, Goal
from onnxq.ir import as_graph, to_model
from onnxq.ir.order import toposort
from onnxq.pipeline import quantize
from onnxq.runtime.sessions import serialized, to_half
from onnxq.steps.budget import Budget
from onnxq.system.publish import data_file, publish, staging


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
