"""Whether forms that operators became for integer kernels, faster as a rule, are so on this machine too."""

from __future__ import annotations

from onnxq.errors import tolerate
from onnxq.evaluation.goal import Goal
from onnxq.preparing.integer_steps import gives_forms, gives_scans
from onnxq.search.context import SEARCH_RUNS
from onnxq.steps.budget import Budget
from onnxq.steps.steps import Evidenced, Prepared, Settled, chooser_of, first_recipe
from onnxq.system.resources import NEVER, Deadline

# What is not even so fast in integers throughout is not searched for what else it could be.
_HOPELESS = 0.8


def hopeless_forms(model: Prepared, seen: Evidenced, goal: Goal, budget: Budget, deadline: Deadline = NEVER) -> bool:
    """Whether a model with a Scan for each recurrent cell is far slower than float in integers, before any search.

    A step of a Scan costs the same however little it computes, so that no choice among other nodes makes up for it.

    Args:
        model: the model as it was prepared.
        seen: what samples have shown of it.
        goal: how faithful the model has to be.
        budget: what may be spent.
        deadline: by when all has to end.
    """
    if model.replay is not None or not gives_scans(model.bench.making.applied):
        return False
    chooser = chooser_of(model, seen, goal, budget, deadline)
    if not chooser.measurable or not chooser.has_time(SEARCH_RUNS):
        return False
    with tolerate("the look at forms for integer kernels"):
        [speed] = chooser.laboratory(first_recipe(model)).speeds([seen.plan])
        return speed < _HOPELESS
    return False


def slowed_by_forms(model: Prepared, settled: Settled) -> bool:
    """Whether a model that was chosen is slower than float, perhaps by what operators became for integer kernels.

    A plan to carry out has the forms that it was made for.
    """
    latency = settled.chosen.verification.latency
    slower = latency is not None and latency.slower and latency.significant
    return slower and model.replay is None and gives_forms(model.bench.making.applied)
