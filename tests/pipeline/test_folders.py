"""Folders of onnxruntime-genai, Optimum and transformers.js are written whole, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli.commands import invoke
from conftest import Build
from decoder_folders import VOCABULARY, put_decoder

from onnxq import AccuracyError, Budget, Data, Goal, Quantized, quantize
from onnxq.errors import DataError, ModelError, OutputError
from onnxq.pipeline.folders import GENAI_CONFIG, open_folder, pairs_of, quantize_folder
from onnxq.pipeline.sessions import calibration_samples
from onnxq.runtime.sessions import open_session
from onnxq.runtime.sessions import run as run_session

TWENTY = np.random.default_rng(1).integers(0, VOCABULARY, (20, 10))
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
    [done] = quantize_folder(folder, output, samples(), quantized).values()
    assert sorted(path.name for path in output.iterdir()) == [GENAI_CONFIG, "model.onnx", "tokenizer.json"]
    assert (output / GENAI_CONFIG).read_text() == (folder / GENAI_CONFIG).read_text()
    assert done.report.output == str(output / "model.onnx")
    # The decoder runs with a KV cache, though it was calibrated without one.
    past = {f"past_0_{one}": np.ones((1, 2, 3, 4), np.float32) for one in ("key", "value")}
    given = {"input_ids": TOKENS[:1, :2], "attention_mask": np.ones((1, 5), np.int64), **past}
    _, keys, _ = run_session(open_session(output / "model.onnx"), given)
    assert keys.shape == (1, 2, 5, 4)


def test_masks_and_a_past_are_added(folder: Path) -> None:
    found = open_folder(folder)
    [session] = found.sessions
    given = calibration_samples(found.sessions, found.samples([{"input_ids": one[None]} for one in TWENTY]))
    assert len(given[session.file]) == 2 * 8 + 12
    first, second, *_, last = given[session.file]
    assert first["attention_mask"].tolist() == [[1] * 9]
    assert first["past_0_key"].shape == (1, 2, 0, 4)
    assert second["input_ids"].tolist() == TWENTY[:1, -1:].tolist()
    assert second["attention_mask"].tolist() == [[1] * 10]
    assert second["past_0_value"].shape == (1, 2, 9, 4)
    assert last["input_ids"].shape == (1, 10)
    assert last["past_0_key"].shape == (1, 2, 0, 4)


def test_the_configuration_tells_the_size_of_a_head(build: Build, tmp_path: Path) -> None:
    put_decoder(tmp_path / "open", build, "kv_cache_dim")
    found = open_folder(tmp_path / "open")
    [given] = calibration_samples(found.sessions, found.samples(samples().calibration)).values()
    assert given[0]["past_0_key"].shape == (1, 2, 0, 4)


def test_a_mask_of_the_samples_is_kept(folder: Path) -> None:
    given = [{"input_ids": TOKENS[:1], "attention_mask": np.zeros((1, 10), np.int64)}]
    [[found]] = open_folder(folder).samples(given).values()
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
        quantize_folder(folder, tmp_path / "output", samples(), lambda *given: quantized(*given, decibels=90.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decoder"]


def test_tokens_of_another_vocabulary_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a sample has token 70, expected below 64"):
        quantize_folder(folder, tmp_path / "output", samples(np.full((4, 3), 70)), quantized)


@pytest.mark.parametrize("words", [{f"w{one}": one for one in range(VOCABULARY + 1)}, [["w", 0.0]] * (VOCABULARY + 1)])
def test_a_tokenizer_of_another_decoder_is_refused(folder: Path, words: object) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    with pytest.raises(ModelError, match=r"tokenizer\.json has 65 tokens, expected at most the 64 of vocab_size in"):
        open_folder(folder)


@pytest.mark.parametrize(
    "tokenizer", [{"model": {"vocab": {"w0": 0}}, "added_tokens": [{"id": VOCABULARY}]}, {"model": 1}]
)
def test_other_tokenizers_are_left_alone(folder: Path, tokenizer: object) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert open_folder(folder).vocabulary == VOCABULARY


def test_a_tokenizer_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: .*; export the folder again"):
        open_folder(folder)


@pytest.mark.parametrize("size", [VOCABULARY - 1, VOCABULARY + 1])
def test_a_configuration_of_another_decoder_is_refused(folder: Path, size: int) -> None:
    config = json.loads((folder / GENAI_CONFIG).read_text())
    config["model"]["vocab_size"] = size
    (folder / GENAI_CONFIG).write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=rf"has 64 logits a token, expected the {size} of vocab_size in .*genai_config"
    ):
        open_folder(folder)


def test_a_missing_data_file_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "model.onnx.data").unlink()
    with pytest.raises(ModelError, match=r"model\.onnx\.data cannot be found"):
        quantize_folder(folder, tmp_path / "output", samples(), quantized)
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "cannot be read"),
        ("[]", "has no model"),
        ('{"model": {"decoder": {}}}', "names the decoder None"),
        ('{"model": {"decoder": {"filename": "../model.onnx"}}}', "names the decoder '../model.onnx'"),
        (
            '{"model": {"decoder": {"filename": "other.onnx"}}}',
            "lacks other.onnx, which genai_config.json names",
        ),
        ('{"model": {"encoder": {}, "decoder": []}}', "names the decoder None"),
    ],
)
def test_a_configuration_that_names_no_decoder_is_refused(folder: Path, config: str, told: str) -> None:
    (folder / GENAI_CONFIG).write_text(config)
    with pytest.raises(ModelError, match=told):
        open_folder(folder)


def test_an_output_that_exists_or_lies_within_is_refused(folder: Path, tmp_path: Path) -> None:
    for place in (folder, folder / "inner", folder / "model.onnx", tmp_path / "missing" / "output"):
        with pytest.raises(OutputError):
            quantize_folder(folder, place, samples(), quantized)
    assert onnx.load(folder / "model.onnx").graph.output


PAIR = {
    "encoder_model": (
        "(int64[batch, length] input_ids, int64[batch, length] attention_mask) "
        "=> (float[batch, length, 64] last_hidden_state) { last_hidden_state = Gather(table, input_ids) }",
        {"table": (VOCABULARY, 64)},
    ),
    "decoder_model": (
        """(int64[batch, steps] input_ids, float[batch, length, 64] encoder_hidden_states)
            => (float[batch, steps, 64] logits) {
            words = Gather(table, input_ids)
            context = ReduceMean <axes = [1], keepdims = 1> (encoder_hidden_states)
            both = Add(words, context)
            logits = MatMul(both, head)
        }""",
        {"table": (VOCABULARY, 64), "head": (64, VOCABULARY)},
    ),
}


@pytest.fixture
def pair(build: Build, tmp_path: Path) -> Path:
    """A folder of an encoder and a decoder, as Optimum writes it, and samples for both."""
    place, tokens = tmp_path / "pair", tmp_path / "tokens"
    place.mkdir()
    tokens.mkdir()
    for name, (text, weights) in PAIR.items():
        onnx.save(build(text, **weights), place / f"{name}.onnx")
        np.savez(tokens / f"{name}.npz", input_ids=TWENTY[:8, None])
    (place / "config.json").write_text(f'{{"vocab_size": {VOCABULARY}}}')
    return place


OPTIONS = ("--search", "off", "--accuracy", "off", "--latency-seconds", 0, "--preset", "int4-block32", "-q")


def test_models_of_optimum_keep_their_names(pair: Path, tmp_path: Path) -> None:
    files = [pair, "--calib", tmp_path / "tokens", "-o", tmp_path / "output", "--report", tmp_path / "report.json"]
    assert invoke("quantize", *files, *OPTIONS, "--min-sqnr", 5).stdout.strip() == str(tmp_path / "output")
    written = {path.name for path in (tmp_path / "output").iterdir()}
    assert written == {"config.json", "encoder_model.onnx", "decoder_model.onnx"}
    assert {path.name for path in tmp_path.glob("report*")} == {f"report.{name}.json" for name in PAIR}


def test_models_of_transformers_js_have_the_suffix_of_their_dtype(pair: Path, tmp_path: Path) -> None:
    (pair / "onnx").mkdir()
    for name in PAIR:
        (pair / f"{name}.onnx").rename(pair / "onnx" / f"{name}.onnx")
    output = tmp_path / "output"
    quantize_folder(pair, output, Data(tmp_path / "tokens"), quantized, scheme="int4-block32", goal=Goal(5))
    assert {path.name for path in (output / "onnx").iterdir()} == {f"{name}_q4.onnx" for name in PAIR}
    assert (output / "config.json").exists()


@pytest.mark.parametrize("kind", ["genai", "optimum", "web"])
def test_folders_are_verified_compared_timed_and_inspected(kind: str, pair: Path, build: Build, tmp_path: Path) -> None:
    tokens, place, output, names = tmp_path / "tokens", pair, tmp_path / "output", [f"{name}.onnx" for name in PAIR]
    if kind == "genai":
        place, tokens, names = tmp_path / "decoder", tmp_path / "tokens.npz", ["model.onnx"]
        put_decoder(place, build)
        np.savez(tokens, input_ids=TOKENS)
    if kind == "web":
        (pair / "onnx").mkdir()
        names = [f"onnx/{name}" for name in names]
        for name in names:
            (pair / Path(name).name).rename(pair / name)
    quantize_folder(place, output, Data(tokens), quantized, scheme="int4-block32", goal=Goal(5))

    def results(*arguments: object) -> list[str]:
        result = json.loads(invoke(*arguments, "--json").stdout)
        return sorted(result) if len(names) > 1 else names if "error" not in result else []

    written = [name.replace(".onnx", "_q4.onnx") for name in names] if kind == "web" else names
    assert results("compare", place, output, "--data", tokens) == sorted(names)
    assert results("bench", place, output, "--data", tokens, "--latency-seconds", 0.01) == sorted(names)
    assert results("verify", output) == results("inspect", output) == sorted(written)
    lines = invoke("verify", output).stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == sorted(written)
    (output / written[0]).unlink()
    lacking = "lacks model.onnx" if kind == "genai" else f"made from {Path(names[0]).name}"
    with pytest.raises(ModelError, match=lacking):
        list(pairs_of(place, output, Data(tokens)))


def test_models_that_miss_the_goal_together_are_refused(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(AccuracyError, match=r"all sessions together have .* dB, expected 90"):
        quantize_folder(pair, tmp_path / "output", Data(tmp_path / "tokens"), quantized, goal=Goal(90))
    assert not (tmp_path / "output").exists()


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no float model, expected genai_config\.json"):
        open_folder(tmp_path)


def test_a_file_that_holds_no_model_is_refused(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.onnx holds no model, it is empty or cut short"):
        open_folder(folder)


def test_settings_of_another_version_are_left_alone(folder: Path) -> None:
    config = json.loads((folder / GENAI_CONFIG).read_text())
    config["model"]["decoder"] |= {"inputs": ["input_ids"], "outputs": 3, "num_hidden_layers": "many", "new": {}}
    (folder / GENAI_CONFIG).write_text(json.dumps(config))
    assert [one.file.name for one in open_folder(folder).sessions] == ["model.onnx"]


def test_settings_of_a_newer_version_are_copied(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / GENAI_CONFIG).read_text())
    config["model"] |= {"type": "of_tomorrow", "new": [1]}
    config |= {"version": 9, "engine": {}}
    (folder / GENAI_CONFIG).write_text(json.dumps(config))
    quantize_folder(folder, tmp_path / "output", samples(), quantized)
    assert json.loads((tmp_path / "output" / GENAI_CONFIG).read_text()) == config


@pytest.mark.parametrize("change", ["operator", "format"])
def test_a_model_of_a_newer_runtime_is_told(folder: Path, tmp_path: Path, change: str) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    if change == "operator":
        model.graph.node[0].op_type = "NewGather"
    else:
        model.ir_version = 99
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(ModelError, match="install a newer onnxruntime, or export the model for this one"):
        quantize_folder(folder, tmp_path / "output", samples(), quantized)
    assert not (tmp_path / "output").exists()


def test_a_weight_of_nan_is_named(folder: Path, tmp_path: Path) -> None:
    with (folder / "model.onnx.data").open("r+b") as file:
        file.write(np.float32(np.nan).tobytes())
    with pytest.raises(ModelError, match=r"weight table of node .* holds NaN or infinity"):
        quantize_folder(folder, tmp_path / "output", samples(), quantized)


@pytest.mark.parametrize("kilobytes", [1, 3])
def test_a_full_disk_leaves_nothing(folder: Path, tmp_path: Path, kilobytes: int) -> None:
    resource = pytest.importorskip("resource")
    (folder / "tokenizer.json").write_text("{}" + " " * 2000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1000, before[1]))
    try:
        with pytest.raises(OutputError, match=r"output cannot be written: .*; free disk space or choose another place"):
            quantize_folder(folder, tmp_path / "output", samples(), quantized)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decoder"]


KILLED = """
import os, sys
from pathlib import Path
from onnxq import Data
from onnxq.pipeline.folders import quantize_folder

def run(file, data, staged):
    staged.write_bytes(file.read_bytes()[:100])
    os.kill(os.getpid(), 9)

samples = Data([{"input_ids": __import__("numpy").zeros((1, 4), "int64")}])
quantize_folder(Path(sys.argv[1]), Path(sys.argv[2]), samples, run)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_a_killed_process_leaves_no_output_and_the_next_run_works(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(output)], check=False, timeout=120)
    assert killed.returncode == -9
    assert not output.exists()
    quantize_folder(folder, output, samples(), quantized)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decoder", "output"]
