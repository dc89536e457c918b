"""A report tells of the files, the stages and what was observed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from onnxq import Budget, Data, calibrate, quantize
from onnxq.cli import terminal
from onnxq.data.dataset import evenly_spaced_indices, ranges_of
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.metrics import Metric, Top1
from onnxq.report import load_report

MODELS = Path(__file__).parents[2] / "models"


def test_a_report_tells_where_everything_comes_from_and_is_read_again(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    data = Data(MODELS / "data" / "calib.npz", limit=8)
    report = quantize(
        MODELS / "gru.onnx", data, output, budget=Budget(search="off", accuracy="off", latency_seconds=0)
    ).report
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
    budget, data = (
        Budget(search="off", accuracy=accuracy, latency_seconds=0),
        Data(MODELS / "data" / "calib.npz", limit=8),
    )
    report = quantize(MODELS / "resnet.onnx", data, tmp_path / "q.onnx", goal=5, budget=budget).report
    assert (report.encoding.skipped_at_sqnr is not None) == told
    terminal.print_report(report)
    assert ("dB without any method are plenty" in capsys.readouterr().err) == told


@pytest.mark.parametrize("wanted", [0, 2])
def test_layers_and_kernels_are_looked_at_where_they_are_wanted(wanted: int, tmp_path: Path) -> None:
    budget = Budget(search="off", accuracy="off", latency_seconds=0, layers=wanted)
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


@pytest.mark.parametrize("apart", [False, True])
def test_the_samples_that_judge_and_are_worst_are_told_by_their_numbers(
    apart: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], build: Callable[..., ModelProto]
) -> None:
    random = np.random.default_rng(0)
    values = random.uniform(-1, 1, (40, 1, 64)).astype(np.float32)
    # What is far out of range is cut off where it did not set the range.
    values[35] *= 30
    np.savez(tmp_path / "all.npz", x=values)
    calibration = tmp_path / "all.npz"
    if apart:
        np.savez(tmp_path / "quiet.npz", x=random.uniform(-1, 1, (16, 1, 64)).astype(np.float32))
        calibration = tmp_path / "quiet.npz"
    data = Data(calibration, validation=tmp_path / "all.npz" if apart else None)
    model = build("(float[1,64] x) => (float[1,64] y) { y = MatMul(x, w) }", w=(64, 64))
    budget = Budget(search="off", accuracy="off", latency_seconds=0, layers=2)
    report = quantize(model, data, goal=Goal(force=True), budget=budget).report
    assert report.samples.split.apart == apart
    judging = [*range(40)] if apart else evenly_spaced_indices(40, 10)
    assert report.samples.split.places == ranges_of(judging)
    worst = report.agreement.outputs[0].worst[0]
    assert (worst.sample, worst.file) == (35, str(tmp_path / "all.npz"))
    assert {one.sample for layer in report.fidelity.layers.layers for one in layer.worst} == {0, 39}
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report
    terminal.print_report(report, every=True)
    told = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert ("(0-39 of those given to judge by, counted from 0)" if apart else "0, 4, 9, 13, 17, 22 and 4 more") in told
    assert "35, all.npz" in told


def test_of_how_many_files_the_samples_are_is_told(tmp_path: Path, build: Callable[..., ModelProto]) -> None:
    (tmp_path / "stacks").mkdir()
    random = np.random.default_rng(0)
    for file in range(32):
        np.savez(tmp_path / "stacks" / f"{file}.npz", x=random.uniform(-1, 1, (3, 64)).astype(np.float32))
    model = build("(float[N,64] x) => (float[N,64] y) { y = MatMul(x, w) }", w=(64, 64))
    budget = Budget(search="off", accuracy="off", latency_seconds=0)
    data = Data(tmp_path / "stacks", batch=1)
    report = quantize(model, data, goal=Goal(force=True), budget=budget).report
    assert (report.samples.split.samples, report.samples.split.files, report.agreement.files) == (24, 8, 8)
    assert report.verdict.endswith("on 24 samples of 8 files it had not seen")
    assert report.agreement.outputs[0].bound < report.agreement.outputs[0].sqnr
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report


@pytest.mark.parametrize("by_labels", [True, False])
@pytest.mark.parametrize("statistics", [True, False])
def test_a_metric_is_of_samples_that_chose_nothing_where_it_knows_them_and_else_tells_that_they_did(
    by_labels: bool, statistics: bool, tmp_path: Path, build: Callable[..., ModelProto]
) -> None:
    random = np.random.default_rng(0)
    values, others = random.uniform(-1, 1, (2, 40, 1, 64)).astype(np.float32)
    model = build("(float[1,64] x) => (float[1,64] y) { y = MatMul(x, w) }", w=(64, 64))
    samples, known = [{"x": one} for one in values], None
    if statistics:
        known = calibrate(model, [{"x": one} for one in others])
    top1 = Metric("top1", Top1(np.zeros(40, np.int64)))
    metric = top1 if by_labels else Metric("same", lambda outputs, samples: float(len(outputs) > 0))
    data, goal = Data(samples, statistics=known), Goal(metric=metric, max_drop=0.1)
    report = quantize(model, data, goal=goal, budget=Budget(accuracy="off", latency_seconds=0)).report
    judged = report.samples.split
    assert (judged.samples, judged.seen) == ((10, 0) if by_labels else (40, 40))
    assert (judged.places == ranges_of(evenly_spaced_indices(40, 10))) == by_labels
    assert (report.fidelity.scores.chosen_by is not None) == by_labels
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report
