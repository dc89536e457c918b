"""Labels that differ in decibels of scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxq.judging.labels import decibels_of_labels, share_at
from onnxq.runtime import open_session, run

MODELS = Path(__file__).parents[2] / "models"


@pytest.mark.parametrize(("seen", "least"), [(2, 0.355), (3, 0.818), (5, 1.970), (10, 5.425), (50, 38.965)])
def test_the_share_counts_that_can_be_told_from_chance(seen: int, least: float) -> None:
    """The exact lower bounds of a Poisson variable are half the 5 % quantiles of chi squared, as tables have them."""
    assert share_at(decibels_of_labels(seen, 10_000)) * 10_000 == pytest.approx(least, abs=0.03)


@pytest.mark.parametrize("name", ["gru", "resnet"])
def test_noise_on_the_scores_of_trained_models_makes_about_as_many_labels_differ(name: str) -> None:
    session = open_session(MODELS / f"{name}.onnx")
    images = np.load(MODELS / "data" / "test.npz")["image"]
    scores = np.concatenate([run(session, {"image": image[None]})[0] for image in images]).astype(np.float64)
    noise = np.random.default_rng(0).normal(size=(20, *scores.shape))
    noise *= np.sqrt(np.square(scores).mean() / np.square(noise).mean())
    for decibels in (20, 30, 40):
        share = np.mean(scores.argmax(-1) != (scores + noise * 10 ** (-decibels / 20)).argmax(-1))
        assert share_at(decibels) / 2 < share < 2 * share_at(decibels)
