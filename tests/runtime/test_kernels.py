"""Profiles of onnxruntime, read beside the graph that ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.errors import ModelError
from onnxq.runtime import kernels as kernels_module
from onnxq.runtime.kernels import _kernels, _runs, loaded_kernels, profile_kernels, read_profile


@pytest.mark.parametrize(("turns", "runs"), [(3, 5), (100, 3), (300, 3), (450, 2), (3_000, 0)])
def test_a_long_loop_is_run_less_often_or_not_at_all(
    looping: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int, runs: int
) -> None:
    profiled = []
    monkeypatch.setattr(kernels_module, "_MOST_EVENTS", 4_000)
    monkeypatch.setattr(kernels_module, "_ENOUGH_EVENTS", 1_600)
    monkeypatch.setattr(kernels_module, "_runs", lambda events: profiled.extend(found := _runs(events)) or found)
    onnx.save(looping, tmp_path / "m.onnx")
    samples = [{"x": np.ones((1, 8), np.float32), "n": np.array(turns)}] * 2
    kernels = profile_kernels(tmp_path / "m.onnx", samples, tmp_path, repeats=2)
    assert len(profiled) == runs
    assert ("inner" in {one.name for one in kernels}) is (runs > 0)


def test_nodes_that_the_runtime_takes_out_make_no_events(
    build: Callable[..., ModelProto], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = " ".join(f"t{index + 1} = Identity(t{index})" for index in range(40))
    model = build(
        f"(float[1,8] x) => (float[1,8] y) {{ [first] t0 = MatMul(x, w0) {passing} y = Relu(t40) }}", w0=(8, 8)
    )
    onnx.save(model, tmp_path / "m.onnx")
    monkeypatch.setattr(kernels_module, "_MOST_EVENTS", 30)
    kernels = profile_kernels(tmp_path / "m.onnx", [{"x": np.ones((1, 8), np.float32)}], tmp_path, repeats=2)
    assert "first" in {one.name for one in kernels}


def test_a_profile_without_a_finished_run_has_no_kernels(perceptron: ModelProto) -> None:
    assert list(_kernels(perceptron.graph, [], 5)) == []


def test_what_was_written_elsewhere_and_is_no_profile_is_told(perceptron: ModelProto, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text('{"cat": 1', encoding="utf-8")
    with pytest.raises(ModelError, match="the profile cannot be read"):
        read_profile(perceptron.SerializeToString(), tmp_path / "profile.json", 2)


def test_loaded_kernels_are_those_that_run(
    residual: ModelProto, samples_for: Callable[..., list], tmp_path: Path
) -> None:
    onnx.save(residual, tmp_path / "m.onnx")
    loaded = loaded_kernels(tmp_path / "m.onnx")
    ran = profile_kernels(tmp_path / "m.onnx", samples_for(residual, 1), tmp_path, repeats=1)
    # The names of what the runtime adds may be other ones each time.
    assert [(one.op_type, one.outputs) for one in loaded] == [(one.op_type, one.outputs) for one in ran]
    assert {one.nanoseconds for one in loaded} == {0.0}
