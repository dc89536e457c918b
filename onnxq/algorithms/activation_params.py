"""Scale and zero point of every activation of a plan, from calibration statistics."""

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

# A corrected bias fits a single row exactly, and half of the error of two rows, which an evaluation on the same samples
# does not show. With three rows the overfit is less than the confidence bounds allow for.
_FEWEST_ROWS = 3


def requests_for(plan: Plan, methods: Iterable[CalibrationMethod]) -> tuple[Request, ...]:
    """Return the statistics that a plan needs if any of these calibration methods may be used."""
    kinds = required_kinds(methods)
    wanted = (default_request(tensor, kind) for tensor in plan.observed_tensors for kind in kinds)
    return tuple(dict.fromkeys((*plan.requests, *wanted)))


def activation_parameters(
    plan: Plan,
    statistics: CalibrationStatistics,
    method: CalibrationMethod,
    own: Mapping[str, CalibrationMethod] = MappingProxyType({}),
) -> Mapping[str, QuantParams]:
    """Compute scale and zero point of each activation; tensors of one group share them.

    Args:
        plan: names the tensors, their specs and their groups.
        statistics: statistics that include `requests_for(plan, (method,))`.
        method: calibration method of all tensors.
        own: calibration methods of single tensors, which take precedence.

    Returns:
        Parameters by tensor name.

    Raises:
        DataError: a tensor was not calibrated.
    """
    ranges: dict[str, tuple[float, float]] = {}
    for activation in plan.activations:
        found = found_range(activation, statistics, own.get(activation.tensor, method))
        low, high = ranges.get(activation.group, found)
        ranges[activation.group] = min(low, found[0]), max(high, found[1])
    return {
        activation.tensor: _parameters(
            ranges[activation.group], activation.spec, fixed=ranges[activation.group] == activation.fixed_range
        )
        for activation in plan.activations
    }


def channel_means(plan: Plan, statistics: CalibrationStatistics) -> Mapping[str, NDArray[np.float64]]:
    """Return the channel means that the bias corrections of a plan use, by tensor.

    Tensors without means along the plan's axis are left out. Such means are missing if another node was the first
    reader in the plan at calibration. Means of fewer than 3 rows are left out as well.
    """
    axes: dict[str, int] = {}
    for decision in plan.decisions:
        if decision.mean is not None:
            axes.setdefault(decision.mean.tensor, decision.mean.axis)
    means = {tensor: statistics.of(tensor).find(ChannelMeans, axis) for tensor, axis in axes.items()}
    return {tensor: one.means for tensor, one in means.items() if one is not None and one.rows >= _FEWEST_ROWS}


def corrected_biases(plan: Plan, statistics: CalibrationStatistics) -> int:
    """Return the number of nodes of a plan that get a corrected bias."""
    known = channel_means(plan, statistics)
    return sum(decision.mean is not None and decision.mean.tensor in known for decision in plan.decisions)


def _parameters(found: tuple[float, float], spec: QuantSpec, *, fixed: bool) -> QuantParams:
    if spec.method is Method.TORCH and fixed and spec.format.startswith("uint8"):
        return fixed_parameters(*found)
    if spec.method is Method.TORCH:
        return Observer(spec.format, spec.symmetric).parameters(*found)
    return params_from_range(*found, format_named(spec.format), symmetric=spec.symmetric)


def found_range(
    activation: Activation, statistics: CalibrationStatistics, method: CalibrationMethod
) -> tuple[float, float]:
    """Return the known range of an activation, or else the range that a calibration method computes.

    Raises:
        DataError: the tensor was not calibrated.
    """
    if activation.known_range is not None:
        return activation.known_range
    key = activation.tensor, repr(method), activation.spec
    if key not in statistics.ranges:
        seen = statistics.of(activation.tensor)
        # A tensor that was empty in every sample has no range; an empty range gives scale 1.
        statistics.ranges[key] = find_range(method, seen, activation.spec) if seen.need(Range).count else (0.0, 0.0)
    return statistics.ranges[key]
