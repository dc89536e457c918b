"""More accurate encodings of a plan: ranges that clip, factors of channels, AWQ and GPTQ.

A method is fitted on some samples and judged on others: ranges that clip fit their own samples too well. Only what
lowers the error there beyond chance is fitted again on all samples, and kept.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.algorithms.activation_params import activation_parameters
from onnxq.algorithms.awq import ScalableTensor, scalable_tensors
from onnxq.algorithms.encoders import encode_weight, encoder_named, weight_gemm_view, weight_requests
from onnxq.algorithms.encoding_config import config_from_plan, tensors_seen
from onnxq.algorithms.equalization import (
    ChannelScales,
    Equalization,
    EqualizationGroup,
    WeightRescaling,
    channel_scales_of,
    costly_scales,
    equalization_of,
    find_groups,
    range_shares,
    select_free_scales,
)
from onnxq.algorithms.gptq import GRAM_BYTES, Gptq, WeightMatrices, within
from onnxq.algorithms.range_search import SaturatingRange, is_significant_reduction, pooled, saturation_limits
from onnxq.calibration.accumulators import ChannelRanges, Request
from onnxq.calibration.collect import collect
from onnxq.calibration.hessian import HessianAccumulator
from onnxq.calibration.instrument import ChannelAxis, expose_body_tensors
from onnxq.calibration.methods import CalibrationMethod, MeanSquaredError, Percentile, format_method
from onnxq.calibration.statistics import CalibrationStatistics
from onnxq.config.effort import AccuracyEffort
from onnxq.data.dataset import Subset, evenly_spaced_indices, group_by_file, halves
from onnxq.data.inputs import SampleSource
from onnxq.ir import Graph, Node, constants
from onnxq.planning.plan import Plan, Weight
from onnxq.search.candidate import Candidate, Recipe, Workshop
from onnxq.search.results import MethodGain
from onnxq.system.failures import tolerate
from onnxq.system.resources import Deadline, silent

_LOG = logging.getLogger(__name__)

Method: TypeAlias = Callable[[Workshop, Recipe, SampleSource], Recipe | None]
"""Finds a recipe beside another one by samples; None if the method does not apply."""

RANGES = Percentile(99.999), Percentile(99.99), MeanSquaredError()
"""The calibration methods that are tried beside minimum to maximum, in this order."""

# Samples that Hessian matrices are summed over; more find hardly anything better.
_MOST_SAMPLES = 512
# Fewer samples judge nothing.
_FEWEST_JUDGES = 2
# Candidates that drop factors which cost nodes of their own.
_MOST_DROPPED = 8
# The largest ratio of the errors with and without AWQ scales at which they are kept: of eleven parts of the samples of
# a vision transformer, scales above it lost up to 1.2 dB on other samples, and those below it gained 0.2 to 0.4 dB.
_AWQ_WORTH = 0.94
# The likeliest damping of GPTQ: the fewer samples there are for the columns of a weight, the more it needs.
_DAMPING = 0.1


def improved(
    workshop: Workshop,
    first: Candidate,
    samples: SampleSource,
    effort: AccuracyEffort,
    aim: float,
    until: Deadline,
) -> tuple[Candidate, tuple[MethodGain, ...]]:
    """Return the candidate of a plan with the recipe of least error, and what each method did.

    Args:
        workshop: builds and compares.
        first: the candidate to improve.
        samples: that it was calibrated by.
        effort: the methods that may be tried.
        aim: SQNR in decibels from which nothing more is tried, unless the effort is thorough. Factors that cost nodes
            of their own are dropped again where it is reached without them.
        until: nothing more is tried after it.
    """
    plan = first.plan
    methods = list(_methods(plan, first.recipe, effort))
    _, judges = halves(samples, len(workshop.reference.samples))
    if not methods or len(judges) < _FEWEST_JUDGES or not _may_reencode(plan):
        return first, ()
    held, fitted = _held_out(workshop, plan, samples)
    start = held.measured(plan, replace(first.recipe, statistics=held.statistics))
    kept, gains = _kept_methods(held, start, methods, fitted, math.inf if effort.thorough else aim, until)
    workshop.tried.update(held.tried)
    if not kept:
        return first, gains
    recipe = first.recipe
    for method in kept:
        recipe = method(workshop, recipe, samples) or recipe
    best = max(first, workshop.measured(plan, recipe), key=lambda candidate: candidate.sqnr)
    return _without_costly_factors(workshop, best, aim, until), gains


def _kept_methods(
    workshop: Workshop,
    best: Candidate,
    methods: Iterable[tuple[str, Method]],
    samples: SampleSource,
    aim: float,
    until: Deadline,
) -> tuple[list[Method], tuple[MethodGain, ...]]:
    """Return the methods that lower the error on samples apart from theirs, and what each that was tried did."""
    ranges, kept, gains, exhausted = best.recipe.config.ranges, list[Method](), list[MethodGain](), set[str]()
    for name, method in methods:
        if until.left <= 0 or best.bound >= aim:
            break
        if name in exhausted:
            continue
        start, before, candidate = time.monotonic(), best, None
        with tolerate(f"accuracy method {name!r}"):
            recipe = method(workshop, best.recipe, samples)
            if recipe is not None and recipe.config.key != best.recipe.config.key:
                candidate = workshop.measured(best.plan, recipe)
        if candidate is None:
            continue
        if _is_better(name, best, candidate):
            best = candidate
            kept.append(method)
        elif name == "ranges" and candidate.recipe.config.ranges != ranges:
            # Ranges that clip more would lose more.
            exhausted.add(name)
        gains = _with_gain(gains, name, before, best, time.monotonic() - start)
    return kept, tuple(gains)


def have_methods(plan: Plan, recipe: Recipe, effort: AccuracyEffort) -> bool:
    """Return whether a plan has something for any accuracy method."""
    return any(True for _ in _methods(plan, recipe, effort))


def _methods(plan: Plan, recipe: Recipe, effort: AccuracyEffort) -> Iterator[tuple[str, Method]]:
    """Yield the methods that a plan has something for, in the order in which they build on one another."""
    if "ranges" in effort.methods and plan.calibrated:
        yield "ranges", partial(_with_ranges, plan, recipe.config.ranges)
        for method in RANGES:
            yield "ranges", partial(_with_ranges, plan, method)
    if "equalization" in effort.methods and plan.calibrated:
        # Factors that cost nodes of their own are tried only if those that cost none are not enough.
        yield "equalization", partial(_with_factors, plan, select_free_scales)
        yield "equalization", partial(_with_factors, plan, lambda graph, plan, factors: factors)
    if "awq" in effort.methods:
        yield "awq", partial(_with_awq, plan, effort.gptq_bits)
    if "gptq" in effort.methods:
        yield "gptq", partial(_with_gptq, plan, effort.gptq_bits)


def _held_out(workshop: Workshop, plan: Plan, samples: SampleSource) -> tuple[Workshop, Subset]:
    """Return a workshop whose samples have no part in its statistics, and the samples that these are of."""
    fitting, judging = halves(samples, len(workshop.reference.samples))
    indices = sorted((*fitting, *judging))
    files = (file for file in group_by_file(samples) if not set(judging).isdisjoint(file))
    apart = set(chain.from_iterable(files))
    fitted = Subset(samples, [index for index in range(len(samples)) if index not in apart])
    statistics = workshop.model.calibrate(plan, fitted, silent)
    return workshop.part([indices.index(index) for index in judging], statistics), fitted


def _may_reencode(plan: Plan) -> bool:
    """Return whether anything is quantized, and no spec follows another toolkit bit by bit."""
    weights = (weight.spec for decision in plan.decisions for weight in decision.weights)
    specs = [*weights, *(activation.spec for activation in plan.activations)]
    return bool(specs) and not any(spec.is_followed for spec in specs)


def _is_better(name: str, before: Candidate, after: Candidate) -> bool:
    worth = _AWQ_WORTH if name == "awq" else 1.0
    return pooled(after.nsr) < worth * pooled(before.nsr) and is_significant_reduction(before.nsr, after.nsr)


def _with_gain(
    gains: Sequence[MethodGain], name: str, before: Candidate, after: Candidate, seconds: float
) -> list[MethodGain]:
    """Return the gains with that of one more try of a method."""
    start = before.sqnr
    if gains and gains[-1].method == name:
        *gains, last = gains
        start, seconds = last.before, seconds + last.seconds
    config, where = after.recipe.config, tuple[str, ...]()
    kept, left = "", "no lower error"
    if after.sqnr > start:
        left = ""
        if name == "ranges":
            own = f" and {len(config.own_ranges)} tensors of their own" if config.own_ranges else ""
            kept, where = f"{format_method(config.ranges) or config.ranges}{own}", tuple(config.own_ranges)
        elif name == "gptq":
            kept = f"weights of at most {config.gptq.bits if config.gptq else 0} bits"
            where = tensors_seen(after.recipe.statistics, "hessian")
        else:
            where = tuple((config.awq if name == "awq" else config.equalization).factors)
            kept = f"{len(where)} tensors"
    gain = MethodGain(name, start, max(after.sqnr, start), kept, seconds, left, where)
    _LOG.debug("%s: %.1f -> %.1f dB in %.1f s, kept: %s", name, gain.before, gain.after, seconds, kept or "nothing")
    return [*gains, gain]


# Ranges: other calibration methods, and ends where the following functions are flat


def _with_ranges(
    plan: Plan, method: CalibrationMethod, workshop: Workshop, recipe: Recipe, samples: SampleSource
) -> Recipe | None:
    ends = saturation_limits(workshop.model.graph, plan, recipe.statistics)
    own = {tensor: SaturatingRange(method, *both) for tensor, both in ends.items()}
    return replace(recipe, config=replace(recipe.config, ranges=method, own_ranges=own))


# Factors of channels between layers


def _with_factors(
    plan: Plan,
    select: Callable[[Graph, Plan, Equalization], Equalization],
    workshop: Workshop,
    recipe: Recipe,
    samples: SampleSource,
) -> Recipe | None:
    """Divide the channels of quantized activations by half of what each uses of its tensor's range (equalization)."""
    graph = workshop.model.graph
    values = {tensor.name: tensor.values for tensor in constants(graph)}
    groups = find_groups(graph, plan)
    observed = _channel_ends(workshop, groups, values.keys(), samples)
    if not observed:
        return None
    parameters = activation_parameters(plan, recipe.statistics, recipe.config.ranges, recipe.config.own_ranges)

    def ends(name: str, axis: int) -> NDArray[np.float64]:
        if name in observed:
            return observed[name]
        array = values[name]
        rest = tuple(index for index in range(array.ndim) if index != axis)
        return np.stack([array.min(rest), array.max(rest)], 1).astype(np.float64)

    def factors(group: EqualizationGroup) -> NDArray[np.float64]:
        used = {name: ends(name, own.axis) for name, own in group.tensors.items()}
        if not all(map(len, used.values())):
            return np.ones(len(group.free))
        return channel_scales_of(group, range_shares(group, plan, parameters, used))

    equalization = select(graph, plan, equalization_of({group: factors(group) for group in groups}))
    if not equalization.factors:
        return None
    return replace(recipe, config=replace(recipe.config, equalization=equalization))


def _channel_ends(
    workshop: Workshop, groups: Iterable[EqualizationGroup], constant: Set[str], samples: SampleSource
) -> Mapping[str, NDArray[np.float64]]:
    """Observe the least and largest value of each channel of the activations in some groups.

    Returns:
        For each tensor float64 of shape (channels, 2), or (0, 2) for tensors of a body that no sample ran.
    """
    path = workshop.model.prepared
    tensors = {
        name: (own, name in group.inside)
        for group in groups
        for name, own in group.tensors.items()
        if name not in constant
    }
    requests = {
        name: Request(name, "channel-ranges", own.axis) for name, (own, inside) in tensors.items() if not inside
    }
    bodies = {
        name: ChannelAxis(own.axis, own.rank, len(own.places)) for name, (own, inside) in tensors.items() if inside
    }
    if bodies:
        proto = expose_body_tensors(onnx.load(path, load_external_data=False), bodies, bodies)
        path = path.with_name("channels.onnx")
        path.write_bytes(proto.SerializeToString())
        requests |= {name: Request(name, "channel-ranges", 1) for name in bodies}
    if not requests:
        return {}
    statistics = collect(path, samples, tuple(requests.values()))
    ranges = {name: statistics.of(name).find(ChannelRanges, request.axis) for name, request in requests.items()}
    return {name: own.ends if own is not None else np.zeros((0, 2)) for name, own in ranges.items()}


def _without_costly_factors(workshop: Workshop, best: Candidate, aim: float, until: Deadline) -> Candidate:
    """Drop factors that cost nodes of their own where the aim is reached without them."""
    for costly in costly_scales(workshop.model.graph, best.plan, best.recipe.config.equalization)[:_MOST_DROPPED]:
        if best.bound < aim or until.left <= 0:
            break
        config = best.recipe.config
        fewer = config.equalization.select(config.equalization.factors.keys() - costly)
        candidate = workshop.measured(best.plan, replace(best.recipe, config=replace(config, equalization=fewer)))
        best = candidate if candidate.bound >= aim else best
    return best


# AWQ: scales of float activations that low-bit weights multiply (Lin et al., 2023)

# Powers of the channel size to try; the first means no scales.
_POWERS = (0.0, 0.15, 0.3, 0.5, 0.7)
# A channel below this share of the largest one says nothing about its size in other samples.
_LEAST = 1e-4
_WEIGHT = 1


def _with_awq(plan: Plan, bits: int, workshop: Workshop, recipe: Recipe, samples: SampleSource) -> Recipe | None:
    """Scale channels by a power of their size, chosen by the error of the products that read them."""
    some = _some(samples)
    rows = Gptq.of_samples(len(some), bits=bits)
    requested: dict[Request, ScalableTensor] = {}
    sizes: dict[Request, int] = {}
    for scalable in scalable_tensors(workshop.model.graph, plan).values():
        views = [weight_gemm_view(reader, _weight(reader, plan), rows) for reader in scalable.readers]
        if views and all(views):
            request = Request.of(scalable.tensor.name, "hessian", -1, rows=rows.rows)
            requested[request], sizes[request] = scalable, max(view.gram_bytes for view in views if view is not None)
    requested = {request: requested[request] for request in within(sizes, GRAM_BYTES)}
    if not requested:
        return None
    statistics = collect(workshop.model.prepared, some, tuple(requested)).statistics
    factors = {
        scalable.tensor.name: scales
        for request, scalable in requested.items()
        if isinstance(gram := statistics[request], HessianAccumulator)
        and (scales := _best_scales(scalable, plan, gram)) is not None
    }
    return replace(recipe, config=replace(recipe.config, awq=Equalization(factors))) if factors else None


def _best_scales(scalable: ScalableTensor, plan: Plan, gram: HessianAccumulator) -> ChannelScales | None:
    """Return the scales with the lowest error in the readers of a tensor; None if no scales are best."""
    products = gram.moments()[0] if gram.count else np.zeros(0)
    if not products.any() or not np.isfinite(products).all():
        return None
    sizes = np.sqrt(products.diagonal())
    seen = sizes > _LEAST * sizes.max()
    # Normalized to about 1, so that nothing grows large; unknown channels get 1.
    sizes = np.where(seen, sizes / np.exp(np.log(sizes[seen]).mean()), 1.0)
    tried = [ChannelScales(len(scalable.tensor.shape or ()) - 1, sizes**power) for power in _POWERS]
    weights = [(reader, _weight(reader, plan)) for reader in scalable.readers]
    losses = [sum(_lost(*pair, products, scales) for pair in weights) for scales in tried]
    best = int(np.argmin(losses))
    return tried[best] if best else None


def _lost(reader: Node, weight: Weight, products: NDArray[np.float64], scales: ChannelScales) -> float:
    """Return the squared error of a matrix multiplication, averaged over the rows of its activations."""
    source, around = reader.inputs[weight.index], WeightRescaling(scales)
    encodings = encode_weight(around.weight(reader, weight.index, source.values), weight)
    error = source.values - around.own_weight(reader, weight.index, encodings.dequantize())
    matrix = WeightMatrices.of_product(error.shape, transposed=bool(reader.attrs.get("transB", 0))).view(error)[0]
    return float(np.vdot(matrix @ products, matrix))


def _weight(reader: Node, plan: Plan) -> Weight:
    return next(weight for weight in plan.by_node[reader.name].weights if weight.index == _WEIGHT)


# GPTQ: rounding whose errors cancel (Frantar et al., 2022)


def _with_gptq(plan: Plan, bits: int, workshop: Workshop, recipe: Recipe, samples: SampleSource) -> Recipe | None:
    some = _some(samples)
    gptq = Gptq.of_samples(len(some), _DAMPING, bits=bits, memory=GRAM_BYTES)
    requests = weight_requests(plan, workshop.model.graph, gptq)
    if not requests:
        return None
    statistics = _joined(recipe.statistics, collect(workshop.model.prepared, some, requests))
    return Recipe(replace(recipe.config, gptq=gptq), statistics)


def with_requested_gptq(workshop: Workshop, plan: Plan, recipe: Recipe, samples: SampleSource) -> Recipe:
    """Return the recipe with GPTQ for the weights whose spec requests it, which nothing judges."""
    weights = (weight.spec for decision in plan.decisions for weight in decision.weights)
    if all(encoder_named(spec.method).sums is None for spec in weights):
        return recipe
    gptq = Gptq.of_samples(len(_some(samples)), _DAMPING, bits=0, memory=GRAM_BYTES)
    observed = {request.tensor for request in weight_requests(plan, workshop.model.graph, gptq)}
    recipe = replace(recipe, config=replace(recipe.config, gptq=gptq))
    return _with_hessians(workshop, plan, recipe, samples, sorted(observed))


def replayed(workshop: Workshop, plan: Plan, samples: SampleSource) -> Recipe:
    """Return the recipe that a plan from a report or file records, without trying anything.

    Hessian matrices, which a plan does not hold, are summed again over the same samples.
    """
    recipe = Recipe(config_from_plan(plan, len(_some(samples))), workshop.statistics)
    return recipe if plan.damping is None else _with_hessians(workshop, plan, recipe, samples, plan.damping.observed)


def _with_hessians(
    workshop: Workshop, plan: Plan, recipe: Recipe, samples: SampleSource, observed: Sequence[str]
) -> Recipe:
    """Return a recipe with the Hessian matrices that its GPTQ needs.

    `observed` names all tensors whose matrices were collected for the plan at first; observing the same tensors keeps
    the sums the same to the last bit.
    """
    gptq = recipe.config.gptq
    wanted = weight_requests(plan, workshop.model.graph, gptq) if gptq is not None else ()
    # Weights whose matrices had no room in memory at first were rounded to nearest.
    requests = tuple(request for request in wanted if request.tensor in observed)
    if not requests:
        return recipe
    seen = collect(workshop.model.prepared, _some(samples), requests, others=observed)
    return replace(recipe, statistics=_joined(recipe.statistics, seen))


def _joined(statistics: CalibrationStatistics, grams: CalibrationStatistics) -> CalibrationStatistics:
    """Merge Hessian matrices into the statistics, of which they may have seen only a part of the samples."""
    # Pending rows are multiplied now, and not again for every candidate.
    whole: Mapping[Request, Any] = {
        request: gram.multiplied() for request, gram in grams.statistics.items() if isinstance(gram, HessianAccumulator)
    }
    return replace(statistics, statistics=MappingProxyType({**statistics.statistics, **whole}))


def _some(samples: SampleSource) -> SampleSource:
    if len(samples) <= _MOST_SAMPLES:
        return samples
    return Subset(samples, evenly_spaced_indices(len(samples), _MOST_SAMPLES))
