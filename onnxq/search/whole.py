"""The fastest of a few plans by how long their whole models take, on runtimes that do not tell of single nodes."""

from __future__ import annotations

import math

from onnxq.config.scheme import Mode
from onnxq.planning.plan import DECODING, Demotion, Plan
from onnxq.runtime.targets import Target
from onnxq.search.measures import Measures
from onnxq.search.profiling import offers_of


def fastest_whole(laboratory: Measures, target: Target, quiet: Plan, goal: float) -> Plan:
    """Return the fastest of the plans that reach a goal.

    Weighed are the quiet plan, and each alternative that the target has kernels for, taken by all nodes that can.

    Args:
        laboratory: builds, times and judges.
        target: the runtime.
        quiet: the plan in which as much is integer as the goal allows; it is the answer where no other will do.
        goal: SQNR in decibels to reach.
    """
    full = laboratory.plan({})
    stored = Demotion(Mode.STORAGE, "as integers it was not timed alone")
    stores = {one.node: stored for one in full.decisions if one.mode in DECODING}
    offered = (offer.plan for offer in offers_of(laboratory, full, target, stores))
    plans = [quiet, *(plan for plan in offered if laboratory.expresses(plan) and laboratory.sqnr(plan) >= goal)]
    speeds = laboratory.speeds(plans) if len(plans) > 1 else [1.0]
    known = (0.0 if math.isnan(speed) else speed for speed in speeds)
    return max(zip(plans, known, strict=True), key=lambda one: one[1])[0]
