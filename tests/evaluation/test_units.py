"""Samples in another unit than the model was trained with are doubted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Build
from onnx import ModelProto

from onnxq.evaluation.warnings import warn_input_units
from onnxq.ir import load, read_model, save
from onnxq.preparing.preparation import prepare

MODELS = Path(__file__).parents[2] / "models"
IMAGES = np.load(MODELS / "data" / "calib.npz")["image"][:8]


def told(path: Path, samples: list[dict[str, np.ndarray]]) -> list[str]:
    return list(warn_input_units(path, load(path), samples))


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "vit", "gru"])
@pytest.mark.parametrize(("unit", "sentence"), [(1, ""), (255, "such as 0..255 where 0..1"), (1 / 255, "0..1 where 0")])
def test_trained_models_know_their_unit(name: str, unit: float, sentence: str, tmp_path: Path) -> None:
    save(prepare(MODELS / f"{name}.onnx"), tmp_path / "prepared.onnx")
    samples = [{"image": np.float32(unit) * image[None]} for image in IMAGES]
    found = told(tmp_path / "prepared.onnx", samples)
    assert len(found) == bool(sentence)
    assert all(one.startswith("input image makes the values of node /") and sentence in one for one in found)


def model(build: Build, nodes: str) -> ModelProto:
    generator = np.random.default_rng(3)
    weights = {
        "w": generator.normal(0, 0.3, (8, 3, 3, 3)).astype(np.float32),
        "b": generator.normal(0, 0.5, 8).astype(np.float32),
        "mean": np.array([[[120.0]], [[110.0]], [[100.0]]], np.float32),
        "deviation": np.array(58.0, np.float32),
        "tiny": np.array(1e-6, np.float32),
        "factor": np.ones(3, np.float32),
        "shift": np.zeros(3, np.float32),
        "running": np.array([120, 110, 100], np.float32),
        "variance": np.full(3, 58.0**2, np.float32),
    }
    return build(f"(float[1,3,16,16] x) => (y) {{ {nodes} }}", **weights)


@pytest.mark.parametrize(
    ("nodes", "unit", "doubted"),
    [
        ("y = Conv(x, w, b)", 1, False),
        ("y = Conv(x, w, b)", 255, True),
        ("y = Conv(x, w, b)", 1 / 255, True),
        ("t = Transpose<perm = [0, 1, 3, 2]>(x) y = Conv(t, w, b)", 255, True),
        # One input may go many ways.
        ("s = Add(x, mean) a = Abs(s) y = Conv(x, w, b)", 255, True),
        ("l, r = Split<axis = 3>(x) c = Concat<axis = 3>(l, r, l) y = Conv(c, w, b)", 255, True),
        # Without a bias, or behind what bends values, nothing is known.
        ("y = Conv(x, w)", 255, False),
        ("t = Tanh(x) y = Conv(t, w, b)", 255, False),
        ("s = Sub(x, mean) y = Div(s, deviation)", 255, False),
        ("s = Sub(x, mean) y = Div(s, deviation)", 1, True),
        ("y = BatchNormalization(x, factor, shift, running, variance)", 255, False),
        ("y = BatchNormalization(x, factor, shift, running, variance)", 1, True),
        # What keeps a logarithm finite says nothing of the data.
        ("s = Add(x, tiny) y = Log(s)", 1, False),
    ],
)
def test_first_layers_tell_the_unit(nodes: str, unit: float, doubted: bool, build: Build, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    samples = [{"x": (unit * generator.uniform(0.1, 1, (1, 3, 16, 16))).astype(np.float32)} for _ in range(4)]
    save(read_model(model(build, nodes)), tmp_path / "model.onnx")
    assert len(told(tmp_path / "model.onnx", samples)) == doubted


def test_silence_and_no_samples_have_no_unit(build: Build, tmp_path: Path) -> None:
    save(read_model(model(build, "y = Conv(x, w, b)")), tmp_path / "model.onnx")
    assert told(tmp_path / "model.onnx", [{"x": np.zeros((1, 3, 16, 16), np.float32)}]) == []
    assert told(tmp_path / "model.onnx", []) == []


def test_layers_in_bodies_are_not_asked(build: Build, tmp_path: Path) -> None:
    body = "then () => (float[2,4] t) { t = Gemm(x, w, b) }"
    other = "else () => (float[2,4] e) { e = Gemm(x, u, b) }"
    text = f"(float[2,8] x, bool c) => (float[2,4] y) {{ y = If(c) <then_branch = {body}, else_branch = {other}> }}"
    save(prepare(build(text, w=(8, 4), u=(8, 4), b=(4,))), tmp_path / "prepared.onnx")
    sample = {"x": 1e3 * np.ones((2, 8), np.float32), "c": np.array(True)}
    assert not told(tmp_path / "prepared.onnx", [sample])
