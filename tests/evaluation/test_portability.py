"""What a model does on engines that are right, wrong, or refuse it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from evaluation.wrong_engine import Wrong
from onnxq.errors import DataError
from onnxq.evaluation.portability import FirstDifference, portability
from onnxq.runtime.engine import OnnxRuntime


@pytest.fixture
def models(build: Callable[..., ModelProto], tmp_path: Path) -> tuple[Path, Path]:
    """Return a float model, and one that is a little off."""
    text = "(float[64] x) => (float[64] y) {{ [a] h = Tanh(x) [b] y = {}(h) }}"
    onnx.save(build(text.format("Sin")), tmp_path / "float.onnx")
    onnx.save(build(text.format("Identity")), tmp_path / "model.onnx")
    return tmp_path / "float.onnx", tmp_path / "model.onnx"


def test_an_engine_that_agrees_is_timed_beside_the_float_model(models: tuple[Path, Path]) -> None:
    reference, model = models
    [port] = portability(model, [OnnxRuntime()], reference=reference, latency_seconds=0.01)
    assert (port.fault, port.agrees, port.difference) == ("", True, "")
    assert port.agreement is not None
    assert port.accuracy is not None
    assert port.agreement.worst_sqnr == np.inf
    assert 10 < port.accuracy.worst_sqnr < 30
    assert port.latency is not None
    assert port.latency.engine == port.version == OnnxRuntime().version
    plain = json.loads(json.dumps(port.to_dict(), allow_nan=False))
    assert (plain["loads"], plain["sqnr"], plain["latency"]["rounds"]) == (True, None, 6)


def test_an_engine_that_does_not_agree_is_told_where(models: tuple[Path, Path]) -> None:
    [port] = portability(models[0], [Wrong()])
    assert (port.fault, port.agrees, port.difference, port.latency) == ("", False, "b (Sin)", None)
    [port] = portability(models[0], [Wrong()], reference=models[0])
    assert (port.agrees, port.difference) == (False, "b (Sin)")


def test_a_fault_of_one_engine_is_told_and_the_others_go_on(build: Callable[..., ModelProto], tmp_path: Path) -> None:
    onnx.save(build("(float[4] x) => (float[4] y) { y = Tan(x) }"), tmp_path / "model.onnx")
    wrong = Wrong()
    first, second = portability(tmp_path / "model.onnx", [wrong, OnnxRuntime()])
    assert (first.fault, first.agrees, first.to_dict()["loads"]) == ("engine wrong cannot load Tan", False, False)
    assert second.agrees
    assert wrong.closed


def test_samples_that_no_run_takes_are_asked_for(build: Callable[..., ModelProto], tmp_path: Path) -> None:
    text = "(float[?, ?] x) => (float[?, ?] y) { y = MatMul(x, w) }"
    onnx.save(build(text, w=(77, 4)), tmp_path / "model.onnx")
    with pytest.raises(DataError, match=r"does not run on generated samples .*; give --data"):
        portability(tmp_path / "model.onnx", [OnnxRuntime()])
    np.savez(tmp_path / "data.npz", x=np.ones((3, 2, 77), np.float32))
    [port] = portability(tmp_path / "model.onnx", [OnnxRuntime()], tmp_path / "data.npz")
    assert port.agreement is not None
    assert port.agreement.samples == 3


# The first node that an engine computes otherwise is found, whatever stands around it.


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("[a] h = Tanh(x) [b] i = Sin(h) [c] j = Exp(i) [d] y = Neg(j)", "b (Sin)"),
        ("[a] y = Sin(x)", "a (Sin)"),
        ("[a] h = Tanh(x) [b] i = Exp(h) y = Neg(i)", ""),
        ("[a] h = Tanh(x) [b] i = Sin(x) [c] j = Exp(h) [d] y = Add(i, j)", "b (Sin)"),
        ("[a] h = Sin(x) [b] i = Tanh(x) [c] j = Exp(i) [d] k = Neg(j) [e] y = Add(h, k)", "a (Sin)"),
        ("h = Sin(x) [b] i = Shape(h) [c] j = Exp(h) [d] y = Neg(j)", "h (Sin)"),
        ("[a] h = Sin(x) [b] i = Greater(h, x) [c] j = Cast<to = 1>(i) [d] y = Neg(j)", "a (Sin)"),
    ],
)
def test_it_is_the_one_whose_inputs_agree(
    build: Callable[..., ModelProto], tmp_path: Path, nodes: str, expected: str
) -> None:
    model = build(f"(float[64] x) => (float[64] y) {{ {nodes} }}")
    sample = {"x": np.linspace(-9, 9, 64, dtype=np.float32)}
    search = FirstDifference(model, sample, OnnxRuntime(), Wrong(), 20.0, tmp_path)
    assert search.node("y") == expected
