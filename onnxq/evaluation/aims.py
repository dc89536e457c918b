"""How many decibels plans and codes aim at for a goal, and how many are plenty."""

from __future__ import annotations

import math

from onnxq.evaluation.goal import Goal

# What is trusted allows for samples that were not measured, but of plans the one is taken that luck made faithful, so
# the search aims a little higher than the gate. More buys hardly any fidelity where other samples judge.
_HEADROOM = 0.5
# Aims beyond these, such as infinity, would say the same: nothing that is computed in float32, or anything finite.
_LOWEST_AIM, _HIGHEST_AIM = -100.0, 150.0
# With so many decibels more than are aimed at, more faithful codes make no difference.
_PLENTY = 10.0


def aim_of(min_sqnr: float) -> float:
    """Return the decibels to aim at, which noise can be weighed against.

    >>> aim_of(20.0)
    20.5
    """
    return min(max(min_sqnr + _HEADROOM, _LOWEST_AIM), _HIGHEST_AIM)


def enough_of(goal: Goal, more: float = 0.0) -> float:
    """Return the decibels that a goal aims at, and so many more; infinity where a metric asks for more or less.

    >>> enough_of(Goal(20.0), 10.0)
    30.5
    """
    return aim_of(goal.min_sqnr) + more if goal.metric is None else math.inf


def plenty_of(goal: Goal) -> float:
    """Return the decibels that are not worth the time to improve on; infinity where a metric asks for more or less."""
    return enough_of(goal, _PLENTY)
