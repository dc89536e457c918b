"""A report tells of the files, the stages and what was observed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from onnxq import Budget, Data, quantize
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
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report
