"""Accuracy methods for weights: AWQ and GPTQ, and the replay of a plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial, reduce
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.awq import ScalableTensor, scalable_tensors
from onnxq.algorithms.encoders import encode_weight, weight_gemm_view, weight_requests
from onnxq.algorithms.encoding_config import EncodingConfig, config_from_plan
from onnxq.algorithms.equalization import NOTHING, ChannelScales, Equalization, WeightRescaling
from onnxq.algorithms.gptq import GRAM_BYTES, Gptq, WeightMatrices, within
from onnxq.algorithms.range_search import pooled
from onnxq.calibration.accumulators import Request
from onnxq.calibration.collect import collect
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.effort import AccuracyEffort
from onnxq.ir import Node
from onnxq.planning.plan import Plan, Weight
from onnxq.search.cross_validation import ALL, LARGE, AlgorithmResult, CrossValidator, Finding, Groups
from onnxq.search.sensitivity import QuantizerToggleSession

AWQ_WORTH = 0.94
"""Largest ratio of the errors with and without AWQ scales, over both folds, at which the scales are kept.

Chosen on calibration samples alone: eleven parts of those of a vision transformer, in 4 and 2 bits, each evaluated on
samples outside of the part. If the folds saw 0.93 or less, scales gained 0.2 and 0.4 dB and lost 0.1 dB once. If they
saw 0.947 to 0.985, scales lost 0.02 to 1.2 dB, though `WORTH` lets some of these pass.
"""

# Powers of the channel size to try; the first means no scales.
_POWERS = (0.0, 0.15, 0.3, 0.5, 0.7)
# A channel below this share of the largest one says nothing about its size in other samples.
_LEAST = 1e-4
_WEIGHT = 1


def with_awq(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: AccuracyEffort
) -> AlgorithmResult:
    """Scale float activations that low-bit weights multiply (AWQ), if this lowers the error.

    The scales of a tensor are a power of its channel sizes. The power is chosen by the error of the consumers, computed
    from the Hessian matrix of the activations. `accuracy` limits the bits of the weights.
    """
    bench = validator.evaluator.bench
    rows = Gptq.of_samples(sum(map(len, validator.groups)), bits=accuracy.gptq_bits)
    requested: dict[Request, ScalableTensor] = {}
    sizes: dict[Request, int] = {}
    possible = scalable_tensors(bench.graph, plan)
    for one in possible.values():
        sums = [weight_gemm_view(reader, _weight(reader, plan), rows) for reader in one.readers]
        if sums and all(sums):
            request = Request.of(one.tensor.name, "hessian", -1, rows=rows.rows)
            requested[request], sizes[request] = one, max(found.gram_bytes for found in sums if found is not None)
    if bench.is_large:
        return basis.unfit(LARGE)
    if not requested:
        bits = f"by weights of {accuracy.gptq_bits} bits or fewer" if possible else "by quantized values alone"
        return basis.unfit(f"no float data that a normalization or a Mul makes is multiplied {bits}")
    requested = {request: requested[request] for request in within(sizes, GRAM_BYTES)}
    if not requested:
        return basis.unfit("Gram matrices of the activations do not fit into memory")

    @cache
    def seen(group: int) -> CalibrationStatistics:
        return collect(bench.prepared, validator.groups[group], tuple(requested))

    @cache
    def found(groups: Groups) -> AlgorithmResult:
        statistics = reduce(CalibrationStatistics.plus, map(seen, groups)).statistics
        factors = {
            one.tensor.name: best
            for request, one in requested.items()
            if isinstance(gram := statistics[request], HessianAccumulator)
            and (best := _best(one, plan, gram)) is not None
        }
        return replace(basis, config=replace(basis.config, awq=Equalization(factors)))

    return validator.kept(plan, basis, [found], AWQ_WORTH)


def _best(one: ScalableTensor, plan: Plan, gram: HessianAccumulator) -> ChannelScales | None:
    """Return the scales with the lowest error in the consumers of a tensor; None if no scales are best."""
    products = gram.moments()[0] if gram.count else np.zeros(0)
    if not products.any() or not np.isfinite(products).all():
        return None
    sizes = np.sqrt(products.diagonal())
    seen = sizes > _LEAST * sizes.max()
    # Normalize to about 1, so nothing grows large; unknown channels get 1.
    sizes = np.where(seen, sizes / np.exp(np.log(sizes[seen]).mean()), 1.0)
    tried = [ChannelScales(len(one.tensor.shape or ()) - 1, sizes**power) for power in _POWERS]
    losses = [
        sum(_lost(reader, _weight(reader, plan), products, factors) for reader in one.readers) for factors in tried
    ]
    best = int(np.argmin(losses))
    return tried[best] if best else None


def _lost(reader: Node, weight: Weight, products: NDArray[np.float64], factors: ChannelScales) -> float:
    """Return the squared error of a matrix multiplication, averaged over the rows of its activations."""
    source, around = reader.inputs[weight.index], WeightRescaling(factors)
    encodings = encode_weight(around.weight(reader, weight.index, source.values), weight)
    error = source.values - around.own_weight(reader, weight.index, encodings.dequantize())
    matrix = WeightMatrices.of_product(error.shape, transposed=bool(reader.attrs.get("transB", 0))).view(error)[0]
    return float(np.vdot(matrix @ products, matrix))


def _weight(reader: Node, plan: Plan) -> Weight:
    return next(one for one in plan.by_node[reader.name].weights if one.index == _WEIGHT)


# GPTQ, evaluated on samples that its Hessian matrices have not seen

# The fewer samples there are for the columns of a weight, the more damping it needs.
_DAMPINGS = (0.01, 0.1, 0.3)
_LIKELIEST = 0.1
# A smaller share of the error is not worth the Hessian matrices: without any of it, the SQNR would rise by 1.2 dB.
_SHARE = 0.25


def with_gptq(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: AccuracyEffort
) -> AlgorithmResult:
    """Round weights so that their errors cancel (GPTQ), if this lowers the error.

    `accuracy` limits the bits of the weights.
    """
    bench = validator.evaluator.bench
    first = Gptq.of_samples(sum(map(len, validator.groups)), bits=accuracy.gptq_bits, memory=GRAM_BYTES)
    requests = weight_requests(plan, bench.graph, first)
    if reason := _obstacle(validator, plan, basis, first, requests):
        return basis.unfit(reason)

    @cache
    def seen(group: int) -> CalibrationStatistics:
        return collect(bench.prepared, validator.groups[group], requests)

    @cache
    def joined(groups: Groups) -> CalibrationStatistics:
        return _joined(basis.statistics, reduce(CalibrationStatistics.plus, map(seen, groups)))

    def found(config: EncodingConfig, damping: float, groups: Groups) -> AlgorithmResult:
        with_gptq = replace(config, gptq=replace(first, damping=damping))
        return replace(basis, config=with_gptq, statistics=joined(groups))

    def lowest_error(config: EncodingConfig) -> partial[AlgorithmResult]:
        tried = [partial(found, config, damping) for damping in _DAMPINGS]
        return validator.lowest_error(plan, tried)

    def plain(groups: Groups) -> AlgorithmResult:
        return basis

    # If the likeliest damping gives no gain, no other damping does.
    tried: list[Finding] = [plain, partial(found, basis.config, _LIKELIEST)]
    if validator.lowest_error(plan, tried) is plain:
        return basis
    best = lowest_error(replace(basis.config, awq=NOTHING))
    # AWQ scales that help with round-to-nearest need not help with GPTQ.
    if basis.config.awq.factors and validator.improves(plan, scaled := lowest_error(basis.config), best, AWQ_WORTH):
        best = scaled
    # Errors that cancel on few samples may not cancel on others.
    return best(ALL) if validator.improves_significantly(plan, best, plain) else basis


def _obstacle(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, first: Gptq, requests: Sequence[Request]
) -> str:
    """Return why GPTQ does not apply, or an empty string."""
    bench = validator.evaluator.bench
    if bench.is_large:
        return LARGE
    if not requests and weight_requests(plan, bench.graph, replace(first, memory=sys.maxsize)):
        return "Gram matrices of the activations do not fit into memory"
    if not requests:
        return f"no weights of {first.bits} bits or fewer are multiplied by data that can be seen"
    return "" if _matters(validator, plan, basis) else "weights alone make hardly any of the error"


def _matters(validator: CrossValidator, plan: Plan, basis: AlgorithmResult) -> bool:
    """Return whether rounded weights alone make a good part of the error: all of it with float activations."""
    if not plan.activations:
        return True
    evaluator = replace(validator.evaluator, statistics=basis.statistics)
    weighted = {decision.node for decision in plan.decisions if decision.weights}
    alone = QuantizerToggleSession.of(evaluator, plan, basis.config, weighted)
    [nsr] = alone.nsr_by_set([alone.sources], range(len(evaluator.answered.samples)))
    return pooled(nsr) >= _SHARE * pooled(evaluator.nsr(plan, basis.config))


def with_requested_rows(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: AccuracyEffort
) -> AlgorithmResult:
    """Apply GPTQ to the weights whose spec requests it, without an evaluation."""
    samples = sum(map(len, validator.groups))
    requested = Gptq.of_samples(samples, _LIKELIEST, bits=0, memory=GRAM_BYTES)
    observed = {request.tensor for request in weight_requests(plan, validator.evaluator.bench.graph, requested)}
    with_gptq = replace(basis, config=replace(basis.config, gptq=requested))
    return with_seen_rows(validator, plan, with_gptq, sorted(observed))


def with_seen_rows(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, observed: Sequence[str]
) -> AlgorithmResult:
    """Return a result with the Hessian matrices that its GPTQ needs, summed in the same order as before.

    `observed` names all tensors whose matrices were collected then, even if the plan no longer needs them.
    """
    bench, gptq = validator.evaluator.bench, basis.config.gptq
    wanted = weight_requests(plan, bench.graph, gptq) if gptq is not None else ()
    # Weights whose matrices had no room in memory then were rounded to nearest.
    requests = tuple(request for request in wanted if request.tensor in observed)
    groups = [validator.groups[group] for group in ALL if requests and len(validator.groups[group])]
    grams = [collect(bench.prepared, group, requests, others=observed) for group in groups]
    return (
        replace(basis, statistics=_joined(basis.statistics, reduce(CalibrationStatistics.plus, grams)))
        if grams
        else basis
    )


def _joined(statistics: CalibrationStatistics, grams: CalibrationStatistics) -> CalibrationStatistics:
    """Merge Hessian matrices into the statistics; their samples are not all samples of these statistics."""
    # Multiply pending rows now, and not again for every candidate.
    whole = {one: gram.multiplied() for one, gram in grams.statistics.items() if isinstance(gram, HessianAccumulator)}
    return replace(statistics, statistics=MappingProxyType({**statistics.statistics, **whole}))


# What a plan does not contain, computed again from the same samples to the last bit


def replay(validator: CrossValidator, plan: Plan, statistics: CalibrationStatistics) -> AlgorithmResult:
    """Return the encoding of a plan from a report or file, without trying anything.

    `validator` must have the samples that the plan was made with.
    """
    basis = AlgorithmResult(config_from_plan(plan, sum(map(len, validator.groups))), statistics)
    if plan.damping is not None:
        basis = with_seen_rows(validator, plan, basis, plan.damping.observed)
    return basis
