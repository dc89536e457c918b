"""Whether a model is good enough: what it lacks of its goal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnxq.calibration.provenance import sample_digest
from onnxq.data.inputs import Sample
from onnxq.evaluation.agreement import Agreement, OutputAgreement
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.labels import share_at
from onnxq.evaluation.scoring import Scores


@dataclass(frozen=True)
class Judged:
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
    def of(cls, samples: Iterable[Sample], calibrated: Iterable[str], tried: Sequence[Sample], rounds: int) -> Judged:
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
