"""Biases in order, kept where they lower noise on samples that they were not found on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from onnxq.algorithms.codes import encode
from onnxq.algorithms.sequential_bias import layers_of, with_sequential_biases
from onnxq.config.scheme import Mode
from onnxq.planning.plan import Plan
from onnxq.runtime.sessions import Array
from onnxq.search.effort import Accuracy
from onnxq.search.folds import ALL, LARGE, Basis, Folds, Groups

# More find no better means (of 192 and 36 samples, 8 found the same decibels as 12, and these as 32), and each costs
# three runs of the float model.
_MOST_SAMPLES = 8
# Fewer do not tell a mean from chance.
_FEWEST_SAMPLES = 3
# They are shrunk as far as samples disagree, so that few of these need not see all that they gain (0.9 dB of one
# network with 400, nothing with 12); what is seen to raise noise is left out.
_HARMLESS = 1.0
# What rounded weights alone do to the mean of their own layer is made up for without running anything.
_MOSTLY = 0.5


def with_biases(folds: Folds, plan: Plan, basis: Basis, accuracy: Accuracy) -> Basis:
    """Return the basis with biases corrected in order, see `with_sequential_biases`, where these lower the noise.

    Only plans most of whose layers round their data get them.

    Args:
        folds: say whether they do.
        plan: what becomes of each node.
        basis: what codes are chosen by; its biases were those of another plan.
        accuracy: with little effort they are found once, and judged by the samples that are left.
    """
    bench, plain = folds.trials.bench, replace(basis, recipe=replace(basis.recipe, biases={}))
    layers = layers_of(bench.graph, plan)
    static = sum(plan.by_node[node].mode is Mode.STATIC for node in layers)
    few = min(len(folds.of(groups, _MOST_SAMPLES)) for groups in folds.found_on) < _FEWEST_SAMPLES
    if bench.is_large:
        return plain.unfit(LARGE)
    if few:
        return plain.unfit(f"fewer than {_FEWEST_SAMPLES} samples do not tell a mean from chance")
    if not static or static < _MOSTLY * len(layers):
        return plain.unfit("most layers do not round their data")
    codes = encode(plan, bench.graph, plain.evidence, plain.recipe, bench.codes)

    @cache
    def found(groups: Groups) -> Basis:
        if groups == ALL:
            # Together the folds have used every sample; what all would give is less shrunk, and nobody judges it.
            every = folds.found_on if accuracy.thorough else folds.found_on[:1]
            biases = _mean([found(one).recipe.biases for one in every])
            return replace(plain, recipe=replace(plain.recipe, biases=biases))
        samples = folds.of(groups, _MOST_SAMPLES)
        recipe = with_sequential_biases(plain.recipe, plan, bench.graph, codes, bench.prepared, samples)
        return replace(plain, recipe=recipe)

    return folds.kept(plan, plain, [found], _HARMLESS, once=not accuracy.thorough)


def _mean(biases: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {
        node: np.mean([one[node] for one in biases], axis=0, dtype=np.float64).astype(bias.dtype)
        for node, bias in biases[0].items()
    }
