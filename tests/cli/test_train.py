"""onnxq train on a model that ships with the project."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cli.commands import CALIB, GRU, invoke, refusal_of
from onnxq.cli.quantize import note_progress
from onnxq.errors import ModelError, OnnxqError, SchemeError
from onnxq.pipeline.request import Budget
from onnxq.training import pipeline
from onnxq.training.settings import Training, TrainingProgress

SHORT = ("--calib", CALIB, "--limit", 24, "--latency-seconds", 0, "--epochs", 1, "--force", "--accuracy", "off")


def test_train_prints_the_written_file_and_says_what_it_bought(tmp_path: Path) -> None:
    output, report = tmp_path / "out.onnx", tmp_path / "r.json"
    result = invoke("train", GRU, *SHORT, "-v", "--preset", "int2-block16", "-o", output, "--report", report)
    assert (result.exit_code, result.stdout) == (0, f"{output}\n")
    assert "training" in result.stderr
    (gain,) = json.loads(report.read_text())["encoding"]["gains"]
    assert gain["after"] > gain["before"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.onnx", "r.json"]


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (("-v", "-q"), "--verbose shows more and --quiet less"),
        (("-o", "out.onnx", "--report", "out.onnx"), "is the output itself"),
        (("--plan", "p.toml", "--preset", "int8"), "--plan decides for every node"),
    ],
)
def test_misuse_is_told_before_anything_runs(options: tuple[str, ...], reported: str) -> None:
    assert reported in refusal_of("train", GRU, *SHORT, *options)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (("--learn", "weight"), "did you mean 'weights'"),
        (("--labels", "l.npy", "--loss", "a.py:b"), "a loss function is given no labels"),
        (("--labels", "no-labels.npy", "--calib", "no-samples"), "no-labels.npy cannot be read"),
        (("--loss", "no_loss.py:best", "--calib", "no-samples"), "there is no file no_loss.py"),
    ],
)
def test_options_that_cannot_be_are_told_before_anything_takes_time(
    options: tuple[str, ...], reported: str, tmp_path: Path
) -> None:
    short = SHORT[2:] if "--calib" in options else SHORT
    with pytest.raises(OnnxqError, match=reported):
        invoke("train", GRU, *short, "-o", tmp_path / "o.onnx", *options)


def test_without_torch_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SchemeError, match=r"training needs torch .*; install it with pip install 'onnxq\[train\]'"):
        invoke("train", GRU, *SHORT, "-o", tmp_path / "o.onnx")


def test_options_of_device_and_threads_reach_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Training] = {}
    budgets: list[Budget] = []

    def stop(*args: object, training: Training, budget: Budget, **kwargs: object) -> None:
        given["training"] = training
        budgets.append(budget)
        raise ModelError("enough was seen")

    monkeypatch.setattr(pipeline, "train", stop)
    options = ("--device", "cpu", "--threads", 1, "--minutes", 2)
    with pytest.raises(ModelError, match="enough was seen"):
        invoke("train", GRU, *SHORT, "-o", tmp_path / "o.onnx", *options)
    training = given["training"]
    assert (training.device, training.minutes) == ("cpu", 2)
    assert [one.threads for one in budgets] == [1]


@pytest.mark.parametrize(("block", "stage"), [(0, "train"), (2, "blocks")])
def test_what_is_noted_is_the_loss_and_decibels(block: int, stage: str) -> None:
    notes: dict[str, str] = {}
    note_progress(notes, TrainingProgress(1, 8, loss=0.5, nsr_by_output=0.01, block=block, blocks=3))
    assert notes == {stage: "loss 0.5, 20.0 dB"}
