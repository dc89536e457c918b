"""What goes wrong in the files and interfaces of other quantizers does not go wrong here."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxq.errors import ModelError
from onnxq.ir import load, read_model
from onnxq.pipeline import plan, quantize
from onnxq.preparing.preparation import prepare
from onnxq.runtime.sessions import open_session, run
from onnxq.steps.request import Budget

# --- models that are quantized already, options, files ---------------------------------------------------------------


def test_quantizing_twice_is_refused(perceptron: ModelProto, quantize_to, samples_for, tmp_path: Path) -> None:
    quantize_to(perceptron, tmp_path / "q.onnx")
    with pytest.raises(ModelError, match="is quantized already"):
        quantize(tmp_path / "q.onnx", samples_for(perceptron), tmp_path / "again.onnx")
    model = onnx.load(tmp_path / "q.onnx")
    del model.metadata_props[:]
    with pytest.raises(ModelError, match=r"is quantized already: node .* is QuantizeLinear"):
        plan(model)


def test_a_report_says_of_every_node_what_was_done_and_why(residual: ModelProto, quantize_to, tmp_path: Path) -> None:
    report = quantize_to(residual, tmp_path / "q.onnx").report
    assert {one.node for one in report.plan.decisions} == {node.name for node in residual.graph.node}
    assert all(one.reason for one in report.plan.decisions)


@pytest.mark.parametrize("option", ["per_channel", "nodes_to_exclude", "minsqnr"])
def test_a_misspelt_option_is_an_error(option: str, perceptron: ModelProto) -> None:
    with pytest.raises(TypeError, match=option):
        quantize(perceptron, [], **{option: True})


def test_nothing_is_written_beside_the_model(perceptron: ModelProto, samples_for, tmp_path: Path) -> None:
    models, outputs = tmp_path / "models", tmp_path / "outputs"
    models.mkdir()
    outputs.mkdir()
    onnx.save(perceptron, models / "model.onnx")
    models.chmod(0o555)
    try:
        quantize(models / "model.onnx", samples_for(perceptron), outputs / "q.onnx", budget=Budget(latency_seconds=0))
        plan(models / "model.onnx")
    finally:
        models.chmod(0o755)
    assert [path.name for path in models.iterdir()] == ["model.onnx"]
    assert [path.name for path in outputs.iterdir()] == ["q.onnx"]


def test_a_model_may_be_given_by_its_bare_name(perceptron: ModelProto, samples_for, tmp_path: Path) -> None:
    onnx.save(perceptron, tmp_path / "model.onnx")
    np.savez(tmp_path / "calib.npz", **samples_for(perceptron, 1)[0])
    command = [
        sys.executable,
        "-m",
        "onnxq",
        "quantize",
        "model.onnx",
        "--calib",
        "calib.npz",
        "--latency-seconds",
        "0",
    ]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "model.int8.onnx\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calib.npz", "model.int8.onnx", "model.onnx"]


def test_external_data_stays_external_and_an_old_data_file_is_replaced(
    perceptron: ModelProto, samples_for, tmp_path: Path
) -> None:
    model = ModelProto()
    model.CopyFrom(perceptron)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    for _ in range(2):
        quantize(
            tmp_path / "model.onnx", samples_for(perceptron), tmp_path / "q.onnx", budget=Budget(latency_seconds=0)
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "model.onnx",
            "q.onnx",
            "q.onnx.data",
            "weights.bin",
        ]
    assert any(
        tensor.external_data for tensor in onnx.load(tmp_path / "q.onnx", load_external_data=False).graph.initializer
    )
    run(open_session(tmp_path / "q.onnx"), samples_for(perceptron, 1)[0])


def test_the_logging_of_an_application_is_left_alone(perceptron: ModelProto, samples_for, capfd) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    quantize(perceptron, samples_for(perceptron), budget=Budget(latency_seconds=0))
    assert (root.level, list(root.handlers)) == before
    assert capfd.readouterr() == ("", "")


def test_a_model_in_memory_is_not_changed(residual: ModelProto, samples_for) -> None:
    before = residual.SerializeToString(deterministic=True)
    quantize(residual, samples_for(residual), budget=Budget(latency_seconds=0))
    assert residual.SerializeToString(deterministic=True) == before


def test_preparing_twice_changes_nothing_more(residual: ModelProto) -> None:
    from onnxq.ir import to_model

    once = to_model(prepare(read_model(residual)))
    assert to_model(prepare(read_model(once))).SerializeToString(deterministic=True) == once.SerializeToString(
        deterministic=True
    )


def test_the_written_model_is_whole_when_read_again(residual: ModelProto, quantize_to, tmp_path: Path) -> None:
    quantize_to(residual, tmp_path / "q.onnx")
    graph = load(tmp_path / "q.onnx")
    assert [tensor.name for tensor in graph.inputs] == ["x"]
    assert [tensor.name for tensor in graph.outputs] == ["y"]
    onnx.checker.check_model(tmp_path / "q.onnx", full_check=True)
