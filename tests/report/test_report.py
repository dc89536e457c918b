"""What a report says as values and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from reports import FULL, REPORT, changed

from onnxq.errors import DataError, OutputError
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.goal import EvaluationSplit, Scores
from onnxq.report import Report, load_report


def strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_holds_every_decision_with_its_reason() -> None:
    plain = strict(REPORT.to_json())
    decisions = plain["plan"]["decisions"]
    assert [(one["node"], one["mode"], one["reason"]) for one in decisions] == [
        ("a", "static", "integer kernel"),
        ("b", "float", "why"),
    ]
    spec = decisions[0]["weights"][0]["spec"]
    assert (spec["format"], spec["per"], spec["symmetric"]) == ("int8-narrow", "tensor", True)
    assert plain["plan"]["activations"][0]["fixed_range"] == [0.0, 1.0]


def test_json_holds_every_field() -> None:
    plain = strict(REPORT.to_json())
    assert {field.name for field in dataclasses.fields(Report)} <= set(plain)
    assert plain["performance"]["kernels"] == {"integer": 1, "quantize": 2, "heavy_float": 0}


def test_infinities_are_words() -> None:
    plain = strict(REPORT.to_json())
    assert plain["fidelity"]["agreement"]["outputs"][0]["sqnr"] == "Infinity"
    assert [one["sqnr"] for one in plain["search"]["sensitivities"]] == ["-Infinity", "Infinity"]


def test_json_sums_up_size_fidelity_and_speed() -> None:
    plain = strict(REPORT.to_json())
    assert (plain["size_ratio"], plain["worst_sqnr"], plain["speed"]) == (0.25, "Infinity", 2.0)


def test_a_report_without_latency_says_null() -> None:
    assert strict(changed(REPORT, performance={"latency": None}).to_json())["performance"]["latency"] is None


def test_the_size_ratio_is_a_share_of_the_float_model() -> None:
    assert REPORT.size_ratio == 0.25


def test_a_saved_report_is_read_back(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert text.endswith("}\n")
    assert strict(text) == strict(REPORT.to_json())
    assert load_report(tmp_path / "report.json") == REPORT


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": None}, r"is of an older onnxq \(version None, expected 2\); quantize again$"),
        ({"version": 1}, r"is of an older onnxq \(version 1, expected 2\)"),
        ({"version": 3}, r"is of a newer onnxq \(version 3, expected 2\)"),
        ({"run": {"seconds": "long"}}, "report .*: the report: run: seconds is a number, found 'long'$"),
        ({"runs": {}}, "report .*: the report has no key 'runs'; did you mean 'run'"),
        ({"search": []}, r"the report: search is a table, found \[\]"),
    ],
)
def test_what_is_no_report_of_this_version_is_refused_in_a_sentence(
    change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_text(json.dumps({**strict(REPORT.to_json()), **change}))
    with pytest.raises(DataError, match=sentence):
        load_report(tmp_path / "report.json")


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "cannot be read"), ("[]", "is no report"), ("{}", "is no report")]
)
def test_another_file_is_no_report(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=sentence):
        load_report(tmp_path / "a.json")


@pytest.mark.parametrize("place", ["no/report.json", "."])
def test_a_report_that_cannot_be_written_is_told(place: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^report .* cannot be written: "):
        REPORT.save(tmp_path / place)


def test_a_report_is_few_words() -> None:
    assert repr(FULL) == (
        "Report(Verified: 2.00x as fast (1.90-2.10), 0.25 of the size, 31 dB on 3 samples it had not seen; "
        "2 nodes: 1 static, 1 float)"
    )


def test_notebooks_show_outputs_and_nodes() -> None:
    shown = FULL._repr_html_()
    assert "<td>y</td><td>31.2 dB</td><td>98.00%</td>" in shown
    assert "<td>b</td><td>Tanh</td><td>float</td><td>why</td>" in shown


# One sentence says what came of a run, and a refusal says what to try with figures of the run.

OUTPUT = OutputAgreement("y", 39.2, None, 0.0, same_shapes=True, finite=True, compared=0)
LABEL = OutputAgreement("l", None, 0.9375, 0.0, same_shapes=True, finite=True, compared=16)
UNTOLD = replace(REPORT.performance.latency, rounds=2)
TIMED = replace(UNTOLD, rounds=6, interval=(1.78, 2.1))
NOISY = changed(REPORT, fidelity={"agreement": Agreement(3, (OUTPUT,))}, performance={"latency": TIMED})


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({}, "Verified: 2.00x as fast (1.78-2.10), 0.25 of the size, 39 dB on 3 samples"),
        (
            {"performance": {"latency": UNTOLD}},
            "Verified: of a speed that 2 rounds of timing do not show, 0.25 of the size, 39 dB on 3 samples",
        ),
        (
            {"performance": {"latency": replace(UNTOLD, rounds=1)}},
            "Verified: of a speed that 1 round of timing does not show, 0.25 of the size, 39 dB on 3 samples",
        ),
        ({"performance": {"latency": None}}, "Verified: 0.25 of the size, 39 dB on 3 samples"),
        (
            {"performance": {"latency": TIMED}, "samples": {"split": EvaluationSplit(103, 0)}},
            "Verified: 2.00x as fast (1.78-2.10), 0.25 of the size, 39 dB on 103 samples it had not seen",
        ),
        (
            {"performance": {"latency": TIMED}, "samples": {"split": EvaluationSplit(400, 0, files=8)}},
            "Verified: 2.00x as fast (1.78-2.10), 0.25 of the size, 39 dB on 400 samples of 8 files it had not seen",
        ),
        (
            {"performance": {"latency": replace(TIMED, interval=(0.63, 3.78))}},
            "Verified: between 0.63x and 3.78x as fast, 0.25 of the size, 39 dB on 3 samples",
        ),
        (
            {"performance": {"latency": replace(TIMED, interval=(0.98, 1.05))}},
            "Verified: as fast as float (0.98-1.05), 0.25 of the size, 39 dB on 3 samples",
        ),
        (
            {"performance": {"latency": replace(TIMED, interval=(0.63, 3.78)), "runs_as_float": True}},
            "Verified: as fast as float, whose kernels it runs, 0.25 of the size, 39 dB on 3 samples",
        ),
        (
            {"performance": {"latency": replace(TIMED, candidate=TIMED.reference / 0.63, interval=(0.6, 0.65))}},
            "Written as asked, but slower than float: 0.63x as fast (0.60-0.65), 0.25 of the size, 39 dB on 3 samples",
        ),
        (
            {"performance": {"latency": None}, "samples": {"split": EvaluationSplit(9, 2)}},
            "Verified: 0.25 of the size, 39 dB on 9 samples, 2 of which it had seen",
        ),
        (
            {"performance": {"latency": None}, "samples": {"split": EvaluationSplit(1, 1)}},
            "Verified: 0.25 of the size, 39 dB on 1 sample that it had seen",
        ),
        (
            {"performance": {"latency": None}, "fidelity": {"scores": Scores("top1", 0.91, 0.905)}},
            "Verified: 0.25 of the size, top1 0.91 -> 0.905 on 3 samples",
        ),
        (
            {"fidelity": {"agreement": REPORT.agreement}},
            "Verified: 2.00x as fast (1.78-2.10), 0.25 of the size, equal",
        ),
        ({"fidelity": {"refusal": "output y has 39.2 dB"}}, "Refused: output y has 39.2 dB"),
    ],
)
def test_the_verdict_is_one_sentence(parts: dict[str, dict[str, object]], sentence: str) -> None:
    assert changed(NOISY, **parts).verdict.startswith(sentence)


def test_what_was_forced_below_its_goal_is_not_called_verified() -> None:
    report = changed(NOISY, fidelity={"wanted": 60.0}, performance={"latency": None})
    assert report.verdict == "Forced, below the 60 dB wanted: 0.25 of the size, 39 dB on 3 samples"
    assert changed(NOISY, fidelity={"wanted": 39.0}).verdict.startswith("Verified: ")


@pytest.mark.parametrize(
    ("agreement", "compared", "told"),
    [
        (1.0, 16, "equal outputs"),
        (0.9375, 16, "93.8% equal labels"),
        (0.5, 16, "50.0% equal labels"),
        (0.9999, 10_000, "99.9% equal labels"),
    ],
)
def test_labels_of_which_any_differs_are_not_called_equal(agreement: float, compared: int, told: str) -> None:
    label = replace(LABEL, agreement=agreement, compared=compared)
    report = changed(NOISY, fidelity={"agreement": Agreement(3, (label,))}, performance={"latency": None})
    assert report.verdict == f"Verified: 0.25 of the size, {told} on 3 samples"


SCORES = replace(OUTPUT, name="s", stands_for=("y", "l"))
SAME = replace(OUTPUT, sqnr=math.inf)


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        ((SAME,), "equal outputs on 3 samples"),
        (
            (SAME, replace(SAME, name="s", stands_for=("y",))),
            "equal in all that was compared on 3 samples; y is compared with what the float model chose",
        ),
        (
            (OUTPUT, SCORES),
            "39 dB on 3 samples; y is compared with what the float model chose; l is judged only by the scores that "
            "decide",
        ),
        (
            (replace(SAME, is_compared=False, skipped=9),),
            "no output that can be compared on 3 samples; y is not compared, as the float model gives no finite number",
        ),
        ((replace(OUTPUT, skipped=9),), "39 dB on 3 samples; y is compared where the float model is finite"),
        (
            (replace(SCORES, stands_for=tuple("abcdefgh")),),
            "39 dB on 3 samples; a, b, c and 5 more are judged only by the scores that decide",
        ),
    ],
)
def test_the_verdict_says_what_was_compared_and_how(outputs: tuple[OutputAgreement, ...], told: str) -> None:
    report = changed(NOISY, fidelity={"agreement": Agreement(3, outputs)}, performance={"latency": None})
    assert report.verdict == f"Verified: 0.25 of the size, {told}"


@pytest.mark.parametrize(
    ("bound", "told"), [(17.2, "39 dB on 3 samples (17 dB or more on others)"), (20.0, "39 dB on 3 samples")]
)
def test_the_verdict_says_where_others_are_not_known_to_be_as_close(bound: float, told: str) -> None:
    agreement = Agreement(3, (replace(OUTPUT, bound=bound),))
    report = changed(NOISY, fidelity={"agreement": agreement, "wanted": 20.0}, performance={"latency": None})
    assert report.verdict == f"Verified: 0.25 of the size, {told}"
