"""Engines by name, and what is told of those that are not there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.errors import EngineError
from onnxq.runtime import engines as table
from onnxq.runtime.engines import engine_names, installed_engines, open_engine, start_engine_for
from onnxq.runtime.targets import target_named

# Does what the real one does with a host that is this machine: hands the command to a shell.
SSH = """#!/bin/sh
[ "$1 $2 $3 $4" = "-o BatchMode=yes -- board" ] || { echo "no route to $4" >&2; exit 255; }
exec sh -c "$5"
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("opnvino", "engine 'opnvino' is not one of .*; did you mean 'openvino'"),
        ("", "engine '' is not one of"),
        ("python", "engine python lacks the path of a Python"),
        ("python:/nowhere/python", "engine python:/nowhere/python cannot be started"),
        ("ssh", "engine ssh lacks a host"),
        ("onnxruntime:elsewhere", "engine onnxruntime takes no 'elsewhere'"),
        ("onnxruntime-web:/nowhere", "engine onnxruntime-web .*(no folder /nowhere|no program node)"),
    ],
)
def test_an_engine_that_is_not_there_is_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        open_engine(name)


def test_openvino_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"engine openvino is not installed; pip install 'onnxq\[openvino\]'"):
        open_engine("openvino")


def test_a_python_without_the_runtime_is_a_sentence(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=r"has ended when it was to start: ModuleNotFoundError: No module named"):
        open_engine(f"python:{python}")


@pytest.mark.parametrize("place", ["python", "ssh"])
def test_another_onnxruntime_runs_times_and_profiles(
    perceptron: ModelProto, samples_for, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "ssh").write_text(SSH, encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    model = ModelProto.FromString(perceptron.SerializeToString())
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    samples = samples_for(perceptron, 2)
    name = f"python:{sys.executable}" if place == "python" else f"ssh:board:{sys.executable}"
    with open_engine(name) as engine, open_engine("onnxruntime") as here:
        assert (engine.name, engine.version) == (name, here.version)
        first, second = (engine.load(tmp_path / "model.onnx", 1) for _ in range(2))
        expected = here.load(tmp_path / "model.onnx", 1)
        assert first.outputs == expected.outputs
        assert np.array_equal(first.run(samples[0])[0], expected.run(samples[0])[0])
        assert sum(map(len, engine.time((first, second), samples, 0.0))) == 1
        found = engine.profile(tmp_path / "model.onnx", samples, tmp_path, 2)
        known = here.profile(tmp_path / "model.onnx", samples, tmp_path, 2)
        assert [(one.op_type, one.elements) for one in found] == [(one.op_type, one.elements) for one in known]


def test_the_engine_of_an_installed_package_is_started_by_its_name(
    perceptron: ModelProto, samples_for, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What pip leaves beside a package that it has installed.
    installed = tmp_path / "fake-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n", encoding="utf-8")
    entry_points = "[onnxq.engines]\nfake = runtime.fake_engine:fake_engine\n"
    (installed / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    onnx.save(perceptron, tmp_path / "model.onnx")
    sample = samples_for(perceptron, 1)[0]
    assert "fake" in engine_names()
    with open_engine("fake") as engine:
        assert engine.version == "fake 1.0"
        (found,) = engine.load(tmp_path / "model.onnx").run(sample)
    assert np.array_equal(found, next(iter(sample.values())) + 1)
    with open_engine("fake:nan") as engine:
        assert np.isnan(engine.load(tmp_path / "model.onnx").run(sample)[0]).all()


@pytest.mark.parametrize(
    ("opener", "message"),
    [
        ("def mine(place): raise ValueError(place)", "engine 'mine:here' failed: ValueError: here; correct it, or do"),
        (
            "def mine(place): return 3",
            "engine 'mine:here' failed: TypeError: it is 3, expected an onnxq.runtime.engine",
        ),
    ],
)
def test_an_engine_of_a_package_that_fails_to_start_is_a_sentence(
    opener: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    exec(opener, found)
    monkeypatch.setattr(table, "load_registered", lambda *_: found["mine"])
    with pytest.raises(EngineError, match=message):
        open_engine("mine:here")


def test_a_host_that_does_not_answer_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH, encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(EngineError, match=r"engine ssh:nobody has ended .* start: no route to nobody"):
        open_engine("ssh:nobody")


def test_what_is_installed_starts_and_what_is_not_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    found = []
    for engine in installed_engines():
        with engine:
            found.append(engine.name)
    assert found == ["onnxruntime", "onnx-reference"]
    assert {"openvino", "python", "ssh", *found} <= set(engine_names())


@pytest.mark.parametrize(
    ("target", "asked", "engine", "why"),
    [
        ("onnxruntime-cpu", "", None, ""),
        ("onnxruntime-cpu", "onnxruntime", None, ""),
        ("openvino", "onnxruntime", None, "onnxruntime in this process is not openvino; give --engine python:PATH"),
        ("tensorrt", "", None, "no engine runs tensorrt on this machine; give --engine"),
        ("openvino", "", None, "engine openvino is not installed"),
        ("onnxruntime-cpu", "onnx-reference", "onnx-reference", ""),
    ],
)
def test_the_engine_of_a_target_is_started_where_it_is_there(
    monkeypatch: pytest.MonkeyPatch, target: str, asked: str, engine: str | None, why: str
) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    found, told = start_engine_for(target_named(target), asked)
    assert (found.name if found else None) == engine
    assert told.startswith(why)
    assert bool(told) == bool(why)
    if found:
        found.close()


def test_an_engine_that_was_asked_for_must_be_there() -> None:
    with pytest.raises(EngineError, match="engine 'openvina' is not one of"):
        start_engine_for(target_named("openvino"), "openvina")
