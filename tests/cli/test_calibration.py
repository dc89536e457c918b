from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import MODELS
from onnx import TensorProto, helper, numpy_helper

from cli.commands import CALIB, invoke
from onnxq.calibration.accumulators import Range
from onnxq.calibration.statistics import load_statistics
from onnxq.errors import OutputError

MODEL = MODELS / "resnet.onnx"
IMAGES = np.load(CALIB)["image"][:24]


@pytest.fixture
def calib(tmp_path: Path) -> Path:
    (tmp_path / "calib").mkdir()
    np.savez(tmp_path / "calib" / "all.npz", image=IMAGES)
    return tmp_path / "calib"


def test_calibrate_writes_one_file_and_names_it(calib: Path, tmp_path: Path) -> None:
    output = tmp_path / "s.npz"
    result = invoke("calibrate", MODEL, "--calib", calib, "-o", output)
    assert (result.exit_code, result.stdout) == (0, f"{output}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calib", "s.npz"]
    invoke("calibrate", MODEL, "--calib", calib, "-o", tmp_path / "again.npz")
    assert output.read_bytes() == (tmp_path / "again.npz").read_bytes()


def test_quantize_takes_the_statistics_and_writes_the_same_model(calib: Path, tmp_path: Path) -> None:
    invoke("calibrate", MODEL, "--calib", calib, "-o", tmp_path / "s.npz")
    # All samples are calibrated where others judge.
    options = ("--calib", calib, "--validation", calib, "--latency-seconds", 0, "--search", "off", "--range", "minmax")
    result = invoke("quantize", MODEL, *options, "-o", tmp_path / "with.onnx", "--stats", tmp_path / "s.npz")
    assert "onnxq:" not in result.stderr
    invoke("quantize", MODEL, *options, "-o", tmp_path / "without.onnx")
    assert (tmp_path / "with.onnx").read_bytes() == (tmp_path / "without.onnx").read_bytes()


def test_statistics_of_the_samples_that_judge_are_told(calib: Path, tmp_path: Path) -> None:
    invoke("calibrate", MODEL, "--calib", calib, "-o", tmp_path / "s.npz")
    options = (
        "--calib",
        calib,
        "--latency-seconds",
        0,
        "--search",
        "off",
        "--range",
        "minmax",
        "--stats",
        tmp_path / "s.npz",
    )
    reported = " ".join(
        invoke("quantize", MODEL, *options, "-o", tmp_path / "out.onnx").stderr.replace("│", "").split()
    )
    assert "on 6 samples that the search used" in reported


def test_extremes_are_enough_for_a_range_method_that_needs_no_more(calib: Path, tmp_path: Path) -> None:
    whole, extremes = tmp_path / "whole.npz", tmp_path / "extremes.npz"
    invoke("calibrate", MODEL, "--calib", calib, "-o", whole)
    invoke("calibrate", MODEL, "--calib", calib, "-o", extremes, "--range", "minmax")
    seen, bare = map(load_statistics, (whole, extremes))
    assert {"range", "channel-means"} == {request.kind for request in bare.statistics}
    assert "histogram" in {request.kind for request in seen.statistics}
    assert all(seen.statistics[request] == found for request, found in bare.statistics.items())


def test_what_does_not_match_is_told(calib: Path, tmp_path: Path) -> None:
    whole, extremes = tmp_path / "whole.npz", tmp_path / "extremes.npz"
    invoke("calibrate", MODEL, "--calib", calib, "-o", whole)
    invoke("calibrate", MODEL, "--calib", calib, "-o", extremes, "--range", "minmax")
    options = ("--calib", calib, "-o", tmp_path / "q.onnx")
    other = fails("quantize", MODELS / "mobilenet.onnx", *options, "--stats", whole)
    assert "The given statistics are of another model, expected those of this one" in other
    assert "The given statistics lack the histogram of " in fails("quantize", MODEL, *options, "--stats", extremes)


@pytest.mark.parametrize(
    ("command", "arguments", "sentence"),
    [
        (
            "calibrate",
            ("--jobs", 2),
            "--jobs was removed: samples run in threads; calibrate and quantize take --cluster",
        ),
        ("quantize", ("--memory", "4GB"), "--memory was removed: calibration limits its own memory"),
        ("quantize", ("--resume",), "--resume was removed: start the run again"),
        (
            "calibrate",
            ("--stats", "s.npz"),
            "--stats was removed: calibrate the new samples alone, then write calibrate",
        ),
    ],
)
def test_removed_options_are_refused_with_what_to_use(
    command: str, arguments: tuple[object, ...], sentence: str, calib: Path
) -> None:
    result = invoke(command, MODEL, "--calib", calib, *arguments)
    assert (result.exit_code, sentence in " ".join(result.stderr.split())) == (2, True)


def test_a_merge_does_not_overwrite_what_it_reads(calib: Path, tmp_path: Path) -> None:
    shard = tmp_path / "a.npz"
    invoke("calibrate", MODEL, "--calib", calib, "-o", shard)
    with pytest.raises(OutputError, match=r"output .*a\.npz is read as well; give another name"):
        invoke("calibrate", "--merge", shard, "-o", shard)


def test_merged_shards_hold_the_samples_of_all(calib: Path, tmp_path: Path) -> None:
    for name, images in (("a", IMAGES[:10]), ("b", IMAGES[10:])):
        np.savez(tmp_path / f"{name}-samples.npz", image=images)
        invoke("calibrate", MODEL, "--calib", tmp_path / f"{name}-samples.npz", "-o", tmp_path / f"{name}.npz")
    for names in ("ab", "ba"):
        files = [tmp_path / f"{name}.npz" for name in names]
        assert invoke("calibrate", "--merge", *files, "-o", tmp_path / f"{names}.npz").exit_code == 0
    assert (tmp_path / "ab.npz").read_bytes() == (tmp_path / "ba.npz").read_bytes()
    assert len(load_statistics(tmp_path / "ab.npz").samples) == 24


@pytest.mark.parametrize(
    "words", [("--merge", "a.npz"), ("--merge", "a.npz", "-o", "b.npz", "--calib", CALIB), (MODEL,)]
)
def test_samples_and_files_to_merge_are_told_apart(words: tuple[object, ...]) -> None:
    result = invoke("calibrate", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--merge" in result.stderr


def fails(*arguments: object) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "onnxq", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2, run.stderr
    sentence = run.stderr.splitlines()[-1]
    assert run.stderr in (f"{sentence}\n", f"Reading {arguments[1]} ...\n{sentence}\n")
    return sentence


def test_files_that_do_not_belong_together_are_told(calib: Path, tmp_path: Path) -> None:
    first, same, other = (tmp_path / f"{name}.npz" for name in ("first", "same", "other"))
    invoke("calibrate", MODEL, "--calib", calib, "-o", first, "--limit", 4)
    invoke("calibrate", MODEL, "--calib", calib, "-o", same, "--limit", 2)
    invoke("calibrate", MODELS / "vit.onnx", "--calib", calib, "-o", other, "--limit", 2)
    assert "hold the same 2 samples" in fails("calibrate", "--merge", first, same, "-o", tmp_path / "m.npz")
    assert "differ in" in fails("calibrate", "--merge", first, other, "-o", tmp_path / "m.npz")
    assert "gone.npz" in fails("calibrate", "--merge", first, tmp_path / "gone.npz", "-o", tmp_path / "m.npz")
    assert not (tmp_path / "m.npz").exists()


def test_a_place_that_cannot_be_written_is_one_sentence(calib: Path, tmp_path: Path) -> None:
    assert "does not exist" in fails("calibrate", MODEL, "--calib", calib, "-o", tmp_path / "gone" / "s.npz")


def test_a_chain_feeds_the_state_of_a_stream(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 8
    nodes = [
        helper.make_node("MatMul", ["h", "w"], ["product"]),
        helper.make_node("Add", ["x", "product"], ["total"]),
        helper.make_node("Tanh", ["total"], ["hN"]),
        helper.make_node("MatMul", ["hN", "w"], ["y"]),
    ]
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64]) for name in names]
        for names in (("x", "h"), ("y", "hN"))
    )
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(weight, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32))
    options = ("--calib", tmp_path / "x.npy", "--chain", "hN=h")
    assert invoke("calibrate", tmp_path / "m.onnx", *options, "-o", tmp_path / "s.npz").exit_code == 0
    state = load_statistics(tmp_path / "s.npz").of("h").need(Range)
    assert state.minimum < -0.5 < 0.5 < state.maximum
    output = tmp_path / "q.onnx"
    assert invoke("quantize", tmp_path / "m.onnx", *options, "-o", output, "--latency-seconds", 0).exit_code == 0
    assert output.exists()
    assert "expected arrays for 'x', 'h'" in fails(
        "calibrate", tmp_path / "m.onnx", *options[:2], "-o", tmp_path / "s.npz"
    )
