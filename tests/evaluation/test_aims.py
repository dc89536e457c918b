"""What goals aim at."""

from __future__ import annotations

import math

import pytest

from onnxq.evaluation.goal import Goal, aim_of, enough_of, plenty_of
from onnxq.evaluation.metrics import Metric


@pytest.mark.parametrize(("wanted", "aim"), [(20.0, 20.5), (math.inf, 150.0), (-math.inf, -100.0)])
def test_aims_are_a_little_higher_than_what_is_wanted_and_finite(wanted: float, aim: float) -> None:
    assert aim_of(wanted) == aim


def test_more_than_plenty_is_not_worth_the_time_unless_a_metric_tells() -> None:
    goal = Goal(20.0)
    assert aim_of(20.0) == enough_of(goal) < plenty_of(goal) < math.inf
    assert plenty_of(Goal(metric=Metric("size", lambda samples, outputs: 1.0))) == math.inf
