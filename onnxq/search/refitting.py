"""Ranges and factors found again on more samples, once it is settled what they are found by."""

from __future__ import annotations

from dataclasses import replace

from onnxq.calibration.methods import kinds_read
from onnxq.data.dataset import Selection
from onnxq.planning.plan import Plan
from onnxq.search.effort import FULL
from onnxq.search.folds import Basis, Folds
from onnxq.search.migrating import migrated_again
from onnxq.search.replaying import with_decided_biases
from onnxq.system.resources import silent


def refit(folds: Folds, full: Plan, plan: Plan, basis: Basis, more: Selection) -> Basis:
    """Return a basis whose ranges and factors of channels are those of all samples.

    Means and Gram matrices stay: a plan holds ranges and factors, and what it does not hold is found again from the
    samples that it was chosen by.

    Args:
        folds: the samples that it was chosen by.
        full: the plan that the factors were found for.
        plan: the one that was chosen.
        basis: what its codes are chosen by.
        more: samples beside those of the folds.
    """
    bench, methods = folds.trials.bench, basis.recipe.methods
    seen = bench.calibrate(full, more, silent, methods=methods)
    kinds = {"range", *kinds_read(methods)}
    evidence = basis.evidence.plus(seen.select(one for one in seen.statistics if one.kind in kinds))
    basis = replace(basis, evidence=evidence)
    # Factors that were left, since they cost time, stay left.
    migration = migrated_again(bench, (*folds.groups, more), full, basis).select(basis.recipe.migration.factors)
    basis = replace(basis, recipe=replace(basis.recipe, migration=migration))
    return with_decided_biases(folds, plan, basis, FULL) if basis.recipe.biases else basis
