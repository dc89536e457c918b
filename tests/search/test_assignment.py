"""The assignment of least cost, against trying them all."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.search.assignment import Border, Problem, cheapest, cost


def assignments(problem: Problem) -> Iterator[frozenset[str]]:
    """Yield every assignment that keeps the problem's conditions."""
    candidates = sorted(problem.integer_costs)
    for chosen in itertools.product((False, True), repeat=len(candidates)):
        integer = frozenset(itertools.compress(candidates, chosen))
        if all(other in integer for node, other in problem.followers if node in integer):
            yield integer


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a directed acyclic graph with fixed nodes, tensors of several consumers and followers; ties are common."""
    names = [f"n{index}" for index in range(draw(st.integers(1, 12)))]
    costs = st.integers(0, draw(st.sampled_from([1, 3, 20, 10**12])))
    integer = [name for name in names if draw(st.integers(0, 5))]
    borders = []
    for index, producer in enumerate([None, *names]):
        later = names[index:]
        if later:
            consumers = draw(st.lists(st.sampled_from(later), max_size=4))
            borders.append(Border(producer, tuple(consumers), draw(costs), draw(costs), draw(costs)))
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names))
    return Problem(
        {name: draw(costs) for name in names},
        {name: draw(costs) for name in integer},
        tuple(borders),
        tuple(draw(st.lists(pairs, max_size=3))),
    )


@settings(max_examples=200)
@given(problems())
def test_no_assignment_is_cheaper_and_ties_give_the_smallest(problem: Problem) -> None:
    every = {integer: cost(problem, integer) for integer in assignments(problem)}
    least = min(every.values())
    found = cheapest(problem)
    assert every[found] == least
    assert all(found <= integer for integer, paid in every.items() if paid == least)


@settings(max_examples=50)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_what_is_given_changes_nothing(problem: Problem, generator: random.Random) -> None:
    def shuffled(items):
        return generator.sample(list(items), len(items))

    other = Problem(
        dict(shuffled(problem.float_costs.items())),
        dict(shuffled(problem.integer_costs.items())),
        tuple(replace(one, consumers=tuple(shuffled(one.consumers))) for one in shuffled(problem.borders)),
        tuple(shuffled(problem.followers)),
    )
    assert cheapest(other) == cheapest(problem)


def test_what_several_consumers_share_is_paid_once() -> None:
    names = ("a", "b", "c")
    # Each consumer gains 4 and the one QuantizeLinear costs 10, so only all three together are worth it.
    three = Problem(dict.fromkeys(names, 5), dict.fromkeys(names, 1), (Border(None, names, 10, 0),))
    assert cheapest(three) == frozenset(names)
    assert cost(three, frozenset(names)) == 13
    assert cheapest(Problem(three.float_costs, {"a": 1, "b": 1}, three.borders)) == frozenset()


def test_an_integer_tensor_with_float_consumers_is_decoded_once() -> None:
    readers = ("b", "c")
    costs = {"a": 9, "b": 0, "c": 0}
    assert cheapest(Problem(costs, {"a": 1}, (Border("a", readers, 0, 7),))) == frozenset({"a"})
    assert cheapest(Problem(costs, {"a": 1}, (Border("a", readers, 0, 8),))) == frozenset()


def test_what_codes_of_a_tensor_add_is_paid_once_by_whoever_is_integer_there() -> None:
    costs = {"a": 9, "b": 5, "c": 5}
    problem = Problem(costs, dict.fromkeys(costs, 1), (Border("a", ("b", "c"), 0, 0, 15),))
    # All three gain 16 together, and each pair less than the 15.
    assert cheapest(problem) == frozenset(costs)
    assert cost(problem, frozenset(costs)) == 18
    assert cheapest(replace(problem, integer_costs={"a": 1, "b": 1})) == frozenset()
    assert cheapest(replace(problem, borders=(Border("a", ("b", "c"), 0, 0, 17),))) == frozenset()


def test_a_follower_needs_the_other_and_may_pull_it_along() -> None:
    costs = {"a": 9, "b": 0}
    assert cheapest(Problem(costs, {"a": 1, "b": 7}, followers=(("a", "b"),))) == frozenset({"a", "b"})
    assert cheapest(Problem(costs, {"a": 1, "b": 8}, followers=(("a", "b"),))) == frozenset()
    assert cheapest(Problem(costs, {"a": 1}, followers=(("a", "b"),))) == frozenset()
    assert cheapest(Problem(costs, {"a": 1, "b": 9}, followers=(("b", "a"),))) == frozenset({"a"})


def test_islands_worth_less_than_their_borders_stay_float() -> None:
    names = [f"n{index}" for index in range(7)]
    borders = tuple(Border(*pair, 3, 3) for pair in zip([None, *names], ((name,) for name in names), strict=False))
    integer = dict.fromkeys(names, 0)
    # The first three gain 9 for two borders of 3; the last gains 5.
    costs = dict(zip(names, (3, 3, 3, 0, 0, 0, 5), strict=True))
    del integer["n3"]
    assert cheapest(Problem(costs, integer, borders)) == frozenset({"n0", "n1", "n2", "n6"})


def test_nothing_to_choose_is_no_error() -> None:
    assert cheapest(Problem({}, {})) == frozenset()
    assert cheapest(Problem({"a": 3}, {})) == frozenset()


@pytest.mark.parametrize(
    ("floats", "integers", "borders"),
    [
        ({"a": -1}, {}, ()),
        ({"a": 1}, {"b": 1}, ()),
        ({"a": 1}, {"a": 1}, (Border("a", ("b",), 1, 1),)),
        ({"a": 1}, {"a": 1}, (Border("a", ("a",), 1, -1),)),
    ],
)
def test_a_problem_that_does_not_hang_together_is_a_fault(floats, integers, borders) -> None:
    with pytest.raises(AssertionError):
        Problem(floats, integers, borders)


def long_chain(length: int, *, branches: float) -> Problem:
    """Return a chain, a tenth of which cannot be integer; some tensors are read further down as well."""
    generator = random.Random(0)
    names = [f"n{index}" for index in range(length)]
    borders = []
    for index, producer in enumerate(names[:-1]):
        consumers = [names[index + 1]]
        if generator.random() < branches:
            consumers.append(names[min(length - 1, index + generator.randint(2, 9))])
        borders.append(Border(producer, tuple(consumers), generator.randint(0, 400_000), generator.randint(0, 400_000)))
    return Problem(
        {name: generator.randint(0, 1_000_000) for name in names},
        {name: generator.randint(0, 1_000_000) for name in names if generator.random() < 0.9},
        tuple(borders),
    )


def least_of_a_chain(problem: Problem) -> int:
    """Return the least cost by going along the chain once: the cheapest way to have the last node float or integer."""
    is_float, is_integer = 0, math.inf
    before: Border | None = None
    for name, border in itertools.zip_longest(problem.float_costs, problem.borders):
        quantize, dequantize = (before.quantize, before.dequantize) if before else (0, 0)
        is_float, is_integer = (
            min(is_float, is_integer + dequantize) + problem.float_costs[name],
            min(is_integer, is_float + quantize) + problem.integer_costs.get(name, math.inf),
        )
        before = border
    return int(min(is_float, is_integer))


def uniform_chain(length: int, *, gain: int, border: int) -> Problem:
    """Return a chain whose every second node gains the same; its ends are floats."""
    names = [f"n{index:05}" for index in range(length)]
    ends = zip([None, *names], [*names, "end"], strict=True)
    return Problem(
        {"end": 0, **{name: gain * (index % 2 == 0) for index, name in enumerate(names)}},
        dict.fromkeys(names, 0),
        tuple(Border(producer, (consumer,), border, border) for producer, consumer in ends),
    )


@pytest.mark.parametrize("length", [1, 2, 5, 8])
@pytest.mark.parametrize(("gain", "border"), [(6, 1), (1, 2), (1, 1), (2, 5), (0, 1)])
def test_of_equal_gains_all_are_taken_or_none(length: int, gain: int, border: int) -> None:
    problem = uniform_chain(length, gain=gain, border=border)
    every = {integer: cost(problem, integer) for integer in assignments(problem)}
    least = min(every.values())
    assert every[cheapest(problem)] == least
    assert all(cheapest(problem) <= integer for integer, paid in every.items() if paid == least)


@pytest.mark.parametrize(("border", "taken"), [(7_999, 15_999), (8_000, 0)])
def test_sixteen_thousand_equal_gains_are_taken_together_or_not_at_all(border: int, taken: int) -> None:
    assert len(cheapest(uniform_chain(15_999, gain=2, border=border))) == taken


def test_a_chain_of_sixteen_thousand_nodes_is_solved_exactly() -> None:
    problem = long_chain(16_000, branches=0)
    assert cost(problem, cheapest(problem)) == least_of_a_chain(problem)


def test_sixteen_thousand_nodes_with_branches_are_solved() -> None:
    problem = long_chain(16_000, branches=0.3)
    found = cheapest(problem)
    least = cost(problem, found)
    generator = random.Random(1)
    # No exchange of one node makes it cheaper.
    for name in generator.sample(sorted(problem.integer_costs), 5):
        assert cost(problem, found ^ {name}) >= least
