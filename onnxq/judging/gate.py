"""Whether a model is good enough: what is wished of it, and what it lacks."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.judging.agreement import Agreement, OutputAgreement, share_at
from onnxq.judging.metrics import Metric


@dataclass(frozen=True)
class Wish:
    """How faithful the model has to be.

    Attributes:
        min_sqnr: SQNR in decibels of the worst output; not asked for where there is a metric.
        metric: what else tells whether the model is good.
        max_drop: how much less than the float model's the metric may be.
    """

    min_sqnr: float
    metric: Metric | None = None
    max_drop: float = 0.0


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
    """Say which output no wish allows: one that is not finite or of another shape; an empty string where all are sound.

    >>> fault(Agreement(1, ()))
    ''
    """
    for output in agreement.outputs:
        if not (output.same_shapes and output.finite):
            what = "is not finite" if output.same_shapes else "has another shape"
            return f"output {output.name} of the quantized model {what}"
    return ""


def lost_score(scores: Scores, wish: Wish) -> str:
    """Say how much a metric has lost, where that is more than was wished."""
    if scores.drop <= wish.max_drop:
        return ""
    fall = f"{scores.name} falls from {scores.reference:.4g} to {scores.candidate:.4g}"
    return f"{fall}, expected to lose at most {wish.max_drop:g}"


def worst_output(agreement: Agreement, wish: Wish) -> OutputAgreement | None:
    """Return the least faithful output, where it is less faithful than was wished."""
    worst = min(agreement.outputs, key=lambda output: output.decibels, default=None)
    return worst if worst is not None and worst.decibels < wish.min_sqnr else None


def shortfall(worst: OutputAgreement, wish: Wish) -> str:
    """Say what an output is and what it should be."""
    if worst.sqnr is not None:
        return f"output {worst.name} has {worst.sqnr:.1f} dB, expected {wish.min_sqnr:g} dB or more"
    return (
        f"output {worst.name} differs in {worst.differing} of {worst.compared} values "
        f"({worst.differing / worst.compared:.2%}), which is more than the {share_at(wish.min_sqnr):.2%} that "
        f"{wish.min_sqnr:g} dB stand for, with 95 % confidence"
    )
