"""When a model is refused, and what is suggested then."""

from __future__ import annotations

import math
import pickle
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from reports import REPORT, changed

from onnxq.config.scheme import Mode
from onnxq.errors import ModelError, names_options
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.metrics import Metric, Scores
from onnxq.evaluation.verification import EngineVerification
from onnxq.planning.delivery import Delivery
from onnxq.planning.plan import Decision, Plan
from onnxq.report import AccuracyError, Report, check
from onnxq.report.refusal import suggestions
from onnxq.search.results import MethodGain, NodeSensitivity, Point


def output(name: str, sqnr: float | None, differing: int = 0, compared: int = 64) -> OutputAgreement:
    share = 1 - differing / compared
    return OutputAgreement(name, sqnr, share, 0.0, same_shapes=True, finite=True, compared=compared)


def refused(report: Report, goal: Goal, *, searched: bool = False) -> str:
    """Return why a report is refused; "" if it is not."""
    try:
        check(report, goal, searched=searched, keeps_up=True)
    except AccuracyError as error:
        return str(error)
    return ""


DIFFERS = (
    "output label differs in 3 of 64 values (4.69%), which is more than the 1.00% that 20 dB stand for, with 95 % "
    "confidence"
)
METRIC = "evaluate with Goal(metric=..., max_drop=...), lower goal=, or write it with Goal(force=True)"
LOWER = "lower goal=, or write it with Goal(force=True)"
NOISY_Y = "output y has 12.0 dB, expected 20 dB or more"


@pytest.mark.parametrize(
    ("outputs", "search", "message", "remedy"),
    [
        # Labels may differ in a few values, and probabilities still count.
        ((output("label", None, 2), output("p", 25.0)), {}, "", ""),
        ((output("label", None, 5, 200), output("p", 25.0)), {}, "", ""),
        ((output("label", None), output("y", 12.0)), {"measured": 12}, NOISY_Y, LOWER),
        ((output("label", None, 3), output("p", 45.0)), {"measured": 12}, DIFFERS, METRIC),
        ((output("label", None, 3),), {}, DIFFERS, f'let budget="fast" keep nodes in float, {METRIC}'),
        ((output("y", 12.0),), {}, NOISY_Y, f'let budget="fast" keep nodes in float, {LOWER}'),
        *(
            (
                (output("y", 12.0),),
                {"measured": measured, "limit": limit, "longer": longer},
                NOISY_Y,
                f"{remedy}, {LOWER}",
            )
            for measured in (0, 3)
            for limit, longer, remedy in (
                ("--time-limit 1", "--time-limit 2", "take time_limit=2"),
                ("--search fast", "--search full", 'take budget="full"'),
            )
        ),
        # Force is not advised for a result of no use.
        (
            (output("y", 0.4),),
            {"measured": 12},
            "output y has 0.4 dB, expected 20 dB or more",
            "use a preset of more bits, or one that quantizes weights alone, such as int8-storage",
        ),
    ],
)
def test_a_refusal_says_what_is_lacking_and_what_to_do(
    outputs: tuple[OutputAgreement, ...], search: dict[str, object], message: str, remedy: str
) -> None:
    agreement = Agreement(64, outputs)
    report = changed(REPORT, accuracy={"agreement": agreement}, search={"measured": 0, "sensitivities": (), **search})
    assert refused(report, Goal(20.0)) == (f"{message}; nothing was written; {remedy}" if message else "")
    token = names_options.set(True)
    try:
        in_a_command = refused(report, Goal(20.0))
    finally:
        names_options.reset(token)
    assert ("goal=" in in_a_command, "--min-sqnr" in in_a_command) == (False, "goal=" in remedy)


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        (None, "no quantized plan keeps 20 dB at the worst output; nothing was written; lower goal=, or use a preset"),
        (Scores("top1", 0.9, 0.9), "no quantized plan keeps top1; nothing was written; raise max_drop=, or use a"),
    ],
)
def test_no_plan_at_all_names_the_goal(scores: Scores | None, sentence: str) -> None:
    plan = replace(REPORT.plan, decisions=REPORT.plan.decisions[1:])
    report = changed(replace(REPORT, plan=plan), accuracy={"scores": scores}, search={"sensitivities": ()})
    assert refused(report, Goal(20.0)).startswith(sentence)


UNWEIGHTED = replace(REPORT.plan, decisions=(Decision("a", "Conv", Mode.FLOAT, "why"),))
POINT = Point(static=0, dynamic=0, milliseconds=1.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, r"keeps 20 dB at the worst output; nothing was written; the nodes with the lowest SQNR are a \("),
        ({"sensitivities": ()}, "keeps 20 dB at the worst output; nothing was written; lower goal="),
        ({"sensitivities": (), "frontier": (POINT,)}, None),
        ({"sensitivities": (), "measured": 1}, None),
        ({"sensitivities": (), "measured": 0}, None),
    ],
    ids=["noise", "noise of a large model", "time", "nothing left", "no search"],
)
def test_a_model_without_codes_is_out_of_reach_or_does_not_pay(
    changes: dict[str, object], sentence: str | None
) -> None:
    report = replace(changed(REPORT, search=changes), plan=UNWEIGHTED)
    expected = AccuracyError if sentence else ModelError
    with pytest.raises(expected, match=sentence or "nothing in the model is worth quantizing: why; budget="):
        check(report, Goal(20.0), searched=False, keeps_up=True)


@pytest.mark.parametrize(
    ("mode", "bound", "force", "refusal"),
    [
        (Mode.STORAGE, 4.8, False, True),
        (Mode.STORAGE, 9.97, False, True),
        (Mode.STORAGE, -math.inf, False, True),
        (Mode.STORAGE, 10.0, False, False),
        (Mode.STORAGE, None, False, False),
        (Mode.STORAGE, 4.8, True, False),
        (Mode.STATIC, 4.8, False, False),
    ],
)
def test_stored_weights_are_taken_only_if_they_are_half_as_good_on_other_samples(
    mode: Mode, bound: float | None, force: bool, refusal: bool
) -> None:
    agreement = Agreement(64, (replace(output("y", 21.0), bound=bound), replace(output("z", 30.0), bound=25.0)))
    plan = replace(REPORT.plan, decisions=tuple(replace(one, mode=mode) for one in REPORT.plan.decisions))
    report = replace(changed(REPORT, accuracy={"agreement": agreement, "wanted": 20.0}), plan=plan)
    told = refused(report, Goal(20.0, force=force), searched=True)
    assert bool(told) is refusal
    if bound == 9.97:
        assert told == (
            "with compressed weights alone, output y is only shown to have 9.9 dB or more on other samples, expected "
            "at least half of 20 dB; nothing was written; give more samples, or use Goal(force=True)"
        )


def test_a_refusal_can_be_sent_and_names_no_file_that_was_not_written() -> None:
    error = AccuracyError("too noisy", changed(REPORT, files={"output": "out.onnx"}))
    sent = pickle.loads(pickle.dumps(error))
    assert (str(sent), sent.report) == (str(error), changed(REPORT, accuracy={"refusal": str(error)}))
    assert (error.report.output, error.report.accuracy.refusal) == (None, "too noisy; nothing was written")


@pytest.mark.parametrize("change", [{"finite": False}, {"same_shapes": False}])
def test_what_no_user_can_want_is_refused_though_forced(change: dict[str, bool]) -> None:
    broken = changed(REPORT, accuracy={"agreement": Agreement(1, (replace(output("y", 30.0), **change),))})
    assert refused(broken, Goal(force=True)).startswith("output y of the quantized model")
    floats = replace(REPORT, plan=Plan((), (), "int8", "onnxruntime-cpu"))
    told = refused(changed(floats, search={"measured": 9, "sensitivities": ()}), Goal(force=True))
    assert re.match(r"no quantized plan .*; budget=.off. takes the scheme as it is", told)


def test_less_than_was_asked_for_is_refused_where_it_has_to_be_exact() -> None:
    partly = changed(REPORT, encoding={"delivered": (Delivery(2, 18, 3),)})
    told = "3 of 18 weights have at most 2 bits; expected all, exactly; nothing was written"
    assert (refused(partly, Goal(force=True, exact=True)), refused(partly, Goal(force=True))) == (told, "")


@pytest.mark.parametrize(
    ("sqnr", "finite", "floats", "reported"),
    [
        (25.0, True, None, ""),
        (12.0, True, None, "has 12.0 dB, expected 20 dB or more; nothing was written; onnxq verify --engine names"),
        (12.0, True, 60.0, "has 12.0 dB, expected 20 dB or more; nothing was written; onnxq verify --engine names"),
        (
            12.0,
            True,
            12.5,
            "has 12.0 dB, expected 20 dB or more, and the float model has 12.5 dB there; nothing was written; use an",
        ),
        (25.0, False, None, "of the quantized model is not finite; nothing was written; see"),
    ],
)
def test_the_engines_that_the_model_is_for_must_agree_too(
    sqnr: float, finite: bool, floats: float | None, reported: str
) -> None:
    there = EngineVerification("openvino 2026", Agreement(64, (replace(output("y", sqnr), finite=finite),)), floats)
    told = refused(changed(REPORT, accuracy={"on_engines": (there,)}), Goal(20.0))
    assert told.startswith(f"on openvino 2026 output y {reported}" if reported else "")
    assert bool(told) == bool(reported)


def gain(bytes: int, interval: tuple[float, float] | None, goal: Goal, floats: int = 10**6, target: str = "") -> str:
    """What a model of this size and speed is told; nothing when it is of use."""
    speed = None if interval is None else Latency(sum(interval) / 2, 1.0, threads=1, runs=5, interval=interval)
    report = changed(REPORT, files={"bytes": bytes, "float_bytes": floats}, performance={"latency": speed})
    report = replace(report, plan=replace(report.plan, target=target or report.plan.target))
    return refused(report, goal, searched=True)


@pytest.mark.parametrize(
    ("bytes", "interval", "goal", "more", "speed"),
    [
        (1_120_000, (0.9, 1.1), Goal(), {}, "1.12 of the size and between 0.90x and 1.10x as fast"),
        (1_120_000, (0.8, 0.9), Goal(), {}, "1.12 of the size and 0.85x as fast (0.80-0.90)"),
        (1_120_000, None, Goal(), {}, "1.12 of the size and of unmeasured speed"),
        (1_000_000, (1.0, 1.1), Goal(prefer="size"), {}, "1.00 of the size and as fast as float (1.00-1.10)"),
        # Smaller, faster, on another runtime, and too small to count bytes.
        (999_999, (0.8, 0.9), Goal(), {}, ""),
        (1_120_000, (1.01, 1.1), Goal(), {}, ""),
        (1_120_000, None, Goal(), {"target": "tensorrt"}, ""),
        (1_120, (0.9, 1.1), Goal(), {"floats": 1_000}, ""),
        # Wanted for something else.
        *(
            (1_120_000, (0.8, 0.9), goal, {}, "")
            for goal in (
                Goal(force=True),
                Goal(exact=True),
                Goal(metric=Metric("y", lambda outputs, samples: 1.0)),
            )
        ),
    ],
)
def test_a_model_that_is_neither_smaller_nor_faster_is_of_no_use(
    bytes: int, interval: tuple[float, float] | None, goal: Goal, more: dict[str, Any], speed: str
) -> None:
    told = (
        f"model.onnx: the quantized model is {speed}, expected smaller or faster; nothing was written; keep the float "
        "model, or use Goal(force=True)"
    )
    assert gain(bytes, interval, goal, **more) == (told if speed else "")


@pytest.mark.parametrize(
    ("keeps_up", "searched", "force", "refusal"),
    [(False, True, False, True), (True, True, False, False), (False, False, False, False), (False, True, True, False)],
)
def test_a_searched_model_that_is_not_shown_to_keep_up_is_refused(
    keeps_up: bool, searched: bool, force: bool, refusal: bool
) -> None:
    goal, sentence = (
        Goal(force=force),
        "model.onnx: the quantized model runs .*, expected no slower than float; nothing",
    )
    with pytest.raises(AccuracyError, match=sentence) if refusal else nullcontext():
        check(REPORT, goal, searched=searched, keeps_up=keeps_up)


# A refusal says what to try, with figures of the run.

OUTPUT = OutputAgreement("y", 39.2, None, 0.0, same_shapes=True, finite=True, compared=0)
NOISY = changed(REPORT, accuracy={"agreement": Agreement(3, (OUTPUT,))})


def commands(**parts: dict[str, object]) -> list[tuple[str, str]]:
    report = AccuracyError("too noisy", changed(NOISY, **parts)).report
    return [(one.command, one.why) for one in suggestions(report)]


def test_a_refusal_suggests_three_commands_with_figures_of_the_run() -> None:
    search = {
        "sensitivities": (NodeSensitivity("/head/a b", Mode.STATIC, 12.34), NodeSensitivity("c", Mode.STATIC, 40.0))
    }
    encoding = {
        "gains": (
            MethodGain("ranges", 20.0, 21.5, "percentile", 2.0),
            MethodGain("gptq", 21.5, 21.5, "", 1.0, "no less"),
        )
    }
    reported = commands(
        search=search,
        encoding=encoding,
        run={"command": ("onnxq", "quantize", "m.onnx", "--min-sqnr", "60", "--calib", "d")},
    )
    assert [command for command, _ in reported] == [
        "onnxq quantize m.onnx --min-sqnr 60 --calib d --exclude '/head/a b'",
        "onnxq quantize m.onnx --min-sqnr 60 --calib d --accuracy full",
        "onnxq quantize m.onnx --calib d --min-sqnr 39",
    ]
    assert "12.3 dB" in reported[0][1]
    assert "gained 1.5 dB in 3 s" in reported[1][1]
    assert "39.2 dB" in reported[2][1]


NO_NODE = {"sensitivities": ()}
ELSEWHERE = EngineVerification("openvino 2026.4", Agreement(3, (replace(OUTPUT, sqnr=12.5),)))


@pytest.mark.parametrize(
    ("parts", "options", "why"),
    [
        ({"search": {"measured": 0, **NO_NODE}}, "--search fast", "39.2 dB"),
        (
            {"search": NO_NODE, "accuracy": {"scores": Scores("top1", 0.91, 0.9)}},
            "--max-drop 0.01",
            "top1 fell by 0.01",
        ),
        # The engine that is less accurate decides.
        ({"search": NO_NODE, "accuracy": {"on_engines": (ELSEWHERE,)}}, "--min-sqnr 12", "12.5 dB"),
        # A model of no use is only forced.
        ({"files": {"float_bytes": 10**6, "bytes": 10**6}, "performance": {"latency": None}}, "--force", "as it is"),
    ],
)
def test_what_is_suggested_has_a_figure_of_the_run(parts: dict[str, Any], options: str, why: str) -> None:
    told = dict(commands(**parts))
    assert why in told[f"onnxq quantize ... {options}"]
    assert len(told) == 1 or options != "--force"


@pytest.mark.parametrize("broken", [{"finite": False}, {"same_shapes": False}, {"sqnr": -math.inf}])
def test_neither_force_nor_a_lower_goal_is_suggested_where_it_cannot_help(broken: dict[str, Any]) -> None:
    reported = commands(search=NO_NODE, accuracy={"agreement": Agreement(3, (replace(OUTPUT, **broken),))})
    assert reported
    assert not any(option in command for command, _ in reported for option in ("--force", "--min-sqnr"))
    assert suggestions(REPORT) == ()


def test_where_all_went_to_float_the_best_plan_with_codes_is_asked_for() -> None:
    plan = replace(REPORT.plan, decisions=tuple(replace(one, weights=()) for one in REPORT.plan.decisions))
    points = (
        Point(3, 0, 1.0, 21.5, None),
        Point(0, 1, 2.0, 39.2, None),
        Point(0, 0, 2.5, 105.0, 1.0, chosen=True),
        Point(0, 0, 2.5, math.inf, 1.0, is_float=True),
    )
    searched = changed(NOISY, search={"frontier": points, "sensitivities": (NodeSensitivity("a", Mode.STATIC, 12.0),)})
    reported = suggestions(AccuracyError("nothing can be quantized", replace(searched, plan=plan)).report)
    assert [one.options for one in reported] == ["--min-sqnr 39", "--accuracy full", "--search off --force"]
    assert "39.2 dB" in reported[0].why
    # A plan that has what is wanted was not trusted with it: to ask for that much again would be refused again.
    trusted = changed(replace(searched, plan=plan), accuracy={"wanted": 30.0})
    reported = suggestions(AccuracyError("nothing can be quantized", trusted).report)
    assert [one.options for one in reported] == ["--accuracy full", "--search off --force"]
    above = changed(replace(searched, plan=plan), accuracy={"wanted": 40.0})
    assert suggestions(AccuracyError("nothing can be quantized", above).report)[0].options == "--min-sqnr 39"


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
    report = AccuracyError("too noisy", changed(NOISY, search=search, run={"command": command})).report
    found = {one.options.split()[0] for one in suggestions(report)}
    assert found
    assert not found & missing


@pytest.mark.parametrize(("right", "suggested"), [((29, 28), 0.0334), ((91, 90), 0.0334), ((30, 20), 0.334)])
def test_what_a_metric_is_to_allow_is_rounded_up(right: tuple[int, int], suggested: float) -> None:
    scores = Scores("top1", right[0] / 30, right[1] / 30)
    reported = dict(commands(search={"sensitivities": ()}, accuracy={"scores": scores}))
    assert f"onnxq quantize ... --max-drop {suggested:g}" in reported
    assert scores.allowed_by(suggested)
    allowed = commands(search={"sensitivities": ()}, accuracy={"scores": scores, "max_drop": suggested})
    assert not any("--max-drop" in command for command, _ in allowed)
