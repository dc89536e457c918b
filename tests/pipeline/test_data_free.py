"""Weight-only schemes need no samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from cli.commands import invoke
from click.testing import CliRunner
from conftest import Build
from decoder_folders import put_decoder

from onnxq import Budget, Goal, load_report, quantize
from onnxq.cli.main import cli
from onnxq.errors import DataError
from onnxq.evaluation.metrics import Metric
from onnxq.runtime.sessions import open_session, run

TEXT = "(float[batch, 64] x) => (float[batch, 32] y) { h = MatMul(x, w0) r = Relu(h) y = MatMul(r, w1) }"
QUICK = Budget(latency_seconds=0)


@pytest.fixture
def model(build: Build, tmp_path: Path) -> Path:
    onnx.save(build(TEXT, w0=(64, 128), w1=(128, 32)), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_report_tells_that_inputs_are_generated(model: Path, tmp_path: Path) -> None:
    report = quantize(model, None, tmp_path / "q.onnx", scheme="int4-block32", budget=QUICK).report
    assert report.samples.generated
    assert report.evaluated_on == "4 generated samples"
    assert report.accuracy.wanted is None
    assert [one.bound for one in report.agreement.outputs] == [None]
    [warning] = report.samples.warnings
    assert warning.startswith("there are no samples")
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json").samples.generated


def test_weights_are_those_that_samples_give(model: Path, tmp_path: Path) -> None:
    given = [{"x": np.random.default_rng(place).standard_normal((1, 64)).astype(np.float32)} for place in range(8)]
    outputs = []
    for data in (None, given):
        budget = Budget(search="off", accuracy="off", latency_seconds=0, certificate=False)
        quantize(model, data, tmp_path / "q.onnx", scheme="int4-block32", goal=1, budget=budget)
        outputs.append(run(open_session(tmp_path / "q.onnx"), given[0])[0])
    assert np.array_equal(*outputs)


@pytest.mark.parametrize(
    ("scheme", "goal", "reason"),
    [
        ("int8", Goal(), "int8 finds the scales of activations by samples"),
        ("int4-block32", Goal(metric=Metric("m", max)), "a metric is measured on samples"),
    ],
)
def test_what_needs_samples_is_refused(model: Path, scheme: str, goal: Goal, reason: str) -> None:
    with pytest.raises(DataError, match=f"there are no samples, and {reason}"):
        quantize(model, None, scheme=scheme, goal=goal, budget=QUICK)


def test_a_model_that_runs_no_generated_input_needs_samples(build: Build, tmp_path: Path) -> None:
    text = TEXT.replace("MatMul(r, w1)", "Reshape(r, shape)").replace("float[batch, 32]", "float[n, m]")
    onnx.save(build(text, w0=(64, 128), shape=np.array([7, 7])), tmp_path / "odd.onnx")
    with pytest.raises(DataError, match=r"the model runs none of .* generated inputs, .*; give --calib"):
        quantize(tmp_path / "odd.onnx", None, scheme="int4-block32", budget=QUICK)


def test_the_command_needs_no_samples_for_weights_alone(model: Path, build: Build, tmp_path: Path) -> None:
    options = ("--preset", "int4-block32", "--latency-seconds", 0)
    found = invoke("quantize", model, "-o", tmp_path / "q.onnx", *options)
    assert found.stdout.strip() == str(tmp_path / "q.onnx")
    assert "4 generated" in " ".join(found.stderr.split())
    put_decoder(tmp_path / "decoder", build)
    invoke("quantize", tmp_path / "decoder", "-o", tmp_path / "folder", *options, "-q")
    assert (tmp_path / "folder" / "tokenizer.json").exists()
    refused = CliRunner().invoke(cli, ["quantize", str(model)])
    assert refused.exit_code == 2
    assert "weight-only presets need none" in " ".join(refused.stderr.split())
