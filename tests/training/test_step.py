"""Training a whole model: what is written is better than without, or the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Build
from runtime.elsewhere import offer_elsewhere

from onnxq.config.presets import PRESETS
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.metrics import Metric
from onnxq.evaluation.verification import Verification, Verifier
from onnxq.pipeline import Quantized
from onnxq.runtime.sessions import open_session, run
from onnxq.search.context import SearchResult
from onnxq.steps.request import Budget, QuantizationRequest
from onnxq.training import pipeline as module
from onnxq.training.pipeline import train
from onnxq.training.settings import Training
from training.modules import images

LAYERS = "(float[N,32] x) => (float[N,16] y) { h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v) }"
WEIGHTS = {"w": (32, 32), "v": (32, 16)}
SAMPLES = images(48, (1, 32))

QUICK = Budget("off", "off", latency_seconds=0)


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
    assert done.report.encoding.gains[-1].left == "worse on the holdout"
    assert done.report.fidelity.scores is not None
    assert done.report.fidelity.scores.candidate == -2


@pytest.mark.parametrize(
    ("noises", "lacking", "taken"),
    [
        ([2.0, 1.0], [0.0, 0.0], True),
        ([1.0, 2.0], [0.0, 0.0], False),
        ([2.0, 1.0], [0.5, 0.0], False),
        ([2.0, 1.0], [0.5, 0.2], True),
    ],
    ids=["quieter", "louder", "quieter, and below the goal for it", "quieter, below the goal before too"],
)
def test_the_noise_of_the_samples_that_judge_decides_and_the_goal_stays_reached(
    noises: list[float], lacking: list[float], taken: bool, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, lacks = iter(noises), iter(lacking)
    monkeypatch.setattr(module, "_noise", lambda judge, candidate: next(heard))
    monkeypatch.setattr(SearchResult, "lacks", lambda found, goal: next(lacks, 0.0))
    gain = trained(build, None, Training(epochs=2)).report.encoding.gains[-1]
    assert (gain.left == "") == taken
    assert bool(gain.kept) == taken


def test_both_models_are_timed_by_the_engine_that_they_are_for(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_elsewhere(monkeypatch)
    latencies = []

    def verified(judge: Verifier, candidate: Path, look: int, known: Latency | None = None) -> Verification:
        found = verify(judge, candidate, look, known)
        latencies.append(found.latency)
        return found

    verify = Verifier.verified
    monkeypatch.setattr(Verifier, "verified", verified)
    plan = QuantizationRequest.of("int4-block32", "openvino", ())
    budget = replace(QUICK, latency_seconds=0.05, engine="elsewhere")
    train(
        build(LAYERS, **WEIGHTS),
        SAMPLES,
        scheme=plan,
        goal=Goal(force=True),
        budget=budget,
        training=Training(epochs=2),
    )
    assert [latency and latency.engine for latency in latencies] == ["elsewhere 1"] * 2


def test_a_model_for_what_does_not_run_here_is_not_timed(build: Build) -> None:
    wanted = QuantizationRequest.of("int2-block16", "onnxruntime-cpu-arm", ())
    goal, budget = Goal(force=True), replace(QUICK, latency_seconds=0.05)
    done = train(
        build(LAYERS, **WEIGHTS), SAMPLES, scheme=wanted, goal=goal, budget=budget, training=Training(epochs=2)
    )
    assert done.report.encoding.gains[-1].kept
    assert done.report.performance.latency is None
    assert "onnxruntime-cpu-arm" in done.report.performance.unmeasured


def test_strict_types_are_written_with_learned_codes(build: Build, tmp_path: Path) -> None:
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
