"""What judges the models that are built."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build

from onnxq.data.dataset import Subset
from onnxq.data.inputs import Input
from onnxq.data.samples import open_samples
from onnxq.errors import DataError
from onnxq.evaluation import verification as verify
from onnxq.evaluation.latency import Latency
from onnxq.evaluation.metrics import Metric, Top1
from onnxq.evaluation.verification import Verifier
from onnxq.system.resources import Deadline

SAMPLES = [{"x": np.random.default_rng(place).standard_normal((1, 4)).astype(np.float32)} for place in range(8)]


@pytest.fixture
def files(build: Build, tmp_path: Path) -> tuple[Path, Path]:
    """A model that returns its input, and one that clips it at 1.5."""
    for name, nodes in (("float", "y = Identity(x)"), ("clipped", "y = Min(x, most)")):
        model = build(f"(float[1,4] x) => (float[1,4] y) {{ {nodes} }}", most=np.array([1.5], np.float32))
        onnx.save(model, tmp_path / f"{name}.onnx")
    return tmp_path / "float.onnx", tmp_path / "clipped.onnx"


def test_a_model_is_verified_and_scored_and_each_look_costs_trust(files: tuple[Path, Path]) -> None:
    labels = np.array([int(sample["x"].argmax()) for sample in SAMPLES])
    judge = Verifier.of(files[0], SAMPLES, 0.0, Metric("top1", Top1(labels)))
    bounds, lost = [], []
    for look in (1, 2, 5):
        (output,) = judge.verified(files[1], look).agreement.outputs
        scores = judge.scores(files[1], look)
        assert scores is not None
        assert output.bound is not None
        assert output.bound < output.decibels < math.inf
        bounds.append(output.bound)
        lost.append(scores.most_lost)
    assert bounds == sorted(bounds, reverse=True)
    assert lost == sorted(lost)
    (worst,) = judge.hardest(files[1], 1)
    assert worst["x"].max() == max(sample["x"].max() for sample in SAMPLES)


@pytest.mark.parametrize(("limit", "labels", "fits"), [(4, 20, True), (8, 8, True), (8, 20, False), (9, 20, False)])
def test_labels_of_more_samples_are_for_a_limit_that_leaves_some_out(
    limit: int, labels: int, fits: bool, files: tuple[Path, Path]
) -> None:
    samples = open_samples(SAMPLES, [Input("x", np.dtype(np.float32), (1, 4))], limit=limit, in_order=True)
    metric = Metric("top1", Top1(np.zeros(labels, np.int64)))
    refused = pytest.raises(DataError, match=f"8 answers for 8 samples and there are {labels} labels, expected one")
    with nullcontext() if fits else refused:
        Verifier.of(files[0], samples, 0.0, metric)


def test_labels_stand_in_the_order_of_all_samples_of_which_some_judge(files: tuple[Path, Path]) -> None:
    samples = open_samples(SAMPLES, [Input("x", np.dtype(np.float32), (1, 4))], limit=6, in_order=True)
    labels = np.array([int(sample["x"].argmax()) for sample in SAMPLES])
    labels[3] += 1
    for places, score in (([0, 3], 0.5), ([0, 5], 1.0)):
        judge = Verifier.of(files[0], Subset(samples, places), 0.0, Metric("top1", Top1(labels)))
        scores = judge.scores(files[1], 1)
        assert scores is not None
        assert scores.chosen_by is not None
        assert (scores.reference, scores.chosen_by.reference) == (score, 1.0 if score < 1 else 0.75)
        assert judge.scored == 6


def test_plain_times_are_not_measured_again(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    known = Latency(3.0, 2.0, threads=1, runs=8, rounds=3, interval=(1.4, 1.6))
    monkeypatch.setattr(verify, "measure_latencies", lambda *given, **options: [replace(known, candidate=1.0)])
    judge = Verifier.of(files[0], SAMPLES, 1.0, None)
    assert judge.verified(files[1], 1, known).latency == known
    measured = judge.verified(files[1], 1).latency
    assert measured is not None
    assert measured.speed == 3.0


def test_times_that_are_not_plain_go_on(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    known = Latency(3.0, 2.9, threads=1, runs=8, rounds=4, interval=(0.9, 1.2), ratios=(0.98, 1.0, 1.1, 1.1))
    asked = []

    def measured(*_: object, rounds: int, **__: object) -> list[Latency]:
        asked.append(rounds)
        return [Latency(2.0, 1.0, 1, 2 * rounds, rounds, ratios=(2.0,) * rounds)]

    monkeypatch.setattr(verify, "measure_latencies", measured)
    found = Verifier.of(files[0], SAMPLES, 1.0, None).verified(files[1], 1, known).latency
    assert found is not None
    assert (asked, found.runs, found.rounds, len(found.ratios)) == ([3], 8 + 6, 7, 7)
    assert (found.reference, found.candidate) == pytest.approx(((4 * 3 + 3 * 2) / 7, (4 * 2.9 + 3 * 1) / 7))
    assert found.interval == pytest.approx((0.98, 2.0))


def test_without_a_metric_nothing_is_scored(files: tuple[Path, Path]) -> None:
    assert Verifier.of(files[0], SAMPLES, 0.0, None).scores(files[1], 1) is None


def test_a_metric_that_cannot_be_told_is_refused_before_any_model_is_built(files: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match="gives 8 answers for 8 samples and there are 9 labels"):
        Verifier.of(files[0], SAMPLES, 0.0, Metric("top1", Top1(np.zeros(9, np.int64))))


@pytest.mark.parametrize(("left", "most"), [(60.0, 30.0), (0.0, 15.0)])
def test_looks_at_speed_take_half_of_the_time_that_is_left_and_are_taken_when_none_is(
    left: float, most: float, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, float]] = []

    def measured(*_: object, **options: float) -> list[Latency]:
        # Slower, and never told: each look there may be is taken.
        asked.append(options)
        return [Latency(1.0, 2.0, 1, 8, 3)]

    monkeypatch.setattr(verify, "measure_latencies", measured)
    monkeypatch.setattr(verify, "_op_types", lambda _: Counter({"QGemm": 1}))
    judge = replace(Verifier.of(files[0], SAMPLES, 10.0, None), deadline=Deadline.within(left))
    assert not judge.verified(files[1], 1).keeps_up
    assert len(asked) == 3
    for name in ("seconds", "patience"):
        assert 0 < sum(one[name] for one in asked) <= most


def test_a_metric_counts_as_the_runs_that_it_takes(files: tuple[Path, Path]) -> None:
    metric = Metric("mean", lambda outputs, samples: 1.0)
    assert Verifier.of(files[0], SAMPLES, 0.0, metric).scored == len(SAMPLES)
    assert Verifier.of(files[0], SAMPLES, 0.0, None).scored == 0
