"""onnxq calibrate, and quantize with statistics."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import MODELS, Build

from cli.commands import CALIB, RESNET, invoke, refusal_of, words_of
from onnxq.calibration.accumulators import Range
from onnxq.calibration.statistics import load_statistics
from onnxq.errors import DataError, OnnxqError, OutputError

IMAGES = np.load(CALIB)["image"][:24]


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of samples, and beside it their statistics: all of them, and those that min-max needs."""
    folder = tmp_path_factory.mktemp("collected")
    (folder / "calib").mkdir()
    np.savez(folder / "calib" / "all.npz", image=IMAGES)
    result = invoke("calibrate", RESNET, "--calib", folder / "calib", "-o", folder / "all.npz")
    assert (result.exit_code, result.stdout) == (0, f"{folder / 'all.npz'}\n")
    invoke("calibrate", RESNET, "--calib", folder / "calib", "-o", folder / "extremes.npz", "--range", "minmax")
    assert sorted(path.name for path in folder.iterdir()) == ["all.npz", "calib", "extremes.npz"]
    return folder


def test_statistics_are_the_same_bytes_again(collected: Path, tmp_path: Path) -> None:
    invoke("calibrate", RESNET, "--calib", collected / "calib", "-o", tmp_path / "again.npz")
    assert (collected / "all.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()


def test_quantize_takes_the_statistics_and_writes_the_same_model(collected: Path, tmp_path: Path) -> None:
    options = ("--calib", collected / "calib", "--latency-seconds", 0, "--search", "off", "--range", "minmax")
    # All samples are calibrated where others judge.
    judged, statistics = ("--validation", collected / "calib"), ("--stats", collected / "all.npz")
    result = invoke("quantize", RESNET, *options, *judged, *statistics, "-o", tmp_path / "with.onnx")
    assert "onnxq:" not in result.stderr
    invoke("quantize", RESNET, *options, *judged, "-o", tmp_path / "without.onnx")
    assert (tmp_path / "with.onnx").read_bytes() == (tmp_path / "without.onnx").read_bytes()
    seen = invoke("quantize", RESNET, *options, *statistics, "-o", tmp_path / "out.onnx")
    assert "on 6 samples that the search used" in words_of(seen.stderr)


def test_extremes_are_enough_for_a_range_method_that_needs_no_more(collected: Path) -> None:
    seen, bare = (load_statistics(collected / f"{name}.npz") for name in ("all", "extremes"))
    assert {"range", "channel-means"} == {request.kind for request in bare.statistics}
    assert "histogram" in {request.kind for request in seen.statistics}
    assert all(seen.statistics[request] == found for request, found in bare.statistics.items())


@pytest.mark.parametrize(
    ("model", "statistics", "sentence"),
    [
        ("mobilenet", "all", "The given statistics are of another model, expected those of this one"),
        ("resnet", "extremes", "The given statistics lack the histogram of "),
    ],
)
def test_statistics_that_do_not_fit_are_refused(
    model: str, statistics: str, sentence: str, collected: Path, tmp_path: Path
) -> None:
    options = ("--calib", collected / "calib", "-o", tmp_path / "q.onnx", "--stats", collected / f"{statistics}.npz")
    with pytest.raises(DataError, match=sentence):
        invoke("quantize", MODELS / f"{model}.onnx", *options)


def test_merged_shards_hold_the_samples_of_all(tmp_path: Path) -> None:
    for name, images in (("a", IMAGES[:10]), ("b", IMAGES[10:])):
        np.savez(tmp_path / f"{name}-samples.npz", image=images)
        invoke("calibrate", RESNET, "--calib", tmp_path / f"{name}-samples.npz", "-o", tmp_path / f"{name}.npz")
    for names in ("ab", "ba"):
        files = [tmp_path / f"{name}.npz" for name in names]
        assert invoke("calibrate", "--merge", *files, "-o", tmp_path / f"{names}.npz").exit_code == 0
    assert (tmp_path / "ab.npz").read_bytes() == (tmp_path / "ba.npz").read_bytes()
    assert len(load_statistics(tmp_path / "ab.npz").samples) == 24


@pytest.mark.parametrize(
    "words", [("--merge", "a.npz"), ("--merge", "a.npz", "-o", "b.npz", "--calib", CALIB), (RESNET,)]
)
def test_samples_and_files_to_merge_are_told_apart(words: tuple[object, ...]) -> None:
    assert "--merge" in refusal_of("calibrate", *words)


def test_files_that_do_not_belong_together_are_refused(collected: Path, tmp_path: Path) -> None:
    for name, model, limit in (("first", "resnet", 4), ("same", "resnet", 2), ("other", "vit", 2)):
        options = ("--calib", collected / "calib", "-o", tmp_path / f"{name}.npz", "--limit", limit)
        invoke("calibrate", MODELS / f"{model}.onnx", *options)
    for name, sentence in (("same", "hold the same 2 samples"), ("other", "differ in"), ("gone", r"gone\.npz")):
        with pytest.raises(OnnxqError, match=sentence):
            invoke("calibrate", "--merge", tmp_path / "first.npz", tmp_path / f"{name}.npz", "-o", tmp_path / "m.npz")
    assert not (tmp_path / "m.npz").exists()


def test_places_that_cannot_be_written_are_refused(collected: Path, tmp_path: Path) -> None:
    shard = shutil.copy(collected / "extremes.npz", tmp_path / "a.npz")
    with pytest.raises(OutputError, match=r"output .*a\.npz is read as well; give another name"):
        invoke("calibrate", "--merge", shard, "-o", shard)
    with pytest.raises(OutputError, match="does not exist"):
        invoke("calibrate", RESNET, "--calib", collected / "calib", "-o", tmp_path / "gone" / "s.npz")


def test_a_chain_feeds_the_state_of_a_stream(build: Build, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 8
    text = """(float[1,64] x, float[1,64] h) => (float[1,64] y, float[1,64] hN) {
        product = MatMul(h, w) total = Add(x, product) hN = Tanh(total) y = MatMul(hN, w)
    }"""
    onnx.save(build(text, w=weight), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32))
    options = ("--calib", tmp_path / "x.npy", "--chain", "hN=h")
    assert invoke("calibrate", tmp_path / "m.onnx", *options, "-o", tmp_path / "s.npz").exit_code == 0
    state = load_statistics(tmp_path / "s.npz").of("h").need(Range)
    assert state.minimum < -0.5 < 0.5 < state.maximum
    output = tmp_path / "q.onnx"
    assert invoke("quantize", tmp_path / "m.onnx", *options, "-o", output, "--latency-seconds", 0).exit_code == 0
    assert output.exists()
    with pytest.raises(DataError, match="expected arrays for 'x', 'h'"):
        invoke("calibrate", tmp_path / "m.onnx", *options[:2], "-o", tmp_path / "s.npz")
