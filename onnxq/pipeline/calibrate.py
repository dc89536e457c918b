"""Calibration: samples run through the prepared model, and statistics of its activations are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxq.algorithms.encoding_config import EncodingConfig, config_from_plan
from onnxq.calibration.methods import DEFAULT_METHODS, CalibrationMethod, Extremes, MinMax
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.effort import METHODS, OFF, AccuracyEffort
from onnxq.evaluation.warnings import warn_mask_values
from onnxq.pipeline.prepare import PreparedRun
from onnxq.pipeline.request import Budget
from onnxq.pipeline.samples import SplitSamples
from onnxq.planning.given import unapplied
from onnxq.planning.obstacles import refuse_idle_nodes
from onnxq.planning.plan import Plan
from onnxq.search.prepared_model import PreparedModel
from onnxq.system.failures import tolerate


@dataclass(frozen=True, eq=False)
class CalibratedModel:
    """What samples have shown of a prepared model.

    Attributes:
        model: the model as it was prepared.
        samples: those that calibrated it, and those that judge it.
        bench: plans no integers where no sample came by.
        plan: what the scheme asks for, or the plan to carry out.
        statistics: of what the plan needs.
        warnings: what of the scheme does not fit the model or its values, in sentences.
    """

    model: PreparedRun
    samples: SplitSamples
    bench: PreparedModel
    plan: Plan
    statistics: CalibrationStatistics
    warnings: tuple[str, ...] = ()


def calibrate_model(
    model: PreparedRun,
    samples: SplitSamples,
    methods: Sequence[CalibrationMethod],
    budget: Budget,
    statistics: CalibrationStatistics | None = None,
) -> CalibratedModel:
    """Calibrate what the plan needs for any of some calibration methods, unless the statistics are given.

    Raises:
        EngineError: the engine does not start, or does not load the float model, which others are timed beside.
    """
    bench = model.bench
    plan = model.replay or bench.plan({})
    if samples.generated:
        return CalibratedModel(model, samples, bench, plan, CalibrationStatistics())
    if statistics is None:
        statistics = bench.calibrate(plan, samples.fit, budget.progress, budget.cluster, methods)
    else:
        statistics = bench.checked(statistics, plan, methods)
    model.ahead.check(wait=False)
    warnings = tuple(unapplied(bench.scheme.encodings, plan))
    if model.replay is not None:
        refuse_idle_nodes(bench.graph, model.replay, statistics)
        return CalibratedModel(model, samples, bench, plan, statistics, warnings)
    bench = bench.without_idle_nodes(plan, statistics)
    if bench.scheme.range_method != Extremes():
        with tolerate("the check for mask values"):
            warnings += tuple(warn_mask_values(statistics, plan.calibrated))
    return CalibratedModel(model, samples, bench, bench.plan({}), statistics, warnings)


def range_methods(model: PreparedRun, budget: Budget) -> tuple[CalibrationMethod, ...]:
    """Return the calibration methods that may be used, for any of which evidence is kept."""
    return DEFAULT_METHODS if "ranges" in accuracy_tried(model, budget).methods else initial_config(model).methods


def initial_config(model: PreparedRun) -> EncodingConfig:
    """Return how encodings are chosen to begin with."""
    if model.replay is not None:
        return config_from_plan(model.replay, 1)
    return EncodingConfig(model.bench.scheme.range_method or MinMax())


def accuracy_tried(model: PreparedRun, budget: Budget) -> AccuracyEffort:
    """Return what is tried for accuracy: no other ranges than given ones, and nothing of a plan to carry out."""
    if model.replay is not None:
        return replace(OFF, thorough=model.replay.thorough)
    large, wanted = model.bench.is_large, budget.tried
    # The others build a model of many bytes too often.
    affordable = ("ranges",) if large else METHODS
    named = {"ranges"} if model.bench.scheme.range_method is not None else set[str]()
    if model.bench.scheme.encodings:
        # These rescale channels, which given scales do not fit.
        named |= {"awq", "equalization"}
    methods = tuple(name for name in wanted.methods if name in affordable and name not in named)
    return replace(wanted, methods=methods)
