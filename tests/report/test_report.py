"""The report: its parts, charts, page and exports."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Build
from reports import FULL, PAYLOAD, REPORT, changed, hostile, large

from onnxq.calibration.histogram import Bins, Histogram
from onnxq.calibration.kinds import default_request
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.errors import DataError, OutputError
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.goal import EvaluationSplit, Scores
from onnxq.evaluation.layers import Layer, Layers, SampleSqnr
from onnxq.ir import Graph, as_graph
from onnxq.numerics.affine import decibels
from onnxq.planning.plan import Activation, Decision, Plan, Weight
from onnxq.report import AccuracyError, Report, load_report
from onnxq.report.charts import (
    Depth,
    causes,
    chain,
    frontier_chart,
    node_rows,
    node_views,
    shared_words,
    sqnr_along,
    sqnr_by_node,
    sqnr_chart,
    ticks,
)
from onnxq.report.formatting import duration, milliseconds, plural, size, visible
from onnxq.report.page import Comparison, save_html, script_json, to_html
from onnxq.report.parts import (
    AppliedPass,
    Machine,
    ModelFiles,
    Stopwatch,
    peak_memory,
    tensor_values,
    weight_channels,
)
from onnxq.report.report import summary_rows
from onnxq.rewrite import Changes, Pass, PassResult
from onnxq.search.results import NodeSensitivity, Point


def strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_holds_every_field_and_sums_up_what_pipelines_read_first() -> None:
    plain = strict(REPORT.to_json())
    assert {field.name for field in dataclasses.fields(Report)} <= set(plain)
    assert [(one["node"], one["mode"], one["reason"]) for one in plain["plan"]["decisions"]] == [
        ("a", "static", "integer kernel"),
        ("b", "float", "why"),
    ]
    spec = plain["plan"]["decisions"][0]["weights"][0]["spec"]
    assert (spec["format"], spec["granularity"], spec["symmetric"]) == ("int8-narrow", "tensor", True)
    assert plain["plan"]["activations"][0]["fixed_range"] == [0.0, 1.0]
    assert plain["performance"]["kernels"] == {"integer": 1, "quantize": 2, "heavy_float": 0, "heavy_integer": 0}
    # Infinities are words.
    assert (plain["size_ratio"], plain["worst_sqnr"], plain["speed"]) == (0.25, "Infinity", 2.0)
    assert plain["accuracy"]["agreement"]["outputs"][0]["sqnr"] == "Infinity"
    assert [one["sqnr"] for one in plain["search"]["sensitivities"]] == ["-Infinity", "Infinity"]
    assert plain["summary"] == [{"name": row.name, "text": row.text} for row in summary_rows(REPORT)]
    assert strict(changed(REPORT, performance={"latency": None}).to_json())["performance"]["latency"] is None
    assert REPORT.size_ratio == ModelFiles("a.onnx", None, float_bytes=400, bytes=100).size_ratio == 0.25


def test_a_saved_report_is_read_back(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert text.endswith("}\n")
    assert strict(text) == strict(REPORT.to_json())
    assert load_report(tmp_path / "report.json") == REPORT


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": None}, r"is of an older onnxq \(version None, expected 3\); quantize again$"),
        ({"version": 1}, r"is of an older onnxq \(version 1, expected 3\)"),
        ({"version": 4}, r"is of a newer onnxq \(version 4, expected 3\)"),
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
    ("text", "sentence"), [("{", "cannot be read"), ("[]", "is not a report"), ("{}", "is not a report")]
)
def test_another_file_is_no_report(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=sentence):
        load_report(tmp_path / "a.json")


def test_a_report_is_few_words_and_a_table_in_notebooks(tmp_path: Path) -> None:
    assert repr(FULL) == (
        "Report(Verified: 2.00x as fast (1.90-2.10), 0.25 of the size, 31.2 dB on 3 held-out samples; "
        "2 nodes: 1 static, 1 float)"
    )
    shown = FULL._repr_html_()
    assert "<td>y</td><td>31.2 dB</td><td>98.00%</td>" in shown
    assert "<td>b</td><td>Tanh</td><td>float</td><td>why</td>" in shown


@pytest.mark.parametrize(
    ("save", "what"),
    [
        (REPORT.save, "report"),
        (lambda path: save_html(FULL, path), "page"),
        (lambda path: FOUND.save_html(path), "page"),
    ],
    ids=["report", "page", "comparison"],
)
def test_a_file_that_cannot_be_written_is_told(save: Callable[[Path], None], what: str, tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "file", tmp_path):
        with pytest.raises(OutputError, match=rf"^{what} .* cannot be written: "):
            save(path)
    save(tmp_path / "file")
    assert (tmp_path / "file").stat().st_size > 100


# One sentence says what came of a run, and a refusal says what to try with figures of the run.

OUTPUT = OutputAgreement("y", 39.2, None, 0.0, same_shapes=True, finite=True, compared=0)


LABEL = OutputAgreement("l", None, 0.9375, 0.0, same_shapes=True, finite=True, compared=16)
SCORES = replace(OUTPUT, name="s", stands_for=("y", "l"))
SAME = replace(OUTPUT, sqnr=math.inf)
NOISY = changed(REPORT, accuracy={"agreement": Agreement(3, (OUTPUT,))}, performance={"latency": None})
TIMED = replace(REPORT.performance.latency, rounds=6, interval=(1.78, 2.1))
UNKNOWN = (0.0, math.inf)
SPEEDS = [
    ({}, "2.00x as fast (1.78-2.10)"),
    ({"rounds": 2, "interval": UNKNOWN}, "of unknown speed (2 rounds of timing are too few)"),
    ({"rounds": 1, "interval": UNKNOWN}, "of unknown speed (1 round of timing is too few)"),
    ({"interval": (0.63, 3.78)}, "between 0.63x and 3.78x as fast"),
    ({"interval": (0.98, 1.05)}, "as fast as float (0.98-1.05)"),
]
SPLITS = [
    (None, "3 samples"),
    (EvaluationSplit(103, 0), "103 held-out samples"),
    (EvaluationSplit(400, 0, files=8), "400 held-out samples of 8 files"),
    (EvaluationSplit(9, 2), "9 samples, 2 of which the search used"),
    (EvaluationSplit(1, 1), "1 sample that the search used"),
]
BOUNDS = [
    # Wanted decibels, the bound, and its text: where it misses the goal, or is far below what was measured.
    (39.0, None, ""),
    (20.0, 17.2, " (at least 17.2 dB on others)"),
    (20.0, 19.97, " (at least 19.9 dB on others)"),
    (20.0, 29.1, " (at least 29.1 dB on others)"),
    (None, 29.1, " (at least 29.1 dB on others)"),
    (20.0, 29.3, ""),
]
FEW = [
    (EvaluationSplit(3, 0), "3 held-out samples; a bound from 3 samples is rough"),
    (EvaluationSplit(40, 0, files=2), "40 held-out samples of 2 files; a bound from 2 files is rough"),
    (EvaluationSplit(4, 0), "4 held-out samples"),
    (EvaluationSplit(3, 3), "3 samples that the search used"),
]
COMPARED = [
    ((SAME,), "equal outputs on 3 samples"),
    ((replace(LABEL, agreement=1.0),), "equal outputs on 3 samples"),
    ((LABEL,), "93.8% equal labels on 3 samples"),
    ((replace(LABEL, agreement=0.5),), "50.0% equal labels on 3 samples"),
    # Labels of which any differs are not called equal.
    ((replace(LABEL, agreement=0.9999, compared=10_000),), "99.9% equal labels on 3 samples"),
    (
        (SAME, replace(SAME, name="s", stands_for=("y",))),
        "equal in all compared outputs on 3 samples; y is compared under the float model's choices",
    ),
    (
        (OUTPUT, SCORES),
        "39.2 dB on 3 samples; y is compared under the float model's choices; l is evaluated only by the scores "
        "that decide",
    ),
    (
        (replace(SAME, is_compared=False, skipped=9),),
        "no comparable output on 3 samples; y is not compared, because the float model's values are not finite",
    ),
    ((replace(OUTPUT, skipped=9),), "39.2 dB on 3 samples; y is compared where the float model is finite"),
    (
        (replace(SCORES, stands_for=tuple("abcdefgh")),),
        "39.2 dB on 3 samples; a, b, c and 5 more are evaluated only by the scores that decide",
    ),
]


def agreed(*outputs: OutputAgreement, samples: int = 3, files: int = 0) -> dict[str, object]:
    return {"agreement": Agreement(samples, outputs, files)}


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        *(
            ({"performance": {"latency": replace(TIMED, **latency)}}, f"Verified: {words}, SIZE, 39.2 dB on 3 samples")
            for latency, words in SPEEDS
        ),
        (
            {"performance": {"latency": replace(TIMED, candidate=TIMED.reference / 0.63, interval=(0.6, 0.65))}},
            "Written as asked, but slower than float: 0.63x as fast (0.60-0.65), SIZE, 39.2 dB on 3 samples",
        ),
        (
            {"performance": {"latency": replace(TIMED, interval=(0.63, 3.78)), "runs_as_float": True}},
            "Verified: as fast as float, whose kernels it runs, SIZE, 39.2 dB on 3 samples",
        ),
        *(({"samples": {"split": split}}, f"Verified: SIZE, 39.2 dB on {words}") for split, words in SPLITS),
        *(
            (
                {"samples": {"split": split}, "accuracy": {"scores": Scores("top1", 0.91, 0.905)}},
                f"Verified: SIZE, top1 0.91 -> 0.905 on {words}",
            )
            for split, words in SPLITS
        ),
        ({"accuracy": {"refusal": "output y has 39.2 dB"}}, "Refused: output y has 39.2 dB"),
        ({"accuracy": {"wanted": 60.0}}, "Forced, below the 60 dB wanted: SIZE, 39.2 dB on 3 samples"),
        *(
            (
                {"accuracy": {"wanted": wanted, **agreed(replace(OUTPUT, bound=bound))}},
                f"Verified: SIZE, 39.2 dB on 3 samples{text}",
            )
            for wanted, bound, text in BOUNDS
        ),
        *(({"accuracy": agreed(*outputs)}, f"Verified: SIZE, {words}") for outputs, words in COMPARED),
        *(
            (
                {
                    "samples": {"split": split},
                    "accuracy": agreed(replace(OUTPUT, bound=30.0), samples=split.samples, files=split.files),
                },
                f"Verified: SIZE, 39.2 dB on {words}",
            )
            for split, words in FEW
        ),
    ],
)
def test_the_verdict_is_one_sentence_of_what_was_measured(parts: dict[str, Any], verdict: str) -> None:
    assert changed(NOISY, **parts).verdict == verdict.replace("SIZE", "0.25 of the size")


@dataclass(frozen=True)
class Scale(Pass):
    factor: float = 2.0

    def apply(self, graph: Graph) -> Changes:
        return Changes()


def test_a_pass_is_told_in_plain_values() -> None:
    applied = PassResult(Scale(3.0), Changes(("a", "b"), (("c", "not wanted"),)), 0.5)
    options = {"factor": "3.0"}
    assert AppliedPass.of(applied) == AppliedPass("Scale", options, 0.5, 2, ("a", "b"), 1, (("c", "not wanted"),))


# Stages and the machine.


@pytest.mark.parametrize("names", [("prepare", "calibrate"), ("prepare", "calibrate", "prepare")])
def test_stages_follow_one_another_and_stand_once(names: tuple[str, ...]) -> None:
    watch = Stopwatch()
    for name in names:
        watch.lap(name)
    assert [stage.name for stage in watch.stages] == ["prepare", "calibrate"]
    assert 0 <= sum(stage.seconds for stage in watch.stages) <= watch.seconds
    assert 0 < watch.stages[0].peak_bytes <= peak_memory()
    machine = Machine.this()
    assert machine.cores >= 1
    assert machine.versions["onnxruntime"]


# Values and channels are counted as NumPy counts them.

CODES = QuantSpec("uint8", symmetric=False)


def plan_of(*activations: Activation, weights: tuple[Weight, ...] = ()) -> Plan:
    return Plan((Decision("a", "MatMul", Mode.STATIC, "why", weights),), activations, "int8", "onnxruntime-cpu")


def seen(counts: list[int]) -> CalibrationStatistics:
    # Sixteenths from 0 to 1.
    bins = Bins(0.0, 0.999, np.array(counts)) if counts else Bins()
    return CalibrationStatistics(("s",), {default_request("x", "histogram"): Histogram(bins)})


@pytest.mark.parametrize(("high", "clipped"), [(2.0, 0.0), (0.75, 0.5), (-1.0, 1.0)])
def test_what_lies_outside_the_range_is_clipped(high: float, clipped: float) -> None:
    exact = Histogram(Bins(0.0, 0.999, np.ones(1, np.int64))).whole
    counts = np.zeros(round(1 / exact.width), np.int64)
    counts[0] = counts[-1] = 4
    found = tensor_values(plan_of(Activation("x", CODES, "x", (-2.0, high))), seen(counts.tolist()))
    assert (found[0].clipped, sum(found[0].counts)) == (clipped, 8)
    assert found[0].counts[0] == found[0].counts[-1] == 4


@pytest.mark.parametrize(
    ("activation", "counts"),
    [
        (Activation("y", CODES, "y", (0.0, 1.0)), [8]),
        (Activation("x", CODES, "x", (0.0, 1.0), factors=(0.5,)), [8]),
        (Activation("x", CODES, "x", (0.0, 1.0)), []),
    ],
    ids=["not seen", "divided", "empty"],
)
def test_values_that_were_not_seen_as_they_are_are_left_out(activation: Activation, counts: list[int]) -> None:
    assert tensor_values(plan_of(activation), seen(counts)) == ()


def test_channels_are_spread_as_their_largest_magnitudes(build: Build) -> None:
    weight = np.diag([1.0, -2.0, 3.0, -4.0, 5.0]).astype(np.float32)
    model = build("(float[1,5] x) => (float[1,5] y) { [a] y = MatMul(x, w) }", w=weight)
    plan = plan_of(weights=(Weight(1, "w", QuantSpec("int8-narrow", granularity=Granularity.CHANNEL), axis=-1),))
    found = weight_channels(plan, as_graph(model))
    assert [(one.tensor, one.channels, one.maxima) for one in found] == [("w", 5, (1.0, 2.0, 3.0, 4.0, 5.0))]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 10.0, (0, 2, 4, 6, 8, 10)), (19.3, 22.6, (20, 21, 22)), (0.0, 0.012, (0, 0.005, 0.01)), (3.0, 3.0, (3,))],
)
def test_ticks_are_few_round_numbers(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert ticks(low, high) == expected


def test_the_chosen_plan_is_drawn_last_and_higher_where_it_is_more_faithful() -> None:
    chart = frontier_chart(FULL.search.frontier)
    assert chart is not None
    expected, chosen = chart.marks
    assert (expected.kind, chosen.kind) == ("expected", "chosen")
    assert expected.y < chosen.y
    assert chosen.x < expected.x
    left, top, right, bottom = chart.frame
    assert all(left <= mark.x <= right and top <= mark.y <= bottom for mark in chart.marks)


@pytest.mark.parametrize(("wanted", "lines"), [(20.0, ["float", "wanted"]), (None, ["float"]), (-math.inf, ["float"])])
def test_what_was_wanted_is_a_line_across(wanted: float | None, lines: list[str]) -> None:
    chart = frontier_chart(FULL.search.frontier, wanted)
    assert chart is not None
    assert [name for name, _ in chart.lines] == lines
    if wanted is not None and math.isfinite(wanted):
        left, _, right, bottom = chart.frame
        ends = [tuple(map(float, end.split(","))) for end in chart.lines[-1][1].split()]
        assert [x for x, _ in ends] == [left, right]
        # Every plan is more faithful.
        assert max(mark.y for mark in chart.marks) < ends[0][1] == ends[1][1] <= bottom


@pytest.mark.parametrize("points", [(), (Point(1, 0, 1.0),), (Point(1, 0, 1.0, math.inf),), FULL.search.frontier[2:]])
def test_without_figures_there_is_no_chart(points: tuple[Point, ...]) -> None:
    assert frontier_chart(points) is None


def test_noise_of_many_nodes_keeps_the_noisiest_and_the_end() -> None:
    depths = [Depth(index, f"n{index}", 10.0 if index == 777 else 50.0, 50 - index / 1e3) for index in range(5000)]
    chart = sqnr_chart(depths, 5000)
    assert chart is not None
    assert len(chart.marks) <= 240
    assert max(chart.marks, key=lambda mark: mark.y).tooltip == "n777: 10.0 dB alone"
    assert sqnr_chart([], 10) is None
    single = sqnr_chart([Depth(0, "a", 30.0, 30.0)], 1)
    assert single is not None
    assert math.isfinite(single.marks[0].x)


# What a page shows follows from the report.


def of_modes(modes: str) -> tuple:
    """Views of nodes whose modes the letters tell."""
    known = {"s": Mode.STATIC, "d": Mode.DYNAMIC, "f": Mode.FLOAT}
    decisions = tuple(Decision(f"n{index}", "Add", known[letter], "why") for index, letter in enumerate(modes))
    return node_views(replace(FULL, plan=Plan(decisions, (), "int8", "onnxruntime-cpu")))


def test_a_node_has_its_times_noise_and_formats() -> None:
    nodes = node_views(FULL)
    first, second = nodes
    assert (first.name, first.formats, first.sqnr) == ("a", "int8-narrow per tensor", 33.5)
    assert (first.float_milliseconds, first.milliseconds, second.formats) == (2.0, 1.0, "")
    # Rows hold each word once.
    words, row = shared_words(nodes), next(iter(node_rows(nodes)))
    assert [row[0], *(words[index] for index in row[1:4])] == ["a", "Conv", "static", "integer kernel"]
    assert row[7:] == [2.0, 1.0, 33.5]
    # The SQNR of a node is that of its own mode.
    measured = tuple(
        NodeSensitivity(node, mode, sqnr)
        for node, mode, sqnr in (("a", Mode.DYNAMIC, 20.0), ("a", Mode.STATIC, 30.0), ("b", Mode.STATIC, 40))
    )
    assert sqnr_by_node(changed(FULL, search={"sensitivities": measured})) == {"a": 30.0, "b": 40}


@pytest.mark.parametrize(
    ("modes", "expected"),
    [("sssffd", [("static", 0, 3), ("float", 3, 2), ("dynamic", 5, 1)]), ("", []), ("s", [("static", 0, 1)])],
)
def test_neighbours_of_one_mode_are_a_link(modes: str, expected: list[tuple[str, int, int]]) -> None:
    assert [(str(link.mode), link.first, link.nodes) for link in chain(of_modes(modes))] == expected


def test_a_chain_of_very_many_regions_takes_neighbours_together() -> None:
    links = chain(of_modes("sf" * 5000))
    assert len(links) <= 120
    assert sum(link.nodes for link in links) == 10_000
    assert [link.first for link in links[:2]] == [0, links[0].nodes]


def test_causes_are_told_with_what_is_at_stake() -> None:
    found = causes(node_views(FULL), FULL)
    assert [(one.reason, one.count, one.examples) for one in found] == [("why", 1, ("b",))]
    assert found[0].stake == (
        "if it alone is quantized, the lowest SQNR is 40.0 dB; in float they take 0.500 ms, 20.0% of the model"
    )


def test_noise_adds_in_energy_and_floats_add_none() -> None:
    nodes = of_modes("ssf")
    noisy = tuple(replace(node, sqnr=30.0) for node in nodes)
    found = sqnr_along(noisy)
    assert [(one.index, one.alone) for one in found] == [(0, 30.0), (1, 30.0)]
    assert found[1].together == pytest.approx(30 - 10 * math.log10(2))
    assert sqnr_along(tuple(replace(node, sqnr=math.inf) for node in nodes)) == ()


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data


@pytest.mark.parametrize("report", [FULL, AccuracyError("too noisy", FULL).report], ids=["verified", "refused"])
def test_no_string_of_a_report_becomes_markup_or_script(report: Report) -> None:
    harmless, found = Elements(to_html(report)), Elements(to_html(hostile(report)))
    # Modes by which rows are coloured are no strings of the model's.
    assert sorted(found.tags) == sorted(harmless.tags)
    assert not {name for name, _ in found.attributes} - {name for name, _ in harmless.attributes}
    assert len(found.scripts) == 2
    assert "alert" not in found.scripts[1]
    assert PAYLOAD.encode("unicode_escape").decode().replace("\\'", "'") in json.loads(found.scripts[0])["words"]
    assert not {"\u202e", "\x07"} & set(to_html(hostile(report)))
    assert "\u2028" not in found.scripts[0]
    assert "49" not in re.findall(r"<h1[^>]*>(.*?)</h1>", to_html(hostile(report)))[0]


def test_a_page_loads_nothing_and_runs_only_its_own_script() -> None:
    page = to_html(FULL)
    assert re.findall(r"[a-z]+://[^\s\"']*", page.replace("http://www.w3.org/2000/svg", "")) == []
    digest = base64.b64encode(hashlib.sha256(Elements(page).scripts[1].encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def test_a_page_shows_all_that_a_report_holds() -> None:
    page = to_html(FULL)
    for text in (
        "Verified: 2.00x as fast (1.90-2.10), 0.25 of the size, 31.2 dB on 3 held-out samples",
        "the samples are few",
        "1 of 2 weights has at most 8 bits",
        "Is it faster?",
        '<tr><th scope="row">integer ops</th>',
        "taken: 1 static; 1.5 ms, 31.2 dB, 2.00x as fast",
        "static: 1 node from a, 1.000 ms, lowest SQNR alone 33.5 dB",
        "+1.5 dB",
        "left out: no lower error",
        "<summary>3 places</summary><bdi>x</bdi>, <bdi>y</bdi>, <bdi>z</bdi></details>",
        "onnxq quantize model.onnx --calib data",
        "cd34",
        "onnxq 0.2, python 3.11",
        "required: 20.0 dB or more",
        "factor=2.0",
        "2.10 MB",
        "x: 40.0 dB alone",
        "The 2 layers of the lowest SQNR",
        "2 (34.5 dB), 0 (37.5 dB)",
        '<td class="codes">[0, 17]</td><td class="number">1.75</td><td class="number">1.25</td>',
    ):
        assert text in page, text
    data = json.loads(Elements(page).scripts[0])
    assert [row[0] for row in data["nodes"]] == ["a", "b"]
    assert [data["words"][row[6]] for row in data["nodes"]] == ["QLinearConv", "part of another"]
    assert data["tensors"] == [["x", -1.0, 3.0, 0.0, 1.0, 0.25, [1, 0, 5]]]
    assert data["weights"] == [["w", "a", 8, [0.1, 0.2, 0.3, 0.4, 0.5]]]


def test_a_report_of_little_has_a_page_without_what_it_lacks() -> None:
    page = to_html(changed(REPORT, performance={"latency": None}, search={"sensitivities": ()}))
    for title in ("Is it faster?", "Where does the error come from?", "Do the calibration", "Which accuracy methods"):
        assert title not in page
    assert '<h2 id="nodes-title">How is each node quantized?</h2>' in page


@pytest.mark.parametrize(
    ("report", "texts"),
    [
        (
            changed(REPORT, encoding={"skipped_at_sqnr": 41.25}),
            ("The first plan has at least 41.2 dB", '<a href="#accuracy">'),
        ),
        (
            AccuracyError("output y has 31.2 dB, expected 60 dB or more", FULL).report,
            (
                "Refused: output y has 31.2 dB, expected 60 dB or more",
                "onnxq quantize model.onnx --calib data --exclude a",
                "none was written",
            ),
        ),
    ],
)
def test_a_page_says_why_nothing_was_tried_or_written(report: Report, texts: tuple[str, ...]) -> None:
    page = to_html(report)
    for text in texts:
        assert text in page, text


def test_figures_that_are_no_numbers_are_no_numbers_on_the_page() -> None:
    odd = replace(FULL.encoding.tensors[0], low=-math.inf, high=math.nan)
    report = changed(FULL, encoding={"tensors": (odd,)}, search={"frontier": FULL.search.frontier[2:]})
    assert json.loads(Elements(to_html(report)).scripts[0])["tensors"][0][1:3] == [0.0, 0.0]


def test_a_page_refuses_figures_that_javascript_cannot_parse() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json([math.nan])


def test_a_page_of_a_thousand_nodes_is_small() -> None:
    assert len(to_html(large(1000)).encode()) < 3_000_000 / 5


@pytest.mark.parametrize(
    ("rounds", "interval", "shown", "hidden"),
    [
        (6, (1.9, 2.1), "2.00x", "no difference"),
        (6, (0.63, 3.78), "0.63 to 3.78 with 95 % confidence, which shows no difference", "of unknown speed"),
        (2, (0.0, math.inf), "of unknown speed (2 rounds of timing are too few)", "2.00x"),
    ],
)
def test_a_speed_is_shown_as_far_as_it_is_known(
    rounds: int, interval: tuple[float, float], shown: str, hidden: str
) -> None:
    latency = replace(FULL.performance.latency, rounds=rounds, interval=interval)
    page = to_html(changed(FULL, performance={"latency": latency}, search={"frontier": ()}))
    assert shown in page
    assert hidden not in page


# A comparison has a page that runs nothing.

LAYERS = Layers(
    4,
    (
        Layer("x", "a", "Conv", "static", 40.0, 38.0, (SampleSqnr(3, 31.5),)),
        Layer("y", "b", "Relu", "static", math.inf, 36.5, ()),
    ),
    {"z": "its channels were divided"},
)


FOUND = Comparison(Path("a.onnx"), Path("b.onnx"), FULL.agreement, LAYERS)


def test_a_page_shows_outputs_and_layers() -> None:
    page = FOUND.to_html()
    for text in (
        "31.2 dB at the worst output, on 3 samples",
        "x: 40.0 dB alone",
        "3 (31.5 dB)",
        "equal",
        "were divided",
    ):
        assert text in page, text
    assert "<script" not in page
    alone = replace(FOUND, layers=None).to_html()
    assert "Error along the depth" not in alone
    assert "<bdi>y</bdi>" in alone
    # Names run nothing.
    page = replace(FOUND, candidate=Path(PAYLOAD), layers=hostile(LAYERS), agreement=hostile(FULL.agreement)).to_html()
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sqnr": math.inf}, "All outputs are equal, on 3 samples"),
        ({"sqnr": None, "agreement": 0.9375, "compared": 16}, "93.8% equal labels, on 3 samples"),
        ({"finite": False}, "Outputs differ in shape or are not finite, on 3 samples"),
    ],
)
def test_the_verdict_of_a_comparison_is_one_sentence(change: dict[str, object], sentence: str) -> None:
    outputs = (replace(FULL.agreement.outputs[0], **change),)
    assert replace(FOUND, agreement=Agreement(3, outputs)).verdict == sentence


@pytest.mark.parametrize(
    ("render", "value", "text"),
    [
        (decibels, math.inf, "equal"),
        (decibels, -math.inf, "-inf dB"),
        (decibels, 21.26, "21.2 dB"),
        (decibels, None, "-"),
        (size, 12_345, "12.3 kB"),
        (size, 1_234_567, "1.23 MB"),
        (lambda count: plural(count, "thread"), 1, "1 thread"),
        (lambda count: plural(count, "thread"), 2, "2 threads"),
        (duration, 0.00123, "1.23 ms"),
        (milliseconds, 0.00123, "0.001 ms"),
        (milliseconds, None, "-"),
    ],
)
def test_figures_are_written_for_people(render: Callable[[Any], str], value: float | None, text: str) -> None:
    assert render(value) == text


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\u202eb", "a\tb", "a\0b"])
def test_what_a_terminal_obeys_is_spelt_out(name: str) -> None:
    assert visible(name).isprintable()
    assert visible(name)[0] + visible(name)[-1] == "ab"
    assert visible("/ä/日本 [x]") == "/ä/日本 [x]"
