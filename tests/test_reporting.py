"""A report tells of the files, the stages and what was observed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from onnxq import Budget, Data, quantize
from onnxq.cli import terminal
from onnxq.report import load_report

MODELS = Path(__file__).parents[1] / "models"


def test_a_report_tells_where_everything_comes_from_and_is_read_again(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    data = Data(MODELS / "data" / "calib.npz", limit=8)
    report = quantize(MODELS / "gru.onnx", data, output, budget=Budget(search="off", accuracy="off", latency=0)).report
    assert report.files.output_digest == hashlib.sha256(output.read_bytes()).hexdigest()
    assert report.files.model_digest == hashlib.sha256((MODELS / "gru.onnx").read_bytes()).hexdigest()
    assert [stage.name for stage in report.run.stages] == ["prepare", "calibrate", "choose and verify", "report"]
    assert {one.tensor for one in report.encoding.tensors} <= {one.tensor for one in report.plan.activations}
    assert len(report.encoding.weights) == sum(len(one.weights) for one in report.plan.decisions) > 0
    assert report.fidelity.wanted == 20.0
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report


@pytest.mark.parametrize(("accuracy", "told"), [("fast", True), ("off", False)])
def test_codes_that_are_faithful_enough_for_no_method_are_told(
    accuracy: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget, data = Budget(search="off", accuracy=accuracy, latency=0), Data(MODELS / "data" / "calib.npz", limit=8)
    report = quantize(MODELS / "resnet.onnx", data, tmp_path / "q.onnx", goal=5, budget=budget).report
    assert (report.encoding.spared is not None) == told
    terminal.print_report(report)
    assert ("dB without any method are plenty" in capsys.readouterr().err) == told


@pytest.mark.parametrize("wanted", [0, 2])
def test_layers_and_kernels_are_looked_at_where_they_are_wanted(wanted: int, tmp_path: Path) -> None:
    budget = Budget(search="off", accuracy="off", latency=0, layers=wanted)
    data = Data(MODELS / "data" / "calib.npz", limit=4)
    report = quantize(MODELS / "resnet.onnx", data, tmp_path / "q.onnx", budget=budget).report
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report
    layers, ran = report.fidelity.layers, report.performance.ran
    if not wanted:
        assert (layers, ran) == (None, {})
        return
    assert layers is not None
    assert layers.samples == wanted
    assert layers.layers[-1].tensor == "logits"
    convolutions = [one.node for one in report.plan.decisions if one.op_type == "Conv"]
    assert {ran[name] for name in convolutions} == {"QLinearConv"}
