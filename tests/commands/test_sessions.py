"""Sessions of a pipeline: their order, what each is given of the others, and decoders that read their own past."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build

from onnxq.commands.sessions import open_sessions, run_sessions, samples_of
from onnxq.errors import DataError
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
    assert np.array_equal(last.given["past_key_values_0"], steps[files[1]][0].made[0])


def test_a_decoder_reads_the_past_that_it_has_made(build: Build, tmp_path: Path) -> None:
    file = saved(build, tmp_path, "model", DECODER.format(more=""))
    [session] = open_sessions([file])
    assert session.remembers
    [steps] = run_sessions([session], [file], samples_of([session], [{"input_ids": ids(3, 1, 4)}]))
    first, second = steps[file]
    assert first.given["past_key_values_0"].shape == (1, 0, 8)
    assert first.given["input_ids"].tolist() == [[3, 1]]
    assert second.given["input_ids"].tolist() == [[4]]
    assert np.array_equal(second.given["past_key_values_0"], first.made[1])
    whole = run(open_session(file), {"input_ids": ids(3, 1, 4), "past_key_values_0": np.zeros((1, 0, 8), np.float32)})
    assert np.allclose(second.made[0][:, 0], whole[0][:, -1])
    with pytest.raises(DataError, match="a sample of model has one token as 'input_ids', expected two or more"):
        run_sessions([session], [file], samples_of([session], [{"input_ids": ids(3)}]))


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
    assert first.given["use_cache_branch"].tolist() == [False]
    assert second.given["use_cache_branch"].tolist() == [True]
    assert np.array_equal(second.given["encoder_hidden_states"], steps[files[1]][0].made[0])
    assert not first.made[0].any()
    assert second.made[0].any()
