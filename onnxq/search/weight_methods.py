"""Accuracy methods for weights: AWQ, GPTQ and sequential bias correction, and how a plan is carried out again."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.awq import ScalableTensor, scalable_tensors
from onnxq.algorithms.bias_correction import layers_of, with_sequential_biases
from onnxq.algorithms.encode import encode
from onnxq.algorithms.encoders import encode_weight, weight_gemm_view, weight_requests
from onnxq.algorithms.encoding_config import EncodingConfig, config_from_plan
from onnxq.algorithms.equalization import NOTHING, ChannelScales, Equalization, WeightRescaling
from onnxq.algorithms.gptq import GRAM_BYTES, Gptq, WeightMatrices, within
from onnxq.algorithms.range_search import pooled
from onnxq.calibration.accumulators import Request
from onnxq.calibration.collect import collect
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.calibration.workers import Threads
from onnxq.config.effort import FAST, FULL, Accuracy
from onnxq.config.scheme import Mode
from onnxq.ir import Node
from onnxq.planning.plan import Plan, Weight
from onnxq.runtime.sessions import Array
from onnxq.search.cross_validation import ALL, LARGE, AlgorithmResult, CrossValidator, Finding, Groups
from onnxq.search.sensitivity import QuantizerToggleSession

# So often there are Gram matrices at once: of three groups of samples, of three sums of these and a sum in the making,
# and those that a thread observes and hands over.
_GRAMS = 9

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


def with_awq(validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: Accuracy) -> AlgorithmResult:
    """Return the basis with factors for float data that weights of few bits multiply, where these lower the noise.

    The factors of a tensor are a power of the size of its channels: the power with which what its readers compute has
    the least error, as the Gram matrix of the data has it.

    Args:
        validator: say whether they do.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: weights of how many bits are compensated, as the others need no factors either, and what Gram
            matrices may take.
    """
    bench = validator.evaluator.bench
    rows = Gptq.of_samples(sum(map(len, validator.groups)), bits=accuracy.compensated_bits)
    asked: dict[Request, ScalableTensor] = {}
    sizes: dict[Request, int] = {}
    possible = scalable_tensors(bench.graph, plan)
    for one in possible.values():
        sums = [weight_gemm_view(reader, _weight(reader, plan), rows) for reader in one.readers]
        if sums and all(sums):
            request = Request.of(one.tensor.name, "hessian", -1, rows=rows.rows)
            asked[request], sizes[request] = one, max(found.gram_bytes for found in sums if found is not None)
    if bench.is_large:
        return basis.unfit(LARGE)
    if not asked:
        bits = f"by weights of {accuracy.compensated_bits} bits or fewer" if possible else "by codes alone"
        return basis.unfit(f"no float data that a normalization or a Mul makes is multiplied {bits}")
    asked = {request: asked[request] for request in within(sizes, gram_bytes(accuracy))}
    if not asked:
        return basis.unfit("Gram matrices of the data have no room in memory")

    @cache
    def seen(group: int) -> CalibrationStatistics:
        return collect(bench.prepared, validator.groups[group], tuple(asked), workers=gram_workers(accuracy))

    @cache
    def found(groups: Groups) -> AlgorithmResult:
        statistics = reduce(CalibrationStatistics.plus, map(seen, groups)).statistics
        factors = {
            one.tensor.name: best
            for request, one in asked.items()
            if isinstance(gram := statistics[request], HessianAccumulator)
            and (best := _best(one, plan, gram)) is not None
        }
        return replace(basis, recipe=replace(basis.recipe, scaling=Equalization(factors)))

    return validator.kept(plan, basis, [found], SCALING_WORTH)


def gram_bytes(accuracy: Accuracy) -> int:
    """Return the bytes that the Hessian matrices of one group of samples may take."""
    return GRAM_BYTES if accuracy.memory is None else min(GRAM_BYTES, accuracy.memory // _GRAMS)


def gram_workers(accuracy: Accuracy) -> Threads | None:
    """Return what runs samples for Gram matrices: each thread has its own, so memory may allow for one."""
    return None if accuracy.memory is None else Threads(1)


def _best(one: ScalableTensor, plan: Plan, gram: HessianAccumulator) -> ChannelScales | None:
    """Return the factors with which the readers of a tensor lose least; None where they lose least without."""
    products = gram.moments()[0] if gram.count else np.zeros(0)
    if not products.any() or not np.isfinite(products).all():
        return None
    sizes = np.sqrt(products.diagonal())
    seen = sizes > _LEAST * sizes.max()
    # About 1, so that nothing grows large, and 1 where nothing is known.
    sizes = np.where(seen, sizes / np.exp(np.log(sizes[seen]).mean()), 1.0)
    tried = [ChannelScales(len(one.tensor.shape or ()) - 1, sizes**power) for power in _POWERS]
    losses = [
        sum(_lost(reader, _weight(reader, plan), products, factors) for reader in one.readers) for factors in tried
    ]
    best = int(np.argmin(losses))
    return tried[best] if best else None


def _lost(reader: Node, weight: Weight, products: NDArray[np.float64], factors: ChannelScales) -> float:
    """Return the squared error of what a product computes, in its mean over the rows of its data."""
    source, around = reader.inputs[weight.index], WeightRescaling(factors)
    codes = encode_weight(around.weight(reader, weight.index, source.values), weight)
    error = source.values - around.own_weight(reader, weight.index, codes.dequantize())
    matrix = WeightMatrices.of_product(error.shape, transposed=bool(reader.attrs.get("transB", 0))).view(error)[0]
    return float(np.vdot(matrix @ products, matrix))


def _weight(reader: Node, plan: Plan) -> Weight:
    return next(one for one in plan.by_node[reader.name].weights if one.index == _WEIGHT)


# Whether errors of rounding that cancel pay: told on samples that the Gram matrices have not seen.

# The fewer samples there are for the columns of a weight, the more damping it takes.
_DAMPINGS = (0.01, 0.1, 0.3)
_LIKELIEST = 0.1
# Less than this part of all noise is not worth the Gram matrices: without any of it there would be 1.2 dB less.
_SHARE = 0.25


def with_gptq(validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: Accuracy) -> AlgorithmResult:
    """Return the basis with weights rounded so that their errors cancel, where that lowers the noise.

    Args:
        validator: say whether it does.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: weights of how many bits are tried, and what their Gram matrices may take.
    """
    bench = validator.evaluator.bench
    first = Gptq.of_samples(
        sum(map(len, validator.groups)), bits=accuracy.compensated_bits, memory=gram_bytes(accuracy)
    )
    requests = weight_requests(plan, bench.graph, first)
    if reason := _obstacle(validator, plan, basis, first, requests):
        return basis.unfit(reason)

    @cache
    def seen(group: int) -> CalibrationStatistics:
        return collect(bench.prepared, validator.groups[group], requests, workers=gram_workers(accuracy))

    @cache
    def joined(groups: Groups) -> CalibrationStatistics:
        return _joined(basis.evidence, reduce(CalibrationStatistics.plus, map(seen, groups)))

    def found(recipe: EncodingConfig, damping: float, groups: Groups) -> AlgorithmResult:
        compensated = replace(recipe, compensation=replace(first, damping=damping))
        return replace(basis, recipe=compensated, evidence=joined(groups))

    def lowest_error(recipe: EncodingConfig) -> partial[AlgorithmResult]:
        tried = [partial(found, recipe, damping) for damping in _DAMPINGS]
        return validator.lowest_error(plan, tried)

    def plain(groups: Groups) -> AlgorithmResult:
        return basis

    # What is no better with the likeliest damping pays with no other.
    tried: list[Finding] = [plain, partial(found, basis.recipe, _LIKELIEST)]
    if validator.lowest_error(plan, tried) is plain:
        return basis
    best = lowest_error(replace(basis.recipe, scaling=NOTHING))
    # Factors that pay where weights are rounded to their nearest codes need not do so where their errors cancel.
    if basis.recipe.scaling.factors and validator.improves(
        plan, scaled := lowest_error(basis.recipe), best, SCALING_WORTH
    ):
        best = scaled
    # Errors that cancel on few samples need not do so on others.
    return best(ALL) if validator.improves_significantly(plan, best, plain) else basis


def _obstacle(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, first: Gptq, requests: Sequence[Request]
) -> str:
    """Return why errors of rounding are not made to cancel, or an empty string."""
    bench = validator.evaluator.bench
    if bench.is_large:
        return LARGE
    if not requests and weight_requests(plan, bench.graph, replace(first, memory=sys.maxsize)):
        return "Gram matrices of the data have no room in memory"
    if not requests:
        return f"no weights of {first.bits} bits or fewer are multiplied by data that can be seen"
    return "" if _matters(validator, plan, basis) else "weights alone make hardly any of the noise"


def _matters(validator: CrossValidator, plan: Plan, basis: AlgorithmResult) -> bool:
    """Whether rounded weights alone make a good part of the noise, as they do where data stays float."""
    if not plan.activations:
        return True
    evaluator = replace(validator.evaluator, evidence=basis.evidence)
    weighted = {decision.node for decision in plan.decisions if decision.weights}
    alone = QuantizerToggleSession.of(evaluator, plan, basis.recipe, weighted)
    [noise] = alone.noises([alone.sources], range(len(evaluator.answered.samples)))
    return pooled(noise) >= _SHARE * pooled(evaluator.noise(plan, basis.recipe))


def with_asked_rows(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: Accuracy
) -> AlgorithmResult:
    """Return a basis by which the errors of those weights cancel whose Spec asks for that, without judging it.

    Args:
        validator: the samples.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: what the Gram matrices may take.
    """
    samples = sum(map(len, validator.groups))
    asked = Gptq.of_samples(samples, _LIKELIEST, bits=0, memory=gram_bytes(accuracy))
    observed = {request.tensor for request in weight_requests(plan, validator.evaluator.bench.graph, asked)}
    compensated = replace(basis, recipe=replace(basis.recipe, compensation=asked))
    return with_seen_rows(validator, plan, compensated, sorted(observed))


def with_seen_rows(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, observed: Sequence[str]
) -> AlgorithmResult:
    """Return a basis whose weights are compensated with the Gram matrices for that, summed up as they once were.

    Args:
        validator: the samples.
        plan: what becomes of each node.
        basis: what codes are chosen by, a compensation among it.
        observed: all tensors whose Gram matrices were seen then, which the plan may need no more.
    """
    bench, compensation = validator.evaluator.bench, basis.recipe.compensation
    wanted = weight_requests(plan, bench.graph, compensation) if compensation is not None else ()
    # What had no room in memory then was rounded.
    requests = tuple(request for request in wanted if request.tensor in observed)
    groups = [validator.groups[group] for group in ALL if requests and len(validator.groups[group])]
    grams = [collect(bench.prepared, group, requests, others=observed) for group in groups]
    return (
        replace(basis, evidence=_joined(basis.evidence, reduce(CalibrationStatistics.plus, grams))) if grams else basis
    )


def _joined(evidence: CalibrationStatistics, grams: CalibrationStatistics) -> CalibrationStatistics:
    """Return the evidence with Gram matrices beside, whose samples are not all of its own."""
    # Rows that wait are multiplied now, and not again for every candidate.
    whole = {one: gram.multiplied() for one, gram in grams.statistics.items() if isinstance(gram, HessianAccumulator)}
    return replace(evidence, statistics=MappingProxyType({**evidence.statistics, **whole}))


# Biases in order, kept where they lower noise on samples that they were not found on.

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


def with_bias_correction(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: Accuracy
) -> AlgorithmResult:
    """Return the basis with biases corrected in order, see `with_sequential_biases`, where these lower the noise.

    Only plans most of whose layers round their data get them.

    Args:
        validator: say whether they do.
        plan: what becomes of each node.
        basis: what codes are chosen by; its biases were those of another plan.
        accuracy: with little effort they are found once, and judged by the samples that are left.
    """
    bench, plain = validator.evaluator.bench, replace(basis, recipe=replace(basis.recipe, biases={}))
    layers = layers_of(bench.graph, plan)
    static = sum(plan.by_node[node].mode is Mode.STATIC for node in layers)
    few = min(len(validator.of(groups, _MOST_SAMPLES)) for groups in validator.found_on) < _FEWEST_SAMPLES
    if bench.is_large:
        return plain.unfit(LARGE)
    if few:
        return plain.unfit(f"fewer than {_FEWEST_SAMPLES} samples do not tell a mean from chance")
    if not static or static < _MOSTLY * len(layers):
        return plain.unfit("most layers do not round their data")
    codes = encode(plan, bench.graph, plain.evidence, plain.recipe, bench.codes)

    @cache
    def found(groups: Groups) -> AlgorithmResult:
        if groups == ALL:
            # Together the folds have used every sample; what all would give is less shrunk, and nobody judges it.
            every = validator.found_on if accuracy.thorough else validator.found_on[:1]
            biases = _mean([found(one).recipe.biases for one in every])
            return replace(plain, recipe=replace(plain.recipe, biases=biases))
        samples = validator.of(groups, _MOST_SAMPLES)
        recipe = with_sequential_biases(plain.recipe, plan, bench.graph, codes, bench.prepared, samples)
        return replace(plain, recipe=recipe)

    return validator.kept(plan, plain, [found], _HARMLESS, once=not accuracy.thorough)


def _mean(biases: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {
        node: np.mean([one[node] for one in biases], axis=0, dtype=np.float64).astype(bias.dtype)
        for node, bias in biases[0].items()
    }


# What a plan does not hold of how its codes were chosen, found again from the same samples to the last bit.


def replay(validator: CrossValidator, plan: Plan, evidence: CalibrationStatistics) -> AlgorithmResult:
    """Return what the codes of a plan are chosen by, with nothing tried.

    Args:
        validator: the samples as they were when it was chosen.
        plan: from a report or file.
        evidence: of what the plan needs.
    """
    basis = AlgorithmResult(config_from_plan(plan, sum(map(len, validator.groups))), evidence)
    if plan.damping is not None:
        basis = with_seen_rows(validator, plan, basis, plan.damping.observed)
    if "bias-correction" in plan.accuracy:
        basis = with_decided_biases(validator, plan, basis, FULL if plan.thorough else FAST)
    return basis


def with_decided_biases(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: Accuracy
) -> AlgorithmResult:
    """Return the basis with biases corrected in order, which are known to pay.

    Args:
        validator: the samples that they are found on.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: with how much effort they were found.
    """
    return with_bias_correction(_Decided(validator.evaluator, validator.samples), plan, basis, accuracy)


@dataclass(frozen=True, eq=False)
class _Decided(CrossValidator):
    """CrossValidator that take what is found without judging it: that was done when the plan was made."""

    def kept(
        self, plan: Plan, basis: AlgorithmResult, findings: Sequence[Finding], worth: float = 1.0, *, once: bool = False
    ) -> AlgorithmResult:
        """Return what the first finding makes of all samples."""
        return findings[0](ALL)
