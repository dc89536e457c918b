"""What a search is given and finds: errors of nodes, the frontier, the result, and rules to demote nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.planning.plan import DECODING, Demotion, Plan
from onnxq.search.kernel_times import NodeTime, Region

_SMALL_SHARE = 0.01

FINER = QuantSpec("int8-narrow", per=(32,), scale="float16")
"""For weights whose codes of fewer bits, or with one scale a channel, are too coarse: a sixteenth larger than int8."""

FINEST = QuantSpec("int16-narrow", per=Granularity.CHANNEL)
"""For weights that 8 bits are too few for: half of their floats, and hardly any noise."""

Demotions = Mapping[str, Demotion]
Planner = Callable[[Demotions], Plan]
Measure = Callable[[Plan], float | None]
"""Builds a plan's model, runs it and gives the SQNR in decibels that its worst output can be trusted to have.

It gives None for what is not measured any more.
"""


@dataclass(frozen=True)
class NodeSensitivity:
    """What one node adds in noise as codes.

    Attributes:
        node: its name.
        mode: how it was quantized when measured.
        sqnr: SQNR in decibels of the worst output with this node quantized and nothing else.
    """

    node: str
    mode: Mode
    sqnr: float


SensitivitiesOfNodes = Callable[[Plan, Set[Mode]], Sequence[NodeSensitivity]]
"""Tells the noise of a plan's weighted nodes that have one of some modes."""


@dataclass(frozen=True)
class Point:
    """A plan on the frontier of latency and fidelity.

    Attributes:
        static: how many nodes run as integer kernels with fixed scales.
        dynamic: how many multiply integers whose scale each run computes.
        milliseconds: expected time of a run.
        sqnr: measured SQNR in decibels of the worst output, or None.
        speed: measured speed beside the float model, or None.
        chosen: whether it is the one that was taken.
        weight_only: how many multiply the codes of their weights with float data.
        predicted: SQNR in decibels that was expected before it was measured, or None.
        is_float: whether it is the float model, beside which the others are timed.
    """

    static: int
    dynamic: int
    milliseconds: float
    sqnr: float | None = None
    speed: float | None = None
    chosen: bool = False
    weight_only: int = 0
    predicted: float | None = None
    is_float: bool = False


@dataclass(frozen=True)
class PlanSearch:
    """What the search found.

    Attributes:
        plan: the plan to build.
        sensitivities: the nodes whose noise was measured, worst first; empty when nothing had to be left.
        measured: how many models were built and run.
        frontier: the plans that were weighed, by expected time; empty when latency was not measured.
        regions: the plan's integer regions beside float, empty likewise.
        times: of the plan's nodes beside float, empty likewise.
        spent: whether there was nothing left to search with, so that it ended, or was left out.
    """

    plan: Plan
    sensitivities: tuple[NodeSensitivity, ...]
    measured: int
    frontier: tuple[Point, ...] = ()
    regions: tuple[Region, ...] = ()
    times: tuple[NodeTime, ...] = ()
    spent: bool = False


def sizes_of(plan: Plan) -> Mapping[str, int]:
    """Return how many weights each weighted node holds."""
    return {one.node: sum(weight.elements for weight in one.weights) for one in plan.decisions if one.weights}


def small_nodes(plan: Plan) -> set[str]:
    """Return the smallest nodes, whose few weights the file hardly feels when they stay float."""
    sizes = sizes_of(plan)
    ascending = sorted(sizes, key=lambda node: sizes[node])
    share = accumulate(sizes[node] for node in ascending)
    return {node for node, held in zip(ascending, share, strict=True) if held <= _SMALL_SHARE * sum(sizes.values())}


def as_stored(plan: Plan, full: Plan, reason: str) -> Demotions:
    """Return what makes of a plan one with the same codes that are decoded when the model is loaded.

    Args:
        plan: whose model was slower than float.
        full: what the planner wants without demotions.
        reason: why the codes are not worked on.
    """
    found = {}
    for one in plan.decisions:
        if one.weights and one.mode is not Mode.FLOAT:
            found[one.node] = Demotion(Mode.STORAGE, reason, weight=one.weights[0].spec, finer=one.finer)
        elif full.by_node[one.node].weights:
            # Codes were too coarse for it.
            found[one.node] = Demotion(Mode.FLOAT, one.reason, one.figures)
    return found


def slower(speed: float) -> str:
    """Return the reason for storing what was worked on, given how many times as fast as float it ran."""
    return f"with codes in each run the model ran {speed:.2f} times as fast as the float model"


def without_integers(planner: Planner, plan: Plan, reason: str) -> Planner:
    """Return a planner for a model that integers do no good: its weights are stored, and it computes in float.

    Args:
        planner: plans with some nodes demoted.
        plan: what the planner wants without demotions, so that no node becomes an integer kernel again.
        reason: why nothing becomes an integer kernel.
    """
    slow = {
        decision.node: Demotion(Mode.STORAGE, reason)
        for decision in plan.decisions
        if decision.mode in DECODING and decision.weights
    }
    return lambda demotions: planner({**slow, **demotions})


# Backward elimination over groups of weights: more bits are given up again if the error allows it.


def backward_elimination(
    better: Demotions,
    coarser: Mapping[str, Demotion | None],
    is_enough: Callable[[Demotions], bool],
    *,
    most: int,
) -> Demotions:
    """Return demotions with as many exchanged for coarser ones as can be found.

    What weights add in noise together is not what they add alone, and a prefix of the noisiest holds large quiet ones
    that one small noisy one stands behind. Groups are tried from halves on, and those that are too noisy are split.

    Args:
        better: what is faithful enough.
        coarser: what nodes would be instead, those first that are worth most for their noise; None takes no demotion.
        is_enough: whether demotions are faithful enough.
        most: how often to ask.

    >>> from onnxq.config.scheme import Mode
    >>> fine = dict.fromkeys("abcd", Demotion(Mode.STORAGE, "too coarse"))
    >>> sorted(backward_elimination(fine, dict.fromkeys("abcd"), lambda left: "c" in left, most=9))
    ['c']
    """
    kept, asked = dict(better), 0
    groups = _halves([node for node in coarser if node in better])
    while groups and asked < most:
        group = groups.pop(0)
        tried = {node: one for node, one in kept.items() if node not in group}
        tried.update({node: one for node in group if (one := coarser[node]) is not None})
        asked += 1
        if is_enough(tried):
            kept = tried
        elif len(group) > 1:
            groups += _halves(group)
    return kept


def _halves(group: Sequence[str]) -> list[Sequence[str]]:
    middle = (len(group) + 1) // 2
    return [half for half in (group[:middle], group[middle:]) if half]
