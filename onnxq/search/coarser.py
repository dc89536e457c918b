"""Weights of fewer bits where size is preferred: as many as a goal takes, before a search looks for speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnxq.config.scheme import Mode, Spec
from onnxq.planning.plan import Demotion, Plan
from onnxq.runtime.targets import Target
from onnxq.search.finer import stored_goal
from onnxq.search.handing_back import handed_back
from onnxq.search.measures import Measures
from onnxq.search.search import Demotions

COARSER = Spec("int4", per=(32,))
"""Five bits a weight with their scale; onnxruntime multiplies such codes, and decodes those of other operators once."""

COARSER_OPSET = 21
"""The first in which DequantizeLinear has blocks and 4 bits."""

_BITS = 4
_REASON = "a small file is preferred to a fast model"


def coarser_weights(
    laboratory: Measures, target: Target, goal: float, *, runs: int, most: int, is_late: Callable[[], bool]
) -> Demotions:
    """Return what makes codes of 4 bits of as many weights as a goal takes, in a model that computes in float.

    Other weights than the usual ones of 8 bits stay: a scheme that names its own has chosen their size. Quiet weights
    that hold much become coarser first. What noise that leaves allowed is for integer kernels.

    Args:
        laboratory: builds and measures.
        target: the runtime.
        goal: SQNR in decibels to reach.
        runs: how often to run a sample to measure what coarser codes add in noise, see `measure_noises`.
        most: models to build at most, to find how many may be coarser.
        is_late: whether time is up: then no more become coarser.
    """
    full = laboratory.plan({})
    stores = {one.node: Demotion(Mode.STORAGE, _REASON) for one in full.decisions if one.mode is not Mode.FLOAT}
    coarser = _possible(laboratory, full, stores, target)
    if not coarser or is_late():
        return {}
    plan, reached = laboratory.plan({**stores, **coarser}), stored_goal(full, goal)
    if laboratory.sqnr(plan) >= reached:
        return coarser
    noise = laboratory.noises(plan, coarser.keys(), runs).nodes
    sizes = {node: sum(weight.elements for weight in plan.by_node[node].weights) for node in coarser}
    quiet = {node: coarser[node] for node in sorted(sizes, key=lambda node: noise.get(node, 0.0) / sizes[node])}

    def is_enough(demotions: Mapping[str, Demotion]) -> bool:
        return not is_late() and laboratory.sqnr(laboratory.plan(demotions)) >= reached

    kept = handed_back(stores, quiet, is_enough, most=most)
    return {node: one for node, one in kept.items() if one.weight == COARSER}


def _possible(laboratory: Measures, full: Plan, stores: Demotions, target: Target) -> Demotions:
    """Return what makes codes of 4 bits of all weights that can be.

    Where what decodes them stands in no opset that the model is the same in, they are those that are multiplied.
    """
    if target.reads.fewest_bits > _BITS:
        return {}
    wished = {node: Demotion(Mode.WEIGHT_ONLY, _REASON, weight=COARSER) for node in _usual(full, target)}
    plan = laboratory.plan({**stores, **wished})
    every = {node: one for node, one in wished.items() if _is_coarser(plan, node)}
    multiplied = {node: one for node, one in every.items() if plan.by_node[node].mode is Mode.WEIGHT_ONLY}
    possible = (one for one in (every, multiplied) if laboratory.expresses(laboratory.plan({**stores, **one})))
    return next(possible, {})


def _usual(full: Plan, target: Target) -> list[str]:
    usual = target.weight
    return [one.node for one in full.decisions if one.weights and all(weight.spec == usual for weight in one.weights)]


def _is_coarser(plan: Plan, node: str) -> bool:
    weights = plan.by_node[node].weights
    return bool(weights) and all((one.spec.format, one.spec.per) == (COARSER.format, COARSER.per) for one in weights)
