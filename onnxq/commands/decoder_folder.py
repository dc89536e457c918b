"""Folders that onnxruntime-genai loads: a decoder beside its configuration and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from onnxq.calibration.data import Data, SamplesLike
from onnxq.data.inputs import Input, Sample, model_inputs, required
from onnxq.data.samples import evenly, open_samples
from onnxq.errors import DataError, ModelError, OutputError
from onnxq.ir.protos import stored_tensors
from onnxq.system.publish import staging

if TYPE_CHECKING:
    from onnxq.pipeline import Quantized

CONFIG = "genai_config.json"
# What is read of the samples is in memory.
_MOST_SAMPLES = 64
_TOKENS, _MASK = "input_ids", "attention_mask"


@dataclass(frozen=True, eq=False)
class DecoderFolder:
    """A folder of onnxruntime-genai.

    Attributes:
        path: the folder.
        model: file of the decoder.
        data: names of the files that hold its weights.
        inputs: inputs of the decoder.
        past: names of the inputs that hold the keys and values of earlier tokens.
        vocabulary: number of tokens; 0 if the configuration does not tell.
        head_size: of the keys and values.
    """

    path: Path
    model: Path
    data: frozenset[str]
    inputs: tuple[Input, ...]
    past: frozenset[str]
    vocabulary: int
    head_size: int

    @classmethod
    def read(cls, folder: Path) -> DecoderFolder:
        """Read the configuration and the interface of the decoder.

        Raises:
            ModelError: the folder has no configuration or decoder, or one that cannot be read.
        """
        config = _config(folder)
        decoder = config["model"].get("decoder")
        decoder = decoder if isinstance(decoder, dict) else {}
        name = decoder.get("filename")
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(
                f"{folder / CONFIG} names the decoder {name!r}, expected the name of a file beside it in "
                "model.decoder.filename; folders of several models are quantized file by file"
            )
        file = folder / name
        try:
            model = onnx.load(file, load_external_data=False)
        except (DecodeError, OSError) as error:
            raise ModelError(f"{file}, the decoder of {folder / CONFIG}, cannot be read: {error}") from error
        locations = (
            entry.value for tensor in stored_tensors(model) for entry in tensor.external_data if entry.key == "location"
        )
        inputs, layers = required(model_inputs(model)), decoder.get("num_hidden_layers", 0)
        patterns = [decoder.get("inputs", {}).get(key, "") for key in ("past_key_names", "past_value_names")]
        past = {pattern.replace("%d", str(layer)) for pattern in patterns for layer in range(layers)}
        known = past & {one.name for one in inputs}
        vocabulary, head_size = config["model"].get("vocab_size", 0), decoder.get("head_size", 0)
        return cls(folder, file, frozenset(locations), inputs, frozenset(known), vocabulary, head_size)

    def samples(self, given: SamplesLike, data: Data) -> list[Sample]:
        """Return samples of texts without a past; samples need to hold tokens only.

        Args:
            given: the calibration or the validation samples.
            data: how they are read.

        Raises:
            DataError: the samples do not fit the decoder, or hold tokens that it does not have.
        """
        optional = (replace(one, optional=one.name == _MASK) for one in self.inputs if one.name not in self.past)
        read = open_samples(given, [*optional], limit=data.limit, source=data.source, batch=data.rows)
        return [self._complete(sample, place) for place, sample in enumerate(evenly(read, _MOST_SAMPLES))]

    def _complete(self, sample: Sample, place: int) -> Sample:
        tokens = sample.get(_TOKENS)
        if tokens is None:
            return sample
        largest = int(tokens.max(initial=0))
        if self.vocabulary and largest >= self.vocabulary:
            raise DataError(
                f"sample {place} has token {largest}, expected below {self.vocabulary}, the vocab_size of "
                f"{self.path / CONFIG}; take the tokenizer of this folder"
            )
        wanted = {one.name: one for one in self.inputs}
        mask = wanted.get(_MASK)
        masked = {_MASK: np.ones(tokens.shape, mask.dtype)} if mask is not None and _MASK not in sample else {}
        return {**sample, **masked, **{name: self._none(wanted[name], len(tokens)) for name in self.past}}

    def _none(self, past: Input, batch: int) -> np.ndarray[Any, Any]:
        """Return the past of no tokens; its axes are batch, heads, tokens, head size."""
        dims = past.shape or ()
        sizes = {0: batch, len(dims) - 1: self.head_size}
        return np.zeros(
            [dim if isinstance(dim, int) else sizes.get(axis, 0) for axis, dim in enumerate(dims)], past.dtype
        )


def quantize_decoder_folder(
    folder: Path, output: Path, data: Data, run: Callable[[Path, Data, Path], Quantized]
) -> Quantized:
    """Write a folder with a quantized decoder that onnxruntime-genai loads.

    Files other than the decoder are copied. The folder appears when the decoder is verified.

    Args:
        folder: folder with a `genai_config.json`.
        output: folder to write; it must not exist, or be empty.
        data: samples of tokens; masks and an empty past are added.
        run: quantizes a model file with samples to an output file.

    Raises:
        ModelError: the folder cannot be read.
        DataError: the samples do not fit.
        OutputError: the output exists, or cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OutputError(f"output {output} exists; give the name of a new folder")
    if not output.parent.is_dir():
        raise OutputError(f"folder {output.parent} of the output does not exist; create it first")
    if output.resolve().is_relative_to(folder.resolve()):
        raise OutputError(f"output {output} lies in the folder that is read; give another place")
    found = DecoderFolder.read(folder)
    validation = None if data.validation is None else found.samples(data.validation, data)
    samples = replace(
        data,
        calibration=found.samples(data.calibration, data),
        validation=validation,
        source=None,
        limit=None,
        batch=None,
    )
    with staging(output) as place:
        staged = place / "folder"
        shutil.copytree(folder, staged, ignore=lambda _, names: found.data.union({found.model.name}) & {*names})
        done = run(found.model, samples, staged / found.model.name)
        try:
            staged.replace(output)
        except OSError as error:
            raise OutputError(f"output {output} cannot be written: {error.strerror or error}") from error
    files = replace(done.report.files, output=str(output))
    return replace(done, report=replace(done.report, files=files))


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{folder} holds no {CONFIG}, expected a folder of onnxruntime-genai; give the model file, or use "
            "onnxq web-folder for transformers.js"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; export the folder again") from error
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise ModelError(f"{path} has no model, expected what onnxruntime-genai writes; export the folder again")
    return found
