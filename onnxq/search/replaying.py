"""What a plan does not hold of how its codes were chosen, found again from the same samples to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxq.algorithms.noting import recipe_of
from onnxq.calibration.statistics import Evidence
from onnxq.planning.plan import Plan
from onnxq.search.biasing import with_biases
from onnxq.search.effort import FAST, FULL, Accuracy
from onnxq.search.folds import ALL, Basis, Finding, Folds
from onnxq.search.rounding import with_seen_rows


def replayed(folds: Folds, plan: Plan, evidence: Evidence) -> Basis:
    """Return what the codes of a plan are chosen by, with nothing tried.

    Args:
        folds: the samples as they were when it was chosen.
        plan: from a report or file.
        evidence: of what the plan needs.
    """
    basis = Basis(recipe_of(plan, sum(map(len, folds.groups))), evidence)
    if plan.damping is not None:
        basis = with_seen_rows(folds, plan, basis, plan.damping.observed)
    if "bias" in plan.accuracy:
        basis = with_decided_biases(folds, plan, basis, FULL if plan.thorough else FAST)
    return basis


def with_decided_biases(folds: Folds, plan: Plan, basis: Basis, accuracy: Accuracy) -> Basis:
    """Return the basis with biases corrected in order, which are known to pay.

    Args:
        folds: the samples that they are found on.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: with how much effort they were found.
    """
    return with_biases(_Decided(folds.trials, folds.samples), plan, basis, accuracy)


@dataclass(frozen=True, eq=False)
class _Decided(Folds):
    """Folds that take what is found without judging it: that was done when the plan was made."""

    def kept(
        self, plan: Plan, basis: Basis, findings: Sequence[Finding], worth: float = 1.0, *, once: bool = False
    ) -> Basis:
        """Return what the first finding makes of all samples."""
        return findings[0](ALL)
