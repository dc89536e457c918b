"""A run that was killed while it encoded weights goes on from those that it had encoded."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli.commands import invoke
from click.testing import CliRunner
from conftest import Build

from onnxq import Budget, quantize
from onnxq.algorithms import encode
from onnxq.algorithms.encoders import encode_array
from onnxq.algorithms.encodings import EncodingCache, WeightStore
from onnxq.cli.main import cli
from onnxq.errors import OutputError
from onnxq.numerics.affine import QTensor
from onnxq.numerics.spec import Granularity, QuantSpec

TEXT = "(float[batch, 64] x) => (float[batch, 32] y) { h = MatMul(x, w0) r = MatMul(h, w1) y = MatMul(r, w2) }"
WEIGHTS = {"w0": (64, 128), "w1": (128, 64), "w2": (64, 32)}
# The process kills itself where the second weight would be encoded.
KILLED = """
import os, signal, sys
from onnxq import Budget, quantize
from onnxq.algorithms import encode

calls, encode_weight = [], encode.encode_weight

def killed(*given):
    calls.append(given)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode_weight(*given)

encode.encode_weight = killed
quantize(sys.argv[1], None, sys.argv[2], scheme="int4-block32", budget=Budget(latency_seconds=0, resume=True))
"""


@pytest.fixture
def model(build: Build, tmp_path: Path) -> Path:
    onnx.save(build(TEXT, **WEIGHTS), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the weights that are encoded from now on."""
    names, encode_weight = list[str](), encode.encode_weight

    def noted(values: Any, weight: Any, *others: Any) -> QTensor:
        names.append(weight.tensor)
        return encode_weight(values, weight, *others)

    monkeypatch.setattr(encode, "encode_weight", noted)
    return names


def run(model: Path, output: Path, *, resume: bool) -> bytes:
    budget = Budget(latency_seconds=0, resume=resume, certificate=False)
    quantize(model, None, output, scheme="int4-block32", budget=budget)
    return output.read_bytes()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes cannot be killed")
def test_the_next_run_encodes_what_is_left(model: Path, encoded: list[str], tmp_path: Path) -> None:
    output, partial = tmp_path / "q.onnx", tmp_path / "q.onnx.partial"
    done = subprocess.run([sys.executable, "-c", KILLED, model, output], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert not output.exists()
    assert len(list(partial.iterdir())) == 1
    whole = run(model, tmp_path / "whole.onnx", resume=False)
    assert len(encoded) == 3
    encoded.clear()
    assert run(model, output, resume=True) == whole
    assert len(encoded) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "q.onnx", "whole.onnx"]


def test_a_full_disk_leaves_the_encoded_weights_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, save = list[object](), np.save

    def full(file: Any, array: Any, **settings: Any) -> None:
        saved.append(array)
        if len(saved) == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(file, array, **settings)

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OutputError, match=r"encoded weight .* cannot be written: No space left on device; free disk"):
        run(model, tmp_path / "q.onnx", resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "q.onnx.partial"]
    assert [path.suffix for path in (tmp_path / "q.onnx.partial").iterdir()] == [".weight"]


SPECS = (
    QuantSpec("int4", (32,)),
    QuantSpec("uint4", (32,), symmetric=False),
    QuantSpec("int8-narrow", Granularity.CHANNEL),
    QuantSpec("float8e4m3fn", Granularity.TENSOR),
)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.format)
def test_a_kept_weight_is_the_same(spec: QuantSpec, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    made, store = encode_array(values, spec, channel_axis=0, reduction_axis=1), WeightStore(tmp_path / "kept")
    assert store.of("key", lambda: made) is made
    read = store.of("key", _fail)
    assert read.format == made.format
    assert read.values.dtype == made.values.dtype
    assert read.values.tobytes() == made.values.tobytes()
    assert np.array_equal(read.dequantize(), made.dequantize())
    assert read.parameters.block == made.parameters.block


def _fail() -> QTensor:
    raise AssertionError("the weight is kept")


@pytest.mark.parametrize("left", [0, 60, -1], ids=lambda left: f"[:{left}]")
def test_a_damaged_weight_is_encoded_again(left: int, tmp_path: Path) -> None:
    values = np.ones((8, 64), np.float32)
    made, store = encode_array(values, SPECS[0], channel_axis=0, reduction_axis=1), WeightStore(tmp_path)
    store.of("key", lambda: made)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:left])
    assert store.of("key", lambda: made) is made


def test_only_its_own_files_are_removed(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "q.onnx.partial")
    made = encode_array(np.ones((8, 64), np.float32), SPECS[0], channel_axis=0, reduction_axis=1)
    store.of("key", lambda: made)
    (store.folder / ".a.weight.12.tmp").touch()
    (store.folder / "mine.txt").touch()
    store.remove()
    assert [path.name for path in store.folder.iterdir()] == ["mine.txt"]


def test_weights_that_differ_have_files_of_their_own(build: Build, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    for scale in (1, 2):
        cache = EncodingCache(store=WeightStore(folder))
        values = np.full((8, 64), scale, np.float32)
        made = encode_array(values, SPECS[0], channel_axis=0, reduction_axis=1)
        found = cache.tensor((values.tobytes(), SPECS[0]), lambda made=made: made, lasts=True)
        assert np.array_equal(found.dequantize(), made.dequantize())
    assert len(list(folder.iterdir())) == 2


def test_a_file_in_the_place_of_the_folder_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "q.onnx.partial").touch()
    with pytest.raises(OutputError, match="is in the place of the folder for encoded weights; move it away"):
        run(model, tmp_path / "q.onnx", resume=True)


def test_the_command_takes_resume_for_a_file(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "q.onnx"
    invoke("quantize", model, "--preset", "int4-block32", "--latency-seconds", 0, "--resume", "-o", output)
    assert output.exists()
    assert not (tmp_path / "q.onnx.partial").exists()
    refused = CliRunner().invoke(cli, ["quantize", str(tmp_path), "--preset", "int4-block32", "--resume"])
    assert "--resume takes the file of one model" in refused.stderr
