"""Whether weights of codes had better be multiplied by factors of their columns: told on samples not used for these."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, reduce

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.encoders import encode_weight, weight_sums
from onnxq.algorithms.gptq import Compensation, Matrices, within
from onnxq.algorithms.migration import Around, Factors, Migration
from onnxq.algorithms.scaling import Divisible, divisible
from onnxq.calibration.accumulators import Request
from onnxq.calibration.collect import collect
from onnxq.calibration.hessian import Gram
from onnxq.calibration.statistics import Evidence
from onnxq.calibration.workers import Threads
from onnxq.ir import Node
from onnxq.planning.plan import Plan, Weight
from onnxq.search.effort import Accuracy
from onnxq.search.folds import LARGE, Basis, Folds, Groups

SCALING_WORTH = 0.94
"""Times the noise of codes without factors that both folds may see at most, so that factors are kept.

Chosen on calibration samples alone: eleven parts of those of a vision transformer, in 4 and in 2 bits, each judged by
others that it had not. Where folds saw 0.93 or less, factors gained 0.2 and 0.4 dB and lost 0.1 dB once; wherever these
saw 0.947 to 0.985, they lost 0.02 to 1.2 dB, though `WORTH` lets some of that pass.
"""

# Of the size of a channel; none is the first.
_POWERS = (0.0, 0.15, 0.3, 0.5, 0.7)
# Channels of less than this part of the largest one show nothing of what they are in other samples.
_LEAST = 1e-4
_WEIGHT = 1


def with_scaling(folds: Folds, plan: Plan, basis: Basis, accuracy: Accuracy) -> Basis:
    """Return the basis with factors for float data that weights of few bits multiply, where these lower the noise.

    The factors of a tensor are a power of the size of its channels: the power with which what its readers compute has
    the least error, as the Gram matrix of the data has it.

    Args:
        folds: say whether they do.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: weights of how many bits are compensated, as the others need no factors either, and what Gram
            matrices may take.
    """
    bench = folds.trials.bench
    rows = Compensation.of_samples(sum(map(len, folds.groups)), bits=accuracy.compensated_bits)
    asked: dict[Request, Divisible] = {}
    sizes: dict[Request, int] = {}
    possible = divisible(bench.graph, plan)
    for one in possible.values():
        sums = [weight_sums(reader, _weight(reader, plan), rows) for reader in one.readers]
        if sums and all(sums):
            request = Request.of(one.tensor.name, "gram", -1, rows=rows.rows)
            asked[request], sizes[request] = one, max(found.gram_bytes for found in sums if found is not None)
    if bench.is_large:
        return basis.unfit(LARGE)
    if not asked:
        bits = f"by weights of {accuracy.compensated_bits} bits or fewer" if possible else "by codes alone"
        return basis.unfit(f"no float data that a normalization or a Mul makes is multiplied {bits}")
    asked = {request: asked[request] for request in within(sizes, accuracy.gram_bytes)}
    if not asked:
        return basis.unfit("Gram matrices of the data have no room in memory")

    @cache
    def seen(group: int) -> Evidence:
        return collect(bench.prepared, folds.groups[group], tuple(asked), workers=gram_workers(accuracy))

    @cache
    def found(groups: Groups) -> Basis:
        statistics = reduce(Evidence.plus, map(seen, groups)).statistics
        factors = {
            one.tensor.name: best
            for request, one in asked.items()
            if isinstance(gram := statistics[request], Gram) and (best := _best(one, plan, gram)) is not None
        }
        return replace(basis, recipe=replace(basis.recipe, scaling=Migration(factors)))

    return folds.kept(plan, basis, [found], SCALING_WORTH)


def gram_workers(accuracy: Accuracy) -> Threads | None:
    """Return what runs samples for Gram matrices: each thread has its own, so memory may allow for one."""
    return None if accuracy.memory is None else Threads(1)


def _best(one: Divisible, plan: Plan, gram: Gram) -> Factors | None:
    """Return the factors with which the readers of a tensor lose least; None where they lose least without."""
    products = gram.moments()[0] if gram.count else np.zeros(0)
    if not products.any() or not np.isfinite(products).all():
        return None
    sizes = np.sqrt(products.diagonal())
    seen = sizes > _LEAST * sizes.max()
    # About 1, so that nothing grows large, and 1 where nothing is known.
    sizes = np.where(seen, sizes / np.exp(np.log(sizes[seen]).mean()), 1.0)
    tried = [Factors(len(one.tensor.shape or ()) - 1, sizes**power) for power in _POWERS]
    losses = [
        sum(_lost(reader, _weight(reader, plan), products, factors) for reader in one.readers) for factors in tried
    ]
    best = int(np.argmin(losses))
    return tried[best] if best else None


def _lost(reader: Node, weight: Weight, products: NDArray[np.float64], factors: Factors) -> float:
    """Return the squared error of what a product computes, in its mean over the rows of its data."""
    source, around = reader.inputs[weight.index], Around(factors)
    codes = encode_weight(around.weight(reader, weight.index, source.values), weight)
    error = source.values - around.own_weight(reader, weight.index, codes.dequantize())
    matrix = Matrices.of_product(error.shape, transposed=bool(reader.attrs.get("transB", 0))).view(error)[0]
    return float(np.vdot(matrix @ products, matrix))


def _weight(reader: Node, plan: Plan) -> Weight:
    return next(one for one in plan.by_node[reader.name].weights if one.index == _WEIGHT)
