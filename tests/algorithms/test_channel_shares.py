"""Factors from what channels were seen to use."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxq.algorithms.channel_shares import SMALLEST, Setting, expected_shares, factors_of, migration_of
from onnxq.algorithms.sites import Channels, Reader, Site


def site(count: int, *, dense: bool = True) -> Site:
    channels = Channels(1, 4, np.arange(count))
    return Site({"t": channels}, frozenset(), np.ones(count, bool), (Reader("n", "t", dense),))


@pytest.mark.parametrize(
    "parts",
    [
        [np.zeros(3)],
        [np.zeros(3), np.zeros(3)],
        [np.array([1.0, np.nan, 0.5])],
        [np.array([0.0, 0.1, 1.0]), np.array([3.0, 0.0, 1.0])],
    ],
)
@pytest.mark.parametrize("setting", [Setting(0.0), Setting(0.5), Setting(1.0, cover=0.0)])
def test_factors_are_usable_whatever_was_seen(parts: list[NDArray[np.float64]], setting: Setting) -> None:
    factors = factors_of(site(3), parts, setting)
    assert ((factors >= SMALLEST) & (factors <= 1)).all()


def test_a_channel_seen_in_one_part_alone_gets_the_largest_margin() -> None:
    found = expected_shares([np.array([0.1, 1.0]), np.array([0.0, 1.0])], 0.5)
    assert found[0] == pytest.approx(0.4)


def test_one_sample_leaves_a_margin() -> None:
    assert expected_shares([np.array([0.1])], 0.98)[0] > 0.1


def test_a_dense_reader_has_a_power_of_its_own() -> None:
    parts = [np.array([0.25, 1.0])] * 2
    assert factors_of(site(2), parts, Setting(0.5))[0] == pytest.approx(0.5)
    assert factors_of(site(2, dense=False), parts, Setting(0.5))[0] == pytest.approx(0.25)


def test_sites_without_gain_have_no_factors() -> None:
    assert not migration_of({site(2): np.ones(2)}).factors


@pytest.mark.parametrize("cover", [0.0, 1.0])
def test_a_channel_of_which_nothing_was_seen_may_use_all(cover: float) -> None:
    assert expected_shares([np.array([0.5, 0.0, 0.001])] * 6, cover).tolist() == [0.5, 1.0, 1.0]
