"""A refusal says what to try, with figures of the run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from reports import REPORT, changed

from onnxq.config.scheme import Mode
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.metrics import Scores
from onnxq.evaluation.verification import EngineVerification
from onnxq.report import FidelityError
from onnxq.report.refusal import suggestions
from onnxq.search.refinement import MethodGain
from onnxq.search.search import NodeSensitivity, Point

OUTPUT = OutputAgreement("y", 39.2, None, 0.0, same_shapes=True, finite=True, compared=0)
NOISY = changed(REPORT, fidelity={"agreement": Agreement(3, (OUTPUT,))})


def refused(**parts: dict[str, object]) -> list[tuple[str, str]]:
    report = FidelityError("too noisy", changed(NOISY, **parts)).report
    return [(one.command, one.why) for one in suggestions(report)]


def test_a_refusal_suggests_three_commands_with_figures_of_the_run() -> None:
    search = {
        "sensitivities": (NodeSensitivity("/head/a b", Mode.STATIC, 12.34), NodeSensitivity("c", Mode.STATIC, 40.0))
    }
    encoding = {
        "gains": (
            MethodGain("ranges", 20.0, 21.5, "percentile", 2.0),
            MethodGain("bias", 21.5, 21.5, "", 1.0, "no less"),
        )
    }
    told = refused(
        search=search,
        encoding=encoding,
        run={"command": ("onnxq", "quantize", "m.onnx", "--min-sqnr", "60", "--calib", "d")},
    )
    assert [command for command, _ in told] == [
        "onnxq quantize m.onnx --min-sqnr 60 --calib d --exclude '/head/a b'",
        "onnxq quantize m.onnx --min-sqnr 60 --calib d --accuracy full",
        "onnxq quantize m.onnx --calib d --min-sqnr 39",
    ]
    assert "12.3 dB" in told[0][1]
    assert "1.5 dB in 3 s" in told[1][1]
    assert "39.2 dB" in told[2][1]


def test_a_search_comes_first_where_there_was_none() -> None:
    first, *_ = refused(search={"measured": 0, "sensitivities": ()})
    assert first[0] == "onnxq quantize ... --search fast"
    assert "39.2 dB" in first[1]


def test_a_metric_is_asked_for_less() -> None:
    told = refused(search={"sensitivities": ()}, fidelity={"scores": Scores("top1", 0.91, 0.9)})
    assert told[1] == ("onnxq quantize ... --max-drop 0.01", "top1 fell by 0.01")


def test_figures_that_are_none_are_not_asked_for() -> None:
    output = replace(OUTPUT, sqnr=-math.inf)
    told = refused(search={"sensitivities": ()}, fidelity={"agreement": Agreement(3, (output,))})
    assert not any("--min-sqnr" in command for command, _ in told)


def test_where_all_went_to_float_the_best_plan_with_codes_is_asked_for() -> None:
    plan = replace(REPORT.plan, decisions=tuple(replace(one, weights=()) for one in REPORT.plan.decisions))
    points = (
        Point(3, 0, 1.0, 21.5, None),
        Point(0, 1, 2.0, 39.2, None),
        Point(0, 0, 2.5, 105.0, 1.0, chosen=True),
        Point(0, 0, 2.5, math.inf, 1.0, is_float=True),
    )
    searched = changed(NOISY, search={"frontier": points, "sensitivities": (NodeSensitivity("a", Mode.STATIC, 12.0),)})
    told = suggestions(FidelityError("nothing can be quantized", replace(searched, plan=plan)).report)
    assert [one.options for one in told] == ["--min-sqnr 39", "--accuracy full", "--search off --force"]
    assert "39.2 dB" in told[0].why
    # A plan that has what is wanted was not trusted with it: to ask for that much again would be refused again.
    trusted = changed(replace(searched, plan=plan), fidelity={"wanted": 30.0})
    told = suggestions(FidelityError("nothing can be quantized", trusted).report)
    assert [one.options for one in told] == ["--accuracy full", "--search off --force"]
    above = changed(replace(searched, plan=plan), fidelity={"wanted": 40.0})
    assert suggestions(FidelityError("nothing can be quantized", above).report)[0].options == "--min-sqnr 39"


def test_a_model_of_no_use_is_only_forced() -> None:
    told = refused(files={"float_bytes": 10**6, "bytes": 10**6}, performance={"latency": None})
    assert [command for command, _ in told] == ["onnxq quantize ... --force"]


def test_what_was_written_needs_no_suggestion() -> None:
    assert suggestions(REPORT) == ()


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (("onnxq", "train", "m.onnx"), {"--search"}),
        (("onnxq", "quantize", "m.onnx", "--plan", "p.toml"), {"--search", "--accuracy", "--exclude", "--preset"}),
        (("onnxq", "quantize", "m.onnx", "--plan=p.toml"), {"--search", "--accuracy", "--exclude", "--preset"}),
    ],
)
def test_options_that_a_command_does_not_take_are_not_suggested(command: tuple[str, ...], missing: set[str]) -> None:
    search = {"measured": 0, "sensitivities": (NodeSensitivity("a", Mode.STATIC, 12.0),)}
    report = FidelityError("too noisy", changed(NOISY, search=search, run={"command": command})).report
    found = {one.options.split()[0] for one in suggestions(report)}
    assert found
    assert not found & missing


def test_the_engine_that_is_less_faithful_says_what_may_be_asked_for() -> None:
    elsewhere = EngineVerification("openvino 2026.4", Agreement(3, (replace(OUTPUT, sqnr=12.5),)))
    told = refused(search={"sensitivities": ()}, fidelity={"on_engine": elsewhere})
    assert "onnxq quantize ... --min-sqnr 12" in [command for command, _ in told]


@pytest.mark.parametrize("broken", [{"finite": False}, {"same_shapes": False}])
def test_neither_force_nor_a_lower_goal_writes_an_unsound_model(broken: dict[str, bool]) -> None:
    told = refused(fidelity={"agreement": Agreement(3, (replace(OUTPUT, **broken),))})
    assert told
    assert not any(option in command for command, _ in told for option in ("--force", "--min-sqnr"))


@pytest.mark.parametrize(("right", "suggested"), [((29, 28), 0.0334), ((91, 90), 0.0334), ((30, 20), 0.334)])
def test_what_a_metric_is_to_allow_is_rounded_up(right: tuple[int, int], suggested: float) -> None:
    scores = Scores("top1", right[0] / 30, right[1] / 30)
    told = dict(refused(search={"sensitivities": ()}, fidelity={"scores": scores}))
    assert f"onnxq quantize ... --max-drop {suggested:g}" in told
    assert scores.allowed_by(suggested)
