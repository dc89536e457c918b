from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from reports import FULL, REPORT, changed

from onnxq.calibration.data import Data
from onnxq.cli import terminal
from onnxq.commands.optimization import Optimized, Size
from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode, Scheme
from onnxq.evaluation.goal import EvaluationSplit, Goal
from onnxq.ir import Graph
from onnxq.pipeline import quantize
from onnxq.planning.delivery import Delivery
from onnxq.planning.plan import Decision
from onnxq.report import FidelityError
from onnxq.runtime.sessions import runtime_version
from onnxq.search.refinement import MethodGain
from onnxq.steps.request import Budget

MODELS = Path(__file__).parents[2] / "models"
UNCORRECTED = replace(PRESETS["int8"], correct_biases=False)


def test_the_closing_table_holds_every_figure_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    report = quantize(
        MODELS / "vit.onnx", Data(MODELS / "data" / "calib.npz", limit=4), budget=Budget(latency_seconds=0.1)
    ).report
    capsys.readouterr()
    terminal.print_report(report)
    out, err = capsys.readouterr()
    assert out == ""
    for row in ("accuracy", "logits: SQNR", "evaluated on", "latency", "size", "integer ops", "Why not faster:"):
        assert row in err


@pytest.mark.parametrize(("measured", "told"), [(0, "left out"), (4, "ended")])
def test_a_budget_that_ended_the_search_is_told(measured: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_report(changed(REPORT, search={"measured": measured, "limit": "1 s with --time-limit"}))
    assert f"{told} by the limit of 1 s with --time-limit" in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_a_speed_of_too_few_rounds_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    few = replace(REPORT.performance.latency, rounds=2)
    terminal.print_report(changed(REPORT, performance={"latency": few}))
    terminal.print_optimized(Optimized(Graph(), (), Size(2, 20), Size(1, 10), None, made_up=True, latency=few))
    err = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert err.count("of a speed that 2 rounds of timing do not show") == 2
    assert "as fast" not in err


@pytest.mark.parametrize(("count", "told"), [(1, "1 sample unseen"), (2, "2 samples unseen")])
def test_one_sample_is_told_of_as_one(count: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_report(changed(REPORT, samples={"split": EvaluationSplit(count, 0)}))
    assert told in " ".join(capsys.readouterr().err.split())


def test_all_that_was_measured_is_shown_where_that_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_report(FULL)
    short = capsys.readouterr().err
    terminal.print_report(FULL, every=True)
    whole = capsys.readouterr().err
    for title in (
        "Where outputs are worst",
        "Accuracy, at the worst output",
        "Integer regions, profiled",
        "Plans that were weighed",
        "What hurts most",
    ):
        assert title not in short
        assert title in " ".join(whole.split())
    assert whole.count("(taken)") == 1
    assert "percentile; x, y and 1 more" in " ".join(whole.replace("│", " ").split())
    for told in (short, whole):
        assert " ".join(told.split()).count("Verified: 2.00x as fast") == 1
    assert "--verbose shows all reasons and figures" in short


@pytest.mark.parametrize("columns", [60, 80])
def test_doubts_and_the_verdict_come_first_and_the_rest_fits_one_screen(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal.print_report(FULL)
    lines = capsys.readouterr().err.splitlines()
    first = "Warning: the samples are few. Verified: 2.00x as fast (1.90-2.10), 0.25 of the size, 31 dB on 3 samples"
    assert " ".join(lines).startswith(first)
    assert max(map(len, lines)) <= columns
    assert len(lines) < 40


def test_reasons_are_told_with_the_operators_they_hold_for(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = {"Softmax is not worth an integer": ["Softmax"] * 2, "no integer kernel": ["Erf", "Tanh", "Sin"]}
    decisions = [
        Decision(f"{op}{index}", op, Mode.FLOAT, reason)
        for reason, names in reasons.items()
        for index, op in enumerate(names)
    ]
    terminal.print_report(replace(REPORT, plan=replace(REPORT.plan, decisions=tuple(decisions))), every=True)
    lines = [line.strip("│ ").split("│") for line in capsys.readouterr().err.splitlines()]
    told = {row[0].strip(): row[1].strip() for row in lines if len(row) == 2}
    assert told["2 Softmax"] == "Softmax is not worth an integer"
    assert told["3 nodes"] == "no integer kernel"
    assert told["nodes"] == "5 float"


def test_a_refusal_comes_behind_doubts_with_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_report(FidelityError("output y has 31.2 dB, expected 60 dB", FULL).report)
    shown = capsys.readouterr().err
    assert shown.startswith("Warning: the samples are few.\nRefused: output y has 31.2 dB, expected 60 dB\n")
    assert "What to try:\n  --exclude a\n" in shown
    assert "model.int8.onnx" not in shown
    # The error itself is printed behind it.
    assert shown.count("Refused") == 1


@pytest.mark.parametrize(("scheme", "shown"), [(PRESETS["int8"], True), (UNCORRECTED, False)], ids=["with", "without"])
def test_corrected_biases_are_told(scheme: Scheme, shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    calib = MODELS / "data" / "calib.npz"
    report = quantize(
        MODELS / "resnet.onnx",
        Data(calib, limit=2),
        scheme=scheme,
        goal=Goal(force=True),
        budget=Budget(latency_seconds=0, search="off"),
    ).report
    terminal.print_report(report)
    assert (report.encoding.corrected_biases > 5) == shown
    assert ("bias correction (" in capsys.readouterr().err) == shown


@pytest.mark.parametrize(
    ("gain", "told"),
    [
        (
            MethodGain("training", 20.0, 24.5, "epoch 3 of 8", 9.0),
            ["training (20.0 dB -> 24.5 dB)"],
        ),
        (
            MethodGain("training", 20.0, 20.0, "", 9.0, "no lower error"),
            ["training (20.0 dB -> 20.0 dB, not kept: no lower error)"],
        ),
    ],
    ids=["better", "no better"],
)
def test_what_training_bought_is_told(gain: MethodGain, told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_report(replace(REPORT, encoding=replace(REPORT.encoding, gains=(gain,))))
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert all(one in shown for one in told)


@pytest.mark.parametrize(("bytes_", "shown"), [(0, False), (9, False), (10, True)])
def test_metadata_is_told_where_it_takes_a_hundredth_of_the_file(
    bytes_: int, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    report = quantize(
        MODELS / "gru.onnx",
        Data(MODELS / "data" / "calib.npz", limit=2),
        budget=Budget(search="off", latency_seconds=0),
    ).report
    capsys.readouterr()
    terminal.print_report(changed(report, files={"bytes": 1000, "metadata_bytes": bytes_}))
    assert ("--strip-metadata" in capsys.readouterr().err) == shown


def test_the_float_model_stands_among_the_plans_and_what_is_missing_comes_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    found = quantize(
        MODELS / "gru.onnx", Data(MODELS / "data" / "calib.npz", limit=4), budget=Budget(latency_seconds=0.02)
    )
    assert [point.speed for point in found.report.search.frontier if point.is_float] == [1.0]
    partly = changed(found.report, encoding={"delivered": (Delivery(2, 18, 3),)})
    terminal.print_report(partly, every=True)
    shown = capsys.readouterr().err
    assert "\n3 of 18 weights have 2 bits.\n" in shown
    assert shown.count("│ the float model ") == 1
    assert runtime_version() in shown


def test_a_plan_for_a_runtime_that_is_not_here_says_that_nothing_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    budget = Budget(search="off", accuracy="off", latency_seconds=0.02)
    done = quantize(MODELS / "gru.onnx", Data(MODELS / "data" / "calib.npz", limit=4), target="tensorrt", budget=budget)
    assert done.report.latency is None
    terminal.print_report(done.report)
    shown = capsys.readouterr().err
    assert "planned for tensorrt, not measured: no engine runs tensorrt on this machine; give --engine" in shown
