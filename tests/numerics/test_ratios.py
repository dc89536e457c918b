"""Ratios of noise to signal say what decibels say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onnxq.numerics.numerics import signal_to_noise
from onnxq.numerics.ratios import decibels, largest


@pytest.mark.parametrize("ratio", [0.0, 1e-300, 0.01, 1.0, 1e10])
def test_decibels_are_those_of_the_energies(ratio: float) -> None:
    assert decibels(ratio) == pytest.approx(signal_to_noise(1.0, ratio))


def test_what_is_not_finite_is_the_worst() -> None:
    assert largest(np.array([0.5, 2.0, 1.0])) == 2.0
    for bad in (math.nan, math.inf, -math.inf):
        assert decibels(largest(np.array([0.5, bad]))) == -math.inf
    assert decibels(largest(np.zeros(0))) == math.inf
