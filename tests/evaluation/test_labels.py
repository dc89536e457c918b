"""Labels that differ in decibels of scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxq.evaluation.bounds import decibels_of_labels, effective_sample_size, share_at
from onnxq.runtime.sessions import open_session, run

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


@pytest.mark.parametrize("files", [8, 16, 32])
@pytest.mark.parametrize(("share", "alike"), [(0.02, 0.3), (0.05, 0.3), (0.05, 0.8), (0.2, 0.5), (0.3, 0.2)])
def test_what_differs_in_the_rows_of_files_is_told_from_chance_by_files(files: int, share: float, alike: float) -> None:
    """Labels of a file differ together: their chance of it is drawn by file, with so high a correlation of its rows."""
    generator = np.random.default_rng(files)
    held, of_rows = [], []
    for _ in range(1500):
        rows = generator.integers(4, 33, files)
        chances = generator.beta(share * (1 / alike - 1), (1 - share) * (1 / alike - 1), files)
        differ, names = generator.binomial(1, np.repeat(chances, rows)), np.repeat(np.arange(files), rows).astype(str)
        counted = effective_sample_size(differ.tolist(), [1] * len(differ), names.tolist())
        seen = int(differ.sum()), len(differ)
        held.append(share_at(decibels_of_labels(*seen, counted)) <= share)
        of_rows.append(share_at(decibels_of_labels(*seen)) <= share)
    assert 0.92 <= np.mean(held) <= 0.99
    assert np.mean(of_rows) < 0.9


@pytest.mark.parametrize(
    ("differing", "counted"), [([1, 0, 0, 0], 1.0), ([4, 0, 0, 0], 1.0), ([2, 2, 2, 2], 8.0), ([0, 0, 0, 0], 0.0)]
)
def test_those_that_differ_count_between_one_and_all(differing: list[int], counted: float) -> None:
    assert effective_sample_size(differing, [4] * 4, ["a", "b", "c", "d"]) == counted


def test_many_that_differ_in_one_file_alone_are_not_taken_for_none() -> None:
    assert decibels_of_labels(1, 400, 1.0) == decibels_of_labels(1, 400)
    assert decibels_of_labels(50, 400) < 1 < decibels_of_labels(50, 400, 1.0) < 30
