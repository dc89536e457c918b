"""The second step: samples run through the prepared model, and statistics of its activations are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from onnxq.algorithms.encoding_config import EncodingConfig, config_from_plan
from onnxq.calibration.data import Data
from onnxq.calibration.methods import DEFAULT_METHODS, CalibrationMethod, Extremes, MinMax
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.effort import METHODS, OFF, AccuracyEffort
from onnxq.data.dataset import split
from onnxq.data.images import ImageOptions, describe_image_samples, warn_narrow_crop
from onnxq.data.inputs import Sample, SampleSource, model_inputs, required
from onnxq.data.samples import evenly
from onnxq.errors import tolerate
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.warnings import (
    INSPECTED_SAMPLES,
    drop_equal_samples,
    find_sample_warnings,
    reject_constant_samples,
    warn_mask_values,
    warn_unmeasured_nodes,
)
from onnxq.onnx_api import weightless_model
from onnxq.passes.preparing.preparation import check_plan
from onnxq.pipeline.prepare import PreparedRun
from onnxq.pipeline.request import Budget
from onnxq.planning.given import unapplied
from onnxq.planning.obstacles import refuse_idle_nodes
from onnxq.planning.plan import Plan
from onnxq.search.prepared_model import PreparedModel

GENERATED = "there are no samples: the SQNR is that of generated inputs, and real ones may have another; give --calib"
"""What a report says of the accuracy of a model that was quantized without samples."""

OpenedSamples: TypeAlias = tuple[SampleSource, SampleSource | None]
"""Samples to calibrate by, and to judge by where others were given for that."""


def opened_samples(bench: PreparedModel, data: Data, goal: Goal) -> OpenedSamples:
    """Open the samples to calibrate by, and those to judge by where others were given.

    Args:
        bench: the prepared model.
        data: the samples.
        goal: a metric counts on the order of all samples, as do its labels.
    """
    in_order = goal.metric is not None
    whole = bench.samples(data.calibration, data, in_order=in_order)
    if data.validation is None:
        return whole, None
    return whole, bench.samples(data.validation, data, in_order=in_order)


def split_holdout(given: OpenedSamples, looked: Sequence[Sample], goal: Goal) -> tuple[SampleSource, SampleSource]:
    """Return the samples by which ranges and plans are chosen, and those by which models are judged.

    Args:
        given: all to calibrate by, and those to judge by where others were given.
        looked: some of the former.
        goal: of a metric each sample counts, as it may have a label for each, equal ones too. Of a metric that knows
            samples by themselves all that are kept apart judge, and of a function of the user's all there are.
    """
    whole, others = given
    if (metric := goal.own_metric) is None:
        whole = drop_equal_samples(whole, looked)
        return (
            split(whole)
            if others is None
            else (whole, drop_equal_samples(others, reject_constant_samples(list(evenly(others, INSPECTED_SAMPLES)))))
        )
    return split(whole, len(whole)) if others is None and metric.knows_samples else (whole, others or whole)


@dataclass(frozen=True, eq=False)
class CalibratedModel:
    """What samples have shown of a prepared model.

    Attributes:
        model: the model as it was prepared.
        bench: plans no integers where no sample came by.
        plan: what the scheme asks for, or the plan to carry out.
        statistics: of what the plan needs.
        samples: those by which it is chosen.
        holdout: those by which the result is judged.
        warnings: why they may not be representative, in sentences.
        opened: the samples as they were given, which may be read but once, and the validation samples.
        generated: whether all of them are generated inputs.
        images: how image files became arrays, in words; empty if there are none.
    """

    model: PreparedRun
    bench: PreparedModel
    plan: Plan
    statistics: CalibrationStatistics
    samples: SampleSource
    holdout: SampleSource
    warnings: tuple[str, ...] = ()
    opened: OpenedSamples | None = None
    generated: bool = False
    images: str = ""


def calibrate_model(
    model: PreparedRun,
    data: Data,
    methods: Sequence[CalibrationMethod],
    goal: Goal,
    budget: Budget,
    known: OpenedSamples | None = None,
) -> CalibratedModel:
    """Calibrate what the plan needs for any of these calibration methods, or take the statistics that were given.

    Samples that are known were opened before.

    Raises:
        EngineError: the engine does not start, or does not load the float model, which others are timed beside.
    """
    bench = model.bench
    plan = model.replay or bench.plan({})
    check_plan(plan, bench.graph)
    whole, _ = known = known or opened_samples(bench, data, goal)
    if data.generated:
        statistics = CalibrationStatistics()
        return CalibratedModel(model, bench, plan, statistics, whole, whole, (GENERATED,), known, generated=True)
    looked = reject_constant_samples(list(evenly(whole, INSPECTED_SAMPLES)))
    samples, holdout = split_holdout(known, looked, goal)
    inputs, options = model_inputs(weightless_model(bench.graph)), data.image_options or ImageOptions()
    images = describe_image_samples(whole, inputs, options)
    crop = warn_narrow_crop(required(inputs)[0], options) if images else ()
    found = (*crop, *_warnings(model, looked, len(whole), goal), *unapplied(bench.scheme.encodings, plan))
    if (given := data.loaded_statistics) is not None:
        given = bench.checked(given, plan, methods)
    statistics = given or bench.calibrate(plan, samples, budget.progress, budget.cluster, methods)
    model.ahead.check(wait=False)
    if model.replay is not None:
        refuse_idle_nodes(bench.graph, model.replay, statistics)
        return CalibratedModel(model, bench, plan, statistics, samples, holdout, found, known, images=images)
    bench = bench.without_idle_nodes(plan, statistics)
    if bench.scheme.range_method != Extremes():
        with tolerate("the check for mask values"):
            found += tuple(warn_mask_values(statistics, plan.calibrated))
    return CalibratedModel(model, bench, bench.plan({}), statistics, samples, holdout, found, known, images=images)


def _warnings(model: PreparedRun, looked: Sequence[Sample], count: int, goal: Goal) -> tuple[str, ...]:
    """Return what keeps the samples from being representative, and what judges the model from seeing its noise."""
    reference, bench = model.reference, model.bench
    found = find_sample_warnings(reference, looked, count)
    if goal.metric is None:
        with tolerate("the check for nodes that are not compared"):
            found += tuple(warn_unmeasured_nodes(ComparisonSpec.of(reference, bench.prepared)))
    return found


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
    given = {"ranges"} if model.bench.scheme.range_method is not None else set[str]()
    if model.bench.scheme.encodings:
        # These rescale channels, which given scales do not fit.
        given |= {"awq", "equalization"}
    methods = tuple(name for name in wanted.methods if name in affordable and name not in given)
    return replace(wanted, methods=methods)
