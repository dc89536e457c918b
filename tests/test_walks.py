"""The walks through the code that the page on architecture lists are those that `quantize` takes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from conftest import Build, Samples

import onnxq

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
GENERATOR = np.random.default_rng(0)
IS_FUNCTION = 0x1  # CO_OPTIMIZED: bodies of classes and modules do not have it.


def floats(*shape: int) -> Samples:
    return [{"x": GENERATOR.standard_normal(shape).astype(np.float32)} for _ in range(8)]


MODELS: dict[str, tuple[str, dict[str, Any], str, Samples]] = {
    "A static Conv": (
        "(float[N,3,16,16] x) => (float[N,8,14,14] y) { c = Conv(x, w)  y = Relu(c) }",
        {"w": (8, 3, 3, 3)},
        "int8",
        floats(1, 3, 16, 16),
    ),
    "A weight in blocks of 4 bits": (
        "(float[N,256] x) => (float[N,256] y) { y = MatMul(x, w) }",
        {"w": (256, 256)},
        "int4-block32",
        floats(1, 256),
    ),
    "An LSTM": (
        "(float[8,1,64] x) => (float[8,1,1,64] y) { y = LSTM <hidden_size = 64> (x, w, r) }",
        {"w": (1, 256, 64), "r": (1, 256, 64)},
        "int8",
        floats(8, 1, 64),
    ),
    "A tied embedding": (
        """(int64[2,3] ids) => (float[2,3,2000] y) {
            h = Gather(w, ids)  g = Tanh(h)  t = Transpose <perm = [1, 0]> (w)  y = MatMul(g, t)
        }""",
        {"w": (2000, 128)},
        "int8",
        [{"ids": GENERATOR.integers(0, 2000, (2, 3))} for _ in range(8)],
    ),
}


def walks() -> dict[str, list[str]]:
    text = PAGE.read_text(encoding="utf-8").partition("## Four walks")[2].partition("\n## ")[0]
    sections = [part.partition("\n") for part in text.split("\n### ")[1:]]
    return {title.partition(" (")[0]: re.findall(r"^\d+\. `([\w.]+)`", rest, re.M) for title, _, rest in sections}


def test_every_walk_has_a_model() -> None:
    assert walks().keys() == MODELS.keys()
    assert all(len(steps) > 3 for steps in walks().values())


@pytest.mark.parametrize("title", MODELS)
def test_functions_are_called_in_the_order_of_the_page(title: str, build: Build, tmp_path: Path) -> None:
    text, weights, scheme, samples = MODELS[title]
    called: dict[str, int] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and frame.f_code.co_flags & IS_FUNCTION and module.startswith("onnxq."):
            called.setdefault(f"{module.removeprefix('onnxq.')}.{frame.f_code.co_qualname}", len(called))

    budget = onnxq.Budget(search="off", accuracy="off", latency_seconds=0)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        onnxq.quantize(
            build(text, **weights),
            onnxq.Data(samples),
            tmp_path / "model.onnx",
            scheme=scheme,
            goal=onnxq.Goal(force=True),
            budget=budget,
        )
    finally:
        sys.setprofile(before)
    steps = walks()[title]
    assert [step for step in steps if step not in called] == []
    assert steps == sorted(steps, key=called.__getitem__)
