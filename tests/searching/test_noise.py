"""How noise is divided among nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from onnxq.searching.noise import _ratio, spread_noise

UNITS = [f"n{index}" for index in range(32)]


class Bench:
    """Measures groups of units whose noise is known, and counts how often."""

    def __init__(self, **noise: float) -> None:
        self.noise = noise
        self.groups: list[int] = []

    def __call__(self, group: Sequence[str]) -> float:
        self.groups.append(len(group))
        return sum(self.noise.get(unit, 0.001) for unit in group)


def test_each_unit_is_measured_alone_when_there_is_time() -> None:
    bench = Bench(n3=1.0, n20=0.5)
    found = spread_noise(UNITS, bench, whole=2.0, most=32, negligible=0.0)
    assert bench.groups == [1] * 32
    assert (found["n3"], found["n20"], found["n0"]) == (1.0, 0.5, 0.001)


def test_few_measurements_find_the_noisiest_units() -> None:
    bench = Bench(n3=1.0, n20=0.5)
    whole = bench(UNITS)
    found = spread_noise(UNITS, bench, whole=whole, most=20, negligible=0.01)
    assert len(bench.groups) <= 21
    assert sorted(found, key=lambda unit: -found[unit])[:2] == ["n3", "n20"]
    assert found["n3"] == pytest.approx(1.0, rel=0.05)
    assert found["n20"] == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("most", [0, 1, 2, 7, 31])
def test_the_parts_make_the_whole_even_where_errors_point_the_same_way(most: int) -> None:
    found = spread_noise(UNITS, lambda group: len(group) ** 2 / 1024, whole=1.0, most=most, negligible=0.0)
    assert sorted(found) == sorted(UNITS)
    assert sum(found.values()) == pytest.approx(1.0)


def test_quiet_groups_are_not_looked_into() -> None:
    bench = Bench(n5=1.0)
    spread_noise(UNITS, bench, whole=1.03, most=30, negligible=0.1)
    assert len(bench.groups) == 10


def test_what_is_not_finite_is_very_noisy_but_can_be_added_up() -> None:
    assert _ratio(-math.inf) == 1e10
    assert _ratio(math.inf) == 0.0
    found = spread_noise(UNITS, lambda group: _ratio(-math.inf), whole=_ratio(-math.inf), most=8, negligible=0.0)
    assert sum(found.values()) == pytest.approx(1e10)
