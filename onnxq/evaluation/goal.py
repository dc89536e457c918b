"""What the user wants of a model's fidelity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxq.calibration.provenance import sample_digest
from onnxq.data.inputs import Sample
from onnxq.errors import SchemeError, check_type, convert_numpy_numbers, did_you_mean
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.bounds import share_at
from onnxq.evaluation.metrics import Metric, Scores, load_metric

MINIMUM_SQNR = 20.0
"""Default fidelity in decibels: the noise at the worst output holds a hundredth of the signal's energy."""

PREFERENCES = ("speed", "size")
"""What a search may look for in plans that are faithful enough, the usual one first."""


@dataclass(frozen=True)
class Goal:
    """How faithful a model has to be to be written.

    Attributes:
        min_sqnr: SQNR in decibels of the worst output; not asked for where there is a metric.
        metric: what tells instead whether the model is good, or a text that load_metric takes, which is read at once.
        max_drop: how much less than the float model's the metric may be.
        force: whether a model that is less faithful is written nevertheless.
        exact: whether a model is refused in which not all weights have the bits that the scheme asks for.
        prefer: what a search takes of plans that are faithful enough: the fastest (``speed``), or the fastest of those
            in which as many weights as can be have 4 bits instead of 8 (``size``).

    Raises:
        SchemeError: the decibels are NaN, the drop is negative or not finite, the metric's text names none, there is no
            such preference, or something is of another type.
        DataError: the labels of the metric cannot be read.

    >>> Goal(30).min_sqnr, Goal.of(25.0)
    (30, Goal(min_sqnr=25.0, metric=None, max_drop=0.0, force=False, exact=False, prefer='speed'))
    """

    min_sqnr: float = MINIMUM_SQNR
    metric: Metric | str | None = None
    max_drop: float = 0.0
    force: bool = False
    exact: bool = False
    prefer: str = PREFERENCES[0]

    def __post_init__(self) -> None:
        convert_numpy_numbers(self, "min_sqnr", "max_drop")
        check_type(self.min_sqnr, (int, float), "the wanted fidelity", "decibels such as 20")
        check_type(self.metric, (Metric, str, type(None)), "the metric", "a text such as top1:labels.npy, or a Metric")
        check_type(self.max_drop, (int, float), "the drop of the metric", "a number such as 0.01")
        for name in ("force", "exact"):
            check_type(getattr(self, name), bool, name, "True or False")
        check_type(self.prefer, str, "what is preferred", f"one of {', '.join(PREFERENCES)}")
        if self.prefer not in PREFERENCES:
            raise SchemeError(
                f"what is preferred is {self.prefer!r}, expected one of {', '.join(PREFERENCES)}"
                f"{did_you_mean(self.prefer, PREFERENCES)}"
            )
        if math.isnan(self.min_sqnr):
            raise SchemeError("the wanted fidelity is NaN, expected decibels such as 20")
        if not 0 <= self.max_drop < math.inf:
            raise SchemeError(
                f"the drop of the metric is {self.max_drop}, expected a finite number that is not negative"
            )
        # A text that names nothing is told here and not after minutes.
        _ = self.judged_by

    @classmethod
    def of(cls, given: float | Goal) -> Goal:
        """Return a goal as it is; a number stands for decibels."""
        return given if isinstance(given, Goal) else cls(given)

    @property
    def prefers_size(self) -> bool:
        """Whether a small file is worth more than a fast model."""
        return self.prefer == "size"

    @cached_property
    def judged_by(self) -> Metric | None:
        """The metric; None where decibels tell."""
        return load_metric(self.metric) if isinstance(self.metric, str) else self.metric


# How many decibels plans and codes aim at for a goal, and how many are plenty.

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


# Whether a model is good enough: what it lacks of its goal.


@dataclass(frozen=True)
class EvaluationSplit:
    """By which samples a model was judged, and by which it was chosen.

    Attributes:
        samples: how many it was judged by.
        seen: how many of these had set ranges, or had a part in choosing the plan.
        tried: how many samples candidates were tried on.
        rounds: how often a plan was searched until one passed, or nothing was left to try.
        places: which of the given samples they are: the first and the last of each run of them, counted from 0.
        apart: whether they are counted among samples that were given to judge by alone.
        files: how many files they are of, where those of one count as one; 0 where each counts by itself.
    """

    samples: int
    seen: int
    tried: int = 0
    rounds: int = 1
    places: tuple[tuple[int, int], ...] = ()
    apart: bool = False
    files: int = 0

    @classmethod
    def of(
        cls, samples: Iterable[Sample], calibrated: Iterable[str], tried: Sequence[Sample], rounds: int
    ) -> EvaluationSplit:
        """Tell which of the samples that a model was judged by were known; equal ones are, wherever they come from.

        Args:
            samples: that it was judged by.
            calibrated: digests of the samples that set ranges, see `sample_digest`.
            tried: those that candidates were tried on.
            rounds: how often a plan was searched.
        """
        judging = [sample_digest(sample) for sample in samples]
        known = {*calibrated, *(sample_digest(sample) for sample in tried)}
        return cls(len(judging), sum(digest in known for digest in judging), len(tried), rounds)


def fault(agreement: Agreement, *, by_metric: bool = False) -> str:
    """Say which output no goal allows: one that is not finite or of another shape; an empty string where all are sound.

    A metric knows what to make of other shapes, such as of boxes that a detector finds more or fewer of.

    >>> fault(Agreement(1, ()))
    ''
    """
    for output in agreement.outputs:
        if not ((output.same_shapes or by_metric) and output.finite):
            what = "has another shape" if output.finite else "is not finite"
            return f"{output.label} of the quantized model {what}"
    return ""


def lost_score(scores: Scores, goal: Goal) -> str:
    """Say how much a metric has lost on the samples that judge, where that is more than the goal allows."""
    if scores.allowed_by(goal.max_drop):
        return ""
    fall = f"{scores.name} falls from {scores.reference:.4g} to {scores.candidate:.4g}"
    return f"{fall}, expected to lose at most {goal.max_drop:g}"


def worst_output(agreement: Agreement, goal: Goal) -> OutputAgreement | None:
    """Return the least faithful output, where it is less faithful than the goal allows."""
    worst = min(agreement.outputs, key=lambda output: output.decibels, default=None)
    return worst if worst is not None and worst.decibels < goal.min_sqnr else None


def shortfall(worst: OutputAgreement, goal: Goal) -> str:
    """Say what an output is and what it should be."""
    if worst.sqnr is not None:
        return f"{worst.label} has {worst.sqnr:.1f} dB, expected {goal.min_sqnr:g} dB or more"
    return (
        f"{worst.label} differs in {worst.differing} of {worst.compared} values "
        f"({worst.differing / worst.compared:.2%}), which is more than the {share_at(goal.min_sqnr):.2%} that "
        f"{goal.min_sqnr:g} dB stand for, with 95 % confidence"
    )


def lack(agreement: Agreement, goal: Goal) -> str:
    """Say in what a model falls short of a goal in decibels; an empty string where it does not.

    >>> lack(Agreement(1, ()), Goal(20))
    ''
    """
    worst = worst_output(agreement, goal)
    return fault(agreement) or (shortfall(worst, goal) if worst is not None else "")
