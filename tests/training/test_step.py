"""Training a whole model: what is written is better than without, or the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Build

from onnxq.budget import Budget
from onnxq.judging.goal import Goal
from onnxq.judging.metrics import Metric
from onnxq.pipeline import Quantized
from onnxq.training.pipeline import train
from onnxq.training.settings import Training
from training.modules import images

LAYERS = "(float[N,32] x) => (float[N,16] y) { h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v) }"
WEIGHTS = {"w": (32, 32), "v": (32, 16)}
SAMPLES = images(48, (1, 32))

QUICK = Budget("off", "off", latency=0)


def trained(build: Build, output: Path | None, training: Training, **more: Any) -> Quantized:
    goal = more.pop("goal", Goal(force=True))
    model = build(LAYERS, **WEIGHTS)
    return train(model, SAMPLES, output, scheme="int2-block16", goal=goal, budget=QUICK, training=training)


def test_what_judges_say_is_worse_is_not_taken(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(outputs: list[dict[str, Any]], samples: list[dict[str, Any]]) -> float:
        score.calls += 1  # type: ignore[attr-defined]
        return -float(score.calls)  # type: ignore[attr-defined]

    score.calls = 0  # type: ignore[attr-defined]
    done = trained(build, None, Training(epochs=2, rate=1e-2), goal=Goal(metric=Metric("falls", score), force=True))
    assert done.report.encoding.gains[-1].left == "worse on the samples that judge"
    assert done.report.fidelity.scores is not None
    assert done.report.fidelity.scores.candidate == -2


def test_strict_types_are_written_with_learned_codes(build: Build, tmp_path: Path) -> None:
    from dataclasses import replace

    from onnxq.presets import PRESETS
    from onnxq.runtime import open_session, run

    scheme = replace(PRESETS["int2-block16"], emit="strict")
    model = build(LAYERS, **WEIGHTS)
    outputs = []
    for name, given in (("plain", PRESETS["int2-block16"]), ("strict", scheme)):
        train(
            model,
            SAMPLES,
            tmp_path / name,
            scheme=given,
            goal=Goal(force=True),
            budget=QUICK,
            training=Training(epochs=2),
        )
        outputs.append(run(open_session(tmp_path / name), SAMPLES[0])[0])
    np.testing.assert_allclose(*outputs, atol=1e-5)
