"""Metrics: top-1 with labels, a user's function, and what goes wrong in either."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.errors import DataError, SchemeError
from onnxq.evaluation.metrics import Metric, Top1, load_metric, of_first_samples, score
from onnxq.runtime.sessions import open_session, run

MODELS = Path(__file__).parents[2] / "models"
LABELS = MODELS / "data" / "test-labels.npy"


def scored(labels: list[int], *outputs: list[list[float]], of_more: bool = False) -> float:
    return Top1(np.array(labels), of_more)([{"y": np.array(output)} for output in outputs], [])


def test_top1_is_the_accuracy_of_a_classifier() -> None:
    session = open_session(MODELS / "mobilenet.onnx")
    images, labels = np.load(MODELS / "data" / "test.npz")["image"][:200], np.load(LABELS)[:200]
    logits = session.run(None, {"image": images})[0]
    metric = of_first_samples(load_metric(f"top1:{LABELS}"))
    samples = [{"image": image[None]} for image in images]
    found = score(metric, [{"logits": one[None]} for one in logits], samples)
    assert found == pytest.approx(np.mean(logits.argmax(axis=-1) == labels))
    assert found > 0.8


def test_top1_of_batches_answers_as_many_labels() -> None:
    assert scored([1, 1, 1], [[0.0, 1], [1, 0]], [[0.0, 1]]) == pytest.approx(2 / 3)


def test_top1_takes_labels_as_they_are() -> None:
    assert scored([3, 1, 4], [3, 2], [4]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("labels", "of_more"), [([1], False), ([1], True), ([1, 1, 1], False)])
def test_top1_needs_a_label_for_each_answer(labels: list[int], of_more: bool) -> None:
    with pytest.raises(DataError, match=rf"gives 2 answers for 1 samples and there are {len(labels)} labels, expected"):
        scored(labels, [[0.0, 1], [1, 0]], of_more=of_more)


def test_top1_of_the_first_samples_leaves_the_other_labels() -> None:
    assert scored([0, 1, 1, 1], [[0.0, 1], [0, 1]], of_more=True) == 0.5
    assert of_first_samples(Metric("m", max)).function is max


def test_top1_of_some_samples_has_their_labels() -> None:
    whole = Top1(np.array([0, 1, 1, 0, 7, 7]), of_more=True)
    outputs = [{"y": np.array(one)} for one in ([1, 1], [1], [0])]
    some = whole.of_places(outputs, [0, 2])
    assert some.labels.tolist() == [0, 1, 0]
    assert some([outputs[0], outputs[2]], []) == pytest.approx(2 / 3)


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
        ("two.npz", "holds labels, image; say which are the labels as top1:.*two.npz:KEY"),
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


def test_a_function_gets_the_outputs_and_the_samples_by_name(quality: Callable[[str], float]) -> None:
    body = """
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
    assert quality(body) == 2 * 4 * 16 + 2 * 32


def test_a_file_is_run_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    metric = load_metric(metric_file(tmp_path, "def quality(outputs, samples): return __file__"))
    assert metric.function([], []) == str(tmp_path / "my metric.py")
    assert [path.name for path in tmp_path.iterdir()] == ["my metric.py"]


def test_a_function_of_an_installed_module_is_found() -> None:
    assert load_metric("operator:is_not").function is operator.is_not


@pytest.mark.parametrize(
    ("returned", "shown"), [("float('nan')", "nan"), ("float('inf')", "inf"), ("None", "None"), ("'much'", "'much'")]
)
def test_what_is_no_finite_number_is_refused(returned: str, shown: str, quality: Callable[[str], float]) -> None:
    with pytest.raises(DataError, match=rf"returned {shown}, expected a finite number, higher for a better model"):
        quality(f"def quality(outputs, samples): return {returned}")


def test_a_number_of_numpy_is_a_number(quality: Callable[[str], float]) -> None:
    assert quality("import numpy\ndef quality(outputs, samples): return numpy.float32(0.5)") == 0.5


def test_a_function_that_fails_is_told(quality: Callable[[str], float]) -> None:
    with pytest.raises(DataError, match=r"^metric .* failed: ZeroDivisionError: division by zero"):
        quality("def quality(outputs, samples): return 1 / 0")


def test_a_function_that_ends_the_process_fails(quality: Callable[[str], float]) -> None:
    with pytest.raises(DataError, match=r"^metric .* failed: SystemExit: 0"):
        quality("def quality(outputs, samples): raise SystemExit(0)")


@pytest.mark.parametrize("written", ["outputs[0]['y']", "samples[0]['x']"])
def test_a_function_cannot_write_into_what_others_are_given(written: str, quality: Callable[[str], float]) -> None:
    with pytest.raises(DataError, match=r"^metric .* failed: ValueError: assignment destination is read-only"):
        quality(f"def quality(outputs, samples): {written}[...] = 0")


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
    ],
)
def test_a_file_without_the_function_is_told(body: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match=sentence):
        load_metric(metric_file(tmp_path, body))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("top1", r"metric top1 needs labels; write top1:LABELS\.npy"),
        ("top2", r"metric 'top2' is not written as top1:LABELS\.npy, .*; did you mean 'top1'"),
        ("module:", "is not written as"),
        (":function", "is not written as"),
        ("nowhere_at_all:f", "cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("top:labels.npy", "cannot be imported: .*; did you mean 'top1'"),
        ("nowhere.py:f", "cannot be imported: there is no file nowhere.py"),
    ],
)
def test_a_text_that_names_nothing_is_told(text: str, sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        load_metric(text)


def test_samples_are_needed() -> None:
    with pytest.raises(DataError, match="there are no samples for metric 'm'"):
        score(Metric("m", lambda outputs, samples: 1.0), [], [])
