"""Folders of models as onnxruntime-genai, transformers.js and Optimum load them, with configuration and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxq.calibration.data import Data
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme
from onnxq.data.inputs import Input, Sample
from onnxq.errors import DataError, ModelError, OnnxqError, OutputError, check_name
from onnxq.evaluation.agreement import agreement_of
from onnxq.evaluation.goal import MINIMUM_SQNR, Goal
from onnxq.ir import as_graph, to_model
from onnxq.ir.order import toposort
from onnxq.numerics.affine import decibels
from onnxq.pipeline.quantization import quantize
from onnxq.pipeline.request import Budget
from onnxq.pipeline.sessions import (
    READ_AS_THEY_ARE,
    TOKENS,
    FolderSamples,
    Session,
    Steps,
    calibration_samples,
    open_sessions,
    run_sessions,
    samples_of,
)
from onnxq.report import AccuracyError
from onnxq.runtime.sessions import serialized, to_half
from onnxq.system.publish import NO_ROOM, data_file, publish, staging

if TYPE_CHECKING:
    from onnxq.pipeline.quantization import Quantized

GENAI_CONFIG = "genai_config.json"
_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_WEB = "onnx"
_LOGITS = "logits"
# Without samples, tokens are generated; any model of language has as many.
_GENERATED_SAMPLES, _GENERATED_TOKENS, _SMALLEST_VOCABULARY = 4, 16, 16


@dataclass(frozen=True)
class Dtype:
    """Suffix of file names by which transformers.js finds a dtype; its scheme, and whether floats have 16 bits."""

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
"""What can be written for transformers.js, by the name that ``dtype`` has in JavaScript."""


@dataclass(frozen=True, eq=False)
class ModelFolder:
    """A folder with float models, in the order in which they run, and the configuration with its number of tokens."""

    path: Path
    sessions: Sequence[Session]
    config: Path
    vocabulary: int = 0

    @property
    def is_web(self) -> bool:
        """Whether transformers.js loads it."""
        return self.sessions[0].file.parent != self.path

    def samples(self, given: FolderSamples, *data: Data) -> Mapping[Path, Sequence[Sample]]:
        """Return the samples of each session, see `samples_of`; refuse tokens outside of the vocabulary."""
        by_file = samples_of(self.sessions, given, *data)
        tokens = (
            sample[name] for samples in by_file.values() for sample in samples for name in TOKENS if name in sample
        )
        largest = max((int(ids.max(initial=0)) for ids in tokens), default=0)
        if self.vocabulary and largest >= self.vocabulary:
            raise DataError(
                f"a sample has token {largest}, expected below {self.vocabulary}, the vocab_size of {self.config}; "
                "take the tokenizer of this folder"
            )
        return by_file


def open_folder(folder: Path) -> ModelFolder:
    """Find out what kind of folder it is, and read the interfaces of its float models.

    A `genai_config.json` names the decoder of onnxruntime-genai. transformers.js has its models in ``onnx``, Optimum in
    the folder itself.

    Raises:
        ModelError: there is no float model, or a file that cannot be read.
    """
    if (folder / GENAI_CONFIG).exists():
        return _genai_folder(folder)
    models = _float_models(folder / _WEB) or _float_models(folder)
    if not models:
        raise ModelError(
            f"{folder} holds no float model, expected {GENAI_CONFIG} of onnxruntime-genai, {_WEB}/model.onnx of "
            "transformers.js or model.onnx of Optimum; name another folder"
        )
    config = folder / _CONFIG
    content = _read_json(config) if config.exists() else {}
    return ModelFolder(folder, open_sessions(models), config, _vocabulary(content, _table(content, "text_config")))


def models_of(place: Path) -> Mapping[str, Path]:
    """Return the models of a folder, float or quantized, by their names in it; of a file the file itself.

    Raises:
        ModelError: the folder holds no model, or lacks the one that its configuration names.
    """
    if not place.is_dir():
        return {place.name: place}
    if (place / GENAI_CONFIG).exists():
        files = [_decoder_file(place, _genai_model(place / GENAI_CONFIG))]
    else:
        files = sorted((place / _WEB).glob("*.onnx")) or sorted(place.glob("*.onnx"))
    if not files:
        raise ModelError(
            f"{place} holds no model, expected {GENAI_CONFIG} of onnxruntime-genai, {_WEB}/model.onnx or model.onnx; "
            "name another folder"
        )
    return {str(file.relative_to(place)): file for file in files}


def pairs_of(reference: Path, candidate: Path, data: Data) -> Iterator[tuple[str, Path, Path, Data]]:
    """Yield each model of two folders or files: its name, the float file, the file to compare, and its samples.

    Args:
        reference: a model, or a folder as `open_folder` takes it.
        candidate: a model, or a folder that was made from the reference.
        data: samples of the reference; for a folder without what its models compute, as `quantize_folder` takes them.

    Raises:
        ModelError: a folder cannot be read, or lacks a model of the other.
        DataError: the samples do not fit.
    """
    others = list(models_of(candidate).values())
    if not reference.is_dir():
        file = others[0] if len(others) == 1 else _counterpart(reference, others, candidate)
        yield reference.name, reference, file, data
        return
    folder = open_folder(reference)
    if len(folder.sessions) == len(others) == 1:
        pairs = [(folder.sessions[0].file, others[0])]
    else:
        pairs = [(session.file, _counterpart(session.file, others, candidate)) for session in folder.sessions]
    samples = calibration_samples(folder.sessions, folder.samples(data.calibration, data))
    for file, made_file in pairs:
        own = replace(data, calibration=samples[file], source=None, limit=None, batch=None)
        yield str(file.relative_to(reference)), file, made_file, own


def _counterpart(file: Path, others: Sequence[Path], place: Path) -> Path:
    """Return the model that was made from a float model, by its name, which the suffix of a dtype may follow."""
    stems = (file.stem, *(file.stem + dtype.suffix for dtype in DTYPES.values()))
    named = [model for model in others if model.stem in stems]
    matching = [model for model in named if model.name == file.name] or named
    if len(matching) != 1:
        names = ", ".join(model.name for model in matching or others)
        raise ModelError(f"{place} holds {names}, expected one model made from {file.name}; name the file to compare")
    return matching[0]


def quantize_folder(
    folder: Path,
    output: Path,
    data: Data | None,
    run: Callable[[Path, Data, Path], Quantized],
    *,
    scheme: str = "",
    goal: Goal | None = None,
) -> Mapping[str, Quantized]:
    """Write a folder with quantized models in the place of the float ones, and copies of the other files.

    The folder appears when all models are verified, and several models also together.

    Args:
        folder: see `open_folder`.
        output: folder to write; it must not exist, or be empty.
        data: samples without what sessions compute, see `samples_of`; None generates tokens.
        run: quantizes a model file with samples to an output file.
        scheme: name of the scheme; models for transformers.js get the suffix of its dtype, else that of ``q8``.
        goal: of all models run in sequence.

    Returns:
        The results by the names of the float models.

    Raises:
        ModelError: the folder cannot be read.
        DataError: the samples do not fit.
        OutputError: the output exists, or cannot be written.
        AccuracyError: a model misses the goal, or all together.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OutputError(f"output {output} exists; give the name of a new folder")
    if not output.parent.is_dir():
        raise OutputError(f"folder {output.parent} of the output does not exist; create it first")
    if output.resolve().is_relative_to(folder.resolve()):
        raise OutputError(f"output {output} lies in the folder that is read; give another place")
    models, goal = open_folder(folder), goal or Goal()
    sessions, suffix = models.sessions, ""
    if models.is_web:
        suffixes = (
            dtype.suffix for dtype in DTYPES.values() if dtype.scheme is not None and dtype.scheme.name == scheme
        )
        suffix = next(suffixes, DTYPES["q8"].suffix)
    given = _generated_tokens(models) if data is None else data.calibration
    data = data or Data((), generated=True)
    samples = models.samples(given, data)
    calibration = calibration_samples(sessions, samples)
    validation: Mapping[Path, list[Sample] | None] = dict.fromkeys(calibration)
    if data.validation is not None:
        validation = dict(calibration_samples(sessions, models.samples(data.validation, data)))
    replaced = {
        file for session in sessions for file in (session.file, *(session.file.parent / name for name in session.data))
    }
    done: dict[str, Quantized] = {}
    with staging(output) as place:
        staged = place / "folder"
        staged.mkdir()
        for path in sorted({*folder.rglob("*")} - replaced):
            _copy(path, staged / path.relative_to(folder))

        def build(file: Path) -> Path:
            name = file.relative_to(folder).with_stem(file.stem + suffix)
            given = replace(data, calibration=calibration[file], validation=validation[file])
            quantized = run(file, replace(given, source=None, limit=None, batch=None), staged / name)
            files = replace(quantized.report.files, output=str(output / name))
            done[file.stem] = replace(quantized, report=replace(quantized.report, files=files))
            if models.is_web:
                _embed_weights(staged / name)
            return staged / name

        built = [build(session.file) for session in sessions]
        if len(built) > 1 and goal.metric is None and not (goal.force or data.generated):
            _, refused = _compare(sessions, built, samples, goal.min_sqnr)
            if refused:
                raise AccuracyError(refused, next(iter(done.values())).report)
        try:
            staged.replace(output)
        except OSError as error:
            raise OutputError(f"output {output} cannot be written: {error.strerror or error}") from error
    return done


@dataclass(frozen=True)
class Written:
    """What became of one dtype.

    Attributes:
        dtype: its name.
        files: what was written; nothing where it was refused.
        bytes: of all files.
        sqnr: in decibels, of the worst output when all sessions run in sequence; None where none was built.
        refused: why nothing was written, in a sentence; empty where something was.
    """

    dtype: str
    files: tuple[Path, ...] = ()
    bytes: int = 0
    sqnr: float | None = None
    refused: str = ""


def write_web_folder(
    model: Path,
    given: FolderSamples,
    data: Data = READ_AS_THEY_ARE,
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    target: str = "onnxruntime-web",
    goal: float = MINIMUM_SQNR,
    budget: str | Budget = "fast",
) -> Iterator[Written]:
    """Write a model, or the models of a folder for transformers.js, in some of DTYPES, beside the float ones.

    A dtype is written when its sessions, each alone and run in sequence, reach the goal in decibels.

    Args:
        model: a file, or a folder as `open_folder` takes it.
        given: samples without what sessions compute, see `samples_of`.
        data: how they are read.
        dtypes: names of DTYPES.
        target: as quantize() takes it.
        goal: in decibels.
        budget: of each model.

    Yields:
        What became of each dtype.

    Raises:
        ModelError: there is no float model, or one that cannot be read.
        DataError: the samples do not fit.
        SchemeError: there is no such dtype.
    """
    for name in dtypes:
        check_name("dtype", name, DTYPES)
    models = open_folder(model) if model.is_dir() else ModelFolder(model, open_sessions([model]), model)
    if not models.is_web:
        raise ModelError(f"{model} holds no {_WEB}/model.onnx for transformers.js; leave --dtypes out")
    sessions, samples = models.sessions, models.samples(given, data)
    calibration = calibration_samples(sessions, samples)
    for name, dtype in ((name, DTYPES[name]) for name in dtypes):
        with staging(sessions[0].file) as place:

            def build(file: Path, dtype: Dtype = dtype, place: Path = place) -> Path:
                source, staged = file, place / f"{file.stem}{dtype.suffix}.onnx"
                if dtype.half:
                    source = staged if dtype.scheme is None else place / f"{file.stem}.half.onnx"
                    graph = as_graph(to_half(onnx.load(file)))
                    # Its casts stand behind what reads them.
                    toposort(graph)
                    source.write_bytes(serialized(to_model(graph)))
                if dtype.scheme is not None:
                    own = Data(calibration[file])
                    quantize(source, own, staged, scheme=dtype.scheme, target=target, goal=Goal(goal), budget=budget)
                _embed_weights(staged)
                return staged

            try:
                built = [build(session.file) for session in sessions]
                decibels, refused = _compare(sessions, built, samples, goal)
            except AccuracyError as error:
                # Models of other dtypes are written.
                yield Written(name, refused="; ".join(filter(None, (error.reason, error.remedy))))
                continue
            except OnnxqError as error:
                yield Written(name, refused=str(error))
                continue
            if refused:
                yield Written(name, sqnr=decibels, refused=f"{refused}; lower the goal")
                continue
            size = sum(file.stat().st_size for file in built)
            files = tuple(session.file.with_name(file.name) for session, file in zip(sessions, built, strict=True))
            for staged, file in zip(built, files, strict=True):
                publish(staged, file)
        yield Written(name, files, size, decibels)


def _genai_folder(folder: Path) -> ModelFolder:
    path = folder / GENAI_CONFIG
    model = _genai_model(path)
    decoder = _table(model, "decoder")
    count = decoder.get("num_hidden_layers")
    layers = range(count if isinstance(count, int) else 0)
    reads: dict[str, str] = {}
    for kind in ("key", "value"):
        past = _table(decoder, "inputs").get(f"past_{kind}_names")
        present = _table(decoder, "outputs").get(f"present_{kind}_names")
        if isinstance(past, str) and isinstance(present, str):
            reads |= {present.replace("%d", str(layer)): past.replace("%d", str(layer)) for layer in layers}
    [session] = open_sessions([_decoder_file(folder, model)], reads)
    # Newer builders leave the size of a head open in the model.
    sizes = {1: decoder.get("num_key_value_heads"), 3: decoder.get("head_size")}
    inputs = (_with_sizes(entry, sizes) if entry.name in session.past else entry for entry in session.inputs)
    vocabulary = _vocabulary(model)
    _check_vocabulary(folder, session, _table(decoder, "outputs").get("logits", _LOGITS), vocabulary)
    return ModelFolder(folder, [replace(session, inputs=tuple(inputs))], path, vocabulary)


def _genai_model(config: Path) -> Mapping[str, Any]:
    model = _table(_read_json(config), "model")
    if not model:
        raise ModelError(f"{config} has no model, expected what onnxruntime-genai writes; export the folder again")
    return model


def _decoder_file(folder: Path, model: Mapping[str, Any]) -> Path:
    """Return the file of the decoder that a configuration of onnxruntime-genai names."""
    config, name = folder / GENAI_CONFIG, _table(model, "decoder").get("filename")
    if not isinstance(name, str) or Path(name).name != name:
        raise ModelError(
            f"{config} names the decoder {name!r}, expected the name of a file beside it in model.decoder.filename; "
            "name the models of several decoders file by file"
        )
    if not (folder / name).is_file():
        raise ModelError(f"{folder} lacks {name}, which {GENAI_CONFIG} names as the decoder; export the folder again")
    return folder / name


def _check_vocabulary(folder: Path, session: Session, logits: str, vocabulary: int) -> None:
    """Refuse a decoder or tokenizer of another vocabulary than that of the configuration."""
    expected = f"{vocabulary} of vocab_size in {folder / GENAI_CONFIG}"
    width = session.widths.get(logits)
    if vocabulary and width is not None and width != vocabulary:
        raise ModelError(
            f"{session.file} has {width} {logits} a token, expected the {expected}; export the folder again"
        )
    tokenizer = folder / _TOKENIZER
    words = _table(_read_json(tokenizer), "model").get("vocab") if vocabulary and tokenizer.exists() else None
    # Added tokens may lie beyond: no text has those of images.
    if isinstance(words, dict | list) and len(words) > vocabulary:
        raise ModelError(
            f"{tokenizer} has {len(words)} tokens, expected at most the {expected}; take the tokenizer of this decoder"
        )


def _with_sizes(entry: Input, sizes: Mapping[int, Any]) -> Input:
    """Return an input whose open dimensions have sizes, by their places."""
    shape = entry.shape or ()
    dims = ((dim, sizes.get(place)) for place, dim in enumerate(shape))
    return replace(
        entry, shape=tuple(size if isinstance(size, int) and not isinstance(dim, int) else dim for dim, size in dims)
    )


def _generated_tokens(folder: ModelFolder) -> FolderSamples:
    generator, most = np.random.default_rng(0), folder.vocabulary or _SMALLEST_VOCABULARY

    def sample(session: Session) -> Sample:
        names = [entry.name for entry in session.inputs if entry.name in TOKENS]
        return {name: generator.integers(0, most, (1, _GENERATED_TOKENS)) for name in names}

    return {session.file.stem: [sample(session) for _ in range(_GENERATED_SAMPLES)] for session in folder.sessions}


def _float_models(folder: Path) -> list[Path]:
    suffixes = tuple(dtype.suffix for dtype in DTYPES.values())
    return [file for file in sorted(folder.glob("*.onnx")) if not file.stem.endswith(suffixes)]


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; export the folder again") from error
    return content if isinstance(content, dict) else {}


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = config.get(key)
    return table if isinstance(table, dict) else {}


def _vocabulary(*configs: Mapping[str, Any]) -> int:
    sizes = (config.get("vocab_size") for config in configs)
    return next((size for size in sizes if isinstance(size, int)), 0)


def _copy(path: Path, place: Path) -> None:
    try:
        if path.is_dir():
            place.mkdir()
        else:
            shutil.copy2(path, place)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise ModelError(f"{path} cannot be copied: {error.strerror}; make it readable or take it away") from error


def _embed_weights(model: Path) -> None:
    """Write a model as one file, which transformers.js finds without being told of its data."""
    if data_file(model).exists():
        model.write_bytes(serialized(onnx.load(model)))
        data_file(model).unlink()


def _compare(
    sessions: Sequence[Session], built: Sequence[Path], samples: Mapping[Path, Sequence[Sample]], goal: float
) -> tuple[float, str]:
    """Return the SQNR of the worst output of all models in sequence, and a sentence where that misses the goal."""
    # A second step, which has a past, makes the same outputs once more.
    places = [(session, place) for session in sessions for place in range(2 if session.remembers else 1)]
    names = [
        f"{session.file.stem}/{name}{' with a KV cache' * place}"
        for session, place in places
        for name in session.outputs
    ]

    def flat(steps: Steps) -> list[Any]:
        return [value for session, place in places for value in steps[session.file][place].outputs]

    runs = (run_sessions(sessions, models, samples) for models in ([session.file for session in sessions], built))
    agreement = agreement_of(
        names, ((flat(float_steps), flat(built_steps)) for float_steps, built_steps in zip(*runs, strict=True))
    )
    if agreement.sound and agreement.worst_sqnr >= goal:
        return agreement.worst_sqnr, ""
    return agreement.worst_sqnr, f"all sessions together have {decibels(agreement.worst_sqnr)}, expected {goal:g}"
