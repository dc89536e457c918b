"""Samples are opened and split, once for all that is tried."""

from __future__ import annotations

from dataclasses import dataclass

from onnxq.calibration.data import Data, with_optional
from onnxq.data.dataset import split
from onnxq.data.images import ImageOptions, describe_image_samples, warn_narrow_crop
from onnxq.data.inputs import SampleSource, model_inputs, required
from onnxq.data.samples import evenly
from onnxq.evaluation.comparison import ComparisonSpec
from onnxq.evaluation.goal import Goal
from onnxq.evaluation.warnings import (
    INSPECTED_SAMPLES,
    drop_equal_samples,
    find_sample_warnings,
    reject_constant_samples,
    warn_unmeasured_nodes,
)
from onnxq.onnx_api import weightless_model
from onnxq.pipeline.prepare import PreparedRun
from onnxq.system.failures import tolerate

GENERATED = "there are no samples: the SQNR is that of generated inputs, and real ones may have another; give --calib"
"""What a report says of the accuracy of a model that was quantized without samples."""


@dataclass(frozen=True, eq=False)
class SplitSamples:
    """The samples of a run.

    Attributes:
        fit: those by which ranges and plans are chosen.
        holdout: those by which models are judged.
        apart: whether the latter were given for that.
        generated: whether all of them are generated inputs.
        images: how image files became arrays, in words; empty if there are none.
        warnings: why they may not be representative, in sentences.
    """

    fit: SampleSource
    holdout: SampleSource
    apart: bool = False
    generated: bool = False
    images: str = ""
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: PreparedRun, data: Data, goal: Goal) -> SplitSamples:
        """Open samples for a model and split them.

        With decibels as the goal, equal samples count once, and a part is kept apart unless samples to judge by were
        given. A metric may have a label for each sample, so equal ones count too. A metric that knows samples by
        themselves judges by a part, and a function of the user's by all.

        Raises:
            DataError: the samples do not fit the model, or all have the same values.
        """
        bench, metric = model.bench, goal.own_metric
        # A metric counts on the order of all samples, as do its labels.
        whole = bench.samples(data.calibration, data, in_order=goal.metric is not None)
        validation = data.validation
        others = None if validation is None else bench.samples(validation, data, in_order=goal.metric is not None)
        if data.generated:
            return cls(whole, whole, generated=True, warnings=(GENERATED,))
        inspected = reject_constant_samples(list(evenly(whole, INSPECTED_SAMPLES)))
        if metric is not None:
            parts = split(whole, len(whole)) if others is None and metric.knows_samples else (whole, others or whole)
        elif others is None:
            parts = split(drop_equal_samples(whole, inspected))
        else:
            looked = reject_constant_samples(list(evenly(others, INSPECTED_SAMPLES)))
            parts = drop_equal_samples(whole, inspected), drop_equal_samples(others, looked)
        inputs = with_optional(model_inputs(weightless_model(bench.graph)), data.chained)
        options = data.image_options or ImageOptions()
        images = describe_image_samples(whole, inputs, options)
        crop = warn_narrow_crop(required(inputs)[0], options) if images else ()
        warnings = (*crop, *find_sample_warnings(model.reference, inspected, len(whole)))
        if goal.metric is None:
            with tolerate("the check for nodes that are not compared"):
                warnings += tuple(warn_unmeasured_nodes(ComparisonSpec.of(model.reference, bench.prepared)))
        return cls(*parts, apart=others is not None, images=images, warnings=warnings)
