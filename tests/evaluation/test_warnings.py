"""Warnings about samples: too few, equal, silent, or in another unit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Build
from observations import observe, wanted

from onnxq.data.samples import evenly
from onnxq.errors import DataError, ModelError
from onnxq.evaluation.warnings import (
    INSPECTED_SAMPLES,
    drop_equal_samples,
    find_sample_warnings,
    reject_constant_samples,
    warn_mask_values,
)


@pytest.fixture(scope="module")
def classifier(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Probabilities of three classes, the logarithm of the inputs, and what depends on nothing."""
    model = build(
        """(float[1,3] x) => (float[1,3] p, float[1,3] l, float[N,3] none, int64[2] shape) {
        p = Softmax(x) l = Log(x) none = Compress <axis = 0> (x, never) shape = Shape(x)
        }""",
        never=np.array([False]),
    )
    path = tmp_path_factory.mktemp("doubts") / "model.onnx"
    onnx.save(model, path)
    return path


def samples(count: int, **changes: object) -> list[dict[str, np.ndarray]]:
    values = np.random.default_rng(0).uniform(0.1, 5, (count, 1, 3)).astype(np.float32)
    return [{"x": value} for value in values]


ALWAYS = {"output none of the float model is empty", "output shape of the float model is the same"}


def looked_at(model: Path, given: list[dict[str, np.ndarray]]) -> tuple[str, ...]:
    return find_sample_warnings(model, list(evenly(given, INSPECTED_SAMPLES)), len(given))


def reported(model: Path, given: list[dict[str, np.ndarray]]) -> set[str]:
    return {sentence.partition(" in all ")[0] for sentence in looked_at(model, given)} - ALWAYS


def test_varied_samples_leave_no_doubt_but_of_what_depends_on_nothing(classifier: Path) -> None:
    assert reported(classifier, samples(12)) == set()
    assert {sentence.partition(" in all ")[0] for sentence in looked_at(classifier, samples(12))} == ALWAYS


@pytest.mark.parametrize(("count", "sentence"), [(1, "one sample is too few"), (7, "7 samples are too few")])
def test_few_samples_are_told(classifier: Path, count: int, sentence: str) -> None:
    assert any(one.startswith(sentence) for one in looked_at(classifier, samples(count)))


def test_equal_samples_are_told(classifier: Path) -> None:
    assert reported(classifier, [*samples(10), *samples(2)]) == {
        "2 of 12 samples repeat others and count once; give different samples"
    }
    assert any("63 of 64 inspected samples (of 100)" in one for one in looked_at(classifier, samples(1) * 100))


def test_silent_samples_and_those_of_one_class_are_told(classifier: Path) -> None:
    silent = [{"x": np.full((1, 3), value, np.float32)} for value in range(1, 10)]
    assert any(one.startswith("9 of 9 samples hold a single value") for one in looked_at(classifier, silent))
    first = [{"x": np.float32([[5, one, 0.5]])} for one in range(1, 5)] * 2
    assert "output p of the float model has class 0" in reported(classifier, first)


FLAT = [{"x": np.full((1, 3), value, np.float32)} for value in (0, 0, 1, 2)]


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (FLAT, "all 4 inspected samples hold a single value"),
        (FLAT[:1], "the only sample holds a"),
        ([{**sample, "id": np.int64([7, 7])} for sample in FLAT], "all 4 inspected samples hold"),
    ],
)
def test_samples_all_of_which_are_silent_are_refused(given: list[dict[str, np.ndarray]], reported: str) -> None:
    with pytest.raises(DataError, match=f"^{reported}.*; give some 50 of its real inputs$"):
        reject_constant_samples(given)


@pytest.mark.parametrize(
    "given",
    [
        [],
        [*FLAT, *samples(1)],
        [{"x": np.float32([1])}, {"x": np.float32([2])}],
        [{"ids": np.int64([0, 0, 0])}],
        # Tokens beside a mask of floats that masks nothing.
        [{"ids": np.int64([7, 8, 9]), "mask": np.ones(3, np.float32)}],
        # Single tokens beside a state that begins with zeros.
        [{"id": np.int64([token]), "state": np.zeros(3, np.float32)} for token in (7, 8)],
    ],
)
def test_samples_of_which_any_tells_something_are_heard(given: list[dict[str, np.ndarray]]) -> None:
    assert reject_constant_samples(given) is given


@pytest.mark.parametrize(("others", "refused"), [("", True), (", float[2] c", False)])
def test_a_model_that_gives_no_number_is_refused_where_no_output_gives_one(
    build: Build, tmp_path: Path, others: str, refused: bool
) -> None:
    also = "c = Identity(k)" if others else ""
    text = f"(float[1,3] x) => (float[1,3] y{others}) {{ a = Mul(x, zero) y = Div(a, zero) {also} }}"
    onnx.save(build(text, zero=np.zeros(3, np.float32), k=np.ones(2, np.float32)), tmp_path / "model.onnx")
    if not refused:
        assert "output y of the float model holds NaN" in reported(tmp_path / "model.onnx", samples(8))
        return
    with pytest.raises(ModelError, match=r"every value of output y of the float model is NaN or infinite on all 8"):
        looked_at(tmp_path / "model.onnx", samples(8))


def test_answers_that_are_no_numbers_are_told(classifier: Path) -> None:
    negative = [{"x": -sample["x"]} for sample in samples(8)]
    assert reported(classifier, negative) == {"output l of the float model holds NaN"}


def test_values_that_are_taken_for_masks_are_told_once() -> None:
    usual = np.linspace(-1, 1, 4000, dtype=np.float32)
    far = np.append(usual, np.full(400, 9000, np.float32))
    statistics = observe({"a": usual, "b": far, "c": far}, wanted("abc", "range"))
    (sentence,) = warn_mask_values(statistics, "abcd")
    assert sentence.startswith("values of b such as 9000 look like an attention mask")
    assert ", as in 1 other tensors, so its range leaves them out; " in sentence
    assert list(warn_mask_values(statistics, "a")) == []


def test_equal_samples_count_once_and_different_ones_are_left_alone() -> None:
    two = samples(2)
    assert list(drop_equal_samples(two * 3, two * 3)) == two
    assert drop_equal_samples(two, two) is two
