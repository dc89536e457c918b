"""What each sample counts where noise is measured to choose plans by."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.search.sensitivity import sample_weights, typical_sample


def test_the_sample_that_decides_counts_most_and_all_noise_stays_what_it_is() -> None:
    noises = np.array([[1.0, 0.0], [1.0, 2.0], [8.0, 2.0]])
    influences = np.array([[-3.0, 1.0], [0.2, 1.0], [50.0, 1.0]])
    weights = sample_weights(noises, influences)
    assert (weights * noises).sum(0) == pytest.approx(noises.sum(0))
    assert weights[0, 0] == weights[1, 0] == pytest.approx(weights[2, 0] / 20)
    assert weights[:, 1] == pytest.approx(np.ones(3))


def test_silence_weighs_alike() -> None:
    assert sample_weights(np.zeros((3, 1)), np.ones((3, 1))).tolist() == [[1.0]] * 3


@pytest.mark.parametrize(
    ("noises", "place"),
    [([1.0], 0), ([1.0, 1.0, 1.0], 1), ([1.0, 9.0, 1.0], 1), ([4.0, 5.0, 6.0, 5.0], 3), ([0.0, 0.0], 0)],
)
def test_the_first_look_is_at_a_usual_sample_unless_one_has_most_of_the_noise(noises: list[float], place: int) -> None:
    assert typical_sample(np.array(noises)) == place
