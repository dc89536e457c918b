"""Runs without samples: weights are quantized by their values alone, and the result runs on generated inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from onnxq.calibration.data import Data
from onnxq.config.scheme import Mode
from onnxq.data.inputs import inputs_of
from onnxq.errors import DataError
from onnxq.evaluation.goal import Goal
from onnxq.ir import load
from onnxq.passes.preparing.equivalence import runnable_samples
from onnxq.pipeline.request import Budget, QuantizationRequest
from onnxq.runtime.sessions import open_session

_MOST_SAMPLES = 4


def without_samples(request: QuantizationRequest, goal: Goal, budget: Budget) -> tuple[Goal, Budget]:
    """Return a goal that any finite output meets, and a budget without search and accuracy methods.

    Raises:
        DataError: activations need scales, or a metric needs samples.
    """
    if request.replay is not None or any(rule.mode is Mode.STATIC for rule in request.scheme.rules):
        raise DataError(
            f"there are no samples, and {request.scheme.name} finds the scales of activations by samples; give some, "
            "or take a weight-only preset such as int4-block32"
        )
    if goal.metric is not None:
        raise DataError("there are no samples, and a metric is measured on samples; give some, or leave the metric out")
    return replace(goal, min_sqnr=-math.inf), replace(budget, search="off", accuracy="off")


def generated_data(reference: Path) -> Data:
    """Return generated inputs that a float model runs.

    Raises:
        DataError: it runs none.
    """
    inputs = inputs_of(load(reference))
    samples = [sample for sample, _ in runnable_samples(open_session(reference), inputs, "--calib")]
    return Data(samples[:_MOST_SAMPLES], generated=True)
