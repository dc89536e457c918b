"""Goal: how faithful a model has to be, checked when it is made."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from onnxq.errors import DataError, SchemeError
from onnxq.evaluation.goal import MINIMUM_SQNR, Goal
from onnxq.evaluation.metrics import score


def test_a_number_stands_for_decibels() -> None:
    assert Goal.of(30) == Goal(min_sqnr=30)
    assert Goal().min_sqnr == MINIMUM_SQNR
    goal = Goal(force=True)
    assert Goal.of(goal) is goal


def test_the_text_of_a_metric_is_read_at_once(tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", np.array([1, 0]))
    goal = Goal(metric=f"top1:{tmp_path / 'labels.npy'}")
    (tmp_path / "labels.npy").unlink()
    assert goal.judged_by is not None
    assert score(goal.judged_by, [{"y": np.float32([[0, 1]])}] * 2, [{}, {}]) == 0.5
    with pytest.raises(DataError, match="labels"):
        Goal(metric=f"top1:{tmp_path / 'labels.npy'}")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"min_sqnr": math.nan}, "the wanted fidelity is NaN, expected decibels such as 20"),
        ({"min_sqnr": True}, "the wanted fidelity is True of type bool, expected decibels such as 20"),
        ({"max_drop": math.nan}, "the drop of the metric is nan, expected a finite number that is not negative"),
        ({"max_drop": math.inf}, "the drop of the metric is inf, expected"),
        ({"max_drop": -0.5}, r"the drop of the metric is -0\.5, expected"),
        ({"metric": 1}, r"the metric is 1 of type int, expected a text such as top1:labels.npy"),
        ({"metric": "top1"}, r"metric top1 needs labels"),
        ({"prefer": "sise"}, "what is preferred is 'sise', expected one of speed, size; did you mean 'size'"),
        ({"prefer": 1}, "what is preferred is 1 of type int, expected one of speed, size"),
        ({"force": 1}, "force is 1 of type int, expected True or False"),
    ],
)
def test_what_says_nothing_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        Goal(**given)  # type: ignore[arg-type]
