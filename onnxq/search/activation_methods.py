"""Accuracy methods for activations: calibration ranges, and equalization of channels between layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import itemgetter, methodcaller

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.algorithms.activation_params import activation_parameters, found_range, requests_for
from onnxq.algorithms.encoding_config import EncodingConfig
from onnxq.algorithms.equalization import (
    SMALLEST,
    EqualizationGroup,
    EqualizationStrength,
    channel_scales_of,
    equalization_of,
    find_groups,
    range_shares,
)
from onnxq.algorithms.range_search import (
    NsrBySample,
    RangeChoice,
    SaturatingRange,
    choose_ranges,
    pooled,
    saturation_limits,
)
from onnxq.calibration.accumulators import ChannelRanges, Range, Request
from onnxq.calibration.collect import collect_apart
from onnxq.calibration.groups import parts_of
from onnxq.calibration.histogram import Histogram
from onnxq.calibration.instrument import ChannelAxis, expose_channels
from onnxq.calibration.methods import (
    DEFAULT_METHODS,
    CalibrationMethod,
    Grid,
    MinMax,
    bins_of_data,
    ends_of_data,
    expected_errors,
)
from onnxq.calibration.statistics import CalibrationStatistics, TensorStatistics
from onnxq.config.effort import AccuracyEffort
from onnxq.data.dataset import Subset
from onnxq.ir import Graph, constants
from onnxq.numerics.spec import QuantSpec
from onnxq.planning.plan import Plan
from onnxq.search.cross_validation import ALL, WORTH, AlgorithmResult, CrossValidator, Groups, channel_requests
from onnxq.search.evaluator import PlanEvaluator
from onnxq.search.prepared_model import PreparedModel


def with_ranges(
    validator: CrossValidator,
    plan: Plan,
    basis: AlgorithmResult,
    accuracy: AccuracyEffort,
    methods: Sequence[CalibrationMethod] = DEFAULT_METHODS,
) -> AlgorithmResult:
    """Choose the calibration ranges with the lowest error, and keep them if they also hold on held-out samples.

    See `choose_ranges` for the search. Ranges also end where the following functions are flat (`saturation_limits`), if
    that lowers the error.

    The first of `methods` is taken if no other is better.
    """
    if not plan.calibrated:
        return basis.unfit("no range of data is found by samples")
    evaluator = replace(validator.evaluator, statistics=basis.statistics)
    config = _narrowed(evaluator, plan, basis.config)

    def measure(choice: RangeChoice[CalibrationMethod]) -> NsrBySample:
        return evaluator.nsr(plan, _chosen(config, choice))

    # Single tensors are tried only if the budget has models left for them.
    ranges = ranges_by_tensor(plan, basis.statistics, methods) if accuracy.models > len(methods) else {}
    patience = 2 if accuracy.thorough else 1
    choice = choose_ranges(ranges, measure, most=accuracy.models, methods=methods, patience=patience)
    found = replace(basis, config=_chosen(config, choice))
    kept = found.config.key != config.key and _holds(validator, plan, found, config)
    return found if kept else replace(basis, config=config)


def _narrowed(evaluator: PlanEvaluator, plan: Plan, config: EncodingConfig) -> EncodingConfig:
    """End ranges where the following function is flat, if that lowers the error.

    Flat regions follow from the functions, not from samples, so no samples are held out and no margin for chance is
    needed.
    """
    ends = saturation_limits(evaluator.bench.graph, plan, evaluator.statistics)
    own = {
        tensor: SaturatingRange(config.own_ranges.get(tensor, config.ranges), *both) for tensor, both in ends.items()
    }
    found = replace(config, own_ranges={**config.own_ranges, **own})
    return found if own and pooled(evaluator.nsr(plan, found)) < pooled(evaluator.nsr(plan, config)) else config


def _chosen(config: EncodingConfig, choice: RangeChoice[CalibrationMethod]) -> EncodingConfig:
    ends = {tensor: one for tensor, one in config.own_ranges.items() if isinstance(one, SaturatingRange)}
    own = {tensor: replace(one, method=choice.of(tensor)) for tensor, one in ends.items()}
    return replace(config, ranges=choice.default, own_ranges={**choice.own, **own})


def _holds(validator: CrossValidator, plan: Plan, found: AlgorithmResult, before: EncodingConfig) -> bool:
    """Return whether new ranges leave less error than the old ones on samples that neither were found on.

    Clipped ranges overfit few samples. The old ranges are first compared with statistics that include the held-out
    samples. They are refitted without these samples only if they win that comparison.
    """
    held_out = validator.held_out_evaluator(plan)
    now = pooled(held_out.nsr(plan, found.config))
    knowing = replace(held_out, statistics=found.statistics)
    return any(now < WORTH * pooled(evaluator.nsr(plan, before)) for evaluator in (knowing, held_out))


def ranges_by_tensor(
    plan: Plan, statistics: CalibrationStatistics, methods: Sequence[CalibrationMethod]
) -> dict[str, dict[CalibrationMethod, tuple[float, float]]]:
    """Return each method's range for each tensor of a plan, tensors with the highest relative error first."""
    specs = plan.calibrated
    seen = {tensor: statistics.of(tensor) for tensor in specs if statistics.of(tensor).need(Range).count}
    order = sorted(seen, key=lambda tensor: -error_share(seen[tensor], specs[tensor]))
    by_name = plan.by_tensor
    return {
        tensor: {method: found_range(by_name[tensor], statistics, method) for method in methods} for tensor in order
    }


def error_share(seen: TensorStatistics, spec: QuantSpec) -> float:
    """Return the squared error of quantizing from minimum to maximum, in units of the variance of the tensor."""
    data = bins_of_data(seen)
    low, high = ends_of_data(seen)
    error = float(expected_errors(data, np.array([low]), np.array([high]), Grid.of(spec))[0])
    centers = (data.edges[:-1] + data.edges[1:]) / 2 / (max(-data.minimum, data.maximum) or 1.0)
    weights = data.counts / data.counts.sum()
    variance = float(weights @ np.square(centers - weights @ centers))
    return error / variance if variance > 0 else 0.0


# Equalization of channels between layers

Array = NDArray[np.float64]

_FIRST, _WITH_MARGIN = EqualizationStrength(0.5, 0.7, 0.0), EqualizationStrength(0.5, 0.5, 0.5)
# At full effort, for all groups alike: strong and weak, with and without a margin. A single group gets full strength:
# none of ten models gained from less there.
_ALIKE = (EqualizationStrength(0.85, 1.0, 0.0), EqualizationStrength(0.5), EqualizationStrength(0.0))
_APART = EqualizationStrength(1.0, 1.0, 0.0)


def with_equalization(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: AccuracyEffort
) -> AlgorithmResult:
    """Equalize the channels between layers of a plan, if that lowers the error.

    Scales fill the unused part of a tensor's range, so clipping may no longer pay. If calibration methods are open, the
    whole range (`MinMax`) is tried too.

    `plan` has all possible nodes static.
    """
    found = find_groups(validator.evaluator.bench.graph, plan).found
    if not found:
        return basis.unfit("no layers can take in factors of the channels between them")
    if _share(found, plan, basis.statistics) < 1 - WORTH:
        return basis.unfit("hardly any of the error comes from tensors whose channels could have factors")
    channels = _Channels(validator.evaluator.bench, validator.groups, plan, found, basis.statistics)
    first = _Candidate(channels, basis, dict.fromkeys(found, _FIRST))
    # A calibration method that the user names stays.
    whole = first.whole() if "ranges" in accuracy.methods else first
    if accuracy.thorough:
        # First choose the ranges, then the strength with these ranges.
        alike = [one.alike(_WITH_MARGIN) for one in (first, whole, whole.roomy())]
        best = validator.lowest_error(plan, list({one.basis.config.key: one for one in alike}.values()))
        best = _finer(validator, plan, validator.lowest_error(plan, [best, best.alike(_FIRST)]), accuracy.models)
        return validator.kept(plan, basis, [best])
    # Seven of eight models lost by whole ranges or a margin, so both are tried only if nothing else pays.
    kept = validator.kept(plan, basis, [first])
    is_clipped = whole.basis.config.key != basis.config.key
    other = whole if is_clipped else first.alike(_WITH_MARGIN)
    return validator.kept(plan, basis, [other]) if kept is basis else kept


def _share(found: Iterable[EqualizationGroup], plan: Plan, statistics: CalibrationStatistics) -> float:
    """Return the share of the groups' tensors in the error of whole ranges, as histograms show it.

    Without histograms the share is 1, because all error may be theirs.
    """
    nsr = {
        tensor: error_share(statistics.of(tensor), spec)
        for tensor, spec in plan.calibrated.items()
        if statistics.of(tensor).need(Range).count and statistics.of(tensor).find(Histogram) is not None
    }
    within = {tensor for site in found for tensor in site.tensors}
    every = sum(nsr.values())
    return sum(nsr[tensor] for tensor in within & nsr.keys()) / every if every else float(bool(within))


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Channel scales with a strength for each equalization group; groups without a strength have none."""

    channels: _Channels
    basis: AlgorithmResult
    settings: Mapping[EqualizationGroup, EqualizationStrength]

    def __call__(self, groups: Groups) -> AlgorithmResult:
        config, parts = self.basis.config, self.channels.shares(self.basis.config, groups)
        factors = {site: channel_scales_of(site, parts[site], setting) for site, setting in self.settings.items()}
        equalized = replace(config, equalization=equalization_of(factors))
        return replace(self.basis, config=equalized)

    def whole(self) -> _Candidate:
        config = self.basis.config
        ends = {tensor: one for tensor, one in config.own_ranges.items() if isinstance(one, SaturatingRange)}
        own = {tensor: replace(one, method=MinMax()) for tensor, one in ends.items()}
        return replace(self, basis=replace(self.basis, config=config.with_choice(RangeChoice(MinMax(), own))))

    def roomy(self) -> _Candidate:
        config = self.basis.config
        own = {
            tensor: replace(one, room=1 / SMALLEST) if isinstance(one, SaturatingRange) else one
            for tensor, one in config.own_ranges.items()
        }
        return replace(self, basis=replace(self.basis, config=replace(config, own_ranges=own)))

    def alike(self, setting: EqualizationStrength) -> _Candidate:
        return replace(self, settings=dict.fromkeys(self.settings, setting))

    def having(self, site: EqualizationGroup, setting: EqualizationStrength) -> _Candidate:
        return replace(self, settings={**self.settings, site: setting})


def _finer(validator: CrossValidator, plan: Plan, best: _Candidate, models: int) -> _Candidate:
    """Try other strengths, first for all groups, then for each group, the largest first.

    A change is kept only if its gain is significant, so few samples change nothing.
    """
    largest = best.channels.largest_first(best.basis.config)
    changes: Iterable[Callable[[_Candidate], _Candidate]] = chain(
        (methodcaller("alike", setting) for setting in _ALIKE),
        (methodcaller("having", site, _APART) for site in largest),
    )
    for change in islice(changes, models):
        other = change(best)
        if validator.improves_significantly(plan, other, best):
            best = other
    return best


class _Channels:
    """The range shares that the channels of equalization groups use."""

    def __init__(
        self,
        bench: PreparedModel,
        groups: Sequence[Subset],
        plan: Plan,
        found: Sequence[EqualizationGroup],
        statistics: CalibrationStatistics,
    ) -> None:
        self._plan, self._found, self._statistics = plan, found, statistics
        self._constants = {tensor.name: tensor for tensor in constants(bench.graph)}
        self._requests, self._parts = _seen(bench, groups, plan, found)
        self._shares: dict[tuple[Hashable, Groups], dict[EqualizationGroup, list[Array]]] = {}

    def shares(self, config: EncodingConfig, groups: Groups) -> dict[EqualizationGroup, list[Array]]:
        key = config.key, groups
        if key not in self._shares:
            parameters = activation_parameters(self._plan, self._statistics, config.ranges, config.own_ranges)
            parts = [part for group, part in self._parts if group in groups]
            self._shares[key] = {
                site: [
                    range_shares(site, self._plan, parameters, self._used(site, part, config))
                    if self._knows(site, parts)
                    else np.ones(len(site.free))
                    for part in parts
                ]
                for site in self._found
            }
        return self._shares[key]

    def largest_first(self, config: EncodingConfig) -> list[EqualizationGroup]:
        """Return the groups by the bits that their channels could gain on average, most first."""
        parts = self.shares(config, ALL)
        bits = {
            site: -np.log2(channel_scales_of(site, parts[site], EqualizationStrength(1.0, cover=0.0))).mean()
            for site in self._found
        }
        return sorted(bits, key=lambda site: -float(bits[site]))

    def _knows(self, site: EqualizationGroup, parts: Sequence[CalibrationStatistics]) -> bool:
        """Tensors of a body that did not run have no values."""
        return all(any(len(self._ends(name, part)) for part in parts) for name in site.tensors)

    def _used(self, site: EqualizationGroup, part: CalibrationStatistics, config: EncodingConfig) -> dict[str, Array]:
        found = {name: (self._ends(name, part), config.own_ranges.get(name)) for name in site.tensors}
        return {
            name: own.clip(ends) if isinstance(own, SaturatingRange) else ends for name, (ends, own) in found.items()
        }

    def _ends(self, name: str, part: CalibrationStatistics) -> Array:
        constant = self._constants.get(name)
        if constant is None:
            request = self._requests[name]
            seen = part.of(request.tensor).find(ChannelRanges, request.axis)
            return seen.ends if seen is not None else np.zeros((0, 2))
        axis = next(site.tensors[name].axis for site in self._found if name in site.tensors)
        others = tuple(place for place in range(constant.values.ndim) if place != axis)
        return np.stack([constant.values.min(others), constant.values.max(others)], 1).astype(np.float64)


def _seen(
    bench: PreparedModel, groups: Sequence[Subset], plan: Plan, found: Sequence[EqualizationGroup]
) -> tuple[dict[str, Request], list[tuple[int, CalibrationStatistics]]]:
    """Return the request for each tensor, and the statistics of each part with the number of its group."""
    requests, inside = channel_requests(bench.graph, found), _inside(bench.graph, found)
    known = {} if inside else bench.grouped.parts(groups, tuple(requests.values()))
    shown = [(group, part) for group, parts in known.items() for part in parts]
    unknown = [group for group in range(len(groups)) if group not in known]
    if left := [(group, part) for group in unknown for part in parts_of(groups[group])]:
        proto, matrices = expose_channels(onnx.load(bench.prepared, load_external_data=False), inside)
        model = bench.prepared.with_name("channels.onnx")
        model.write_bytes(proto.SerializeToString())
        requests |= {name: Request(matrices[name], "channel-ranges", 1) for name in inside}
        # `others` keeps the results bit-identical to a run that observes all that the plan needs.
        others = dict.fromkeys(one.tensor for one in requests_for(plan, ()))
        seen = collect_apart(model, [[part] for _, part in left], tuple(requests.values()), others=tuple(others))
        shown += [(group, one) for (group, _), (one, _) in zip(left, seen, strict=True)]
    return requests, sorted(shown, key=itemgetter(0))


def _inside(graph: Graph, found: Sequence[EqualizationGroup]) -> dict[str, ChannelAxis]:
    known = {tensor.name for tensor in constants(graph)}
    return {
        name: ChannelAxis(own.axis, own.rank, len(own.places))
        for site in found
        for name, own in site.tensors.items()
        if name in site.inside and name not in known
    }
