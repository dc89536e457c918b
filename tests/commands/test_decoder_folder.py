"""Folders of onnxruntime-genai are written whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from cli.commands import invoke
from conftest import Build
from decoder_folders import VOCABULARY, put_decoder

from onnxq import AccuracyError, Budget, Data, Goal, Quantized, quantize
from onnxq.commands.decoder_folder import CONFIG, DecoderFolder, quantize_decoder_folder
from onnxq.errors import DataError, ModelError, OutputError
from onnxq.runtime.sessions import open_session
from onnxq.runtime.sessions import run as run_session

TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (6, 10))


@pytest.fixture
def folder(build: Build, tmp_path: Path) -> Path:
    place = tmp_path / "decoder"
    put_decoder(place, build)
    return place


def samples(tokens: np.ndarray = TOKENS) -> Data:
    return Data([{"input_ids": one[None]} for one in tokens])


def quantized(model: Path, data: Data, output: Path, decibels: float = 5.0) -> Quantized:
    budget = Budget(search="off", accuracy="off", latency_seconds=0)
    return quantize(model, data, output, scheme="int4-block32", goal=Goal(decibels), budget=budget)


def test_a_folder_is_written_with_everything_beside_the_decoder(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    done = quantize_decoder_folder(folder, output, samples(), quantized)
    assert sorted(path.name for path in output.iterdir()) == [CONFIG, "model.onnx", "model.onnx.data", "tokenizer.json"]
    assert (output / CONFIG).read_text() == (folder / CONFIG).read_text()
    assert done.report.output == str(output)
    # The decoder runs behind a past, though it was calibrated without one.
    past = {f"past_0_{one}": np.ones((1, 2, 3, 4), np.float32) for one in ("key", "value")}
    given = {"input_ids": TOKENS[:1, :2], "attention_mask": np.ones((1, 5), np.int64), **past}
    _, keys, _ = run_session(open_session(output / "model.onnx"), given)
    assert keys.shape == (1, 2, 5, 4)


def test_masks_and_an_empty_past_are_added(folder: Path) -> None:
    [first, *_] = DecoderFolder.read(folder).samples(samples().calibration, samples())
    assert first["attention_mask"].tolist() == [[1] * 10]
    assert first["past_0_key"].shape == (1, 2, 0, 4)


def test_a_mask_of_the_samples_is_kept(folder: Path) -> None:
    given = [{"input_ids": TOKENS[:1], "attention_mask": np.zeros((1, 10), np.int64)}]
    [found] = DecoderFolder.read(folder).samples(given, Data(given))
    assert not found["attention_mask"].any()


def test_the_command_takes_a_folder(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "tokens.npz", input_ids=TOKENS)
    options = ["--search", "off", "--accuracy", "off", "--latency-seconds", "0", "--min-sqnr", "5", "-q"]
    files = [folder, "--calib", tmp_path / "tokens.npz", "-o", tmp_path / "output"]
    found = invoke("quantize", *files, "--preset", "int4-block32", *options)
    assert found.stdout.strip() == str(tmp_path / "output")
    assert (tmp_path / "output" / "tokenizer.json").exists()


def test_a_refusal_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AccuracyError):
        quantize_decoder_folder(folder, tmp_path / "output", samples(), lambda *given: quantized(*given, decibels=90.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decoder"]


def test_tokens_of_another_vocabulary_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"sample 0 has token 70, expected below 64"):
        quantize_decoder_folder(folder, tmp_path / "output", samples(np.full((4, 3), 70)), quantized)


def test_a_missing_data_file_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "model.onnx.data").unlink()
    with pytest.raises(ModelError, match=r"model\.onnx\.data cannot be found"):
        quantize_decoder_folder(folder, tmp_path / "output", samples(), quantized)
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (None, "holds no genai_config.json"),
        ("{", "cannot be read"),
        ("[]", "has no model"),
        ('{"model": {"decoder": {}}}', "names the decoder None"),
        ('{"model": {"decoder": {"filename": "../model.onnx"}}}', "names the decoder '../model.onnx'"),
        ('{"model": {"decoder": {"filename": "other.onnx"}}}', "cannot be read"),
        ('{"model": {"encoder": {}, "decoder": []}}', "names the decoder None"),
    ],
)
def test_a_configuration_that_names_no_decoder_is_refused(folder: Path, config: str | None, told: str) -> None:
    if config is None:
        (folder / CONFIG).unlink()
    else:
        (folder / CONFIG).write_text(config)
    with pytest.raises(ModelError, match=told):
        DecoderFolder.read(folder)


def test_an_output_that_exists_or_lies_within_is_refused(folder: Path, tmp_path: Path) -> None:
    for place in (folder, folder / "inner", folder / "model.onnx", tmp_path / "missing" / "output"):
        with pytest.raises(OutputError):
            quantize_decoder_folder(folder, place, samples(), quantized)
    assert onnx.load(folder / "model.onnx").graph.output
