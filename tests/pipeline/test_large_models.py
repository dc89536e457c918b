"""A model that counts as large: weights in several files, a full disk, a killed process, and what --verbose tells."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from conftest import Build
from onnx import TensorProto, numpy_helper

from onnxq import Budget, Data, quantize
from onnxq.algorithms import encodings
from onnxq.errors import ModelError, OnnxqError, OutputError
from onnxq.evaluation.reference import ReferenceModel
from onnxq.ir import writer
from onnxq.report import Report

TEXT = "(float[1, 64] x) => (float[1, 32] y) { h = MatMul(x, w0) r = MatMul(h, w1) y = MatMul(r, w2) }"
WEIGHTS: Mapping[str, tuple[int, ...]] = {"w0": (64, 128), "w1": (128, 70), "w2": (70, 32)}
BUDGET = Budget(search="off", accuracy="off", latency_seconds=0)
# The process kills itself at one of its steps.
KILLED = """
import importlib, os, signal, sys
import onnxq.ir.stored_tensors
import onnxq.pipeline.prepare
onnxq.ir.stored_tensors._LARGE_BYTES = onnxq.pipeline.prepare._ONE_FILE = 1000
from onnxq.__main__ import main

model, output, samples, module, name, count = sys.argv[1:]
holder, _, name = name.rpartition(".")
place = importlib.import_module(module)
place = getattr(place, holder) if holder else place
calls, called = [], getattr(place, name)

def killed(*given, **named):
    calls.append(given)
    if len(calls) == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return called(*given, **named)

setattr(place, name, killed)
options = ["--preset", "int4-block32", "--search", "off", "--accuracy", "off", "--latency-seconds", "0", "--force"]
sys.argv = ["onnxq", "quantize", model, "--calib", samples, "-o", output, *options]
main()
"""
KILLED_AT = {
    "the second weight is encoded": ("onnxq.algorithms.encode", "encode_weight", 2),
    "the second weight waits in a file": ("onnxq.algorithms.encodings", "spill", 3),
    "weights are written": ("onnxq.ir.writer", "SidecarWriter._append", 2),
    "the model is verified": ("onnxq.evaluation.verification", "open_session", 1),
    "it is put in its place": ("onnxq.pipeline.quantization", "publish_model", 1),
}


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.ir.stored_tensors._LARGE_BYTES", 1000)
    monkeypatch.setattr("onnxq.pipeline.prepare._ONE_FILE", 1000)


@pytest.fixture
def model(build: Build, tmp_path: Path) -> Path:
    return in_files(build(TEXT, **WEIGHTS), tmp_path)


def in_files(model: onnx.ModelProto, folder: Path) -> Path:
    """Write a model whose weights lie in a file each."""
    for tensor in model.graph.initializer:
        onnx.external_data_helper.set_external_data(tensor, f"{tensor.name}.bin")
        (folder / f"{tensor.name}.bin").write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def samples() -> Data:
    inputs = np.random.default_rng(3).normal(size=(12, 1, 64)).astype(np.float32)
    return Data([{"x": values} for values in inputs])


def quantized(model: Path, output: Path, **options: Any) -> Report:
    return quantize(model, samples(), output, scheme="int4-block32", goal=5, budget=BUDGET, **options).report


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_weights_in_several_files_become_one(model: Path, tmp_path: Path) -> None:
    report = quantized(model, tmp_path / "q.onnx")
    assert report.plan.by_node  # every weight was found
    assert {"q.onnx", "q.onnx.data"} <= set(listed(tmp_path))
    assert report.agreement.worst_sqnr > 10


def test_stages_tell_encoding_writing_and_verifying(model: Path, tmp_path: Path) -> None:
    stages = {stage.name: stage.seconds for stage in quantized(model, tmp_path / "q.onnx").run.stages}
    assert list(stages) == ["prepare", "calibrate", "choose", "encode", "write", "verify", "report"]
    assert min(stages.values()) >= 0


def test_the_float_model_runs_once_on_a_sample(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, given = list[bytes](), ReferenceModel._given

    def noted(self: ReferenceModel, sample: Any) -> object:
        ran.append(sample["x"].tobytes())
        return given(self, sample)

    monkeypatch.setattr(ReferenceModel, "_given", noted)
    quantized(model, tmp_path / "q.onnx")
    assert len(ran) == len(set(ran)) > 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_weights_of_16_bits_are_quantized_or_refused(dtype: type, build: Build, tmp_path: Path) -> None:
    made = build(TEXT, **WEIGHTS)
    kind = TensorProto.FLOAT16 if dtype is np.float16 else TensorProto.BFLOAT16
    for tensor in made.graph.initializer:
        values: Any = numpy_helper.to_array(tensor).astype(dtype)
        tensor.raw_data, tensor.data_type = values.tobytes(), kind
    for info in (*made.graph.input, *made.graph.output):
        info.type.tensor_type.elem_type = kind
    path = in_files(made, tmp_path)
    try:
        inputs: list[Any] = [{"x": np.ones((1, 64), dtype)}, {"x": np.full((1, 64), 2, dtype)}]
        quantize(path, Data(inputs), tmp_path / "q.onnx", scheme="int4-block32", goal=0, budget=BUDGET)
    except OnnxqError:
        assert not (tmp_path / "q.onnx").exists()
    else:
        assert (tmp_path / "q.onnx").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named(value: float, build: Build, tmp_path: Path) -> None:
    made = build(TEXT, **WEIGHTS)
    values = numpy_helper.to_array(made.graph.initializer[1]).copy()
    values[-1, -1] = value
    made.graph.initializer[1].raw_data = values.tobytes()
    with pytest.raises(ModelError, match="w1"):
        quantized(in_files(made, tmp_path), tmp_path / "q.onnx")
    assert not [name for name in listed(tmp_path) if name.startswith(("q.", ".q"))]


@pytest.mark.parametrize(("holder", "name"), [(writer.SidecarWriter, "_append"), (encodings, "spill")])
def test_a_full_disk_leaves_the_old_file(
    holder: Any, name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "q.onnx").write_bytes(b"old")
    calls, called = list[object](), getattr(holder, name)

    def full(*given: Any) -> object:
        calls.append(given)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return called(*given)

    monkeypatch.setattr(holder, name, full)
    before = listed(tmp_path)
    with pytest.raises(OutputError, match="No space left on device"):
        quantized(model, tmp_path / "q.onnx")
    assert listed(tmp_path) == before
    assert (tmp_path / "q.onnx").read_bytes() == b"old"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes cannot be killed")
@pytest.mark.parametrize("place", KILLED_AT)
def test_a_killed_process_leaves_the_old_file_and_nothing_else(place: str, model: Path, tmp_path: Path) -> None:
    output, inputs = tmp_path / "q.onnx", tmp_path / "samples.npz"
    output.write_bytes(b"old")
    np.savez(inputs, x=np.random.default_rng(3).normal(size=(12, 64)).astype(np.float32))
    before = listed(tmp_path)
    arguments = [str(argument) for argument in (model, output, inputs, *KILLED_AT[place])]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False, capture_output=True, text=True)
    assert "SIGKILL" in done.stderr or done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
    assert listed(tmp_path) == before
    assert output.read_bytes() == b"old"
