"""A page shows a report, loads nothing, and runs nothing that a model's names hold."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reports import FULL, PAYLOAD, REPORT, changed, hostile, large

from onnxq.errors import OutputError
from onnxq.evaluation.agreement import Agreement
from onnxq.evaluation.layers import Layer, Layers, SampleSqnr
from onnxq.report import FidelityError, Report
from onnxq.report.page import Comparison, save_html, to_html


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


@pytest.mark.parametrize("report", [FULL, FidelityError("too noisy", FULL).report], ids=["verified", "refused"])
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
        "Verified: 2.00x as fast (1.90-2.10), 0.25 of the size, 31 dB on 3 samples it had not seen",
        "the samples are few",
        "1 of 2 weights has 8 bits",
        "Is it faster?",
        '<tr><th scope="row">integer ops</th>',
        "taken: 1 static; 1.5 ms, 31.2 dB, 2.00x as fast",
        "static: 1 node from a, 1.000 ms, lowest SQNR alone 33.5 dB",
        "+1.5 dB",
        "not: no lower error",
        "<summary>3 places</summary><bdi>x</bdi>, <bdi>y</bdi>, <bdi>z</bdi></details>",
        "onnxq quantize model.onnx --calib data",
        "cd34",
        "onnxq 0.2, python 3.11",
        "wanted: 20.0 dB or more",
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


def test_a_speed_that_may_be_none_is_told_as_such() -> None:
    latency = replace(FULL.performance.latency, interval=(0.63, 3.78))
    page = to_html(changed(FULL, performance={"latency": latency}))
    assert "0.63 to 3.78 with 95 % confidence, which shows no difference" in page
    assert "no difference" not in to_html(FULL)


def test_codes_that_no_method_was_tried_on_are_told() -> None:
    page = to_html(changed(REPORT, encoding={"skipped_at_sqnr": 41.25}))
    assert "The scheme alone reaches 41.2 dB" in page
    assert '<a href="#accuracy">' in page


def test_a_refusal_has_its_page_with_what_to_try() -> None:
    page = to_html(FidelityError("output y has 31.2 dB, expected 60 dB or more", FULL).report)
    assert "Refused: output y has 31.2 dB, expected 60 dB or more" in page
    assert "onnxq quantize model.onnx --calib data --exclude a" in page
    assert "none was written" in page


def test_figures_that_are_no_numbers_are_no_numbers_on_the_page() -> None:
    odd = replace(FULL.encoding.tensors[0], low=-math.inf, high=math.nan)
    report = changed(FULL, encoding={"tensors": (odd,)}, search={"frontier": FULL.search.frontier[2:]})
    assert json.loads(Elements(to_html(report)).scripts[0])["tensors"][0][1:3] == [0.0, 0.0]


def test_a_page_of_a_thousand_nodes_is_small() -> None:
    assert len(to_html(large(1000)).encode()) < 3_000_000 / 5


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^page .* cannot be written: "):
        save_html(FULL, tmp_path / "no" / "page.html")
    save_html(FULL, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == to_html(FULL)


def test_a_speed_of_too_few_rounds_is_not_told() -> None:
    def page(rounds: int, interval: tuple[float, float]) -> str:
        found = replace(FULL.performance.latency, rounds=rounds, interval=interval)
        return to_html(changed(FULL, performance={"latency": found}, search={"frontier": ()}))

    assert "2.00x" in page(6, (1.9, 2.1))
    few = page(2, (0.0, math.inf))
    assert "of a speed that 2 rounds of timing do not show" in few
    assert "2.00x" not in few


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


def test_without_layers_there_are_outputs_alone() -> None:
    page = replace(FOUND, layers=None).to_html()
    assert "Noise along the depth" not in page
    assert "<bdi>y</bdi>" in page


def test_names_run_nothing() -> None:
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
def test_the_verdict_is_one_sentence(change: dict[str, object], sentence: str) -> None:
    outputs = (replace(FULL.agreement.outputs[0], **change),)
    assert replace(FOUND, agreement=Agreement(3, outputs)).verdict == sentence


def test_a_page_that_cannot_be_written_is_told_of_comparison(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^page .* cannot be written: "):
        FOUND.save_html(tmp_path / "no" / "page.html")
