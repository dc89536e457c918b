"""EncodingConfig: the results of accuracy methods that the encoding of a plan uses, and their form in plan files."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from onnxq.algorithms.activation_params import channel_means, found_range
from onnxq.algorithms.equalization import NOTHING, ChannelScales, Equalization
from onnxq.algorithms.gptq import Gptq
from onnxq.algorithms.range_search import without_limits
from onnxq.calibration.methods import CalibrationMethod, MinMax, format_method, parse_calibration_method
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.planning.plan import Activation, AwqScales, Damping, Decision, Plan


@dataclass(frozen=True)
class EncodingConfig:
    """The choices that determine quantized values beyond the plan.

    Attributes:
        ranges: calibration method of all tensors.
        own_ranges: calibration methods of single tensors, which take precedence.
        gptq: GPTQ settings; None rounds all weights to nearest.
        equalization: factors by which channels of quantized activations are divided (equalization).
        awq: factors by which channels of float activations are divided (AWQ).
    """

    ranges: CalibrationMethod = field(default_factory=MinMax)
    own_ranges: Mapping[str, CalibrationMethod] = field(default_factory=lambda: MappingProxyType({}))
    gptq: Gptq | None = None
    equalization: Equalization = NOTHING
    awq: Equalization = NOTHING

    @property
    def accuracy(self) -> tuple[str, ...]:
        """Names of the accuracy methods in use, without calibration methods."""
        held = {
            "equalization": bool(self.equalization.factors),
            "awq": bool(self.awq.factors),
            "gptq": self.gptq is not None,
        }
        return tuple(name for name, holds in held.items() if holds)

    @property
    def methods(self) -> tuple[CalibrationMethod, ...]:
        """All calibration methods in use."""
        return self.ranges, *self.own_ranges.values()

    @property
    def key(self) -> Hashable:
        """A key that differs between configs with different quantized values."""
        own = tuple((tensor, repr(self.own_ranges[tensor])) for tensor in sorted(self.own_ranges))
        return repr(self.ranges), own, self.equalization.key, self.awq.key, self.gptq


DEFAULT_CONFIG = EncodingConfig()
"""Min-max calibration and no accuracy method."""


# --- in plan files --------------------------------------------------------------------------------------------------

_LAST = -1


def attach_encodings(plan: Plan, config: EncodingConfig, statistics: CalibrationStatistics) -> Plan:
    """Return a plan that records the config and the ranges its model was built from.

    The plan file does not hold GPTQ weights, which are as large as the model. The same samples reproduce them.

    Args:
        plan: the built plan.
        config: the config it was encoded with.
        statistics: the calibration statistics. Mean requests without a statistic are dropped, because no bias uses
            them.
    """
    means = channel_means(plan, statistics)

    def observed(decision: Decision) -> Decision:
        known = decision.mean is None or decision.mean.tensor in means
        return decision if known else replace(decision, mean=None)

    return replace(
        plan,
        decisions=tuple(map(observed, plan.decisions)),
        activations=tuple(_with_config(activation, config, statistics) for activation in plan.activations),
        ranges=format_method(config.ranges) if plan.preparation is None else plan.ranges,
        accuracy=config.accuracy,
        damping=_damping(config, statistics),
        awq=tuple(AwqScales(name, tuple(map(float, scaled.values))) for name, scaled in config.awq.factors.items()),
        observed=plan.observed or tensors_seen(statistics),
    )


def _damping(config: EncodingConfig, statistics: CalibrationStatistics) -> Damping | None:
    gptq = config.gptq
    return Damping(gptq.damping, gptq.bits, tensors_seen(statistics, "hessian")) if gptq else None


def tensors_seen(statistics: CalibrationStatistics, kind: str = "") -> tuple[str, ...]:
    """Return the tensors that have statistics of a kind; without a kind, of any kind but Hessians."""
    requests = (
        request for request in statistics.statistics if (request.kind == kind if kind else request.kind != "hessian")
    )
    return tuple(dict.fromkeys(request.tensor for request in requests))


def _with_config(activation: Activation, config: EncodingConfig, statistics: CalibrationStatistics) -> Activation:
    method, factors = config.own_ranges.get(activation.tensor), config.equalization.factors.get(activation.tensor)
    found = activation.found_range
    if activation.fixed_range is None:
        low, high = found_range(activation, statistics, method or config.ranges)
        found = float(low), float(high)
    return replace(
        activation,
        ranges=activation.ranges if method is None else format_method(without_limits(method)),
        found_range=found,
        factors=tuple(map(float, factors.values)) if factors is not None else (),
        channels=factors.axis if factors is not None else 0,
    )


def config_from_plan(plan: Plan, samples: int) -> EncodingConfig:
    """Return the config that `attach_encodings` stored in a plan.

    Args:
        plan: from a report or file.
        samples: number of samples for the Hessians of GPTQ.

    Raises:
        SchemeError: a range is not known yet, and its calibration method is unknown.
    """
    # If all ranges are known, the package with the calibration method need not be installed.
    open_ranges = {
        activation.tensor: activation.ranges for activation in plan.activations if activation.known_range is None
    }
    methods = {tensor: parse_calibration_method(text) for tensor, text in open_ranges.items() if text}
    factors = {
        activation.tensor: ChannelScales(activation.channels, np.array(activation.factors))
        for activation in plan.activations
        if activation.factors
    }
    damping = plan.damping
    return EncodingConfig(
        parse_calibration_method(plan.ranges) if plan.ranges and open_ranges else MinMax(),
        methods,
        gptq=Gptq.of_samples(samples, damping.share, damping.bits) if damping is not None else None,
        equalization=Equalization(factors),
        awq=Equalization({scaled.tensor: ChannelScales(_LAST, np.array(scaled.factors)) for scaled in plan.awq}),
    )
