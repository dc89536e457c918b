"""How codes are chosen beyond what a plan says."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from onnxq.algorithms.gptq import Compensation
from onnxq.algorithms.migration import NOTHING, Migration
from onnxq.algorithms.range_choice import RangeChoice
from onnxq.calibration.methods import MinMax, RangeMethod
from onnxq.numerics.affine import Array


@dataclass(frozen=True)
class Recipe:
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

    ranges: RangeMethod = field(default_factory=MinMax)
    own_ranges: Mapping[str, RangeMethod] = field(default_factory=lambda: MappingProxyType({}))
    biases: Mapping[str, Array] = field(default_factory=lambda: MappingProxyType({}))
    compensation: Compensation | None = None
    migration: Migration = NOTHING
    scaling: Migration = NOTHING

    def with_choice(self, choice: RangeChoice[RangeMethod]) -> Recipe:
        """Return the recipe with these ranges."""
        return replace(self, ranges=choice.default, own_ranges=choice.own)

    @property
    def accuracy(self) -> tuple[str, ...]:
        """Names of the accuracy methods whose findings it holds besides ranges."""
        held = {
            "migration": bool(self.migration.factors),
            "scaling": bool(self.scaling.factors),
            "compensation": self.compensation is not None,
            "bias": bool(self.biases),
        }
        return tuple(name for name, holds in held.items() if holds)

    @property
    def methods(self) -> tuple[RangeMethod, ...]:
        """All range methods that are used."""
        return self.ranges, *self.own_ranges.values()

    @property
    def key(self) -> Hashable:
        """What tells recipes apart that give other codes."""
        biases = hashlib.blake2b()
        for node in sorted(self.biases):
            biases.update(node.encode() + self.biases[node].tobytes())
        own = tuple((tensor, repr(self.own_ranges[tensor])) for tensor in sorted(self.own_ranges))
        return repr(self.ranges), own, biases.digest(), self.migration.key, self.scaling.key, self.compensation


USUAL = Recipe()
"""What is taken where nothing else is said."""
