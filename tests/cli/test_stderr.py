"""What a user sees on stderr: sentences of onnxq, and nothing of Python or numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import MODELS, Build
from onnx import ModelProto

Case = tuple[ModelProto, list[dict[str, np.ndarray]]]


def infinite_layer(build: Build) -> Case:
    """Logarithms of 0 inside, which a Max makes finite again."""
    model = build(
        """(float[n,64] x) => (float[n,16] y) {
            g = MatMul(x, w0) r = Relu(g) l = Log(r) c = Max(l, least) m = MatMul(c, w1) a = Relu(m) y = MatMul(a, w2)
        }""",
        w0=(64, 96),
        w1=(96, 96),
        w2=(96, 16),
        least=np.float32(-5),
    )
    generator = np.random.default_rng(0)
    return model, [{"x": generator.standard_normal((8, 64)).astype(np.float32)} for _ in range(8)]


def wrapped_indices(build: Build) -> Case:
    """A float input of indices, where a shift wraps negative ones."""
    model = build(
        """(float[n,21] ids) => (float[n,16] y) {
            i = Cast<to = 6>(ids) neg = Less(i, zero) w = Add(i, rows) j = Where(neg, w, i) e = Gather(table, j)
            f = Flatten(e) m = MatMul(f, w1) a = Relu(m) y = MatMul(a, w2)
        }""",
        zero=np.int32(0),
        rows=np.int32(40),
        table=(40, 16),
        w1=(336, 64),
        w2=(64, 16),
    )
    generator = np.random.default_rng(0)
    return model, [{"ids": generator.integers(0, 4, (8, 21)).astype(np.float32)} for _ in range(8)]


def normalized_images(build: Build) -> Case:
    """Images of 0..255, for a network that divides its first sums by their own spread."""
    model = build(
        """(float[n,1,16,16] x) => (float[n,16,8,8] y) {
            c = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w, b) m = ReduceMean<axes = [1]>(c) d = Sub(c, m)
            q = Mul(d, d) v = ReduceMean<axes = [1]>(q) e = Add(v, tiny) r = Sqrt(e) o = Div(d, r) t = Relu(o)
            y = Conv<pads = [1, 1, 1, 1]>(t, u)
        }""",
        w=(32, 1, 3, 3),
        b=np.random.default_rng(0).normal(0, 0.08, 32).astype(np.float32),
        u=(16, 32, 3, 3),
        tiny=np.float32(1e-3),
    )
    generator = np.random.default_rng(0)
    return model, [{"x": generator.uniform(0, 255, (1, 1, 16, 16)).astype(np.float32)} for _ in range(8)]


def run(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    command = [sys.executable, "-m", "onnxq", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("case", [infinite_layer, wrapped_indices, normalized_images])
def test_odd_values_and_sound_inputs_leave_stderr_clean(
    case: Callable[[Build], Case], build: Build, tmp_path: Path
) -> None:
    model, samples = case(build)
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "calib").mkdir()
    for index, sample in enumerate(samples):
        np.savez(tmp_path / "calib" / f"{index}.npz", **sample)  # type: ignore[arg-type]
    quick = ("--search", "off", "--accuracy", "off", "--latency-seconds", 0, "--force")
    done = run(
        "quantize", "model.onnx", "--calib", "calib", *quick, "--html", "p.html", "-o", "q.onnx", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("Reading model.onnx ...\n")
    assert "Warning" not in done.stderr
    done = run("compare", "model.onnx", "q.onnx", "--data", "calib", "--layers", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_refusal_is_printed_once(tmp_path: Path) -> None:
    calib = MODELS / "data" / "calib.npz"
    quick = ("--search", "off", "--accuracy", "off", "--latency-seconds", 0, "--min-sqnr", 200, "--limit", 8)
    for quiet in ((), ("-q",)):
        done = run("quantize", MODELS / "gru.onnx", "--calib", calib, *quick, *quiet, folder=tmp_path)
        assert done.returncode == 3
        assert done.stderr.count("expected 200 dB or more") == 1
        assert done.stderr.splitlines()[-1].startswith("onnxq: output logits has ")


def test_a_mistyped_command_gets_the_closest_one(tmp_path: Path) -> None:
    done = run("quantise", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("Error: there is no command 'quantise'; did you mean 'quantize'?\n")


def test_a_damaged_file_of_times_is_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "onnxq").mkdir()
    (tmp_path / "onnxq" / "times.json").write_text("{broken")
    files = [MODELS / "gru.onnx", "--calib", MODELS / "data" / "calib.npz", "--limit", "12", "-o", tmp_path / "q.onnx"]
    command = [sys.executable, "-m", "onnxq", "quantize", *map(str, files)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("does not hold times") == 1
