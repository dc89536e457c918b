"""EncodingConfig: how a plan is encoded beyond what it says, and how a plan file records it."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from onnxq.algorithms.activation_params import channel_means, found_range
from onnxq.algorithms.equalization import NOTHING, ChannelScales, Equalization
from onnxq.algorithms.gptq import Gptq
from onnxq.algorithms.range_search import RangeChoice, without_limits
from onnxq.calibration.methods import CalibrationMethod, MinMax, format_method, parse_calibration_method
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.numerics.affine import Array
from onnxq.planning.plan import Activation, Damping, Decision, Plan, Scaling


@dataclass(frozen=True)
class EncodingConfig:
    """How codes are chosen beyond what a plan says.

    Attributes:
        ranges: which range the statistics of a tensor mean.
        own_ranges: by tensor, where another than `ranges` says so.
        biases: by node, in the shape and type of those of the model: biases that were found to make up for all rounding
            in front of them, in the place of those that make up for the mean of the own weight's.
        compensation: which weights are rounded so that their errors cancel; None rounds all to their nearest codes.
        migration: what the channels of tensors are divided by before they become codes.
        scaling: what the channels of float data are divided by, which weights of codes make up for.
    """

    ranges: CalibrationMethod = field(default_factory=MinMax)
    own_ranges: Mapping[str, CalibrationMethod] = field(default_factory=lambda: MappingProxyType({}))
    biases: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    compensation: Gptq | None = None
    migration: Equalization = NOTHING
    scaling: Equalization = NOTHING

    def with_choice(self, choice: RangeChoice[CalibrationMethod]) -> EncodingConfig:
        """Return the recipe with these ranges."""
        return replace(self, ranges=choice.default, own_ranges=choice.own)

    @property
    def accuracy(self) -> tuple[str, ...]:
        """Names of the accuracy methods whose findings it holds besides ranges."""
        held = {
            "equalization": bool(self.migration.factors),
            "awq": bool(self.scaling.factors),
            "gptq": self.compensation is not None,
            "bias-correction": bool(self.biases),
        }
        return tuple(name for name, holds in held.items() if holds)

    @property
    def methods(self) -> tuple[CalibrationMethod, ...]:
        """All calibration methods that are used."""
        return self.ranges, *self.own_ranges.values()

    @property
    def key(self) -> Hashable:
        """What tells recipes apart that give other codes."""
        biases = hashlib.blake2b()
        for node in sorted(self.biases):
            biases.update(node.encode() + self.biases[node].tobytes())
        own = tuple((tensor, repr(self.own_ranges[tensor])) for tensor in sorted(self.own_ranges))
        return repr(self.ranges), own, biases.digest(), self.migration.key, self.scaling.key, self.compensation


DEFAULT_CONFIG = EncodingConfig()
"""What is taken where nothing else is said."""


# --- in plan files --------------------------------------------------------------------------------------------------

_LAST = -1


def attach_encodings(plan: Plan, recipe: EncodingConfig, evidence: CalibrationStatistics) -> Plan:
    """Return a plan that says by which recipe, and from which ranges, its model was built.

    Not in it are biases that were corrected and weights whose errors cancel, which are as large as the model: they
    follow from the same samples again.

    Args:
        plan: what was built.
        recipe: how its codes were chosen.
        evidence: what its codes rest on. Means that were not observed, by which no bias was corrected, are left out.
    """
    means = channel_means(plan, evidence)

    def observed(decision: Decision) -> Decision:
        known = decision.mean is None or decision.mean.tensor in means
        return decision if known else replace(decision, mean=None)

    return replace(
        plan,
        decisions=tuple(map(observed, plan.decisions)),
        activations=tuple(_with_recipe(one, recipe, evidence) for one in plan.activations),
        ranges=format_method(recipe.ranges) if plan.preparation is None else plan.ranges,
        accuracy=recipe.accuracy,
        damping=_damping(recipe, evidence),
        scaling=tuple(Scaling(name, tuple(map(float, one.values))) for name, one in recipe.scaling.factors.items()),
        observed=plan.observed or tensors_seen(evidence),
    )


def _damping(recipe: EncodingConfig, evidence: CalibrationStatistics) -> Damping | None:
    compensation = recipe.compensation
    return Damping(compensation.damping, compensation.bits, tensors_seen(evidence, "hessian")) if compensation else None


def tensors_seen(evidence: CalibrationStatistics, kind: str = "") -> tuple[str, ...]:
    """Return the tensors of which there is a kind of evidence; where none is named, any but that of weights."""
    requests = (one for one in evidence.statistics if (one.kind == kind if kind else one.kind != "hessian"))
    return tuple(dict.fromkeys(one.tensor for one in requests))


def _with_recipe(activation: Activation, recipe: EncodingConfig, evidence: CalibrationStatistics) -> Activation:
    method, factors = recipe.own_ranges.get(activation.tensor), recipe.migration.factors.get(activation.tensor)
    found = activation.found_range
    if activation.fixed_range is None:
        low, high = found_range(activation, evidence, method or recipe.ranges)
        found = float(low), float(high)
    return replace(
        activation,
        ranges=activation.ranges if method is None else format_method(without_limits(method)),
        found_range=found,
        factors=tuple(map(float, factors.values)) if factors is not None else (),
        channels=factors.axis if factors is not None else 0,
    )


def config_from_plan(plan: Plan, samples: int) -> EncodingConfig:
    """Return the recipe that `attach_encodings` has put into a plan, but for the biases, which are to be found anew.

    Args:
        plan: from a report or file.
        samples: how many samples its compensation rests on.

    Raises:
        SchemeError: a range is still to be found, and the method is not known.
    """
    # Where all ranges are known, the package whose method found them need not be installed.
    open_ones = {one.tensor: one.ranges for one in plan.activations if one.known_range is None}
    methods = {tensor: parse_calibration_method(text) for tensor, text in open_ones.items() if text}
    factors = {
        one.tensor: ChannelScales(one.channels, np.array(one.factors)) for one in plan.activations if one.factors
    }
    damping = plan.damping
    return EncodingConfig(
        parse_calibration_method(plan.ranges) if plan.ranges and open_ones else MinMax(),
        methods,
        compensation=Gptq.of_samples(samples, damping.share, damping.bits) if damping is not None else None,
        migration=Equalization(factors),
        scaling=Equalization({one.tensor: ChannelScales(_LAST, np.array(one.factors)) for one in plan.scaling}),
    )
