"""Goal: how faithful a model has to be, checked when it is made."""

from __future__ import annotations

import math

import pytest

from onnxq.errors import SchemeError
from onnxq.judging.goal import MINIMUM_SQNR, Goal


def test_a_number_stands_for_decibels() -> None:
    assert Goal.of(30) == Goal(min_sqnr=30)
    assert Goal().min_sqnr == MINIMUM_SQNR
    goal = Goal(force=True)
    assert Goal.of(goal) is goal


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"min_sqnr": math.nan}, "the wanted fidelity is NaN, expected decibels such as 20"),
        ({"min_sqnr": True}, "the wanted fidelity is True of type bool, expected decibels such as 20"),
        ({"max_drop": math.nan}, "the drop of the metric is nan, expected a finite number that is not negative"),
        ({"max_drop": math.inf}, "the drop of the metric is inf, expected"),
        ({"max_drop": -0.5}, r"the drop of the metric is -0\.5, expected"),
        ({"metric": "top1:l.npy"}, r"the metric is 'top1:l.npy' of type str, expected what load_metric"),
        ({"force": 1}, "force is 1 of type int, expected True or False"),
    ],
)
def test_what_says_nothing_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        Goal(**given)  # type: ignore[arg-type]
