"""Losses: the noise that judging counts, cross entropy, and a function of a user's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onnxq.errors import DataError, SchemeError
from onnxq.evaluation.sqnr import nsr_by_sample
from onnxq.training.losses import CrossEntropy, Distillation, load_loss
from onnxq.training.training_set import Batch

OUTPUTS = [torch.randn(1, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def lessons(outputs: list[torch.Tensor], labels: list[int] | None = None) -> list[Batch]:
    given = [None] * len(outputs) if labels is None else [torch.tensor([label]) for label in labels]
    return [Batch({}, {"y": one}, label) for one, label in zip(outputs, given, strict=True)]


@pytest.mark.parametrize("probabilities", [False, True])
def test_distillation_is_the_noise_that_judges_count(probabilities: bool) -> None:
    expected = [one.softmax(-1) for one in OUTPUTS] if probabilities else OUTPUTS
    found = [
        (one.log() + 0.1 * OUTPUTS[0]).softmax(-1) if probabilities else one + 0.1 * OUTPUTS[0] for one in expected
    ]
    loss = Distillation.of(lessons(expected))
    total = sum(float(loss({"y": one}, batch)) for one, batch in zip(found, lessons(expected), strict=True)) / 4
    pairs = [((one.numpy(),), (other.numpy(),)) for one, other in zip(expected, found, strict=True)]
    assert total == pytest.approx(nsr_by_sample(pairs).sum(), rel=1e-3)


def test_outputs_that_are_no_floats_are_no_lesson() -> None:
    with pytest.raises(DataError, match="no output of the model is a float"):
        Distillation.of(lessons([torch.tensor([1])]))


@pytest.mark.parametrize("probabilities", [False, True])
def test_cross_entropy_takes_scores_and_probabilities(probabilities: bool) -> None:
    scores = [one.softmax(-1) for one in OUTPUTS] if probabilities else OUTPUTS
    some = lessons(scores, [0, 1, 2, 3])
    loss = CrossEntropy.of(some)
    expected = torch.nn.functional.cross_entropy(torch.cat(OUTPUTS), torch.arange(4))
    batch = Batch({}, {}, torch.arange(4), 4)
    assert float(loss({"y": torch.cat(scores)}, batch)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("labels", "told"), [([0, 1, 2, 5], "labels lie in 0..5, expected 0..4"), ([-1, 0, 0, 0], "lie in -1..0")]
)
def test_labels_of_no_class_are_refused(labels: list[int], told: str) -> None:
    with pytest.raises(DataError, match=told):
        CrossEntropy.of(lessons(OUTPUTS, labels))


def test_labels_are_about_rows_of_scores() -> None:
    with pytest.raises(DataError, match="expected one row of scores of classes"):
        CrossEntropy.of(lessons([torch.zeros(1, 3, 4)], [0]))


def test_a_users_loss_is_given_outputs_expected_and_inputs(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def loss(outputs, expected, inputs):\n    return (outputs['y'] - expected['y'] + inputs['x']).sum()\n"
    )
    batch = Batch({"x": torch.ones(2)}, {"y": torch.zeros(2)})
    assert float(load_loss(f"{path}:loss")({"y": torch.ones(2)}, batch)) == 4


@pytest.mark.parametrize(
    ("code", "told"),
    [("return 3", "returned int, expected a scalar tensor"), ("raise KeyError(1)", "failed: KeyError: 1")],
)
def test_a_users_loss_that_is_none_is_told(code: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def loss(outputs, expected, inputs):\n    {code}\n")
    with pytest.raises(DataError, match=told):
        load_loss(f"{path}:loss")({}, Batch({}, {}))


@pytest.mark.parametrize(("text", "told"), [("mine", "is not written as"), ("{}:los", "did you mean 'loss'")])
def test_a_loss_that_is_not_there_is_told(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def loss(outputs, expected, inputs):\n    return 0\n")
    with pytest.raises(SchemeError, match=told):
        load_loss(text.format(path))
