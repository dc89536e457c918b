"""Statistics collected once, for any number of quantizations."""

from __future__ import annotations

from collections.abc import Sequence

from onnxq.calibration.calibrate import Collection
from onnxq.calibration.data import Data, SamplesLike
from onnxq.calibration.methods import FIRST_RANGES
from onnxq.calibration.statistics import Evidence
from onnxq.config.scheme import Scheme
from onnxq.preparing.named_passes import Step
from onnxq.runtime.targets import DEFAULT_TARGET
from onnxq.steps.budget import Budget
from onnxq.steps.opening import Model, opened, rewritten
from onnxq.steps.wanted import Wanted
from onnxq.system.publish import staging


def calibrate(
    model: Model,
    data: SamplesLike | Data,
    *,
    scheme: str | Scheme = "int8",
    target: str = DEFAULT_TARGET,
    prepare: Sequence[Step] = (),
    budget: str | Budget = "fast",
) -> Evidence:
    """Collect the statistics that quantize() needs, once, to try range methods or fidelities without running again.

    Args:
        model: a file, a ModelProto or a GraphSurgeon graph.
        data: representative samples, as quantize() takes them.
        scheme: a preset's name or a Scheme; of its range method the statistics are kept, or, where it names none, those
            of the ones that quantize() tries.
        target: a name of TARGETS.
        prepare: passes of your own, the same as quantize() is given.
        budget: its collection and progress count here.

    Returns:
        Statistics of every activation that the plan quantizes; onnxq.save_statistics writes them to one file.
    """
    wanted, data, budget = Wanted.of(scheme, target, prepare), Data.of(data), Budget.of(budget)
    method, collection = wanted.scheme.range_method, budget.collection or Collection()
    methods = FIRST_RANGES if method is None else (method,)
    graph = rewritten(model, prepare)
    with staging(None) as folder:
        bench = opened(graph, wanted, folder, measured=budget.measures and wanted.target == DEFAULT_TARGET)
        samples = bench.samples(data.calibration, data, collection.notice)
        return bench.calibrate(bench.plan({}), samples, budget.progress, collection, methods)
