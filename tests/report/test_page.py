"""A page shows a report, loads nothing, and runs nothing that a model's names hold."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from reports import FULL, REPORT, changed

from onnxq.errors import OutputError
from onnxq.planning.plan import Activation, Decision, Plan
from onnxq.report import FidelityError, Report
from onnxq.report.page import save_html, to_html
from onnxq.scheme import Mode, Spec

PAYLOAD = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'{{ 7*7 }}\u2028\u202e\x07&lt;"


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


def hostile(value: Any) -> Any:
    """The same value with the payload in every string; specs hold none that a model can choose."""
    if isinstance(value, Spec):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: hostile(getattr(value, one.name)) for one in fields(value) if one.init})
    if isinstance(value, Mapping):
        return {f"{PAYLOAD}{number}": hostile(item) for number, item in enumerate(value.values())}
    if isinstance(value, tuple):
        return tuple(map(hostile, value))
    return PAYLOAD if type(value) is str and value else value


@pytest.mark.parametrize("report", [FULL, FidelityError("too noisy", FULL).report], ids=["verified", "refused"])
def test_no_string_of_a_report_becomes_markup_or_script(report: Report) -> None:
    harmless, found = Elements(to_html(report)), Elements(to_html(hostile(report)))
    # Modes by which rows are coloured are no strings of the model's.
    assert sorted(found.tags) == sorted(harmless.tags)
    assert not {name for name, _ in found.attributes} - {name for name, _ in harmless.attributes}
    assert len(found.scripts) == 2
    assert "alert" not in found.scripts[1]
    assert PAYLOAD in json.loads(found.scripts[0])["words"]
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
        "Plans that were weighed",
        "taken: 1 static; 1.5 ms, 31.2 dB, 2.00x as fast",
        "static: 1 node from a, 1.000 ms, noisiest alone 33.5 dB",
        "+1.5 dB",
        "not: no less noise",
        "onnxq quantize model.onnx --calib data",
        "cd34",
        "onnxq 0.2, python 3.11",
        "factor=2.0",
        "2.10 MB",
    ):
        assert text in page, text
    data = json.loads(Elements(page).scripts[0])
    assert [row[0] for row in data["nodes"]] == ["a", "b"]
    assert data["tensors"] == [["x", -1.0, 3.0, 0.0, 1.0, 0.25, [1, 0, 5]]]
    assert data["weights"] == [["w", "a", 8, [0.1, 0.2, 0.3, 0.4, 0.5]]]


def test_a_report_of_little_has_a_page_without_what_it_lacks() -> None:
    page = to_html(changed(REPORT, performance={"latency": None}, search={"sensitivities": ()}))
    for title in ("Plans that were weighed", "Noise along the depth", "Values and ranges", "accuracy methods bought"):
        assert title not in page
    assert '<h2 id="nodes-title">Nodes</h2>' in page


def test_a_refusal_has_its_page_with_what_to_try() -> None:
    page = to_html(FidelityError("output y has 31.2 dB, expected 60 dB or more", FULL).report)
    assert "Refused: output y has 31.2 dB, expected 60 dB or more" in page
    assert "onnxq quantize model.onnx --calib data --exclude a" in page
    assert "none was written" in page


def test_figures_that_are_no_numbers_are_no_numbers_on_the_page() -> None:
    odd = replace(FULL.encoding.tensors[0], low=-math.inf, high=math.nan)
    report = changed(FULL, encoding={"tensors": (odd,)}, search={"frontier": FULL.search.frontier[2:]})
    assert json.loads(Elements(to_html(report)).scripts[0])["tensors"][0][1:3] == [0.0, 0.0]


def large(nodes: int) -> Report:
    """A report of a deep network whose modes alternate and whose names are as long as exporters make them."""
    decisions = tuple(
        Decision(f"/model/layers.{index}/self_attn/q_proj/MatMul", "MatMul", list(Mode)[index % 5], "integer kernel")
        for index in range(nodes)
    )
    spec = Spec("uint8", symmetric=False)
    names = tuple(f"/model/layers.{index}/self_attn/q_proj/MatMul_output_0" for index in range(nodes))
    tensors = tuple(replace(FULL.encoding.tensors[0], tensor=name, counts=tuple(range(48))) for name in names)
    activations = tuple(Activation(name, spec, name, (0.0, 1.0)) for name in names)
    report = changed(FULL, encoding={"tensors": tensors}, search={"sensitivities": ()}, performance={"times": ()})
    return replace(report, plan=Plan(decisions, activations, "int8", "onnxruntime-cpu"))


def test_a_page_of_a_thousand_nodes_is_small() -> None:
    assert len(to_html(large(1000)).encode()) < 3_000_000 / 5


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^page .* cannot be written: "):
        save_html(FULL, tmp_path / "no" / "page.html")
    save_html(FULL, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == to_html(FULL)
