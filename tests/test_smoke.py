"""The whole way on one real model, small enough to run with the oldest supported packages as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import MODELS

import onnxq

MODEL = MODELS / "resnet.onnx"
CALIBRATED, TESTED = 32, 200
SMALLEST_ACCURACY = 0.9
LARGEST_SIZE = 0.3


def accuracy(model: Path) -> float:
    """Return the share of test images that a model gives their class, computed by onnxruntime alone."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    images = np.load(MODELS / "data" / "test.npz")["image"][:TESTED]
    labels = np.load(MODELS / "data" / "test-labels.npy")[:TESTED]
    (logits,) = session.run(["logits"], {"image": images})
    return float((logits.argmax(axis=-1) == labels).mean())


@pytest.fixture
def calibration(tmp_path) -> Path:
    images = np.load(MODELS / "data" / "calib.npz")["image"][:CALIBRATED]
    np.savez(tmp_path / "calibration.npz", image=images)
    return tmp_path / "calibration.npz"


@pytest.mark.parametrize("preset", ["int8", "int8-per-tensor", "int8-storage"])
def test_each_preset_keeps_the_classes_of_a_trained_model_at_a_quarter_of_its_size(
    tmp_path, calibration, preset
) -> None:
    output = tmp_path / "quantized.onnx"

    done = onnxq.quantize(MODEL, calibration, output, scheme=preset, budget=onnxq.Budget(latency_seconds=0))

    onnx.checker.check_model(output, full_check=True)
    assert done.report.size_ratio < LARGEST_SIZE
    assert done.report.agreement.sound
    assert accuracy(output) >= SMALLEST_ACCURACY


def test_the_command_line_writes_the_model_of_the_python_api(tmp_path, calibration) -> None:
    written, called, report = tmp_path / "written.onnx", tmp_path / "called.onnx", tmp_path / "report.json"
    options = ["--calib", str(calibration), "-o", str(written), "--report", str(report), "--latency-seconds", "0"]

    done = subprocess.run(
        [sys.executable, "-m", "onnxq", "quantize", str(MODEL), *options], capture_output=True, text=True, check=False
    )
    onnxq.quantize(MODEL, calibration, called, budget=onnxq.Budget(latency_seconds=0))

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(written)
    assert written.read_bytes() == called.read_bytes()
    assert json.loads(report.read_text())["files"]["output"] == str(written)
