"""The search where the profile of single nodes says little of whole models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from onnx import ModelProto

from onnxq.config.scheme import Mode
from onnxq.ir import read_model
from onnxq.planning.plan import Plan
from onnxq.preparing.preparation import prepare
from onnxq.search import frontier
from search.table_laboratory import NODES, Table, products_of, search, static


@dataclass
class Misprofiled(Table):
    """Where models are the faster the more of their nodes are integers, whatever the profile says of single nodes."""

    timed: list[int] = field(default_factory=list)

    def speeds(self, plans: Sequence[Plan]) -> list[float]:
        self.timed += [plan.count(Mode.STATIC) for plan in plans]
        return [1.0 + plan.count(Mode.STATIC) for plan in plans]


def test_all_but_the_noisiest_is_tried_whatever_the_profile_says(build: Callable[..., ModelProto]) -> None:
    slow_to_integers = {**dict.fromkeys(NODES, 3e5), "c4": 2e6}
    table = Misprofiled(
        products_of(build), dict.fromkeys(NODES, 9e5), slow_to_integers, {**dict.fromkeys(NODES, 1e-4), "c1": 0.5}
    )
    assert static(search(table)) == ["c0", "c2", "c3", "c4", "c5"]


def test_of_the_noisiest_those_are_integers_after_all_that_may_be(build: Callable[..., ModelProto]) -> None:
    slow_to_integers = {**dict.fromkeys(NODES, 3e5), "c4": 2e6, "c5": 2e6}
    noisy = {name: 0.006 - number * 1e-5 for number, name in enumerate(NODES[:4])}
    table = Misprofiled(
        products_of(build), dict.fromkeys(NODES, 9e5), slow_to_integers, {**noisy, "c4": 1e-4, "c5": 1e-4}
    )
    # Two of the four are too noisy together, so that four are left out first, and the quietest comes back.
    assert static(search(table)) == ["c3", "c4", "c5"]


@pytest.mark.parametrize(("time", "tried"), [(16e5, True), (25e5, False)])
def test_integers_that_take_much_longer_than_floats_throughout_are_not_tried(
    build: Callable[..., ModelProto], time: float, tried: bool
) -> None:
    table = Misprofiled(products_of(build), dict.fromkeys(NODES, 9e5), {**dict.fromkeys(NODES, time), "c0": 3e5}, {})
    assert static(search(table)) == list(NODES if tried else NODES[:1])


@pytest.mark.parametrize(("longest", "timed"), [(1e6, [6]), (2e6, [5, 6])])
def test_a_plan_with_all_stands_in_for_one_that_is_expected_to_take_hardly_less(
    build: Callable[..., ModelProto], longest: float, timed: list[int]
) -> None:
    times = {**dict.fromkeys(NODES, 3e5), "c4": longest}
    table = Misprofiled(products_of(build), dict.fromkeys(NODES, 9e5), times, {})
    assert static(search(table)) == list(NODES)
    assert table.timed == timed


@dataclass
class Asked(Table):
    """Remembers how many nodes were integers in each plan that it was asked the fidelity of."""

    asked: list[int] = field(default_factory=list)

    def sqnr(self, plan: Plan) -> float:
        self.asked.append(plan.count(Mode.STATIC))
        return super().sqnr(plan)


@dataclass
class Observed(Misprofiled):
    """Remembers which tensors were codes in any plan that it was asked the fidelity of."""

    coded_tensors: set[str] = field(default_factory=set)

    def sqnr(self, plan: Plan) -> float:
        self.coded_tensors |= {one.tensor for one in plan.activations}
        return super().sqnr(plan)


def test_a_convolution_is_left_out_together_with_its_clamp(
    build: Callable[..., ModelProto],
) -> None:
    layers = " ".join(
        f"[c{n}] c{n}_y = Conv <pads = [1,1,1,1]> ({read}, w{n}) [r{n}] r{n}_y = Relu(c{n}_y)"
        for n, read in enumerate(("x", "r0_y", "r1_y"))
    )
    weights = {f"w{n}": (8, 8, 3, 3) for n in range(3)}
    made = build(f"(float[1,8,8,8] x) => (float[1,8,8,8] r2_y) {{ {layers} }}", **weights)
    names = ("c0", "r0", "c1", "r1", "c2", "r2")
    # What c1 reads is noisy, which r0 makes.
    table = Observed(
        prepare(read_model(made)), dict.fromkeys(names, 9e5), {**dict.fromkeys(names, 3e5), "c2": 2e6}, {"c1": 0.5}
    )
    outcome = search(table)
    assert table.coded_tensors == {one.tensor for one in table.plan({}).activations}
    assert static(outcome) == ["c2", "r2"]


def test_weights_of_noise_that_mean_a_plan_that_is_known_are_soon_halved(
    build: Callable[..., ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "expectation", lambda measured, goal: lambda predicted: -math.inf)
    noise = dict.fromkeys(NODES, 0.5)
    table = Asked(products_of(build), dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, 3e5), noise)
    assert static(search(table)) == []
    assert len(table.asked) < 15


@pytest.mark.parametrize(("integers", "taken"), [(8e5, 0), (3e5, len(NODES))])
def test_integers_that_gain_little_are_timed_beside_what_only_stores_weights(
    build: Callable[..., ModelProto], integers: float, taken: int
) -> None:
    class Simpler(Table):
        """What is made of the float model is 1.4 times as fast as that, as nobody knows before it is timed."""

        def speeds(self, plans: Sequence[Plan]) -> list[float]:
            return [
                1.4 if not plan.count(Mode.STATIC) else speed
                for plan, speed in zip(plans, super().speeds(plans), strict=True)
            ]

    floats, times = dict.fromkeys(NODES, 9e5), dict.fromkeys(NODES, integers)
    table = Simpler(products_of(build), floats, times, {})
    assert len(static(search(table))) == taken
    assert len(table.compared) == (1 if taken else 2)
    # Where the float model itself is as fast as what stores weights, integers are taken that gain a little.
    assert len(static(search(Table(products_of(build), floats, times, {})))) == len(NODES)
