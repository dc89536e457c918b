"""The accuracy that the user asks for, and whether a model reaches it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.calibration.provenance import sample_digest
from onnxq.data.inputs import Sample
from onnxq.errors import SchemeError, check_type, convert_numpy_numbers, did_you_mean
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.bounds import share_at
from onnxq.evaluation.metrics import Metric, Scores, load_metric
from onnxq.numerics.affine import decibels
from onnxq.system.option_text import parse_size

MINIMUM_SQNR = 20.0
"""Default SQNR in decibels: the error of the worst output holds a hundredth of the signal's energy."""

PREFERENCES = ("speed", "size")
"""What a search optimizes among plans that are accurate enough; the first is the default."""

_REMOVED_PREFERENCES = ("mean", "worst")


@dataclass(frozen=True)
class Goal:
    """How accurate a model must be to be written.

    Attributes:
        min_sqnr: SQNR in decibels of the worst output; not required if there is a metric.
        metric: replaces `min_sqnr`; a text for `load_metric` is resolved at once.
        max_drop: how much less than the float model's the metric may be.
        force: whether a less accurate model is written nevertheless.
        exact: whether a model is refused if some weights do not have the bits of the scheme.
        prefer: which accurate model a search takes: ``speed`` takes the fastest; ``size`` takes the smallest file, with
            bits and blocks chosen for each weight, and needs a weight-only scheme of integers in blocks.
        max_size: largest size of the model, for such a scheme: a share of the float model's bytes up to 1, bytes, or a
            text such as ``300MB``. The bits and blocks of each weight are chosen for the least error in this size.

    Raises:
        SchemeError: a value has the wrong type, or the metric or the preference is unknown. Or `min_sqnr` is NaN,
            `max_drop` is negative or not finite, or `max_size` is no size or contradicts `exact`.
        DataError: The labels of the metric cannot be read.

    >>> Goal(30).min_sqnr, Goal.of(25.0)
    (30, Goal(min_sqnr=25.0, metric=None, max_drop=0.0, force=False, exact=False, prefer='speed', max_size=None))
    """

    min_sqnr: float = MINIMUM_SQNR
    metric: Metric | str | None = None
    max_drop: float = 0.0
    force: bool = False
    exact: bool = False
    prefer: str = PREFERENCES[0]
    max_size: float | str | None = None

    def __post_init__(self) -> None:
        convert_numpy_numbers(self, "min_sqnr", "max_drop", "max_size")
        check_type(self.min_sqnr, (int, float), "the required SQNR", "decibels such as 20")
        check_type(self.metric, (Metric, str, type(None)), "the metric", "a text such as top1:labels.npy, or a Metric")
        check_type(self.max_drop, (int, float), "the drop of the metric", "a number such as 0.01")
        for name in ("force", "exact"):
            check_type(getattr(self, name), bool, name, "True or False")
        check_type(self.prefer, str, "prefer", f"one of {', '.join(PREFERENCES)}")
        if self.prefer in _REMOVED_PREFERENCES:
            raise SchemeError(f"prefer {self.prefer!r} was removed together with several targets; leave it out")
        if self.prefer not in PREFERENCES:
            raise SchemeError(
                f"prefer is {self.prefer!r}, expected one of {', '.join(PREFERENCES)}"
                f"{did_you_mean(self.prefer, PREFERENCES)}"
            )
        if math.isnan(self.min_sqnr):
            raise SchemeError("the required SQNR is NaN, expected decibels such as 20")
        if not 0 <= self.max_drop < math.inf:
            raise SchemeError(
                f"the drop of the metric is {self.max_drop}, expected a finite number that is not negative"
            )
        _check_size(self.max_size)
        if self.exact and self.max_size is not None:
            raise SchemeError("exact keeps the bits of the scheme, and max_size chooses them; leave one of them out")
        # Refuse a wrong metric here and not after minutes.
        _ = self.own_metric

    @classmethod
    def of(cls, goal: float | Goal) -> Goal:
        """Return a goal; a number stands for decibels."""
        return goal if isinstance(goal, Goal) else cls(goal)

    def with_bytes(self, float_bytes: int) -> Goal:
        """Return the same with the largest size in bytes, given the bytes of the float model.

        >>> Goal(max_size=0.25).with_bytes(4000).max_size, Goal(max_size="2kB").with_bytes(4000).max_size
        (1000, 2000)
        """
        if self.max_size is None:
            return self
        size = _size_of(self.max_size)
        return replace(self, max_size=int(size * float_bytes) if size <= 1 else int(size))

    @property
    def prefers_size(self) -> bool:
        """Whether a small file matters more than a fast model."""
        return self.prefer == "size"

    @cached_property
    def own_metric(self) -> Metric | None:
        """The metric; None if the SQNR decides."""
        return load_metric(self.metric) if isinstance(self.metric, str) else self.metric


def _check_size(size: float | str | None) -> None:
    check_type(size, (int, float, str, type(None)), "the largest size", "a share such as 0.3, or a text such as 300MB")
    with suppress(ValueError):
        if size is None or 0 < _size_of(size) < math.inf:
            return
    raise SchemeError(f"the largest size is {size}, expected a share such as 0.3, or a size such as 300MB")


def _size_of(size: float | str) -> float:
    """Return a share up to 1, or bytes."""
    if not isinstance(size, str):
        return size
    with suppress(ValueError):
        return float(size)
    return parse_size(size)


# The SQNR that a search aims at for a goal, and the SQNR above which nothing is worth improving.

# In decibels. The confidence bound allows for unseen samples, but the search selects a plan that was partly accurate by
# luck. So it aims a little higher than the goal. More hardly improves accuracy on the holdout set.
_HEADROOM = 0.5
# Decibels. Aims beyond these limits, such as infinity, mean the same: nothing in float32 reaches them, or everything.
_LOWEST_AIM, HIGHEST_AIM = -100.0, 150.0


def aim_of(min_sqnr: float) -> float:
    """Return the SQNR in decibels to aim at, always finite.

    >>> aim_of(20.0)
    20.5
    """
    return min(max(min_sqnr + _HEADROOM, _LOWEST_AIM), HIGHEST_AIM)


# Whether a model reaches its goal.


@dataclass(frozen=True)
class EvaluationSplit:
    """Which samples a model was evaluated on, and which chose it.

    Attributes:
        samples: number of samples that it was evaluated on.
        seen: how many of these calibrated ranges or helped to choose the plan.
        tried: number of samples that candidates were tried on.
        rounds: number of models that were judged on these samples.
        places: first and last index of each run of the samples that it was evaluated on, counted from 0.
        apart: whether `places` index a separate holdout set of the user.
        files: number of files that the samples come from, if samples of one file count as one; else 0.
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
        """Count which evaluated samples are equal to known ones, wherever they come from.

        `calibrated` holds digests of the calibration samples, see `sample_digest`; candidates were tried on `tried`.
        """
        digests = [sample_digest(sample) for sample in samples]
        seen = {*calibrated, *(sample_digest(sample) for sample in tried)}
        return cls(len(digests), sum(digest in seen for digest in digests), len(tried), rounds)


def fault(agreement: Agreement, *, by_metric: bool = False, model: str = "the quantized model") -> str:
    """Describe the first output that no goal allows: not finite or of another shape. Return "" if there is none.

    With a metric, other shapes are allowed: a detector may find more or fewer boxes.

    >>> fault(Agreement(1, ()))
    ''
    """
    for output in agreement.outputs:
        if not ((output.same_shapes or by_metric) and output.finite):
            what = "has another shape" if output.finite else "is not finite"
            return f"{output.label} of {model} {what}"
    return ""


def lost_score(scores: Scores, goal: Goal) -> str:
    """Describe the drop of a metric if it is larger than the goal allows; else return ""."""
    if scores.allowed_by(goal.max_drop):
        return ""
    fall = f"{scores.name} falls from {scores.reference:.4g} to {scores.candidate:.4g}"
    return f"{fall}, expected to lose at most {goal.max_drop:g}"


def worst_output(agreement: Agreement, goal: Goal) -> OutputAgreement | None:
    """Return the output with the lowest SQNR if it is below the goal."""
    worst = min(agreement.outputs, key=lambda output: output.decibels, default=None)
    return worst if worst is not None and worst.decibels < goal.min_sqnr else None


# Share of the goal in decibels that the bound of stored weights must reach. They are the last plan of a search, so
# nothing better takes their place, and a lower bound would promise next to nothing on other samples.
_LEAST_BOUND = 0.5


def lacking_bound(agreement: Agreement, goal: Goal) -> tuple[OutputAgreement, float] | None:
    """Return the output with the lowest bound, and the decibels that it lacks to half of the goal; None if none.

    >>> lacking_bound(Agreement(1, ()), Goal(20))
    """
    least = min(_LEAST_BOUND * goal.min_sqnr, goal.min_sqnr)
    lacks = [(output, least - output.bound) for output in agreement.outputs if output.bound is not None]
    worst = max(lacks, key=lambda pair: pair[1], default=None)
    return worst if worst is not None and worst[1] > 0 else None


def shortfall(worst: OutputAgreement, goal: Goal) -> str:
    """Describe an output's accuracy and the goal."""
    if worst.sqnr is not None:
        return f"{worst.label} has {decibels(worst.sqnr)}, expected {goal.min_sqnr:g} dB or more"
    return (
        f"{worst.label} differs in {worst.differing} of {worst.compared} values "
        f"({worst.differing / worst.compared:.2%}), which is more than the {share_at(goal.min_sqnr):.2%} that "
        f"{goal.min_sqnr:g} dB stand for, with 95 % confidence"
    )


def lack(agreement: Agreement, goal: Goal, model: str = "the quantized model") -> str:
    """Describe how `model` misses a goal in decibels; "" if it does not.

    >>> lack(Agreement(1, ()), Goal(20))
    ''
    """
    worst = worst_output(agreement, goal)
    return fault(agreement, model=model) or (shortfall(worst, goal) if worst is not None else "")
