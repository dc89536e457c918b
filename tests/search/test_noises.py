"""How noise is divided among what becomes codes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxq.numerics.affine import decibels
from onnxq.search.sensitivity import (
    LARGEST_NSR,
    QuantizerId,
    Sensitivities,
    attribute_error,
    measure_sensitivities,
    worst_output_nsr,
)

UNITS = tuple(QuantizerId(f"t{index}") for index in range(32))


@dataclass
class Board:
    """Answers for sources whose noise is known: by source, at two outputs, the second of which has half of it."""

    loud: Mapping[str, float]
    rest: float = 0.001
    asked: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    count: int = 3

    @property
    def sources(self) -> tuple[QuantizerId, ...]:
        return UNITS

    def noise(self, coded: Collection[QuantizerId], samples: Sequence[int]) -> NDArray[np.float64]:
        self.asked.append(len(coded))
        self.samples += samples
        total = sum(self.loud.get(source.name, self.rest) for source in coded)
        return np.array([[total, total / 2] for _ in samples]) / len(samples)

    def noises(self, asked: Iterable[Collection[QuantizerId]], samples: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        return (self.noise(coded, samples) for coded in asked)

    def everything(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        noise = self.noise(UNITS, range(self.count))
        return noise, np.tile(np.linspace(0.5, 5.0, self.count)[:, None], 2)

    def groups(self, groups: Sequence[Sequence[QuantizerId]]) -> list[NDArray[np.float64]]:
        return [found[0] for found in self.noises(groups, [0])]


def spread(board: Board, most: int, negligible: float = 0.0) -> dict[str, float]:
    [whole] = Board(board.loud, board.rest).groups([UNITS])
    found = attribute_error(UNITS, board.groups, whole=whole, most=most, negligible=negligible)
    assert list(found) == list(UNITS)
    assert all(ratios[1] == pytest.approx(ratios[0] / 2) for ratios in found.values())
    return {source.name: worst_output_nsr(ratios) for source, ratios in found.items()}


def test_each_source_is_measured_alone_when_there_is_time() -> None:
    board = Board({"t3": 1.0, "t20": 0.5})
    found = spread(board, 32)
    assert board.asked == [1] * 32
    assert (found["t3"], found["t20"], found["t0"]) == (1.0, 0.5, 0.001)


def test_few_measurements_find_the_noisiest() -> None:
    board = Board({"t3": 1.0, "t20": 0.5})
    found = spread(board, 20, 0.01)
    assert len(board.asked) <= 20
    assert sorted(found, key=lambda unit: -found[unit])[:2] == ["t3", "t20"]
    assert (found["t3"], found["t20"]) == (pytest.approx(1.0, rel=0.05), pytest.approx(0.5, rel=0.05))


@pytest.mark.parametrize("most", [0, 1, 2])
def test_the_parts_make_the_whole_even_where_errors_point_the_same_way(most: int) -> None:
    found = attribute_error(
        UNITS,
        lambda groups: [np.array([len(group) ** 2 / 1024]) for group in groups],
        whole=np.ones(1),
        most=most,
        negligible=0.0,
    )
    assert sum(map(worst_output_nsr, found.values())) == pytest.approx(1.0)


def test_the_noise_of_a_group_is_divided_by_likely_shares() -> None:
    shares = {UNITS[1]: 3.0, UNITS[2]: 0.0, UNITS[3]: 1.0}
    found = attribute_error(
        UNITS[:4], lambda groups: [np.ones(1)] * len(groups), whole=np.ones(1), most=1, negligible=0.0, shares=shares
    )
    # Of the first none is known.
    assert [worst_output_nsr(found[unit]) for unit in UNITS[:4]] == pytest.approx([0.2, 0.6, 0.0, 0.2])


def test_groups_of_one_size_come_first_and_then_the_noisiest_are_split() -> None:
    board = Board({"t3": 1.0})
    found = spread(board, 10)
    assert board.asked == [4] * 8 + [2] * 2
    assert found["t2"] == found["t3"] > 100 * found["t0"]


@pytest.mark.parametrize(("runs", "again"), [(1000, 32), (57, 7)])
def test_all_are_measured_on_all_samples_as_far_as_runs_go_and_the_noisiest_first(runs: int, again: int) -> None:
    board = Board({"t3": 1.0, "t20": 0.5}, rest=1e-4)
    found = measure_sensitivities(board, 3, runs=runs)
    assert board.asked == [32, 32, *[1] * 32, *[1] * again]
    assert found.tensors["t3"] == pytest.approx(1.0)
    assert found.nodes == {}
    assert list(found.errors)[:2] == [QuantizerId("t3"), QuantizerId("t20")]
    assert len(found.errors) == again
    assert found.alone == set(UNITS)
    assert found.joint == pytest.approx([1.5 + 30e-4, 0.75 + 15e-4])
    assert found.of([QuantizerId("t3"), QuantizerId("t20"), QuantizerId("unknown")]) == pytest.approx(1.5)


def test_what_is_silent_in_the_sample_that_is_looked_at_first_is_heard_in_others() -> None:
    class Late(Board):
        def noise(self, coded: Collection[QuantizerId], samples: Sequence[int]) -> NDArray[np.float64]:
            late = {0: 0.0, 1: 0.0, 2: 5.0}
            return super().noise(coded, samples) + [
                [late[sample] * (QuantizerId("t5") in coded)] * 2 for sample in samples
            ]

    found = measure_sensitivities(Late({"t3": 1.0}), 3, runs=1000)
    assert found.tensors["t5"] == pytest.approx(5.0, rel=1e-3)
    assert found.of(UNITS) == pytest.approx(worst_output_nsr(found.joint))


@pytest.mark.parametrize("weighed", [False, True])
def test_what_is_noisy_in_the_sample_that_decides_is_the_noisiest_where_samples_are_weighed(weighed: bool) -> None:
    class Apart(Board):
        def noise(self, coded: Collection[QuantizerId], samples: Sequence[int]) -> NDArray[np.float64]:
            # As much of both altogether, in the last sample of one.
            noise = [float(UNITS[2] in coded) * (sample == 2) + float(UNITS[1] in coded) / 3 for sample in samples]
            return np.array([[one, one] for one in noise])

    found = measure_sensitivities(Apart({}), 3, runs=1000, weighed=weighed)
    assert found.joint == pytest.approx([2.0, 2.0])
    assert (found.tensors["t2"] > 1.5 * found.tensors["t1"]) is weighed


def test_without_time_all_sources_share_what_they_do_together() -> None:
    found = measure_sensitivities(Board({"t3": 1.0}, count=2), 2, runs=0)
    assert found.alone == frozenset()
    assert list(found.tensors.values()) == pytest.approx([1.031 / 32] * 32)


def test_what_is_not_finite_is_very_noisy_but_can_be_added_up() -> None:
    found = measure_sensitivities(Board({"t3": math.nan, "t4": math.inf}, count=2), 2, runs=1000)
    assert found.tensors["t3"] == found.tensors["t4"] == LARGEST_NSR
    assert found.of(UNITS) == LARGEST_NSR


def test_no_sources_or_samples_have_no_noise() -> None:
    assert measure_sensitivities(Board({}), 0, runs=10).ratios == {}
    assert Sensitivities().of(UNITS) == 0.0
    assert decibels(0.001) == pytest.approx(30.0)


def test_the_worst_output_is_that_of_the_sum_and_not_of_each() -> None:
    found = Sensitivities({UNITS[0]: np.array([0.5, 0.1]), UNITS[1]: np.array([0.1, 0.6])})
    assert found.of(UNITS) == pytest.approx(0.7)
    assert found.tensors == {"t0": 0.5, "t1": 0.6}


@pytest.mark.parametrize("joint", [0.5, 1.6, 6.4])
def test_many_codes_make_what_was_measured_of_all_and_few_make_their_sum(joint: float) -> None:
    sources = tuple(QuantizerId(f"t{index}") for index in range(16))
    found = Sensitivities(dict.fromkeys(sources, np.array([0.1, 0.0])), joint=np.array([joint, 0.0]))
    assert found.together(sources) == pytest.approx([joint, 0.0])
    parts = [worst_output_nsr(found.together(sources[:count])) for count in range(17)]
    assert parts == sorted(parts)
    assert parts[0] == 0.0
    assert parts[1] == pytest.approx(0.1, rel=0.15)
    # All the way, they are on the side of the sum on which the joint is.
    sums = [worst_output_nsr(np.array([0.1 * count])) for count in range(17)]
    assert all((one - summed) * (joint - 1.6) >= -1e-12 for one, summed in zip(parts, sums, strict=True))


def test_without_a_joint_measurement_codes_make_their_sum_together() -> None:
    found = Sensitivities({UNITS[0]: np.array([0.5, 0.1]), UNITS[1]: np.array([0.1, 0.6])})
    assert found.together(UNITS) == pytest.approx([0.6, 0.7])
    assert Sensitivities().together(UNITS) == pytest.approx([0.0])


def test_weights_have_a_share_of_the_noise() -> None:
    found = Sensitivities(
        {QuantizerId("t"): np.array([0.3, 0.1]), QuantizerId("n", is_node=True): np.array([0.1, 0.0])}
    )
    assert found.share_of_nodes == pytest.approx(0.25)
    assert Sensitivities().share_of_nodes == 0.0


def test_progress_says_how_many_questions_there_are() -> None:
    told: list[tuple[int, int]] = []
    measure_sensitivities(
        Board({"t3": 1.0}, rest=1e-5, count=2), 2, 1000, lambda done, total: told.append((done, total))
    )
    assert told[0] == (1, 32)
    assert told[-1] == (64, 64)
    assert all(done <= total for done, total in told)


def test_where_runs_take_long_fewer_are_made() -> None:
    told: list[int] = []
    measure_sensitivities(Board({"t3": 1.0}, count=2), 2, 1000, lambda done, _: told.append(done), longest=0.0)
    assert told == []
