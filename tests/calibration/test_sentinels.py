from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from observations import seen

from onnxq.calibration.accumulators import Range
from onnxq.calibration.methods import attention_mask_values, data_range, find_doubtful_masks

SCORES = np.random.default_rng(0).normal(scale=5, size=4000).astype(np.float32)


def observe(values: NDArray[np.float32]) -> Range:
    return seen(values, "range").need(Range)


def with_values(*values: float, count: int = 400, scores: NDArray[np.float32] = SCORES) -> NDArray[np.float32]:
    return np.concatenate([scores, np.repeat(np.float32(values), count)])


@pytest.mark.parametrize("mask", [-1e4, -65504.0, -1e9, -np.finfo(np.float32).max, 1e9])
def test_mask_constants_are_recognised_and_left_out(mask: float) -> None:
    found = observe(with_values(mask))
    assert attention_mask_values(found) == (np.float32(mask),)
    assert data_range(found) == (SCORES.min(), SCORES.max())


def test_scores_added_to_a_mask_are_still_a_mask() -> None:
    found = observe(np.concatenate([SCORES, SCORES - np.float32(1e4)]))
    assert attention_mask_values(found) == (found.minimum,)
    assert data_range(found) == (SCORES.min(), SCORES.max())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rounding_of_large_numbers_is_no_spread(dtype: type[np.floating]) -> None:
    masked = np.float32(dtype(-60_000) + np.linspace(-1, 1, 100).astype(dtype))
    assert len(attention_mask_values(observe(np.append(np.linspace(-1, 1, 100, dtype=np.float32), masked)))) == 1


def test_masks_on_both_sides_are_recognised() -> None:
    assert attention_mask_values(observe(with_values(-1e9, 1e9))) == (-1e9, 1e9)


def test_a_single_smallest_float_is_a_mask() -> None:
    assert attention_mask_values(observe(with_values(-3.4e38, count=1))) == (np.float32(-3.4e38),)


@pytest.mark.parametrize(
    "values",
    [
        SCORES,
        SCORES * 1000,
        with_values(-1e4, scores=SCORES * 1000),
        with_values(20_000, count=1, scores=np.tile(SCORES, 3)),
        np.full(10, -1e4, np.float32),
        with_values(-1e4, -1e6),
        with_values(-5000),
        np.append(SCORES[:63], np.linspace(9000, 10_000, 64)).astype(np.float32),
        np.append(SCORES, np.linspace(-12_000, -8192, 400)).astype(np.float32),
    ],
    ids=[
        "scores",
        "wide",
        "wide with -1e4",
        "one outlier",
        "nothing else",
        "two clusters",
        "too small",
        "large data",
        "large negative data",
    ],
)
def test_data_is_not_taken_for_a_mask(values: NDArray[np.float32]) -> None:
    found = observe(values)
    assert attention_mask_values(found) == ()
    assert data_range(found) == (values.min(), values.max())


def test_masks_that_may_be_data_are_told_apart_from_those_that_cannot_be() -> None:
    values = {"data": with_values(9000.0), "both": with_values(-1e4, 2e4), "never": with_values(-3.4e38), "no": SCORES}
    assert find_doubtful_masks({name: observe(one) for name, one in values.items()}) == {"data": 9000.0, "both": 2e4}
