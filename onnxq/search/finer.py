"""Finer codes for stored weights that are too coarse, as few as will do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onnxq.config.scheme import Granularity, Mode, Spec
from onnxq.numerics.affine import decibels
from onnxq.numerics.formats import format_named
from onnxq.planning.plan import Decision, Demotion, Plan
from onnxq.search.handing_back import handed_back
from onnxq.search.measures import Builds
from onnxq.search.search import FINER, FINEST, Demotions, small_nodes

# Part of the noise allowed that stored weights may make; beyond it some of them get finer codes.
_STORED_SHARE = 0.6
# Finer weights take away too little of the noise of all codes where weights make no more than this part of it.
_QUIET_SHARE = 0.25
# Between codes of fewer bits than 8 and FINER, the coarsest first: the second takes hardly more bytes than one scale a
# channel does.
_BETWEEN = (Spec("int4", (32,)), Spec("int8-narrow", (128,), scale="float16"))

HANDED_BACK = 8
"""How often models are built for handing finer codes back, for each step of coarseness, where they are small."""


def stored_goal(full: Plan, goal: float) -> float:
    """Return the SQNR in decibels at which stored weights make no more than their part of the noise allowed."""
    integers = any(one.mode in (Mode.STATIC, Mode.DYNAMIC) for one in full.decisions)
    return goal + (decibels(_STORED_SHARE) if integers else 0.0)


@dataclass(frozen=True, eq=False)
class FinerWeights:
    """Finds which weights need finer codes where nodes only store them.

    Attributes:
        laboratory: builds and measures.
        full: the plan in which every node is an integer kernel that can be.
        stores: demotions that leave no node an integer kernel.
        goal: SQNR in decibels to reach.
        is_late: whether time is up: then nothing more is handed back, and more are finer than need be.
        most: models to build at most for handing finer codes back, for each step of coarseness.
        parts: into how many of them weights are told apart.
    """

    laboratory: Builds
    full: Plan
    stores: Demotions
    goal: float
    is_late: Callable[[], bool] = lambda: False
    most: int = HANDED_BACK
    parts: float = math.inf

    def are_needed(self, share: float) -> bool:
        """Return whether weights as codes leave no noise to integer kernels, or little and are much of what they make.

        Args:
            share: part of the noise of all codes that those of weights make.
        """
        enough = self.goal if share <= _QUIET_SHARE else self._stored_goal
        return self._sqnr({}) < enough

    def found(self, noise: Mapping[str, float]) -> Demotions:
        """Return what becomes of weights whose codes are too coarse, most noise for their size first.

        They get codes of finer scales, or of 16 bits where they are small, or where even those are too coarse; where
        nothing else is faithful, they stay float. What turns out not to be needed is handed back.

        Args:
            noise: noise-to-signal ratio that the codes of a node's weights make alone, by node.
        """
        weighted = self._weighted
        sizes = {node: sum(weight.elements for weight in one.weights) for node, one in weighted.items()}
        order = sorted(weighted, key=lambda node: -noise.get(node, 0.0) / (sizes[node] + 1))
        return self._handed_back(self._too_fine(order, noise), order)

    def _too_fine(self, order: Sequence[str], noise: Mapping[str, float]) -> Demotions:
        """Return what becomes of the noisiest weights, so many of them in their order that the rest may stay."""
        weighted = self._weighted
        floats = dict.fromkeys(order, Demotion(Mode.FLOAT, _too_coarse("codes")))
        small = small_nodes(self.full)
        finer = {
            node: _finer(Mode.STORAGE, self._own(node), FINEST)
            if node in small
            else _finer(_storing(weighted[node].mode), self._own(node), FINER)
            for node in order
        }
        # Those of 8 bits were never tried for small ones.
        finest = {node: finer[node] if node in small else _finer(Mode.STORAGE, FINER, FINEST) for node in order}
        with_finer = self._sqnr(finer)
        if with_finer >= self._stored_goal:
            return self._fewest(finer, {}, noise)
        if with_finer >= self.goal:
            return finer
        # Runtimes that multiply codes may round the data too, which those that are decoded first are spared.
        decoded = {node: replace(one, mode=Mode.STORAGE) for node, one in finer.items()}
        if decoded != finer:
            if self._sqnr(decoded) >= self.goal:
                return self._fewest(decoded, finer, noise)
            finer = decoded
        # Codes of 16 bits are twice as large, and floats four times, so they are for what is not faithful otherwise.
        return self._fewest(finest if self._sqnr(finest) >= self.goal else floats, finer, noise)

    def _handed_back(self, better: Demotions, order: Sequence[str]) -> Demotions:
        """Return finer codes for fewer of the weights, or codes that are less fine; first come the quiet large ones."""

        def is_enough(demotions: Demotions) -> bool:
            return not self.is_late() and self._sqnr(demotions) >= min(self._stored_goal, reached)

        reached = self._sqnr(better)
        if reached < self.goal:
            return better
        quiet = [node for node in reversed(order) if node in better]
        kept = handed_back(better, dict.fromkeys(quiet), is_enough, most=self.most)
        for spec in _BETWEEN:
            finer = [node for node in quiet if node in kept and _is_between(self._weighted[node], spec, kept[node])]
            coarser = {node: _finer(kept[node].mode, self._own(node), spec) for node in finer}
            kept = handed_back(kept, coarser, is_enough, most=self.most)
        return kept

    @cached_property
    def _weighted(self) -> Mapping[str, Decision]:
        return {one.node: one for one in self.full.decisions if one.weights}

    def _own(self, node: str) -> Spec:
        """Return how the scheme wants a node's weights."""
        return self._weighted[node].weights[0].spec

    def _fewest(self, better: Demotions, base: Demotions, noise: Mapping[str, float]) -> Demotions:
        """Return as few of the first as reach the goal, looking first where they take half of the noise away."""
        order, total = tuple(better), sum(noise.values())
        low, high, taken, middle = 0, len(better), 0.0, 0
        while middle < high and taken < total / 2:
            taken += noise.get(order[middle], 0.0)
            middle += 1
        near = max(int(high / self.parts), 1)
        while high - low > near and not self.is_late():
            middle = min(max(middle, low + 1), high - 1)
            enough = self._sqnr({**base, **{node: better[node] for node in order[:middle]}}) >= self._stored_goal
            low, high = (low, middle) if enough else (middle, high)
            middle = (low + high) // 2
        return {**base, **{node: better[node] for node in order[:high]}}

    @property
    def _stored_goal(self) -> float:
        return stored_goal(self.full, self.goal)

    def _sqnr(self, demotions: Demotions) -> float:
        return self.laboratory.sqnr(self.laboratory.plan({**self.stores, **demotions}))


def _finer(mode: Mode, coarse: Spec, spec: Spec) -> Demotion:
    """Return the wish for codes of a spec, since those of a coarser one were too coarse."""
    if isinstance(coarse.per, Granularity):
        codes = f"{coarse.format} codes with one scale a {coarse.per}"
    else:
        codes = f"{coarse.format} codes in blocks of {'x'.join(map(str, coarse.per))}"
    reason = _too_coarse(codes)
    return Demotion(mode, reason, weight=spec, finer=reason)


def _too_coarse(codes: str) -> str:
    return f"its weights as {codes} would hurt the worst output too much"


def _storing(mode: Mode) -> Mode:
    """Return the mode in which a node only has other weights."""
    return Mode.WEIGHT_ONLY if mode is Mode.WEIGHT_ONLY else Mode.STORAGE


def _is_between(decision: Decision, spec: Spec, better: Demotion) -> bool:
    """Return whether codes of a spec are finer than those that the scheme wants, and coarser than better ones."""
    bits, own = format_named(spec.format).bits, format_named(decision.weights[0].spec.format).bits
    return own < bits and better.weight in (FINER, FINEST)
