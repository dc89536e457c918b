"""Goals, what is aimed at for them, and what a model lacks of one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from onnxq.calibration.provenance import sample_digest
from onnxq.errors import DataError, SchemeError
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.goal import (
    MINIMUM_SQNR,
    EvaluationSplit,
    Goal,
    aim_of,
    fault,
    lost_score,
    shortfall,
    worst_output,
)
from onnxq.evaluation.metrics import Scores, score


def test_a_number_stands_for_decibels() -> None:
    assert Goal.of(30) == Goal(min_sqnr=30)
    assert Goal().min_sqnr == MINIMUM_SQNR
    goal = Goal(force=True)
    assert Goal.of(goal) is goal


def test_the_text_of_a_metric_is_read_at_once(tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", np.array([1, 0]))
    goal = Goal(metric=f"top1:{tmp_path / 'labels.npy'}")
    (tmp_path / "labels.npy").unlink()
    assert goal.own_metric is not None
    assert score(goal.own_metric, [{"y": np.float32([[0, 1]])}] * 2, [{}, {}]) == 0.5
    with pytest.raises(DataError, match="labels"):
        Goal(metric=f"top1:{tmp_path / 'labels.npy'}")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"min_sqnr": math.nan}, "the required SQNR is NaN, expected decibels such as 20"),
        ({"min_sqnr": True}, "the required SQNR is True of type bool, expected decibels such as 20"),
        ({"max_drop": math.nan}, "the drop of the metric is nan, expected a finite number that is not negative"),
        ({"max_drop": math.inf}, "the drop of the metric is inf, expected"),
        ({"max_drop": -0.5}, r"the drop of the metric is -0\.5, expected"),
        ({"metric": 1}, r"the metric is 1 of type int, expected a text such as top1:labels.npy"),
        ({"metric": "top2"}, r"metric 'top2' is not written as top1, .*; did you mean 'top1'"),
        ({"prefer": "sise"}, "prefer is 'sise', expected one of speed, size; did you mean 'size'"),
        ({"prefer": 1}, "prefer is 1 of type int, expected one of speed, size"),
        ({"max_size": 0}, "the largest size is 0, expected a share such as 0.3, or a size such as 300MB"),
        ({"max_size": "much"}, "the largest size is much, expected"),
        ({"max_size": math.nan}, "the largest size is nan, expected"),
        ({"max_size": 0.3, "exact": True}, "exact keeps the bits of the scheme, and max_size chooses them"),
        ({"force": 1}, "force is 1 of type int, expected True or False"),
    ],
)
def test_what_says_nothing_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        Goal(**given)  # type: ignore[arg-type]


# What goals aim at.


@pytest.mark.parametrize(("wanted", "aim"), [(20.0, 20.5), (math.inf, 150.0), (-math.inf, -100.0)])
def test_aims_are_a_little_higher_than_what_is_wanted_and_finite(wanted: float, aim: float) -> None:
    assert aim_of(wanted) == aim


# The gate: what a model lacks of its goal, in words.


def output(sqnr: float | None = 30.0, differing: int = 0, **changes: bool) -> OutputAgreement:
    return OutputAgreement(
        "y", sqnr, 1 - differing / 64, 0.0, **{"same_shapes": True, "finite": True, **changes}, compared=64
    )


@pytest.mark.parametrize(
    ("broken", "reported"),
    [
        (output(), ""),
        (output(finite=False), "output y of the quantized model is not finite"),
        (output(same_shapes=False), "output y of the quantized model has another shape"),
    ],
)
def test_outputs_that_no_goal_allows_are_named(broken: OutputAgreement, reported: str) -> None:
    agreement = Agreement(1, (output(), broken))
    assert fault(agreement) == reported
    # Other shapes are left to a metric.
    assert fault(agreement, by_metric=True) == (reported if "finite" in reported else "")


@pytest.mark.parametrize(
    ("reference", "candidate", "max_drop", "sentence"),
    [
        (0.75, 0.5, 0.25, ""),
        (0.91, 0.9, 0.01, ""),
        (0.75, 0.5, 0.0, "m falls from 0.75 to 0.5, expected to lose at most 0"),
        (0.5, 0.75, 0.0, ""),
    ],
)
def test_a_score_may_fall_as_far_as_the_goal_allows(
    reference: float, candidate: float, max_drop: float, sentence: str
) -> None:
    scores = Scores("m", reference, candidate)
    assert scores.drop == pytest.approx(reference - candidate)
    assert lost_score(scores, Goal(20.0, max_drop=max_drop)) == sentence


@pytest.mark.parametrize(
    ("outputs", "reported"),
    [
        ((), None),
        ((output(20.0), output(math.inf)), None),
        ((output(25.0), output(19.96)), "output y has 19.9 dB, expected 20 dB or more"),
        ((output(None, 2),), None),
        (
            (output(None, 3),),
            "output y differs in 3 of 64 values (4.69%), which is more than the 1.00% that 20 dB stand for, with 95 % "
            "confidence",
        ),
    ],
)
def test_the_worst_output_decides(outputs: tuple[OutputAgreement, ...], reported: str | None) -> None:
    worst = worst_output(Agreement(1, outputs), Goal(20.0))
    assert (worst and shortfall(worst, Goal(20.0))) == reported


def test_samples_that_were_known_are_counted_whatever_they_are_known_from() -> None:
    samples = [{"x": np.full(2, value, np.float32)} for value in range(10)]
    calibrated = [sample_digest(sample) for sample in samples[:3]]
    split = EvaluationSplit.of(samples, calibrated, samples[2:5], 2)
    assert split == EvaluationSplit(samples=10, seen=5, tried=3, rounds=2)
    assert EvaluationSplit.of(samples[5:], calibrated, (), 1) == EvaluationSplit(samples=5, seen=0)
