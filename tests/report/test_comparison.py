"""A comparison has a page that runs nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from reports import FULL, PAYLOAD, hostile

from onnxq.errors import OutputError
from onnxq.evaluation.agreement import Agreement
from onnxq.evaluation.layers import Layer, Layers, SampleSqnr
from onnxq.report.page import Comparison

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


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^page .* cannot be written: "):
        FOUND.save_html(tmp_path / "no" / "page.html")
