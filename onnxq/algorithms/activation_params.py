"""Calibration statistics to parameters: the scale and zero point of every activation of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from onnxq.calibration.accumulators import ChannelMeans, Range, Request
from onnxq.calibration.kinds import default_request
from onnxq.calibration.methods import CalibrationMethod, find_range, required_kinds
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.numerics.affine import QuantParams, params_from_range
from onnxq.numerics.formats import format_named
from onnxq.numerics.spec import Method, QuantSpec
from onnxq.numerics.torch_observers import Observer, fixed_parameters
from onnxq.planning.plan import Activation, Plan

# One row is fitted exactly by the bias that makes up for rounding, and two by half, so that samples which judge as well
# would not tell of it; of three the rest is less than what bounds allow for.
_FEWEST_ROWS = 3


def requests_for(plan: Plan, methods: Iterable[CalibrationMethod]) -> tuple[Request, ...]:
    """Return what must be observed for a plan, so that any of these calibration methods can be used."""
    kinds = required_kinds(methods)
    wanted = (default_request(tensor, kind) for tensor in plan.taps for kind in kinds)
    return tuple(dict.fromkeys((*plan.requests, *wanted)))


def activation_parameters(
    plan: Plan,
    evidence: CalibrationStatistics,
    method: CalibrationMethod,
    own: Mapping[str, CalibrationMethod] = MappingProxyType({}),
) -> Mapping[str, QuantParams]:
    """Turn what calibration saw into scales and zero points; tensors of one group share them.

    Args:
        plan: names the tensors, their specs and their groups.
        evidence: of at least ``requests_for(plan, (method,))``.
        method: which range the statistics of a tensor mean.
        own: methods of single tensors, which go before.

    Returns:
        Parameters by tensor name.

    Raises:
        DataError: a tensor was not calibrated.
    """
    ranges: dict[str, tuple[float, float]] = {}
    for activation in plan.activations:
        found = found_range(activation, evidence, own.get(activation.tensor, method))
        low, high = ranges.get(activation.group, found)
        ranges[activation.group] = min(low, found[0]), max(high, found[1])
    return {
        activation.tensor: _parameters(
            ranges[activation.group], activation.spec, fixed=ranges[activation.group] == activation.fixed_range
        )
        for activation in plan.activations
    }


def channel_means(plan: Plan, evidence: CalibrationStatistics) -> Mapping[str, NDArray[np.float64]]:
    """Return the mean of each channel of the tensors that a plan's corrections rest on.

    Left out are those of which calibration kept no means, or along another axis than the plan's, as it does for a plan
    in which another node was the first to read the tensor, and means of fewer than 3 rows.
    """
    axes: dict[str, int] = {}
    for decision in plan.decisions:
        if decision.mean is not None:
            axes.setdefault(decision.mean.tensor, decision.mean.axis)
    found = {tensor: evidence.of(tensor).find(ChannelMeans, axis) for tensor, axis in axes.items()}
    return {tensor: one.means for tensor, one in found.items() if one is not None and one.rows >= _FEWEST_ROWS}


def corrected_biases(plan: Plan, evidence: CalibrationStatistics) -> int:
    """Return how many nodes of a plan have a bias that makes up for its rounded weight."""
    known = channel_means(plan, evidence)
    return sum(decision.mean is not None and decision.mean.tensor in known for decision in plan.decisions)


def _parameters(found: tuple[float, float], spec: QuantSpec, *, fixed: bool) -> QuantParams:
    if spec.method is Method.TORCH and fixed and spec.format.startswith("uint8"):
        return fixed_parameters(*found)
    if spec.method is Method.TORCH:
        return Observer(spec.format, spec.symmetric).parameters(*found)
    return params_from_range(*found, format_named(spec.format), symmetric=spec.symmetric)


def found_range(
    activation: Activation, evidence: CalibrationStatistics, method: CalibrationMethod
) -> tuple[float, float]:
    """Return the range of a tensor by itself: the one that is known, else what a method makes of the evidence.

    Raises:
        DataError: it was not calibrated.
    """
    if activation.known_range is not None:
        return activation.known_range
    key = activation.tensor, repr(method), activation.spec
    if key not in evidence.ranges:
        seen = evidence.of(activation.tensor)
        # A tensor that was empty in every sample has no range; zero width becomes scale 1.
        evidence.ranges[key] = find_range(method, seen, activation.spec) if seen.need(Range).count else (0.0, 0.0)
    return evidence.ranges[key]
