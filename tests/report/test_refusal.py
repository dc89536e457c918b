"""When a model is refused, and what is suggested then."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Build, QuantizeTo, Samples
from onnx import ModelProto
from reports import REPORT, changed

from onnxq.config.presets import PRESETS
from onnxq.config.scheme import Mode
from onnxq.errors import ModelError, names_options
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.metrics import Metric, Scores
from onnxq.evaluation.verification import EngineVerification
from onnxq.planning.delivery import Delivery
from onnxq.planning.plan import Decision, Plan
from onnxq.report import AccuracyError, check_accuracy, check_bound, check_gain
from onnxq.report.refusal import suggestions
from onnxq.search.results import MethodGain, NodeSensitivity, Point


def output(name: str, sqnr: float | None, differing: int = 0, compared: int = 64) -> OutputAgreement:
    share = 1 - differing / compared
    return OutputAgreement(name, sqnr, share, 0.0, same_shapes=True, finite=True, compared=compared)


def refusal(*outputs: OutputAgreement, measured: int = 0) -> str:
    """What a model of these outputs is told at 20 dB; nothing when it is faithful enough."""
    search = {"measured": measured, "sensitivities": ()}
    report = changed(REPORT, accuracy={"agreement": Agreement(64, outputs)}, search=search)
    try:
        check_accuracy(report, Goal(20.0))
    except AccuracyError as error:
        return str(error)
    return ""


def test_labels_may_differ_in_a_few_values_and_probabilities_still_count() -> None:
    assert refusal(output("label", None, 2), output("probabilities", 25.0)) == ""
    assert refusal(output("label", None, 5, 200), output("probabilities", 25.0)) == ""
    assert "output probabilities has 18.0 dB" in refusal(output("label", None, 0), output("probabilities", 18.0))
    assert "output label differs in 3 of 64" in refusal(output("label", None, 3), output("probabilities", 45.0))


def test_the_refusal_of_labels_says_what_share_differs_and_what_to_do() -> None:
    labels = output("label", None, 3)
    assert refusal(labels, measured=12) == (
        "output label differs in 3 of 64 values (4.69%), which is more than the 1.00% that 20 dB stand for, with 95 % "
        "confidence; nothing was written; evaluate with Goal(metric=..., max_drop=...), lower goal=, "
        "or write it with Goal(force=True)"
    )
    assert '; let budget="fast" keep nodes in float, evaluate with' in refusal(labels)


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
    with pytest.raises(AccuracyError, match=re.escape(sentence)):
        check_accuracy(report, Goal(20.0))


@pytest.mark.parametrize("measured", [0, 3])
@pytest.mark.parametrize(
    ("limit", "remedy"),
    [
        ("1 s with --time-limit", "raise time_limit= above 1 s, "),
        ("75 s with --search fast", 'let budget="full" take more than 75 s, '),
    ],
)
def test_a_limit_that_ended_the_search_is_what_to_raise(measured: int, limit: str, remedy: str) -> None:
    search = {"measured": measured, "sensitivities": (), "limit": limit}
    report = changed(REPORT, accuracy={"agreement": Agreement(64, (output("y", 12.0),))}, search=search)
    with pytest.raises(AccuracyError, match=re.escape(f"; {remedy}lower goal=")):
        check_accuracy(report, Goal(20.0))


def test_the_refusal_of_floats_says_what_is_still_to_be_done() -> None:
    floats = output("y", 12.0)
    reported = "output y has 12.0 dB, expected 20 dB or more; nothing was written; "
    assert (
        refusal(floats)
        == reported + 'let budget="fast" keep nodes in float, lower goal=, or write it with Goal(force=True)'
    )
    assert refusal(floats, measured=12) == reported + "lower goal=, or write it with Goal(force=True)"
    token = names_options.set(True)
    try:
        assert refusal(floats, measured=12) == reported + "lower --min-sqnr, or write it with --force"
    finally:
        names_options.reset(token)


def test_force_is_not_advised_for_a_result_of_no_use() -> None:
    useless = refusal(output("y", 0.4))
    assert "force" not in useless
    assert useless.endswith("use a preset of more bits, or one that quantizes weights alone, such as int8-storage")


UNWEIGHTED = dataclasses.replace(REPORT.plan, decisions=(Decision("a", "Conv", Mode.FLOAT, "why"),))
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
    report = dataclasses.replace(changed(REPORT, search=changes), plan=UNWEIGHTED)
    expected = AccuracyError if sentence else ModelError
    with pytest.raises(expected, match=sentence or "nothing in the model is worth quantizing: why; nothing"):
        check_accuracy(report, Goal(20.0))


@pytest.fixture
def classifier(build: Build) -> ModelProto:
    """Labels and probabilities, as converters of scikit-learn write them, of scores that lie close together."""
    return build(
        """(float[1,32] x) => (int64[1] label, float[1,10] probabilities) {
        hidden = MatMul(x, w0) active = Relu(hidden) scores = MatMul(active, w1)
        probabilities = Softmax(scores) label = ArgMax <axis = 1, keepdims = 0> (scores)
        }""",
        w0=(32, 64),
        w1=(64, 10),
    )


def test_a_classifier_of_labels_and_probabilities_is_quantized(
    classifier: ModelProto, quantize_to: QuantizeTo, samples_for: Callable[..., Samples], tmp_path: Path
) -> None:
    samples = samples_for(classifier, 200)
    done = quantize_to(classifier, tmp_path / "a.onnx", goal=20, samples=samples)
    probabilities, scores = done.report.agreement.outputs
    assert (scores.name, scores.stands_for, scores.compared) == ("scores", ("label",), 50)
    assert 20 < done.report.agreement.worst_sqnr <= (probabilities.sqnr or 0)


def test_a_classifier_of_labels_alone_is_refused_for_noisy_scores(
    classifier: ModelProto, quantize_to: QuantizeTo, samples_for: Callable[..., Samples], tmp_path: Path
) -> None:
    samples = samples_for(classifier, 200)
    options = {"samples": samples, "scheme": PRESETS["int4-block32"], "goal": 20}
    del classifier.graph.output[1]
    with pytest.raises(
        AccuracyError, match=r"tensor scores, compared in place of label, has \S+ dB, expected 20 dB or more"
    ):
        quantize_to(classifier, tmp_path / "a.onnx", **options)
    assert not (tmp_path / "a.onnx").exists()
    assert quantize_to(classifier, tmp_path / "a.onnx", **{**options, "goal": -20}).report.output


@pytest.mark.parametrize(
    ("mode", "bound", "force", "refused"),
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
    mode: Mode, bound: float | None, force: bool, refused: bool
) -> None:
    agreement = Agreement(64, (replace(output("y", 21.0), bound=bound), replace(output("z", 30.0), bound=25.0)))
    plan = replace(REPORT.plan, decisions=tuple(replace(one, mode=mode) for one in REPORT.plan.decisions))
    report = replace(changed(REPORT, accuracy={"agreement": agreement, "wanted": 20.0}), plan=plan)
    told = ""
    try:
        check_bound(report, Goal(20.0, force=force))
    except AccuracyError as error:
        told = str(error)
    assert bool(told) is refused
    if bound == 9.97:
        assert told == (
            "with compressed weights alone, output y is only shown to have 9.9 dB or more on other samples, expected "
            "at least half of 20 dB; nothing was written; give more samples, or use Goal(force=True)"
        )


def test_a_refusal_can_be_sent_to_another_process() -> None:
    sent = pickle.loads(pickle.dumps(AccuracyError("too noisy", REPORT)))
    assert (str(sent), sent.report) == ("too noisy", changed(REPORT, accuracy={"refusal": "too noisy"}))


def test_a_refused_report_names_no_file_that_was_not_written() -> None:
    report = AccuracyError("too noisy", changed(REPORT, files={"output": "out.onnx"})).report
    assert (report.output, report.accuracy.refusal) == (None, "too noisy")


@pytest.mark.parametrize("change", [{"finite": False}, {"same_shapes": False}])
def test_what_no_user_can_want_is_refused_though_forced(change: dict[str, bool]) -> None:
    outputs = (dataclasses.replace(output("y", 30.0), **change),)
    broken = changed(REPORT, accuracy={"agreement": Agreement(1, outputs)})
    with pytest.raises(AccuracyError, match="output y of the quantized model"):
        check_accuracy(broken, Goal(force=True))


def test_a_float_model_is_no_quantized_one_though_forced() -> None:
    plain = dataclasses.replace(REPORT, plan=Plan((), (), "int8", "onnxruntime-cpu"))
    with pytest.raises(AccuracyError, match=r"no quantized plan .*; budget=.off. takes the scheme as it is"):
        check_accuracy(changed(plain, search={"measured": 9, "sensitivities": ()}), Goal(force=True))


def test_less_than_was_asked_for_is_refused_where_it_has_to_be_exact() -> None:
    partly = changed(REPORT, encoding={"delivered": (Delivery(2, 18, 3),)})
    with pytest.raises(
        AccuracyError, match="3 of 18 weights have at most 2 bits; expected all, exactly; nothing was written"
    ):
        check_accuracy(partly, Goal(force=True, exact=True))
    check_accuracy(partly, Goal(force=True))


@pytest.mark.parametrize(
    ("sqnr", "finite", "reported"),
    [
        (25.0, True, ""),
        (
            12.0,
            True,
            "on openvino 2026.4.1 output y has 12.0 dB, expected 20 dB or more; nothing was written; onnxq verify",
        ),
        (25.0, False, "on openvino 2026.4.1 output y of the quantized model is not finite; nothing was written; see"),
    ],
)
def test_what_the_model_is_for_must_agree_too(sqnr: float, finite: bool, reported: str) -> None:
    there = Agreement(64, (replace(output("y", sqnr), finite=finite),))
    report = changed(REPORT, accuracy={"on_engines": (EngineVerification("openvino 2026.4.1", there),)})
    try:
        check_accuracy(report, Goal(20.0))
        found = ""
    except AccuracyError as error:
        found = str(error)
    assert found.startswith(reported)
    assert bool(found) == bool(reported)


@pytest.mark.parametrize(
    ("floats", "reported"), [(12.5, ", and the float model has 12.5 dB there; nothing was written; use"), (60.0, "; ")]
)
def test_an_engine_that_computes_floats_too_coarsely_is_told(floats: float, reported: str) -> None:
    there = EngineVerification("openvino 2026.4.1", Agreement(64, (output("y", 12.0),)), floats)
    message = re.escape(f"on openvino 2026.4.1 output y has 12.0 dB, expected 20 dB or more{reported}")
    with pytest.raises(AccuracyError, match=message):
        check_accuracy(changed(REPORT, accuracy={"on_engines": (there,)}), Goal(20.0))


def gain(bytes: int, interval: tuple[float, float] | None, goal: Goal, floats: int = 10**6, target: str = "") -> str:
    """What a model of this size and speed is told; nothing when it is of use."""
    speed = None if interval is None else Latency(sum(interval) / 2, 1.0, threads=1, runs=5, interval=interval)
    report = changed(REPORT, files={"bytes": bytes, "float_bytes": floats}, performance={"latency": speed})
    report = replace(report, plan=replace(report.plan, target=target or report.plan.target))
    try:
        check_gain(report, goal)
    except AccuracyError as error:
        return error.report.accuracy.refusal
    return ""


def test_a_model_that_is_neither_smaller_nor_faster_is_of_no_use() -> None:
    reported = (
        "model.onnx: the quantized model is 1.12 of the size and {}, expected smaller or faster"
        "; nothing was written; keep the float model, or use Goal(force=True)"
    )
    equal = "between 0.90x and 1.10x as fast"
    assert gain(1_120_000, (0.9, 1.1), Goal()) == reported.format(equal)
    assert gain(1_120_000, (0.8, 0.9), Goal()) == reported.format("0.85x as fast (0.80-0.90)")
    assert gain(1_120_000, None, Goal()) == reported.format("of unmeasured speed")
    assert gain(1_000_000, (1.0, 1.1), Goal(prefer="size"))


@pytest.mark.parametrize(
    "goal", [Goal(force=True), Goal(exact=True), Goal(metric=Metric("y", lambda outputs, samples: 1.0))]
)
def test_what_is_wanted_for_something_else_is_written(goal: Goal) -> None:
    assert gain(1_120_000, (0.8, 0.9), goal) == ""


@pytest.mark.parametrize(
    ("bytes", "interval", "more"),
    [
        (999_999, (0.8, 0.9), {}),
        (1_120_000, (1.01, 1.1), {}),
        (1_120_000, None, {"target": "tensorrt"}),
        (1_120, (0.9, 1.1), {"floats": 1_000}),
    ],
    ids=["smaller", "faster", "on another runtime", "too small to count bytes"],
)
def test_a_model_that_may_be_of_use_is_written(
    bytes: int, interval: tuple[float, float] | None, more: dict[str, object]
) -> None:
    assert gain(bytes, interval, Goal(), **more) == ""


# A refusal says what to try, with figures of the run.

OUTPUT = OutputAgreement("y", 39.2, None, 0.0, same_shapes=True, finite=True, compared=0)
NOISY = changed(REPORT, accuracy={"agreement": Agreement(3, (OUTPUT,))})


def refused(**parts: dict[str, object]) -> list[tuple[str, str]]:
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
    reported = refused(
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


def test_a_search_comes_first_where_there_was_none() -> None:
    first, *_ = refused(search={"measured": 0, "sensitivities": ()})
    assert first[0] == "onnxq quantize ... --search fast"
    assert "39.2 dB" in first[1]


def test_a_metric_is_asked_for_less() -> None:
    reported = refused(search={"sensitivities": ()}, accuracy={"scores": Scores("top1", 0.91, 0.9)})
    assert reported[1] == ("onnxq quantize ... --max-drop 0.01", "top1 fell by 0.01")


def test_figures_that_are_none_are_not_asked_for() -> None:
    output = replace(OUTPUT, sqnr=-math.inf)
    reported = refused(search={"sensitivities": ()}, accuracy={"agreement": Agreement(3, (output,))})
    assert not any("--min-sqnr" in command for command, _ in reported)


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


def test_a_model_of_no_use_is_only_forced() -> None:
    reported = refused(files={"float_bytes": 10**6, "bytes": 10**6}, performance={"latency": None})
    assert [command for command, _ in reported] == ["onnxq quantize ... --force"]


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
    report = AccuracyError("too noisy", changed(NOISY, search=search, run={"command": command})).report
    found = {one.options.split()[0] for one in suggestions(report)}
    assert found
    assert not found & missing


def test_the_engine_that_is_less_faithful_says_what_may_be_asked_for() -> None:
    elsewhere = EngineVerification("openvino 2026.4", Agreement(3, (replace(OUTPUT, sqnr=12.5),)))
    reported = refused(search={"sensitivities": ()}, accuracy={"on_engines": (elsewhere,)})
    assert "onnxq quantize ... --min-sqnr 12" in [command for command, _ in reported]


@pytest.mark.parametrize("broken", [{"finite": False}, {"same_shapes": False}])
def test_neither_force_nor_a_lower_goal_writes_an_unsound_model(broken: dict[str, bool]) -> None:
    reported = refused(accuracy={"agreement": Agreement(3, (replace(OUTPUT, **broken),))})
    assert reported
    assert not any(option in command for command, _ in reported for option in ("--force", "--min-sqnr"))


@pytest.mark.parametrize(("right", "suggested"), [((29, 28), 0.0334), ((91, 90), 0.0334), ((30, 20), 0.334)])
def test_what_a_metric_is_to_allow_is_rounded_up(right: tuple[int, int], suggested: float) -> None:
    scores = Scores("top1", right[0] / 30, right[1] / 30)
    reported = dict(refused(search={"sensitivities": ()}, accuracy={"scores": scores}))
    assert f"onnxq quantize ... --max-drop {suggested:g}" in reported
    assert scores.allowed_by(suggested)
    allowed = refused(search={"sensitivities": ()}, accuracy={"scores": scores, "max_drop": suggested})
    assert not any("--max-drop" in command for command, _ in allowed)
