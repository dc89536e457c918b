"""Plan and statistics to parameters: the scale and zero point of every activation that gets one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import DataError
from onnxq.evidence.statistics import Statistics
from onnxq.evidence.tensor_statistics import TensorStatistics
from onnxq.numbers.formats import format_named
from onnxq.numbers.numerics import Parameters, parameters_from_range
from onnxq.numbers.spec import Method, Spec
from onnxq.numbers.torch_observers import Observer, fixed_parameters
from onnxq.planning.plan import Plan

RangeMethod = Callable[[TensorStatistics], tuple[float, float]]


def activation_parameters(
    plan: Plan, statistics: Statistics, method: RangeMethod, own: Mapping[str, RangeMethod] = MappingProxyType({})
) -> Mapping[str, Parameters]:
    """Turn what calibration saw into scales and zero points; tensors of one group share them.

    Args:
        plan: names the tensors, their specs and their groups.
        statistics: of at least ``plan.taps``.
        method: which range the statistics of a tensor mean.
        own: methods of single tensors, which go before.

    Returns:
        Parameters by tensor name.

    Raises:
        DataError: a tensor was not calibrated.
    """
    ranges: dict[str, tuple[float, float]] = {}
    for activation in plan.activations:
        found = activation.fixed_range or _calibrated_range(
            activation.tensor, statistics, own.get(activation.tensor, method)
        )
        low, high = ranges.get(activation.group, found)
        ranges[activation.group] = min(low, found[0]), max(high, found[1])
    return {
        activation.tensor: _parameters(
            ranges[activation.group], activation.spec, fixed=ranges[activation.group] == activation.fixed_range
        )
        for activation in plan.activations
    }


def channel_means(plan: Plan, statistics: Statistics) -> Mapping[str, NDArray[np.float64]]:
    """Return the mean of each channel of the tensors that a plan's corrections rest on.

    Left out are those of which calibration kept no means, or along another axis than the plan's, as it does for a plan
    in which another node was the first to read the tensor.
    """
    known = ((tensor, axis, statistics.tensors.get(tensor)) for tensor, axis in plan.means.items())
    return {tensor: found.means for tensor, axis, found in known if found and found.axis == axis and len(found.sums)}


def corrected_biases(plan: Plan, statistics: Statistics) -> int:
    """Return how many nodes of a plan have a bias that makes up for its rounded weight."""
    known = channel_means(plan, statistics)
    return sum(decision.mean is not None and decision.mean.tensor in known for decision in plan.decisions)


def _parameters(found: tuple[float, float], spec: Spec, *, fixed: bool) -> Parameters:
    if spec.method is Method.TORCH and fixed and spec.format.startswith("uint8"):
        return fixed_parameters(*found)
    if spec.method is Method.TORCH:
        return Observer(spec.format, spec.symmetric).parameters(*found)
    return parameters_from_range(*found, format_named(spec.format), symmetric=spec.symmetric)


def _calibrated_range(tensor: str, statistics: Statistics, method: RangeMethod) -> tuple[float, float]:
    found = statistics.tensors.get(tensor)
    if found is None or not found.has_range:
        raise DataError(f"tensor {tensor} has no calibration statistics; calibrate with the plan's taps")
    # A tensor that was empty in every sample has no range; zero width becomes scale 1.
    return method(found) if found.count else (0.0, 0.0)
