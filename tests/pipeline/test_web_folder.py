"""Sessions of a pipeline: their order, what each is given of the others, and decoders that read their own past."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli.commands import CALIB, MODELS, invoke
from conftest import Build, Samples
from node_packages import PLACE
from seq2seq import export_pair

from onnxq import Budget
from onnxq.errors import DataError, ModelError, SchemeError
from onnxq.pipeline.folders import DTYPES, Written, write_web_folder
from onnxq.pipeline.sessions import open_sessions, run_sessions, samples_of
from onnxq.runtime.node import node_program
from onnxq.runtime.sessions import open_session, run

ENCODER = (
    "(int64[batch, length] ids) => (float[batch, length, 8] last_hidden_state) { last_hidden_state = Gather(t, ids) }"
)
# Its new words are added up with what it has seen before, so that one word less or twice shows.
DECODER = """(int64[batch, steps] input_ids, float[batch, past, 8] past_key_values_0{more})
    => (float[batch, steps, 8] logits, float[batch, all, 8] present_0) {{
    words = Gather(t, input_ids)
    present_0 = Concat <axis = 1> (past_key_values_0, words)
    total = ReduceSum <keepdims = 1> (present_0, axis)
    logits = Add(words, total)
}}"""
CONTEXT = ", float[batch, length, 8] encoder_hidden_states"


def saved(build: Build, folder: Path, name: str, text: str) -> Path:
    model = build(text, t=(16, 8), axis=np.array([1])) if "axis)" in text else build(text, t=(16, 8))
    onnx.save(model, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


def ids(*words: int) -> np.ndarray:
    return np.array([words])


def test_sessions_stand_behind_those_that_make_what_they_read(build: Build, tmp_path: Path) -> None:
    first = """(float[1, 4, 8] encoder_hidden_states) => (float[1, 4, 8] present_0) {
        present_0 = Relu(encoder_hidden_states)
    }"""
    files = [
        saved(build, tmp_path, "a_with_past", DECODER.format(more="")),
        saved(build, tmp_path, "b_decoder", first),
        saved(build, tmp_path, "c_encoder", ENCODER),
    ]
    sessions = open_sessions(files)
    assert [one.file.stem for one in sessions] == ["c_encoder", "b_decoder", "a_with_past"]
    assert not any(one.remembers for one in sessions)
    data = {"c_encoder": [{"ids": ids(1, 2, 3, 4)}], "a_with_past": [{"input_ids": ids(5)}]}
    samples = samples_of(sessions, data)
    assert samples[files[1]] == [{}]
    [steps] = run_sessions(sessions, [one.file for one in sessions], samples)
    [last] = steps[files[0]]
    assert np.array_equal(last.inputs["past_key_values_0"], steps[files[1]][0].outputs[0])


def test_a_decoder_reads_the_past_that_it_has_made(build: Build, tmp_path: Path) -> None:
    file = saved(build, tmp_path, "model", DECODER.format(more=""))
    [session] = open_sessions([file])
    assert session.remembers
    [steps] = run_sessions([session], [file], samples_of([session], [{"input_ids": ids(3, 1, 4)}]))
    first, second = steps[file]
    assert first.inputs["past_key_values_0"].shape == (1, 0, 8)
    assert first.inputs["input_ids"].tolist() == [[3, 1]]
    assert second.inputs["input_ids"].tolist() == [[4]]
    assert np.array_equal(second.inputs["past_key_values_0"], first.outputs[1])
    whole = run(open_session(file), {"input_ids": ids(3, 1, 4), "past_key_values_0": np.zeros((1, 0, 8), np.float32)})
    assert np.allclose(second.outputs[0][:, 0], whole[0][:, -1])
    with pytest.raises(DataError, match="a sample of model has one token as 'input_ids', expected two or more"):
        list(run_sessions([session], [file], samples_of([session], [{"input_ids": ids(3)}])))


def test_a_decoder_that_is_two_in_one_is_told_whether_there_is_a_past(build: Build, tmp_path: Path) -> None:
    text = DECODER.format(more=", bool[1] use_cache_branch" + CONTEXT).replace(
        "logits = Add(words, total)",
        "branch = Cast <to = 1> (use_cache_branch) mean = ReduceSum (encoder_hidden_states, axis) "
        "moved = Add(words, mean) both = Add(moved, total) logits = Mul(both, branch)",
    )
    files = [saved(build, tmp_path, "decoder_model_merged", text), saved(build, tmp_path, "encoder_model", ENCODER)]
    sessions = open_sessions(files)
    data = {"encoder_model": [{"ids": ids(1, 2)}], "decoder_model_merged": [{"input_ids": ids(3, 1)}]}
    [steps] = run_sessions(sessions, [one.file for one in sessions], samples_of(sessions, data))
    first, second = steps[files[0]]
    assert first.inputs["use_cache_branch"].tolist() == [False]
    assert second.inputs["use_cache_branch"].tolist() == [True]
    assert np.array_equal(second.inputs["encoder_hidden_states"], steps[files[1]][0].outputs[0])
    assert not first.outputs[0].any()
    assert second.outputs[0].any()


QUICK = Budget(search="off", accuracy="off", latency_seconds=0)
MODULES = Path(PLACE) / "node_modules"
# Prints the first output of a model of one's own dtype, as transformers.js loads and runs it.
SCRIPT = """
import { AutoModel, Tensor, env } from "@huggingface/transformers";
const [place, dtype] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = place;
const model = await AutoModel.from_pretrained("folder", { dtype });
const ids = [1, 5, 9, 2].map(BigInt);
const [input_ids, attention_mask] = [ids, ids.map(() => 1n)].map((one) => new Tensor("int64", one, [1, 4]));
const found = await model({ input_ids, attention_mask });
console.log(JSON.stringify([...Object.values(found)[0].data]));
process.exit(0);
"""
# Prints what a pair makes of some words at once, and what it goes on with, one word after the other.
GENERATING = """
import { AutoModelForSeq2SeqLM, Tensor, env } from "@huggingface/transformers";
const [place, dtype] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = place;
const model = await AutoModelForSeq2SeqLM.from_pretrained("pair", { dtype });
const row = (values) => new Tensor("int64", values.map(BigInt), [1, values.length]);
const [input_ids, attention_mask] = [row([5, 9, 17, 2, 60, 33]), row([1, 1, 1, 1, 1, 1])];
const found = await model({ input_ids, attention_mask, decoder_input_ids: row([0, 7, 11]) });
const words = await model.generate({ input_ids, attention_mask, max_new_tokens: 8, min_new_tokens: 8 });
console.log(JSON.stringify({ logits: [...found.logits.data], words: [...words.data].map(Number) }));
process.exit(0);
"""
needs_transformers = pytest.mark.skipif(
    node_program() is None or not (MODULES / "@huggingface" / "transformers").is_dir(),
    reason="@huggingface/transformers is not installed into tests/node",
)


@pytest.fixture
def encoder(build: Build, tmp_path: Path) -> Path:
    """A folder with one session, that embeds words."""
    model = build(
        """(int64[batch, length] input_ids, int64[batch, length] attention_mask)
            => (float[batch, length, 64] last_hidden_state) {
            words = Gather(table, input_ids)
            mask = Cast <to = 1> (attention_mask)
            axes = Constant <value_ints = [2]> ()
            wide = Unsqueeze(mask, axes)
            masked = Mul(words, wide)
            hidden = MatMul(masked, w0)
            bent = Relu(hidden)
            last_hidden_state = MatMul(bent, w1)
        }""",
        table=(128, 64),
        w0=(64, 128),
        w1=(128, 64),
    )
    folder = tmp_path / "folder"
    (folder / "onnx").mkdir(parents=True)
    onnx.save(model, folder / "onnx" / "model.onnx")
    config = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 128}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def pair(encoder: Path, build: Build) -> Path:
    """A folder with two sessions, of which the second reads what the first makes."""
    decoder = build(
        """(int64[batch, steps] input_ids, float[batch, length, 64] encoder_hidden_states)
            => (float[batch, steps, 128] logits) {
            words = Gather(table, input_ids)
            context = ReduceMean <axes = [1], keepdims = 1> (encoder_hidden_states)
            both = Add(words, context)
            logits = MatMul(both, w)
        }""",
        table=(128, 64),
        w=(64, 128),
    )
    (encoder / "onnx" / "model.onnx").rename(encoder / "onnx" / "encoder_model.onnx")
    onnx.save(decoder, encoder / "onnx" / "decoder_model.onnx")
    return encoder


def words(count: int, *, masked: bool) -> Samples:
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, 128, (1, 6)) for _ in range(count)]
    return [{"input_ids": one, **({"attention_mask": np.ones_like(one)} if masked else {})} for one in ids]


def test_all_dtypes_have_the_names_that_are_looked_for(encoder: Path) -> None:
    found = list(write_web_folder(encoder, words(8, masked=True), goal=12, budget=QUICK))
    assert [one.refused for one in found] == [""] * len(DTYPES)
    suffixes = ("_quantized", "_int8", "_uint8", "_q4", "_q4f16", "_fp16", "_bnb4")
    assert [one.files[0].name for one in found] == [f"model{suffix}.onnx" for suffix in suffixes]
    assert sum(one.bytes for one in found) == sum(one.files[0].stat().st_size for one in found)
    whole = (encoder / "onnx" / "model.onnx").stat().st_size
    assert all(one.bytes < (0.55 if one.dtype == "fp16" else 0.4) * whole for one in found)
    for one in found:
        onnx.checker.check_model(one.files[0])
    # What was written is not taken for a float model the next time.
    again = list(write_web_folder(encoder, words(8, masked=True), dtypes=["int8"], budget=QUICK))
    assert [len(one.files) for one in again] == [1]


def test_sessions_are_calibrated_and_gated_together(pair: Path) -> None:
    data = {"encoder_model": words(8, masked=True), "decoder_model": words(8, masked=False)}
    [found] = write_web_folder(pair, data, dtypes=["q8"], budget=QUICK)
    assert {file.name for file in found.files} == {"encoder_model_quantized.onnx", "decoder_model_quantized.onnx"}
    assert found.sqnr is not None

    def logits(suffix: str) -> np.ndarray:
        first, second = (open_session(pair / "onnx" / f"{name}{suffix}.onnx") for name in data)
        hidden = run(first, data["encoder_model"][0])[0]
        return np.asarray(run(second, {**data["decoder_model"][0], "encoder_hidden_states": hidden})[0])

    expected = logits("")
    nsr = np.square(expected - logits("_quantized")).sum() / np.square(expected).sum()
    assert 20 < -10 * np.log10(nsr) < 60


def test_what_is_too_noisy_together_is_not_written(pair: Path) -> None:
    data = {"encoder_model": words(8, masked=True), "decoder_model": words(8, masked=False)}
    [apart] = write_web_folder(pair, data, dtypes=["int8"], goal=1, budget=QUICK)
    assert apart.sqnr is not None
    for file in apart.files:
        file.unlink()
    [found] = write_web_folder(pair, data, dtypes=["int8"], goal=apart.sqnr + 0.1, budget=QUICK)
    assert found.refused
    assert found.files == ()
    assert {file.name for file in (pair / "onnx").iterdir()} == {"encoder_model.onnx", "decoder_model.onnx"}


def test_samples_in_a_folder_are_called_after_their_session(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "calib").mkdir()
    for name, masked in (("encoder_model", True), ("decoder_model", False)):
        stacked = {key: np.stack([one[key] for one in words(8, masked=masked)]) for key in words(1, masked=masked)[0]}
        np.savez(tmp_path / "calib" / f"{name}.npz", **stacked)
    [found] = write_web_folder(pair, tmp_path / "calib", dtypes=["int8"], budget=QUICK)
    assert len(found.files) == 2
    (tmp_path / "calib" / "decoder_model.npz").unlink()
    with pytest.raises(DataError, match="calib holds no samples for decoder_model, expected a folder"):
        list(write_web_folder(pair, tmp_path / "calib", budget=QUICK))


def test_bad_input_is_told_in_a_sentence(pair: Path, tmp_path: Path) -> None:
    first = words(8, masked=True)
    with pytest.raises(SchemeError, match=r"dtype 'q5' is not one of .*did you mean"):
        list(write_web_folder(pair, first, dtypes=["q5"]))
    with pytest.raises(DataError, match="the samples are of one session, expected a dictionary"):
        list(write_web_folder(pair, first))
    with pytest.raises(DataError, match="there are no samples for decoder_model"):
        list(write_web_folder(pair, {"encoder_model": first}))
    with pytest.raises(DataError, match="8 of encoder_model, 2 of decoder_model; expected as many"):
        list(write_web_folder(pair, {"encoder_model": first, "decoder_model": words(2, masked=False)}))
    with pytest.raises(ModelError, match=r"holds no float model, expected genai_config.json"):
        list(write_web_folder(tmp_path, first))
    (pair / "onnx" / "decoder_model.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"decoder_model.onnx cannot be read"):
        list(write_web_folder(pair, first))


@needs_transformers
def test_transformers_js_reads_every_dtype(encoder: Path, tmp_path: Path) -> None:
    list(write_web_folder(encoder, words(8, masked=True), goal=12, budget=QUICK))
    (tmp_path / "node_modules").symlink_to(MODULES.resolve())
    script = tmp_path / "script.mjs"
    script.write_text(SCRIPT, encoding="utf-8")

    def embedded(dtype: str) -> np.ndarray:
        command = [str(node_program()), str(script), str(tmp_path), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return np.array(json.loads(done.stdout.splitlines()[-1]))

    expected = embedded("fp32")
    for dtype in DTYPES:
        nsr = np.square(expected - embedded(dtype)).sum() / np.square(expected).sum()
        assert -10 * np.log10(nsr) > 10


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformers_js_generates_with_a_quantized_past(tmp_path: Path) -> None:
    export_pair(tmp_path / "pair")
    data = {"encoder_model": words(12, masked=True), "decoder_model_merged": words(12, masked=False)}
    for one, other in zip(*data.values(), strict=True):
        other["encoder_attention_mask"] = one["attention_mask"]
    [written] = write_web_folder(tmp_path / "pair", data, dtypes=["q8"], budget=QUICK)
    assert written.sqnr is not None
    (tmp_path / "node_modules").symlink_to(MODULES.resolve())
    script = tmp_path / "script.mjs"
    script.write_text(GENERATING, encoding="utf-8")
    found = {}
    for dtype in ("fp32", "q8"):
        command = [str(node_program()), str(script), str(tmp_path), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        found[dtype] = json.loads(done.stdout.splitlines()[-1])
    expected, logits = (np.array(one["logits"]) for one in found.values())
    nsr = np.square(expected - logits).sum() / np.square(expected).sum()
    assert -10 * np.log10(nsr) > 20
    assert found["q8"]["words"] == found["fp32"]["words"]
    assert len(found["q8"]["words"]) == 9


def test_weights_outside_of_a_model_come_into_one_file(encoder: Path) -> None:
    file = encoder / "onnx" / "model.onnx"
    onnx.save(onnx.load(file), file, save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    for written in write_web_folder(encoder, words(8, masked=True), dtypes=["int8", "q4f16"], goal=12, budget=QUICK):
        assert written.bytes == written.files[0].stat().st_size
        assert not any(tensor.external_data for tensor in onnx.load(written.files[0]).graph.initializer)
    assert len(list((encoder / "onnx").iterdir())) == 4


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with one session, that classifies images."""
    (tmp_path / "images" / "onnx").mkdir(parents=True)
    shutil.copy(MODELS / "resnet.onnx", tmp_path / "images" / "onnx" / "model.onnx")
    return tmp_path / "images"


def test_quantize_writes_dtypes_and_prints_them(images: Path) -> None:
    options = ("--calib", CALIB, "--limit", 24, "--search", "off", "--latency-seconds", 0, "--dtypes", "int8,fp16")
    text = invoke("quantize", images, *options).stdout
    assert "model_int8.onnx" in text
    assert "model_fp16.onnx" in text
    refused = invoke("quantize", images, *options, "--min-sqnr", 55, "--json")
    assert refused.exit_code == 3
    int8, fp16 = json.loads(refused.stdout)
    assert int8["files"] == []
    assert "55" in int8["refused"]
    assert fp16["refused"] == ""
    assert fp16["sqnr"] > 55


def test_a_single_model_gets_its_dtypes_beside_it(images: Path) -> None:
    invoke("quantize", images / "onnx" / "model.onnx", "--calib", CALIB, "--limit", 8, "--dtypes", "fp16")
    weights = onnx.load(images / "onnx" / "model_fp16.onnx").graph.initializer
    assert {weight.data_type for weight in weights if weight.dims} >= {onnx.TensorProto.FLOAT16}


@pytest.mark.parametrize("words", [("--preset", "int8"), ("--output", "x"), ("--report", "x"), ("--dry-run",)])
def test_quantize_refuses_options_that_dtypes_replace(words: tuple[str, ...], images: Path) -> None:
    result = invoke("quantize", images, "--calib", CALIB, "--dtypes", "q8", *words)
    assert result.exit_code == 2
    assert f"--dtypes goes without {words[0]}" in result.stderr


def test_equal_outputs_are_a_word_that_json_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written("fp16", (tmp_path / "model_fp16.onnx",), 8, math.inf)
    monkeypatch.setattr("onnxq.pipeline.folders.write_web_folder", lambda *_, **__: [written])
    reported = invoke("quantize", tmp_path, "--calib", CALIB, "--dtypes", "fp16", "--json").stdout
    (found,) = json.loads(reported, parse_constant=pytest.fail)
    assert (found["sqnr"], found["files"]) == ("Infinity", [str(tmp_path / "model_fp16.onnx")])


def test_the_help_of_quantize_names_every_dtype() -> None:
    assert ",".join(DTYPES) in "".join(invoke("quantize", "--help-all").stdout.split())
