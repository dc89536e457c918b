"""What a metric says of two models, and how much the second may have lost on other samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build

from onnxq.data.dataset import Origin
from onnxq.errors import DataError
from onnxq.evaluation.bounds import alpha_spending
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.metrics import Metric, Scorer, Scores, Top1

Files = tuple[Path, Path]
LABELS = np.arange(40) % 4
CLASSES = [{"x": np.eye(4, dtype=np.float32)[[label]]} for label in LABELS]


@pytest.fixture(scope="module")
def files(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model that returns its input, and one that takes every fourth class for the first."""
    folder = tmp_path_factory.mktemp("scoring")
    for name, added in (("float", [0, 0, 0, 0]), ("int8", [0.6, 0, 0, -0.6])):
        text = "(float[1,4] x) => (float[1,4] y) { y = Add(x, b) }"
        onnx.save(build(text, b=np.array([added], np.float32)), folder / f"{name}.onnx")
    return folder / "float.onnx", folder / "int8.onnx"


def accuracy(outputs: list, samples: list) -> float:
    """What Top1 says, as a function of the user's that finds the labels in the samples."""
    pairs = zip(outputs, samples, strict=True)
    return float(np.mean([output["y"].argmax() == sample["x"].argmax() for output, sample in pairs]))


METRICS = {"top1": Metric("top1", Top1(LABELS)), "function": Metric("function", accuracy)}


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_the_bound_lies_above_the_drop(metric: Metric, files: Files) -> None:
    scorer = Scorer.of(metric, files[0], CLASSES)
    scores = scorer.scores(files[1])
    assert (scores.reference, scores.candidate, scores.doubt) == (1.0, 0.75, "")
    assert 0.35 < scores.most_lost < 0.6
    assert scorer.scores(files[1], alpha_spending(3)).most_lost > scores.most_lost


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_models_that_answer_alike_may_still_lose_as_much_as_so_few_samples_do_not_show(
    metric: Metric, files: Files
) -> None:
    scores = Scorer.of(metric, files[0], CLASSES).scores(files[0])
    assert scores.drop == 0
    assert scores.most_lost == scores.least_shown == pytest.approx(3 / 40, rel=0.2)


@pytest.mark.parametrize(
    ("scores", "allowed", "trusted"),
    [
        (Scores("m", 0.9, 0.9, 0.02, 0.01), 0.03, True),
        (Scores("m", 0.9, 0.9, 0.05, 0.01), 0.03, False),
        # So few samples could never show that little is lost, so what is seen decides.
        (Scores("m", 0.9, 0.9, 0.05, 0.04), 0.0, True),
        (Scores("m", 0.9, 0.8, 0.2, 0.04), 0.0, False),
        (Scores("m", 0.9, 0.9, doubt="because"), 0.0, True),
        # 91 of 100 answers, and 90.
        (Scores("m", 0.91, 0.9), 0.01, True),
    ],
)
def test_a_drop_is_trusted_by_its_bound_where_that_can_be_told(scores: Scores, allowed: float, trusted: bool) -> None:
    assert scores.is_trusted(allowed) is trusted


def test_those_that_judge_are_scored_by_themselves(files: Files) -> None:
    judging, metric = [0, 1, *range(20, 28), 37], METRICS["top1"]
    found = Scorer.of(metric, files[0], CLASSES, judging).scores(files[1])
    others = sorted(set(range(40)).difference(judging))
    alone, chosen = (
        Scorer.of(Metric("top1", Top1(LABELS[places])), files[0], [CLASSES[place] for place in places]).scores(files[1])
        for places in (judging, others)
    )
    assert found == replace(alone, chosen_by=chosen)
    assert alone.candidate != chosen.candidate


def test_a_plan_is_trusted_where_the_samples_that_chose_it_are_content_too() -> None:
    content, lost = Scores("m", 1.0, 1.0, 0.01, 0.01), Scores("m", 1.0, 0.9, 0.2, 0.01)
    for judged, chosen in ((content, content), (content, lost), (lost, content)):
        both = replace(judged, chosen_by=chosen)
        assert both.is_trusted(0.03) == (lost not in (judged, chosen))
        # The model that is written is judged by those that judge.
        assert both.allowed_by(0.03) == judged.allowed_by(0.03)


class OfFiles(list):
    """Samples of eight files, all of one class in each."""

    def origin(self, index: int) -> Origin:
        return Origin(index, f"file{index % 4 + 4 * (index >= 20)}")


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_samples_of_one_file_are_left_out_together(metric: Metric, files: Files) -> None:
    scorer = Scorer.of(metric, files[0], OfFiles(CLASSES))
    scores, by_itself = scorer.scores(files[1]), Scorer.of(metric, files[0], CLASSES).scores(files[1])
    assert (scores.reference, scores.candidate, scores.doubt) == (1.0, 0.75, "")
    # Two of eight files lose all they can.
    assert scores.most_lost > by_itself.most_lost + 0.2
    assert scores.least_shown == pytest.approx(0.32, abs=0.01)


@pytest.mark.parametrize("count", [8, 16, 32])
@pytest.mark.parametrize(("lost", "alike"), [(0.02, 0.3), (0.1, 0.3), (0.05, 0.5), (0.3, 0.2)])
def test_bounds_of_answers_that_turn_over_together_hold(
    count: int, lost: float, alike: float, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of 4 to 32 samples of a file turn over with a chance that is drawn by file."""
    generator, views = np.random.default_rng(count), ComparisonSpec.whole(files[0])
    held: dict[bool, list[bool]] = {True: [], False: []}
    for _ in range(120):
        names = np.repeat(np.arange(count), generator.integers(4, 33, count))
        chances = generator.beta(lost * (1 / alike - 1), (1 - lost) * (1 / alike - 1), count)
        turned = [{"y": np.array([int(one)])} for one in generator.random(len(names)) < chances[names]]
        monkeypatch.setattr("onnxq.evaluation.metrics._run_each", lambda *_, turned=turned: tuple(turned))
        right = tuple({"y": np.array([0])} for _ in names)
        whole = Metric("top1", Top1(np.zeros(len(names), np.int64)))
        for together, own in held.items():
            shared = tuple(names.astype(str)) if together else ()
            scorer = Scorer(whole, views, ({},) * len(names), right, 1.0, shared)
            own.append(scorer.scores(files[1]).most_lost >= lost)
    # Of so few draws a share of 92 % is told to 2.5 %.
    assert np.mean(held[True]) >= 0.9
    assert np.mean(held[False]) < 0.85


def test_no_more_answers_are_lost_than_are_right(files: Files) -> None:
    scores = Scorer.of(Metric("top1", Top1(LABELS[:2])), files[0], CLASSES[:2]).scores(files[0])
    assert (scores.reference, scores.most_lost, scores.least_shown) == (1.0, 1.0, 1.0)


def test_one_sample_tells_no_bound(files: Files) -> None:
    scores = Scorer.of(Metric("top1", Top1(LABELS[:1])), files[0], CLASSES[:1]).scores(files[1])
    assert scores.most_lost == math.inf
    assert scores.doubt == "one sample does not show how much less others may score"


def first_ones(outputs: list, samples: list) -> float:
    return float(np.mean([output["y"].argmax() == label for output, label in zip(outputs, LABELS, strict=False)]))


def whole(outputs: list, samples: list) -> float:
    if len(outputs) < len(CLASSES):
        raise KeyError("sample 0")
    return accuracy(outputs, samples)


class Drawn:
    """Accuracy on a few samples that are drawn anew in each call."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __call__(self, outputs: list, samples: list) -> float:
        return accuracy(outputs, samples) - float(self.random.uniform(0.1, 0.5))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            first_ones,
            "metric 'm' depends on the order of the samples, from 1 to 0 when it is turned round",
        ),
        (Drawn(), "metric 'm' gives another score for the same answers in the same order, 0."),
        (whole, "cannot be estimated, for without some of them metric 'm' failed: KeyError: 'sample 0'"),
    ],
)
def test_metrics_that_cannot_leave_samples_out_tell_no_bound(
    function: Callable[[list, list], float], sentence: str, files: Files
) -> None:
    scores = Scorer.of(Metric("m", function), files[0], CLASSES).scores(files[1])
    assert sentence in scores.doubt
    assert ("order of the samples" in scores.doubt) == (function is first_ones)
    assert scores.most_lost == math.inf


def test_what_a_metric_makes_of_the_quantized_model_has_to_be_a_number_too(files: Files) -> None:
    metric = Metric("m", lambda outputs, samples: accuracy(outputs, samples) // 1 or math.nan)
    scorer = Scorer.of(metric, files[0], CLASSES)
    with pytest.raises(DataError, match="returned nan, expected a finite number"):
        scorer.scores(files[1])
