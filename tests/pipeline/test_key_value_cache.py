"""A key-value cache of int8: scales follow the samples, and the decoder is judged and certified with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli.commands import invoke
from conftest import Build
from decoder_folders import VOCABULARY, put_attention, put_decoder
from onnx import numpy_helper

from onnxq import AccuracyError, Budget, Data, Goal, Quantized, quantize, verify
from onnxq.certificate.certificate import read_certificate
from onnxq.errors import DataError, SchemeError
from onnxq.evaluation.agreement import compare_files
from onnxq.evaluation.latency import bench
from onnxq.evaluation.metrics import Metric
from onnxq.pipeline import key_value_cache
from onnxq.pipeline.folders import GENAI_CONFIG, quantize_folder
from onnxq.runtime.sessions import attends_to_integers, open_session, run

TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (6, 10))
OPTIONS = ("--search", "off", "--accuracy", "off", "--latency-seconds", 0, "--preset", "int8-storage", "-q")
Run = Callable[[Path, Data, Path], Quantized]
recent = pytest.mark.skipif(not attends_to_integers(), reason="an old onnxruntime")


@pytest.fixture
def folder(build: Build, tmp_path: Path) -> Path:
    put_attention(tmp_path / "decoder", build)
    return tmp_path / "decoder"


@pytest.fixture(scope="module")
def written(build: Build, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Quantized]:
    """Return the float decoder, the one with a cache of int8, and how it came about."""
    place = tmp_path_factory.mktemp("written")
    put_attention(place / "decoder", build)
    [done] = quantize_folder(place / "decoder", place / "output", data(), built, cache="int8").values()
    return place / "decoder" / "model.onnx", place / "output" / "model.onnx", done


def data(**options: object) -> Data:
    return Data([{"input_ids": one[None]} for one in TOKENS], **options)


def built(model: Path, data: Data, output: Path) -> Quantized:
    budget = Budget(search="off", accuracy="off", latency_seconds=0)
    return quantize(model, data, output, scheme="int8-storage", budget=budget)


@pytest.fixture
def copied(written: tuple[Path, Path, Quantized]) -> Run:
    """Return a function that writes the float decoder in place of a quantized one."""

    def copied(model: Path, data: Data, output: Path) -> Quantized:
        onnx.save(onnx.load(model), output)
        return written[2]

    return copied


def given(kind: type, tokens: np.ndarray = TOKENS[:1], past: int = 0) -> dict[str, np.ndarray]:
    mask = np.ones((1, past + tokens.shape[1]), np.int64)
    empty = {f"past_0_{one}": np.zeros((1, 2, past, 8), kind) for one in ("key", "value")}
    return {"input_ids": tokens, "attention_mask": mask, **empty}


@recent
def test_scales_follow_the_samples_and_logits_those_of_the_float_decoder(
    written: tuple[Path, Path, Quantized],
) -> None:
    floating, output, done = written
    names = [one.name for one in done.report.agreement.outputs]
    assert names == ["logits", "logits behind a past"]
    assert 30 < done.report.agreement.worst_sqnr < 60
    model = onnx.load(output, load_external_data=False)
    scale = next(numpy_helper.to_array(one) for one in model.graph.initializer if one.name == "past_0_key.scale")
    session = open_session(floating)
    keys = [run(session, given(np.float32, one[None]))[1] for one in TOKENS]
    largest = np.abs(np.concatenate(keys)).max((0, 2), keepdims=True)
    np.testing.assert_allclose(scale, largest / 127, rtol=1e-5)
    assert scale[0, 1, 0, -1] > 5 * scale[0, 1, 0, :-1].max()
    # A past of integers is read as what it stands for.
    session = open_session(output)
    first = run(session, given(np.int8, TOKENS[:1, :9]))
    assert first[1].dtype == np.int8
    assert np.abs(first[1] * scale - keys[0][:, :, :9]).max() < 0.1 * largest.max()
    past = given(np.int8, TOKENS[:1, 9:], 9) | {"past_0_key": first[1], "past_0_value": first[2]}
    whole = run(open_session(floating), given(np.float32))[0]
    found = run(session, past)[0][:, -1]
    assert np.abs(found - whole[:, -1]).max() < 0.1 * np.abs(whole).max()


@recent
def test_the_certificate_is_that_of_the_written_decoder(written: tuple[Path, Path, Quantized], tmp_path: Path) -> None:
    floating, output, done = written
    assert done.report.certificate is not None
    assert {one.name for one in done.report.certificate.fingerprints} == {"logits", "present_0_key", "present_0_value"}
    assert done.report.certificate.measured.unseen == 0
    assert verify(output, reference=floating).right
    model = onnx.load(output, load_external_data=False)
    scale = next(one for one in model.graph.initializer if one.name == "past_0_value.scale")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * 3, scale.name))
    for file in output.parent.glob("model.onnx*"):
        shutil.copy(file, tmp_path)
    onnx.save(model, tmp_path / "model.onnx")
    found = verify(tmp_path / "model.onnx", reference=floating)
    assert "changed after it was certified" in found.fault
    assert "present_0_value" in found.engines[0].wrong


@recent
def test_a_certificate_that_fails_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no probe")

    monkeypatch.setattr(key_value_cache, "make_certificate", fail)
    [done] = quantize_folder(folder, tmp_path / "output", data(), built, cache="int8").values()
    assert done.report.run.failures == ("the certificate failed and was left out: ValueError: no probe",)
    assert done.report.certificate is None
    assert read_certificate(tmp_path / "output" / "model.onnx")[0] is None


@recent
def test_without_a_certificate_none_is_made(folder: Path, tmp_path: Path, copied: Run) -> None:
    validated = data(validation=[{"input_ids": one[None, ::-1]} for one in TOKENS])
    [done] = quantize_folder(folder, tmp_path / "output", validated, copied, cache="int8").values()
    assert done.report.certificate is None
    assert b"onnxq.certificate" not in (tmp_path / "output" / "model.onnx").read_bytes()
    split = done.report.samples.split
    assert split is not None
    assert (split.samples, split.seen) == (6, 0)


@recent
def test_what_misses_the_goal_is_refused_unless_forced(folder: Path, tmp_path: Path, copied: Run) -> None:
    arguments = folder, tmp_path / "output", data(), copied
    with pytest.raises(AccuracyError, match=r"with a cache of int8 the decoder has \d\d\.\d dB, expected 80; nothing"):
        quantize_folder(*arguments, goal=Goal(80), cache="int8")
    assert not (tmp_path / "output").exists()
    quantize_folder(*arguments, goal=Goal(80, force=True), cache="int8")
    assert (tmp_path / "output" / GENAI_CONFIG).exists()


@recent
def test_a_channel_of_zeros_has_a_scale(folder: Path, tmp_path: Path, copied: Run) -> None:
    model = onnx.load(folder / "model.onnx")
    key = next(one for one in model.graph.initializer if one.name == "key")
    values = numpy_helper.to_array(key).copy()
    values[:, :9] = 0
    key.CopyFrom(numpy_helper.from_array(values, "key"))
    onnx.save(model, folder / "model.onnx")
    quantize_folder(folder, tmp_path / "output", data(), copied, cache="int8")
    written = onnx.load(tmp_path / "output" / "model.onnx").graph.initializer
    scale = next(numpy_helper.to_array(one) for one in written if one.name == "past_0_key.scale")[0, :, 0]
    np.testing.assert_allclose(scale[0], 1 / 127)
    np.testing.assert_allclose(scale[1, 0], scale[1].max() / 100, rtol=1e-5)


@recent
def test_comparing_with_a_float_past_says_what_differs(written: tuple[Path, Path, Quantized]) -> None:
    floating, output, _ = written
    for measure in (compare_files, bench):
        with pytest.raises(
            DataError, match=r"takes input 'past_0_key' as int8, expected float32 as in .* onnxq verify"
        ):
            measure(floating, output, [given(np.float32)])


@recent
def test_the_command_quantizes_the_cache(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "tokens.npz", input_ids=TOKENS)
    files = (folder, "--calib", tmp_path / "tokens.npz", "-o", tmp_path / "output", "--report", tmp_path / "r.json")
    assert invoke("quantize", *files, *OPTIONS, "--cache", "int8").exit_code == 0
    found = onnx.load(tmp_path / "output" / "model.onnx").graph
    integers = {one.name for one in (*found.input, *found.output) if one.type.tensor_type.elem_type == 3}
    assert integers == {f"{one}_0_{kind}" for one in ("past", "present") for kind in ("key", "value")}
    report = json.loads((tmp_path / "r.json").read_text())
    assert [one["name"] for one in report["accuracy"]["agreement"]["outputs"]] == ["logits", "logits behind a past"]
    file = invoke("quantize", folder / "model.onnx", *OPTIONS, "--cache", "int8")
    assert "--cache int8 takes a folder of onnxruntime-genai" in file.stderr


@recent
def test_what_has_no_such_cache_is_refused(folder: Path, build: Build, tmp_path: Path) -> None:
    put_decoder(tmp_path / "other", build)
    with pytest.raises(SchemeError, match=r"model\.onnx has no GroupQueryAttention for past_0_key, expected"):
        quantize_folder(tmp_path / "other", tmp_path / "output", data(), built, cache="int8")
    with pytest.raises(SchemeError, match="give some with --calib"):
        quantize_folder(folder, tmp_path / "output", None, built, cache="int8")
    goal = Goal(metric=Metric("right", lambda *_: 1.0))
    with pytest.raises(SchemeError, match="--metric has another goal"):
        quantize_folder(folder, tmp_path / "output", data(), built, goal=goal, cache="int8")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    model.graph.node.append(onnx.helper.make_node("Shape", ["past_0_key"], ["extent"]))
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(SchemeError, match=r"GroupQueryAttention attention of .* that no other node reads"):
        quantize_folder(folder, tmp_path / "output", data(), built, cache="int8")
    (folder / GENAI_CONFIG).unlink()
    with pytest.raises(SchemeError, match=r"holds no genai_config\.json"):
        quantize_folder(folder, tmp_path / "output", data(), built, cache="int8")


def test_an_old_onnxruntime_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value_cache, "attends_to_integers", lambda: False)
    with pytest.raises(SchemeError, match=r"needs onnxruntime 1\.32 or later"):
        quantize_folder(folder, tmp_path / "output", data(), built, cache="int8")
