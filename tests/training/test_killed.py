"""A training that is killed, wherever that is, ends in the same model when it is run again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build

TEXT = """(float[N,16] x) => (float[N,16] y) {
    a = MatMul(x, s)  b = Relu(a)  c = MatMul(b, t)  d = MatMul(c, u)  e = MatMul(d, v)  f = Relu(e)
    g = MatMul(f, w)  h = Add(f, g)  y = MatMul(h, z)
}"""
WEIGHTS = dict.fromkeys("stuvwz", (16, 16))
# Beside the moments between two epochs, it is killed in the midst of one, and of what is written behind it.
RUN = """
import os, signal, sys, threading
import torch
from onnxq import Budget, Goal
from onnxq.training import Training
from onnxq.training.pipeline import train

torch.set_num_threads(1)
model, samples, output, moment, delay = *sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5])
told = 0

def progress(stage, done, total):
    global told
    if stage in ("blocks", "train"):
        told += 1
        if told == moment:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start() if delay else os.kill(
                os.getpid(), signal.SIGKILL
            )

budget = Budget("off", "off", latency_seconds=0, progress=progress)
training = Training(epochs=6, batch=4, rate=5e-3)
train(model, samples, output, scheme="int2-block16", goal=Goal(force=True), budget=budget, training=training)
"""


@pytest.fixture
def folder(build: Build, tmp_path: Path) -> Path:
    onnx.save(build(TEXT, **WEIGHTS), tmp_path / "m.onnx")
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "s.npz", x=generator.standard_normal((64, 16)).astype(np.float32))
    return tmp_path


def run(folder: Path, output: Path, moment: int = 0, delay: float = 0.0) -> int:
    arguments = (folder / "m.onnx", folder / "s.npz", output, moment, delay)
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    return subprocess.run(command, check=False).returncode


@pytest.mark.parametrize(
    "moments",
    [
        # Of 3 calls that tell of two blocks and 7 of epochs.
        [(2, 0.0), (3, 0.02)],
        pytest.param([(1, 0.0), (1, 0.05), (2, 0.03), (4, 0.0), (2, 0.02)], marks=pytest.mark.slow),
        pytest.param([(6, 0.0), (2, 0.01), (2, 0.03), (1, 0.01), (1, 0.02)], marks=pytest.mark.slow),
    ],
    ids=["two moments", "five moments", "five other moments"],
)
def test_it_ends_in_the_same_model(moments: list[tuple[int, float]], folder: Path) -> None:
    (folder / "whole").mkdir()
    (folder / "killed").mkdir()
    whole, killed = folder / "whole" / "q.onnx", folder / "killed" / "q.onnx"
    assert run(folder, whole) == 0
    for moment, delay in moments:
        assert run(folder, killed, moment, delay) == -signal.SIGKILL
        assert not killed.exists()
    assert run(folder, killed) == 0
    assert killed.read_bytes() == whole.read_bytes()
    assert [path.name for path in killed.parent.iterdir()] == ["q.onnx"]
