"""Inputs and results of a search (sensitivities, frontier, plan), and rules that demote nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.evaluation.latency import NOT_SLOWER
from onnxq.planning.plan import DECODING, Demotion, Plan
from onnxq.search.kernel_times import NodeTime, Region

_SMALL_SHARE = 0.01

FINER = QuantSpec("int8-narrow", granularity=(32,), scale="float16")
"""For weights that are too coarse with fewer bits or one scale per channel: a sixteenth larger than int8."""

FINEST = QuantSpec("int16-narrow", granularity=Granularity.CHANNEL)
"""For weights that need more than 8 bits: half the size of floats, and hardly any error."""

Demotions = Mapping[str, Demotion]
Planner = Callable[[Demotions], Plan]
Measure = Callable[[Plan], float | None]
"""Builds a plan's model, runs it, and returns the SQNR estimate in decibels of its worst output.

It returns None when no more models may be built.
"""


@dataclass(frozen=True)
class NodeSensitivity:
    """The error that one quantized node adds.

    Attributes:
        sqnr: SQNR in decibels of the worst output with only this node quantized.
    """

    node: str
    mode: Mode
    sqnr: float


SensitivitiesOfNodes = Callable[[Plan, Set[Mode]], Sequence[NodeSensitivity]]
"""Returns the sensitivities of a plan's weighted nodes that have one of some modes."""


@dataclass(frozen=True)
class Point:
    """A plan on the frontier of latency and accuracy.

    Attributes:
        static: number of integer nodes with fixed scales.
        dynamic: number of integer nodes whose scale each run computes.
        milliseconds: expected time of a run.
        sqnr: measured SQNR in decibels of the worst output, or None.
        speed: measured speed relative to the float model, or None.
        weight_only: number of nodes that multiply quantized weights with float activations.
        predicted: expected SQNR in decibels before the measurement, or None.
        is_float: True for the float model, the reference of the others.
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
class SizePoint:
    """A size of the file, and the least error in it.

    Attributes:
        bytes: expected size.
        sqnr: expected SQNR in decibels of the worst output; None if nothing is measured.
    """

    bytes: int
    sqnr: float | None = None


@dataclass(frozen=True)
class PlanSearch:
    """The result of a search.

    Attributes:
        sensitivities: the measured nodes, highest error first; empty if no node had to be demoted.
        measured: number of models built and run.
        frontier: the plans that were tried, by expected time; empty if latency was not measured.
        regions: the plan's integer regions beside float; empty likewise.
        times: times of the plan's nodes beside float; empty likewise.
        spent: True if the search ended, or was skipped, because its time or models were used up.
        sizes: sizes that the model could have, smallest first; empty if the bits of weights were not chosen.
    """

    plan: Plan
    sensitivities: tuple[NodeSensitivity, ...]
    measured: int
    frontier: tuple[Point, ...] = ()
    regions: tuple[Region, ...] = ()
    times: tuple[NodeTime, ...] = ()
    spent: bool = False
    sizes: tuple[SizePoint, ...] = ()


def sizes_of(plan: Plan) -> Mapping[str, int]:
    """Return the number of weights of each weighted node."""
    return {one.node: sum(weight.elements for weight in one.weights) for one in plan.decisions if one.weights}


def small_nodes(plan: Plan) -> set[str]:
    """Return the smallest nodes, which hold a hundredth of all weights together."""
    sizes = sizes_of(plan)
    ascending = sorted(sizes, key=lambda node: sizes[node])
    share = accumulate(sizes[node] for node in ascending)
    return {node for node, held in zip(ascending, share, strict=True) if held <= _SMALL_SHARE * sum(sizes.values())}


def as_stored(plan: Plan, full: Plan, reason: str) -> Demotions:
    """Return demotions that keep a plan's weights but dequantize them at load.

    `full` is the plan without demotions.
    """
    found = {}
    for one in plan.decisions:
        if one.weights and one.mode is not Mode.FLOAT:
            found[one.node] = Demotion(Mode.STORAGE, reason, weight=one.weights[0].spec, finer=one.finer)
        elif full.by_node[one.node].weights:
            # Quantization was too coarse for this node.
            found[one.node] = Demotion(Mode.FLOAT, one.reason, one.figures, finer=one.finer)
    return found


def slower(speed: float, *, integers: bool = True) -> str:
    """Return the reason to compress weights only, given the speed relative to float.

    Args:
        speed: of the model.
        integers: whether it multiplies integers, and does not only decode weights in each run.

    >>> slower(0.51), slower(NOT_SLOWER)
    ('as integers the model ran 0.51 times as fast as in float', 'as integers the model was not faster than in float')
    >>> slower(0.51, integers=False)
    'with weights decoded in each run the model ran 0.51 times as fast as in float'
    """
    how = "as integers" if integers else "with weights decoded in each run"
    if speed < NOT_SLOWER:
        return f"{how} the model ran {speed:.2f} times as fast as in float"
    # Where measurements disagree, NOT_SLOWER stands for the speed and was not measured.
    return f"{how} the model was not faster than in float"


def without_integers(planner: Planner, plan: Plan, reason: str) -> Planner:
    """Return a planner that only compresses weights, for a model that computes in float.

    `plan` is the plan without demotions; its integer nodes are demoted.
    """
    slow = {
        decision.node: Demotion(Mode.STORAGE, reason)
        for decision in plan.decisions
        if decision.mode in DECODING and decision.weights
    }
    return lambda demotions: planner({**slow, **demotions})


# Backward elimination over groups of weights: more bits are given up again if the error allows it


def backward_elimination(
    better: Demotions,
    coarser: Mapping[str, Demotion | None],
    is_enough: Callable[[Demotions], bool],
    *,
    most: int,
) -> Demotions:
    """Exchange as many demotions for coarser ones as the accuracy allows.

    The error of weights together is not the sum of their errors alone. A prefix by error also holds large weights of
    low error behind one small weight of high error. So groups are tried, halves first, and a group that fails is split.

    Args:
        better: demotions that are accurate enough.
        coarser: cheaper demotions, those with the largest saving for their error first; None removes the demotion.
        is_enough: returns whether demotions are accurate enough.
        most: number of calls of `is_enough` at most.

    >>> from onnxq.config.scheme import Mode
    >>> fine = dict.fromkeys("abcd", Demotion(Mode.STORAGE, "too coarse"))
    >>> sorted(backward_elimination(fine, dict.fromkeys("abcd"), lambda left: "c" in left, most=9))
    ['c']
    """
    kept, tries = dict(better), 0
    groups = _halves([node for node in coarser if node in better])
    while groups and tries < most:
        group = groups.pop(0)
        tried = {node: one for node, one in kept.items() if node not in group}
        tried.update({node: one for node in group if (one := coarser[node]) is not None})
        tries += 1
        if is_enough(tried):
            kept = tried
        elif len(group) > 1:
            groups += _halves(group)
    return kept


def _halves(group: Sequence[str]) -> list[Sequence[str]]:
    middle = (len(group) + 1) // 2
    return [half for half in (group[:middle], group[middle:]) if half]
