"""Ranges and factors of all samples, once the model of those that were not kept for judging has been judged."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from onnxq.data.dataset import Selection
from onnxq.errors import tolerate
from onnxq.planning.plan import Plan
from onnxq.search.choosing import Chooser, Chosen
from onnxq.search.folds import Folds
from onnxq.search.refining import Gain, Refined
from onnxq.search.refitting import refit

# The samples that judge have judged the model before.
_SECOND = 2
# Runs of the float model for each of these samples: to calibrate, to see channels, and to compare.
_RUNS = 3


def refitted(chooser: Chooser, full: Plan, refined: Refined, found: Chosen) -> tuple[Refined, Chosen]:
    """Return what was chosen with ranges and factors of all samples, unless those that judge see more noise then.

    What was found by cross-validation is found once more on all there is, as is usual. The verdict stays that of the
    model before: it is of samples that it had not seen.

    Args:
        chooser: has built and judged it.
        full: the plan in which every node is static that can be.
        refined: what the codes rest on.
        found: what was chosen.
    """
    judge, plan = chooser.judge, found.outcome.plan
    apart = judge.samples is not chooser.samples and judge.scorer is None
    if not apart or not plan.calibrated or chooser.bench.is_large or not chooser.has_time(_RUNS * len(judge.samples)):
        return refined, found
    start, before = time.monotonic(), found.verification.agreement.worst_sqnr
    more = Selection(judge.samples, range(len(judge.samples)))
    folds = Folds(chooser.trials, chooser.samples)
    reached, better, count = before, False, len(chooser.samples) + len(more)
    with tolerate("ranges of all samples"):
        basis = refit(folds, full, plan, replace(refined.basis, recipe=found.recipe), more)
        again = chooser.with_evidence(basis.evidence)
        after = replace(again, judge=replace(judge, seconds=0.0)).built(found.outcome, basis.recipe, _SECOND)
        reached = after.agreement.worst_sqnr
        better = after.agreement.sound and not (math.isnan(reached) or reached < before)
    told, where = f"{len(plan.calibrated)} ranges of {count} samples", tuple(plan.calibrated)
    gain = Gain("all samples", before, reached, told, 0.0, where=where)
    if not better:
        chooser.bench.build(
            plan, chooser.evidence, found.recipe, chooser.files.staged, external_data=chooser.files.external_data
        )
        gain = replace(gain, after=before, kept="", left="no less noise", where=())
    gains = (*found.gains, replace(gain, seconds=time.monotonic() - start))
    if not better:
        return refined, replace(found, gains=gains)
    return replace(refined, basis=basis), replace(found, recipe=basis.recipe, gains=gains, refitted=count)
