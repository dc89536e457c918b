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
    NOTHING,
    SMALLEST,
    Equalization,
    EqualizationGroup,
    EqualizationStrength,
    channel_scales_of,
    equalization_of,
    find_groups,
    range_shares,
)
from onnxq.algorithms.range_search import Noise, RangeChoice, SaturatingRange, choose_ranges, pooled, saturation_limits
from onnxq.calibration.accumulators import ChannelRanges, Range, Request
from onnxq.calibration.collect import collect_apart, parts_of
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
from onnxq.config.effort import Accuracy
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
    accuracy: Accuracy,
    methods: Sequence[CalibrationMethod] = DEFAULT_METHODS,
) -> AlgorithmResult:
    """Return the basis with the ranges of least noise, see `choose_ranges`, where they hold on samples held out.

    Those of tensors end where what follows is flat, see `saturation_limits`, where that takes off noise.

    Args:
        validator: judges candidates.
        plan: what becomes of each node.
        basis: what codes are chosen by otherwise.
        accuracy: how many models to build at most.
        methods: to choose from; the first is taken where nothing is better.
    """
    if not plan.calibrated:
        return basis.unfit("no range of data is found by samples")
    evaluator = replace(validator.evaluator, evidence=basis.evidence)
    recipe = _narrowed(evaluator, plan, basis.recipe)

    def measure(choice: RangeChoice[CalibrationMethod]) -> Noise:
        return evaluator.noise(plan, _chosen(recipe, choice))

    # Tensors are looked at one by one only where models are left for them.
    ranges = ranges_by_tensor(plan, basis.evidence, methods) if accuracy.models > len(methods) else {}
    patience = 2 if accuracy.thorough else 1
    choice = choose_ranges(ranges, measure, most=accuracy.models, methods=methods, patience=patience)
    found = replace(basis, recipe=_chosen(recipe, choice))
    kept = found.recipe.key != recipe.key and _holds(validator, plan, found, recipe)
    return found if kept else replace(basis, recipe=recipe)


def _narrowed(evaluator: PlanEvaluator, plan: Plan, recipe: EncodingConfig) -> EncodingConfig:
    """Return a recipe whose ranges end where what follows is flat, where that takes off noise.

    Where functions are flat no samples say, so that none are held out, and no chance is allowed for.
    """
    ends = saturation_limits(evaluator.bench.graph, plan, evaluator.evidence)
    own = {
        tensor: SaturatingRange(recipe.own_ranges.get(tensor, recipe.ranges), *both) for tensor, both in ends.items()
    }
    found = replace(recipe, own_ranges={**recipe.own_ranges, **own})
    return found if own and pooled(evaluator.noise(plan, found)) < pooled(evaluator.noise(plan, recipe)) else recipe


def _chosen(recipe: EncodingConfig, choice: RangeChoice[CalibrationMethod]) -> EncodingConfig:
    """Return a recipe with these ranges, which end where its own do."""
    ends = {tensor: one for tensor, one in recipe.own_ranges.items() if isinstance(one, SaturatingRange)}
    own = {tensor: replace(one, method=choice.of(tensor)) for tensor, one in ends.items()}
    return replace(recipe, ranges=choice.default, own_ranges={**choice.own, **own})


def _holds(validator: CrossValidator, plan: Plan, found: AlgorithmResult, before: EncodingConfig) -> bool:
    """Whether ranges leave less noise than those before on samples that neither are made of.

    Ranges that clip fit the samples that they are made of, the more so the fewer these are. Those before are only made
    anew where they would win with what they know of the samples that judge.
    """
    held_out = validator.held_out_evaluator(plan)
    now = pooled(held_out.noise(plan, found.recipe))
    knowing = replace(held_out, evidence=found.evidence)
    return any(now < WORTH * pooled(evaluator.noise(plan, before)) for evaluator in (knowing, held_out))


def ranges_by_tensor(
    plan: Plan, evidence: CalibrationStatistics, methods: Sequence[CalibrationMethod]
) -> dict[str, dict[CalibrationMethod, tuple[float, float]]]:
    """Return the range that each method means for each tensor of a plan, tensors of much noise for their signal first.

    Args:
        plan: names the tensors and their specs.
        evidence: of the tensors.
        methods: hashable calibration methods.
    """
    specs = plan.calibrated
    seen = {tensor: evidence.of(tensor) for tensor in specs if evidence.of(tensor).need(Range).count}
    order = sorted(seen, key=lambda tensor: -noise_share(seen[tensor], specs[tensor]))
    by_name = plan.by_tensor
    return {tensor: {method: found_range(by_name[tensor], evidence, method) for method in methods} for tensor in order}


def noise_share(seen: TensorStatistics, spec: QuantSpec) -> float:
    """Return the squared error that codes from minimum to maximum have, in units of the variance of the data."""
    data = bins_of_data(seen)
    low, high = ends_of_data(seen)
    error = float(expected_errors(data, np.array([low]), np.array([high]), Grid.of(spec))[0])
    centers = (data.edges[:-1] + data.edges[1:]) / 2 / (max(-data.minimum, data.maximum) or 1.0)
    weights = data.counts / data.counts.sum()
    variance = float(weights @ np.square(centers - weights @ centers))
    return error / variance if variance > 0 else 0.0


# Equalization of channels between layers, kept if it lowers the error on samples that it was not found on.

Array = NDArray[np.float64]

_FIRST, _WITH_MARGIN = EqualizationStrength(0.5, 0.7, 0.0), EqualizationStrength(0.5, 0.5, 0.5)
# With all effort, for all sites alike: much and little, with and without a margin. One site at a time gets as much as
# it can take: of ten models none gained by less there.
_ALIKE = (EqualizationStrength(0.85, 1.0, 0.0), EqualizationStrength(0.5), EqualizationStrength(0.0))
_APART = EqualizationStrength(1.0, 1.0, 0.0)


def with_equalization(
    validator: CrossValidator, plan: Plan, basis: AlgorithmResult, accuracy: Accuracy
) -> AlgorithmResult:
    """Return the basis with factors for the channels of a plan's tensors, where these lower the noise.

    Factors fill what channels leave of the range of their tensor, so that what was worth clipping without them need not
    be with them: the whole range is tried too, where ranges are open.

    Args:
        validator: say whether they do.
        plan: the one in which every node is static that can be.
        basis: what codes are chosen by otherwise.
        accuracy: whether sites are tried one by one as well, and in how many models.
    """
    found = find_groups(validator.evaluator.bench.graph, plan).found
    if not found:
        return basis.unfit("no layers can take in factors of the channels between them")
    if _share(found, plan, basis.evidence) < 1 - WORTH:
        return basis.unfit("hardly any of the noise comes from tensors whose channels could have factors")
    channels = _Channels(validator.evaluator.bench, validator.groups, plan, found, basis.evidence)
    first = _Candidate(channels, basis, dict.fromkeys(found, _FIRST))
    # A calibration method that the user names stays.
    whole = first.whole() if "ranges" in accuracy.methods else first
    if accuracy.thorough:
        # First the ranges, and then, with these, how much of them.
        alike = [one.alike(_WITH_MARGIN) for one in (first, whole, whole.roomy())]
        best = validator.lowest_error(plan, list({one.basis.recipe.key: one for one in alike}.values()))
        best = _finer(validator, plan, validator.lowest_error(plan, [best, best.alike(_FIRST)]), accuracy.models)
        return validator.kept(plan, basis, [best])
    # Of eight models seven lost by whole ranges or a margin, so that these are tried where nothing else pays.
    kept = validator.kept(plan, basis, [first])
    is_clipped = whole.basis.recipe.key != basis.recipe.key
    other = whole if is_clipped else first.alike(_WITH_MARGIN)
    return validator.kept(plan, basis, [other]) if kept is basis else kept


def _share(found: Iterable[EqualizationGroup], plan: Plan, evidence: CalibrationStatistics) -> float:
    """Return the part of sites in the noise that codes of whole ranges have for their signal, as histograms tell it.

    Without any, all noise may be theirs.
    """
    noises = {
        tensor: noise_share(evidence.of(tensor), spec)
        for tensor, spec in plan.calibrated.items()
        if evidence.of(tensor).need(Range).count and evidence.of(tensor).find(Histogram) is not None
    }
    within = {tensor for site in found for tensor in site.tensors}
    every = sum(noises.values())
    return sum(noises[tensor] for tensor in within & noises.keys()) / every if every else float(bool(within))


def refit_equalization(
    bench: PreparedModel, groups: Sequence[Subset], plan: Plan, basis: AlgorithmResult
) -> Equalization:
    """Return the factors that the settings of a basis mean on other samples than those it was found on.

    Args:
        bench: has the model.
        groups: of samples, each of which is looked at in parts.
        plan: the one that the sites are of.
        basis: with the evidence that ranges come from now.
    """
    if not basis.settings:
        return NOTHING
    channels = _Channels(bench, groups, plan, tuple(basis.settings), basis.evidence)
    return _Candidate(channels, basis, basis.settings)(tuple(range(len(groups)))).recipe.migration


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A finding: factors by settings for each site; sites without one have none."""

    channels: _Channels
    basis: AlgorithmResult
    settings: Mapping[EqualizationGroup, EqualizationStrength]

    def __call__(self, groups: Groups) -> AlgorithmResult:
        recipe, parts = self.basis.recipe, self.channels.shares(self.basis.recipe, groups)
        factors = {site: channel_scales_of(site, parts[site], setting) for site, setting in self.settings.items()}
        migrated = replace(recipe, migration=equalization_of(factors))
        return replace(self.basis, recipe=migrated, settings=self.settings)

    def whole(self) -> _Candidate:
        recipe = self.basis.recipe
        ends = {tensor: one for tensor, one in recipe.own_ranges.items() if isinstance(one, SaturatingRange)}
        own = {tensor: replace(one, method=MinMax()) for tensor, one in ends.items()}
        return replace(self, basis=replace(self.basis, recipe=recipe.with_choice(RangeChoice(MinMax(), own))))

    def roomy(self) -> _Candidate:
        """Return the same with room beyond where ranges end since what follows is flat."""
        recipe = self.basis.recipe
        own = {
            tensor: replace(one, room=1 / SMALLEST) if isinstance(one, SaturatingRange) else one
            for tensor, one in recipe.own_ranges.items()
        }
        return replace(self, basis=replace(self.basis, recipe=replace(recipe, own_ranges=own)))

    def alike(self, setting: EqualizationStrength) -> _Candidate:
        return replace(self, settings=dict.fromkeys(self.settings, setting))

    def having(self, site: EqualizationGroup, setting: EqualizationStrength) -> _Candidate:
        return replace(self, settings={**self.settings, site: setting})


def _finer(validator: CrossValidator, plan: Plan, best: _Candidate, models: int) -> _Candidate:
    """Return what becomes of a candidate with other settings: of all sites, and of each, the largest first.

    What takes off noise by more than chance is kept, so that few samples leave all as it is.

    Args:
        validator: say what does.
        plan: what becomes of each node.
        best: the candidate.
        models: how many other settings are tried at most.
    """
    largest = best.channels.largest_first(best.basis.recipe)
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
    """What the channels of sites use of their ranges."""

    def __init__(
        self,
        bench: PreparedModel,
        groups: Sequence[Subset],
        plan: Plan,
        found: Sequence[EqualizationGroup],
        evidence: CalibrationStatistics,
    ) -> None:
        self._plan, self._found, self._evidence = plan, found, evidence
        self._constants = {tensor.name: tensor for tensor in constants(bench.graph)}
        self._requests, self._parts = _seen(bench, groups, plan, found)
        self._shares: dict[tuple[Hashable, Groups], dict[EqualizationGroup, list[Array]]] = {}

    def shares(self, recipe: EncodingConfig, groups: Groups) -> dict[EqualizationGroup, list[Array]]:
        """Return what each channel of each site used in each part of some groups of samples."""
        key = recipe.key, groups
        if key not in self._shares:
            parameters = activation_parameters(self._plan, self._evidence, recipe.ranges, recipe.own_ranges)
            parts = [part for group, part in self._parts if group in groups]
            self._shares[key] = {
                site: [
                    range_shares(site, self._plan, parameters, self._used(site, part, recipe))
                    if self._knows(site, parts)
                    else np.ones(len(site.free))
                    for part in parts
                ]
                for site in self._found
            }
        return self._shares[key]

    def largest_first(self, recipe: EncodingConfig) -> list[EqualizationGroup]:
        """Return the sites in the order of how much finer their codes could be, in bits over all their channels."""
        parts = self.shares(recipe, ALL)
        bits = {
            site: -np.log2(channel_scales_of(site, parts[site], EqualizationStrength(1.0, cover=0.0))).mean()
            for site in self._found
        }
        return sorted(bits, key=lambda site: -float(bits[site]))

    def _knows(self, site: EqualizationGroup, parts: Sequence[CalibrationStatistics]) -> bool:
        """Whether all tensors of a site had values in any sample, as those of a body that did not run have not."""
        return all(any(len(self._ends(name, part)) for part in parts) for name in site.tensors)

    def _used(self, site: EqualizationGroup, part: CalibrationStatistics, recipe: EncodingConfig) -> dict[str, Array]:
        """Return the ends of the channels of each tensor of a site, no further than where they make a difference."""
        found = {name: (self._ends(name, part), recipe.own_ranges.get(name)) for name in site.tensors}
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
    """Return what is asked of each tensor of sites, and what each part of each group shows, with the group."""
    requests, inside = channel_requests(bench.graph, found), _inside(bench.graph, found)
    known = {} if inside else bench.grouped.parts(groups, tuple(requests.values()))
    shown = [(group, part) for group, parts in known.items() for part in parts]
    unknown = [group for group in range(len(groups)) if group not in known]
    if left := [(group, part) for group in unknown for part in parts_of(groups[group])]:
        proto, matrices = expose_channels(onnx.load(bench.prepared, load_external_data=False), inside)
        model = bench.prepared.with_name("channels.onnx")
        model.write_bytes(proto.SerializeToString())
        requests |= {name: Request(matrices[name], "channel-ranges", 1) for name in inside}
        # Of the same bits as where they are seen with all that the plan needs.
        others = dict.fromkeys(one.tensor for one in requests_for(plan, ()))
        seen = collect_apart(model, [[part] for _, part in left], tuple(requests.values()), others=tuple(others))
        shown += [(group, one) for (group, _), (one, _) in zip(left, seen, strict=True)]
    return requests, sorted(shown, key=itemgetter(0))


def _inside(graph: Graph, found: Sequence[EqualizationGroup]) -> dict[str, ChannelAxis]:
    """Return where the channels of the tensors of sites lie that bodies make."""
    known = {tensor.name for tensor in constants(graph)}
    return {
        name: ChannelAxis(own.axis, own.rank, len(own.places))
        for site in found
        for name, own in site.tensors.items()
        if name in site.inside and name not in known
    }
