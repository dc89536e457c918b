"""Metrics of users, and how much a model may have lost by them on all samples."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import MODELS, Build
from onnx import ModelProto
from PIL import Image

from onnxq.data.dataset import Origin, Subset, labels_of
from onnxq.data.inputs import Input, model_inputs
from onnxq.data.samples import open_samples
from onnxq.errors import DataError, SchemeError
from onnxq.evaluation.bounds import alpha_spending
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.metrics import Metric, Scorer, Scores, Top1, load_metric, score
from onnxq.runtime.sessions import open_session, run

LABELS = MODELS / "data" / "test-labels.npy"


def scored(labels: list[int], *outputs: list[list[float]], of_more: bool = False) -> float:
    return Top1(np.array(labels), of_more)([{"y": np.array(output)} for output in outputs], [])


def test_top1_is_the_accuracy_of_a_classifier() -> None:
    session = open_session(MODELS / "mobilenet.onnx")
    images, labels = np.load(MODELS / "data" / "test.npz")["image"][:200], np.load(LABELS)[:200]
    logits = session.run(None, {"image": images})[0]
    metric = Metric("top1", replace(load_metric(f"top1:{LABELS}").function, of_more=True))
    samples = [{"image": image[None]} for image in images]
    found = score(metric, [{"logits": one[None]} for one in logits], samples)
    assert found == pytest.approx(np.mean(logits.argmax(axis=-1) == labels))
    assert found > 0.8


@pytest.mark.parametrize(
    ("labels", "outputs", "of_more", "share"),
    [
        # An output of several rows has a label for each.
        ([1, 1, 1], ([[0.0, 1], [1, 0]], [[0.0, 1]]), False, 2 / 3),
        # Numbers of classes are answers as they are.
        ([3, 1, 4], ([3, 2], [4]), False, 2 / 3),
        ([0, 1, 1, 1], ([[0.0, 1], [0, 1]],), True, 0.5),
    ],
)
def test_top1_is_the_share_of_right_answers(labels: list[int], outputs: Any, of_more: bool, share: float) -> None:
    assert scored(labels, *outputs, of_more=of_more) == pytest.approx(share)


@pytest.mark.parametrize(("labels", "of_more"), [([1], False), ([1], True), ([1, 1, 1], False)])
def test_top1_needs_a_label_for_each_answer(labels: list[int], of_more: bool) -> None:
    with pytest.raises(DataError, match=rf"gives 2 answers for 1 samples and there are {len(labels)} labels, expected"):
        scored(labels, [[0.0, 1], [1, 0]], of_more=of_more)


@pytest.mark.parametrize("output", [np.float32(1), np.zeros((3, 0)), [1.0]])
def test_top1_needs_scores(output: object) -> None:
    with pytest.raises(DataError, match="holds no scores or numbers of classes"):
        Top1(np.array([1]))([{"y": output}], [])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "l.npy", np.array([[1], [2]], np.uint8))
    np.save(tmp_path / "floats.npy", np.array([1.0]))
    np.savez(tmp_path / "one.npz", labels=np.array([3, 4]))
    np.savez(tmp_path / "two.npz", labels=np.array([5, 6]), image=np.zeros((2, 4)))
    return tmp_path


@pytest.mark.parametrize(("place", "labels"), [("l.npy", [1, 2]), ("one.npz", [3, 4]), ("two.npz:labels", [5, 6])])
def test_labels_come_from_arrays(place: str, labels: list[int], folder: Path) -> None:
    metric = load_metric(f"top1:{folder / place}")
    assert isinstance(metric.function, Top1)
    assert metric.function.labels.tolist() == labels


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("two.npz", "has arrays labels, image, expected one; name the labels as top1:.*two.npz:KEY"),
        ("two.npz:label", "has no array 'label'; did you mean 'labels'"),
        ("floats.npy", "have type float64, expected whole numbers"),
        ("none.npy", "none.npy"),
        ("l.npy:key", "not written as LABELS.npy or"),
        ("labels.csv", "not written as LABELS.npy or"),
    ],
)
def test_wrong_labels_are_told(place: str, sentence: str, folder: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        load_metric(f"top1:{folder / place}")


def metric_file(folder: Path, body: str) -> str:
    path = folder / "my metric.py"
    path.write_text(body)
    return f"{path}:quality"


@pytest.fixture
def quality(perceptron: ModelProto, samples_for, tmp_path: Path) -> Callable[[str], float]:
    """Return a function: the body of a metric's file to the score of a model on two samples."""

    def quality(body: str) -> float:
        session, samples = open_session(perceptron), samples_for(perceptron, 2)
        outputs = [{"y": run(session, sample)[0]} for sample in samples]
        return score(load_metric(metric_file(tmp_path, body)), outputs, samples)

    return quality


DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Seen:
    outputs: list
    samples: list

def quality(outputs, samples):
    seen = Seen(outputs, samples)
    return sum(output["y"].size for output in seen.outputs) + len(seen.samples) * seen.samples[0]["x"].shape[1]
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (DATACLASS, 2 * 4 * 16 + 2 * 32),
        ("import numpy\ndef quality(outputs, samples): return numpy.float32(0.5)", 0.5),
    ],
)
def test_a_function_gets_the_outputs_and_the_samples_by_name(
    body: str, expected: float, quality: Callable[[str], float], tmp_path: Path
) -> None:
    assert quality(body) == expected
    # A file is run, and nothing is left beside it.
    metric = load_metric(metric_file(tmp_path, "def quality(outputs, samples): return __file__"))
    assert metric.function([], []) == str(tmp_path / "my metric.py")
    assert [path.name for path in tmp_path.iterdir()] == ["my metric.py"]
    assert load_metric("operator:is_not").function is operator.is_not


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        *(
            (f"return {returned}", f"returned {shown}, expected a finite number, higher for a better model")
            for returned, shown in (("float('nan')", "nan"), ("float('inf')", "inf"), ("None", "None"), ("'a'", "'a'"))
        ),
        ("return 1 / 0", "^metric .* failed: ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "^metric .* failed: SystemExit: 0"),
        *(
            (f"{written}[...] = 0", "^metric .* failed: ValueError: assignment destination is read-only")
            for written in ("outputs[0]['y']", "samples[0]['x']")
        ),
    ],
)
def test_a_function_that_fails_is_refused(statement: str, sentence: str, quality: Callable[[str], float]) -> None:
    with pytest.raises(DataError, match=sentence):
        quality(f"def quality(outputs, samples): {statement}")


def test_a_function_may_put_others_in_the_place_of_its_arrays() -> None:
    outputs = [{"y": [np.float32([3, 4])]}]

    def length(given: list, samples: list) -> float:
        given[0]["y"] = np.linalg.norm(given[0]["y"])
        return float(given[0]["y"])

    assert [score(Metric("length", length), outputs, [{}]) for _ in range(2)] == [5.0, 5.0]
    assert outputs[0]["y"][0].flags.writeable


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("raise OSError('no room')", "cannot be imported: OSError: no room"),
        ("def quality(:", "cannot be imported: SyntaxError"),
        ("def qualitiy(a, b): return 1", "has none of that name; did you mean 'qualitiy'"),
        ("quality = 0.5", "has float 'quality'"),
        (None, "is not written as"),
    ],
)
def test_a_file_without_the_function_is_told(body: str | None, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match=sentence):
        load_metric(metric_file(tmp_path, body) if body is not None else "module:")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("top2", r"metric 'top2' is not written as top1, top1:LABELS\.npy, .*; did you mean 'top1'"),
        (":function", "is not written as"),
        ("nowhere_at_all:f", "cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("top:labels.npy", "cannot be imported: .*; did you mean 'top1'"),
        ("nowhere.py:f", "cannot be imported: there is no file nowhere.py"),
    ],
)
def test_a_text_that_names_nothing_is_told(text: str, sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        load_metric(text)
    with pytest.raises(DataError, match="there are no samples for metric 'm'"):
        score(Metric("m", lambda outputs, samples: 1.0), [], [])


# What a metric says of two models, and how much the second may have lost on other samples.

Files = tuple[Path, Path]
LABELS_SCORING = np.arange(40) % 4
CLASSES = [{"x": np.eye(4, dtype=np.float32)[[label]]} for label in LABELS_SCORING]


@pytest.fixture(scope="module")
def files(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model that returns its input, and one that takes every fourth class for the first."""
    folder = tmp_path_factory.mktemp("scoring")
    for name, added in (("float", [0, 0, 0, 0]), ("int8", [0.6, 0, 0, -0.6])):
        text = "(float[1,4] x) => (float[1,4] y) { y = Add(x, b) }"
        onnx.save(build(text, b=np.array([added], np.float32)), folder / f"{name}.onnx")
    return folder / "float.onnx", folder / "int8.onnx"


class Items:
    """A map-style data set of inputs and labels."""

    def __len__(self) -> int:
        return len(CLASSES)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return CLASSES[index]["x"][0], int(LABELS_SCORING[index])


ROWS, HALVES = np.concatenate([one["x"] for one in CLASSES]), (slice(0, 25), slice(25, 40))
LABELLED: dict[str, Any] = {
    "tuples": [(ROWS[half], LABELS_SCORING[half]) for half in HALVES],
    "single tuples": [(row, label) for row, label in zip(ROWS, LABELS_SCORING, strict=True)],
    "dictionaries": [{"x": ROWS[half], "labels": LABELS_SCORING[half]} for half in HALVES],
    "lists in dictionaries": [{"x": ROWS[half], "label": LABELS_SCORING[half].tolist()} for half in HALVES],
    "map-style": Items(),
}


@pytest.mark.parametrize("given", LABELLED.values(), ids=LABELLED)
@pytest.mark.parametrize("batch", [None, 1])
def test_labels_that_a_loader_yields_are_those_of_the_metric(given: Any, batch: int | None, files: Files) -> None:
    samples = open_samples(given, model_inputs(onnx.load(files[0])), batch=batch)
    assert [labels_of(samples, index) for index in range(40)] == [(label,) for label in LABELS_SCORING]
    assert labels_of(Subset(samples, [2, 7]), 1) == (3,)
    assert Scorer.of(load_metric("top1"), files[0], samples).scores(files[1]).candidate == 0.75

    def quality(outputs: list, samples: list) -> float:
        pairs = zip(samples, outputs, strict=True)
        return float(np.mean([sample["labels"] == output["y"].argmax() for sample, output in pairs]))

    assert Scorer.of(Metric("mine", quality), files[0], samples).scores(files[1]).candidate == 0.75


@pytest.mark.parametrize(
    ("names", "labels"), [(("cat", "dog"), [0, 0, 1, 1]), (("10", "9"), [9, 9, 10, 10]), (("only",), [None, None])]
)
def test_subfolders_of_images_are_classes(names: tuple[str, ...], labels: list[int | None], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        for index in range(2):
            Image.new("RGB", (2, 2)).save(tmp_path / name / f"{index}.png")
    samples = open_samples(tmp_path, (Input("x", np.dtype(np.float32), (1, 3, 2, 2)),))
    found = [labels_of(samples, index) for index in range(len(samples))]
    assert found == [() if label is None else (label,) for label in labels]


@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ([*LABELLED["tuples"][:1], ROWS[25:]], "15 of 40"),
        ([(ROWS[:2], LABELS_SCORING[:3])], "2 of 2"),
        ([(ROWS, LABELS_SCORING.astype(np.float32))], "40 of 40"),
        (CLASSES, "40 of 40"),
    ],
)
def test_samples_without_a_label_each_are_told(given: Any, lacking: str, files: Files) -> None:
    samples = open_samples(given, model_inputs(onnx.load(files[0])))
    with pytest.raises(
        DataError, match=f"metric top1 has no label for {lacking} samples, expected one for each; write"
    ):
        Scorer.of(load_metric("top1"), files[0], samples)


@pytest.mark.parametrize(("shift", "doubt"), [(0, ""), (1, "the float model gives 0.0% of top1 right, where guessing")])
def test_a_float_model_near_chance_is_in_doubt(shift: int, doubt: str, files: Files) -> None:
    metric = Metric("top1", Top1((LABELS_SCORING + shift) % 4))
    found = Scorer.of(metric, files[0], CLASSES).scores(files[0]).doubt
    assert found.startswith(doubt)
    assert bool(found) is bool(doubt)


def accuracy(outputs: list, samples: list) -> float:
    """What Top1 says, as a function of the user's that finds the labels in the samples."""
    pairs = zip(outputs, samples, strict=True)
    return float(np.mean([output["y"].argmax() == sample["x"].argmax() for output, sample in pairs]))


METRICS = {"top1": Metric("top1", Top1(LABELS_SCORING)), "function": Metric("function", accuracy)}


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_the_bound_lies_above_the_drop(metric: Metric, files: Files) -> None:
    scorer = Scorer.of(metric, files[0], CLASSES)
    scores, equal = scorer.scores(files[1]), scorer.scores(files[0])
    assert (scores.reference, scores.candidate, scores.warning) == (1.0, 0.75, "")
    assert 0.35 < scores.most_lost < 0.6
    assert scorer.scores(files[1], alpha_spending(3)).most_lost > scores.most_lost
    # Models that answer alike may still lose as much as so few samples do not show.
    assert equal.drop == 0
    assert equal.most_lost == equal.least_shown == pytest.approx(3 / 40, rel=0.2)


@pytest.mark.parametrize(
    ("scores", "allowed", "trusted"),
    [
        (Scores("m", 0.9, 0.9, 0.02, 0.01), 0.03, True),
        (Scores("m", 0.9, 0.9, 0.05, 0.01), 0.03, False),
        # So few samples could never show that little is lost, so what is seen decides.
        (Scores("m", 0.9, 0.9, 0.05, 0.04), 0.0, True),
        (Scores("m", 0.9, 0.8, 0.2, 0.04), 0.0, False),
        (Scores("m", 0.9, 0.9, warning="because"), 0.0, True),
        # 91 of 100 answers, and 90.
        (Scores("m", 0.91, 0.9), 0.01, True),
    ],
)
def test_a_drop_is_trusted_by_its_bound_where_that_can_be_told(scores: Scores, allowed: float, trusted: bool) -> None:
    assert scores.is_trusted(allowed) is trusted


def test_those_that_judge_are_scored_by_themselves(files: Files) -> None:
    holdout, metric = [0, 1, *range(20, 28), 37], METRICS["top1"]
    found = Scorer.of(metric, files[0], CLASSES, holdout).scores(files[1])
    others = sorted(set(range(40)).difference(holdout))
    alone, chosen = (
        Scorer.of(Metric("top1", Top1(LABELS_SCORING[places])), files[0], [CLASSES[place] for place in places]).scores(
            files[1]
        )
        for places in (holdout, others)
    )
    assert found == replace(alone, chosen_by=chosen)
    assert alone.candidate != chosen.candidate


def test_a_plan_is_trusted_where_the_samples_that_chose_it_are_content_too() -> None:
    content, lost = Scores("m", 1.0, 1.0, 0.01, 0.01), Scores("m", 1.0, 0.9, 0.2, 0.01)
    for holdout, chosen in ((content, content), (content, lost), (lost, content)):
        both = replace(holdout, chosen_by=chosen)
        assert both.is_trusted(0.03) == (lost not in (holdout, chosen))
        # The model that is written is judged by those that judge.
        assert both.allowed_by(0.03) == holdout.allowed_by(0.03)


class OfFiles(list):
    """Samples of eight files, all of one class in each."""

    def origin(self, index: int) -> Origin:
        return Origin(index, f"file{index % 4 + 4 * (index >= 20)}")

    def labels(self, index: int) -> tuple[int, ...]:
        return ()


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_samples_of_one_file_are_left_out_together(metric: Metric, files: Files) -> None:
    scorer = Scorer.of(metric, files[0], OfFiles(CLASSES))
    scores, by_itself = scorer.scores(files[1]), Scorer.of(metric, files[0], CLASSES).scores(files[1])
    assert (scores.reference, scores.candidate, scores.warning) == (1.0, 0.75, "")
    # Two of eight files lose all they can.
    assert scores.most_lost > by_itself.most_lost + 0.2
    assert scores.least_shown == pytest.approx(0.32, abs=0.01)


@pytest.mark.parametrize(("count", "lost", "alike"), [(8, 0.02, 0.3), (8, 0.1, 0.3), (16, 0.05, 0.5), (16, 0.3, 0.2)])
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
            samples = ({},) * len(names)
            scorer = Scorer(whole, views, samples, samples, right, 1.0, shared)
            own.append(scorer.scores(files[1]).most_lost >= lost)
    # Of so few draws a share of 92 % is told to 2.5 %.
    assert np.mean(held[True]) >= 0.9
    assert np.mean(held[False]) < 0.85


@pytest.mark.parametrize(
    ("count", "most_lost", "warning"),
    [(2, 1.0, ""), (1, math.inf, "one sample gives no bound for the score of others")],
)
def test_no_more_answers_are_lost_than_are_right(count: int, most_lost: float, warning: str, files: Files) -> None:
    scores = Scorer.of(Metric("top1", Top1(LABELS_SCORING[:count])), files[0], CLASSES[:count]).scores(files[0])
    assert (scores.reference, scores.most_lost, scores.least_shown) == (1.0, most_lost, most_lost)
    assert scores.warning == warning


def first_ones(outputs: list, samples: list) -> float:
    return float(
        np.mean([output["y"].argmax() == label for output, label in zip(outputs, LABELS_SCORING, strict=False)])
    )


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
            "metric 'm' depends on the order of the samples (1, reversed 0), so its score has no bound",
        ),
        (Drawn(), "metric 'm' gives 0."),
        (whole, "without some samples, metric 'm' failed: KeyError: 'sample 0'"),
    ],
)
def test_metrics_that_cannot_leave_samples_out_tell_no_bound(
    function: Callable[[list, list], float], sentence: str, files: Files
) -> None:
    scores = Scorer.of(Metric("m", function), files[0], CLASSES).scores(files[1])
    assert sentence in scores.warning
    assert ("order of the samples" in scores.warning) == (function is first_ones)
    assert scores.most_lost == math.inf


def test_what_a_metric_makes_of_the_quantized_model_has_to_be_a_number_too(files: Files) -> None:
    metric = Metric("m", lambda outputs, samples: accuracy(outputs, samples) // 1 or math.nan)
    scorer = Scorer.of(metric, files[0], CLASSES)
    with pytest.raises(DataError, match="returned nan, expected a finite number"):
        scorer.scores(files[1])
