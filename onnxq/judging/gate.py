"""Whether a model is good enough: what it lacks of its goal."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.judging.agreement import Agreement, OutputAgreement, share_at
from onnxq.judging.goal import Goal


@dataclass(frozen=True)
class Scores:
    """What a metric says of both models, on the calibration samples in their order.

    Attributes:
        name: of the metric.
        reference: of the float model.
        candidate: of the quantized model.
    """

    name: str
    reference: float
    candidate: float

    @property
    def drop(self) -> float:
        """How much less the quantized model's is."""
        return self.reference - self.candidate


def fault(agreement: Agreement) -> str:
    """Say which output no goal allows: one that is not finite or of another shape; an empty string where all are sound.

    >>> fault(Agreement(1, ()))
    ''
    """
    for output in agreement.outputs:
        if not (output.same_shapes and output.finite):
            what = "is not finite" if output.same_shapes else "has another shape"
            return f"output {output.name} of the quantized model {what}"
    return ""


def lost_score(scores: Scores, goal: Goal) -> str:
    """Say how much a metric has lost, where that is more than the goal allows."""
    if scores.drop <= goal.max_drop:
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
        return f"output {worst.name} has {worst.sqnr:.1f} dB, expected {goal.min_sqnr:g} dB or more"
    return (
        f"output {worst.name} differs in {worst.differing} of {worst.compared} values "
        f"({worst.differing / worst.compared:.2%}), which is more than the {share_at(goal.min_sqnr):.2%} that "
        f"{goal.min_sqnr:g} dB stand for, with 95 % confidence"
    )
