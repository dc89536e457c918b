"""Finer codes for stored weights that are too coarse, as few as will do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxq.planning.plan import Demotion, Plan
from onnxq.scheme import Mode
from onnxq.searching.measures import Measures
from onnxq.searching.noises import decibels
from onnxq.searching.search import FINER, FINEST, Demotions, small_nodes

# Part of the noise allowed that stored weights may make; beyond it some of them get finer codes.
_STORED_SHARE = 0.6


@dataclass(frozen=True, eq=False)
class FinerWeights:
    """Finds which weights need finer codes where nodes only store them.

    Attributes:
        laboratory: builds and measures.
        full: the plan in which every node is an integer kernel that can be.
        stores: demotions that leave no node an integer kernel.
        goal: SQNR in decibels to reach.
    """

    laboratory: Measures
    full: Plan
    stores: Demotions
    goal: float

    @property
    def are_needed(self) -> bool:
        """Whether weights as codes leave little noise to integer kernels, or none."""
        return self._sqnr({}) < self._stored_goal

    def found(self, noise: Mapping[str, float]) -> Demotions:
        """Return what becomes of weights whose codes are too coarse, most noise for their size first.

        They get codes of finer scales, or of 16 bits where they are small, or where even those are too coarse; where
        nothing else is faithful, they stay float.

        Args:
            noise: noise-to-signal ratio that the codes of a node's weights make alone, by node.
        """
        weighted = {one.node: one for one in self.full.decisions if one.weights}
        sizes = {node: sum(weight.elements for weight in one.weights) for node, one in weighted.items()}
        order = sorted(weighted, key=lambda node: -noise.get(node, 0.0) / (sizes[node] + 1))
        hurts = "its weights as codes would hurt the worst output too much"
        floats = dict.fromkeys(order, Demotion(Mode.FLOAT, hurts))
        finest = dict.fromkeys(order, Demotion(Mode.STORAGE, hurts.replace("codes", "8-bit codes"), weight=FINEST))
        small = small_nodes(self.full)
        reason = "its weights as coarser codes would hurt the worst output too much"
        finer = {
            node: finest[node] if node in small else Demotion(_storing(weighted[node].mode), reason, weight=FINER)
            for node in order
        }
        with_finer = self._sqnr(finer)
        if with_finer >= self._stored_goal:
            return self._fewest(finer, {}, noise)
        # Codes of 16 bits are twice as large, and floats four times, so they are for what is not faithful otherwise.
        if with_finer >= self.goal:
            return finer
        return self._fewest(finest if self._sqnr(finest) >= self.goal else floats, finer, noise)

    def _fewest(self, better: Demotions, base: Demotions, noise: Mapping[str, float]) -> Demotions:
        """Return as few of the first as reach the goal, looking first where they take half of the noise away."""
        order, total = tuple(better), sum(noise.values())
        low, high, taken, middle = 0, len(better), 0.0, 0
        while middle < high and taken < total / 2:
            taken += noise.get(order[middle], 0.0)
            middle += 1
        while high - low > 1:
            middle = min(max(middle, low + 1), high - 1)
            enough = self._sqnr({**base, **{node: better[node] for node in order[:middle]}}) >= self._stored_goal
            low, high = (low, middle) if enough else (middle, high)
            middle = (low + high) // 2
        return {**base, **{node: better[node] for node in order[:high]}}

    @property
    def _stored_goal(self) -> float:
        """The SQNR in decibels at which stored weights make no more than their part of the noise allowed."""
        return self.goal + decibels(_STORED_SHARE)

    def _sqnr(self, demotions: Demotions) -> float:
        return self.laboratory.sqnr(self.laboratory.plan({**self.stores, **demotions}))


def _storing(mode: Mode) -> Mode:
    """Return the mode in which a node only has other weights."""
    return Mode.WEIGHT_ONLY if mode is Mode.WEIGHT_ONLY else Mode.STORAGE
