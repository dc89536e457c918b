"""Mixed precision: the bits and block size of each weight, by the error that they add for their bytes.

Each weight has a few formats, each with its bytes and the error that it adds at the worst output. Errors of weights add
up. So the least error under a limit of bytes is a multiple-choice knapsack. The steps of highest gain for each byte, on
the convex hull of the formats of each weight, solve it up to one step. The source is Sinha and Zoltners, "The
Multiple-Choice Knapsack Problem", Operations Research 1979.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from onnxq.algorithms.encoders import encode_weight, look_of
from onnxq.config.scheme import Method, Mode, QuantSpec, Scheme
from onnxq.ir import Constant, Graph, all_nodes
from onnxq.numerics.affine import ratio_of_sqnr, sqnr_of_ratio
from onnxq.numerics.formats import format_named
from onnxq.planning.plan import Decision, Demotion, Plan, Weight
from onnxq.planning.weights import readable, stored_bytes
from onnxq.runtime.targets import Target
from onnxq.search.results import SizePoint

_FINER = "its error counts more than its size"
_FLOAT = f"{_FINER}, even with 8 bits"
_COARSER = "its error counts less than its size"
# Bits and block extents to choose from. Blocks fill the large gaps between the bytes of two widths.
_BITS, _EXTENTS = (2, 4, 8), (16, 32, 64, 128)
# Values of a weight whose error is computed; the error of more values is the same within a few percent.
_SAMPLED_VALUES = 1 << 17
# Sizes that a report shows.
_SHOWN_POINTS = 16
# Large weights each of whose formats is tried.
_LARGE_WEIGHTS = 8
# Plans whose weights are measured one by one: that of the scheme, and those that seem best by what is known.
_MEASURED_PLANS = 3
# Models that are built until the file fits.
_MOST_FITS = 3
# Bytes of nodes for each weight, and share of the file, that are kept free if no model is built.
_NODE_BYTES, _FREE_SHARE = 600, 0.002
# Two sizes that are nearer are not told apart.
_SAME_SIZE = 1.003
# Models whose size the prediction gives; bisection gives the others.
_PREDICTED = 3


Planner = Callable[[Mapping[str, Demotion]], Plan]
"""Makes a plan from demotions."""

Nodes = tuple[str, ...]
"""Names of the nodes that share weights, which the file stores once."""


def is_mixable(scheme: Scheme) -> bool:
    """Return whether the bits of a scheme's weights can be chosen: integers in blocks, with float activations.

    >>> from onnxq.config.presets import PRESETS
    >>> [is_mixable(PRESETS[name]) for name in ("int4-block32", "int8", "nf4-block64")]
    [True, False, False]
    """
    return not scheme.multiplies_integers and any(
        rule.mode is not Mode.FLOAT and rule.weight is not None and _is_mixable(rule.weight) for rule in scheme.rules
    )


def _is_mixable(spec: QuantSpec) -> bool:
    in_blocks = isinstance(spec.granularity, tuple) and len(spec.granularity) == 1
    return in_blocks and spec.method in (*Method,) and not spec.is_followed and _family(spec) is not None


def _family(spec: QuantSpec) -> Mapping[int, str] | None:
    """Return the formats of the same kind as a spec's, by bits; None for floats and others."""
    signed = {2: "int2", 4: "int4", 8: "int8-narrow"}
    unsigned = {2: "uint2", 4: "uint4", 8: "uint8"}
    return next((one for one in (signed, unsigned) if spec.format in (*one.values(), "int8")), None)


# Formats of each weight, with their bytes and error


@dataclass(frozen=True)
class WeightFormat:
    """A format that weights can have.

    Attributes:
        spec: of the weights; None for float.
        bytes: that the weights take in the file, with their scales.
        nsr: noise-to-signal ratio that they add at the worst output; before it is measured, that of the weights.
    """

    spec: QuantSpec | None
    bytes: int
    nsr: float


def candidate_specs(spec: QuantSpec, target: Target) -> Iterator[QuantSpec]:
    """Yield the specs that a weight of a scheme's spec can have instead, coarsest first.

    >>> from onnxq.runtime.targets import TARGETS
    >>> len(list(candidate_specs(QuantSpec("int4", (32,)), TARGETS["onnxruntime-cpu"])))
    12
    """
    family = _family(spec) if _is_mixable(spec) else None
    extents = sorted({*_EXTENTS, *(spec.granularity if isinstance(spec.granularity, tuple) else ())}, reverse=True)
    for bits, name in (family or {}).items():
        if bits >= target.reads.fewest_bits:
            # The scheme may name the wider range of 8 bits.
            format = spec.format if format_named(spec.format).bits == bits else name
            yield from (readable(replace(spec, format=format, granularity=(extent,)), target) for extent in extents)


def weight_formats(
    planner: Planner, graph: Graph, target: Target, expresses: Callable[[Plan], bool]
) -> Mapping[Nodes, Sequence[WeightFormat]]:
    """Return the formats that weights can have, with the error of the weights, by the nodes that share these weights.

    Args:
        planner: makes a plan from demotions.
        graph: the prepared graph.
        target: the runtime.
        expresses: returns whether a plan's model can be built.
    """
    weighted = {one.node: one for one in planner({}).decisions if one.weights and _is_mixable(one.weights[0].spec)}
    values = {
        node.name: [node.inputs[weight.index] for weight in weighted[node.name].weights]
        for _, node in all_nodes(graph)
        if node.name in weighted
    }
    allowed = _allowed(planner, weighted, target, expresses)
    found: dict[Nodes, list[WeightFormat]] = {}
    for nodes in _groups(weighted, values):
        weights = list(_pairs(weighted[nodes[0]], values[nodes[0]]))
        sampled = [_sampled(*pair) for pair in weights]
        formats = [
            WeightFormat(spec, _stored(weights, spec), len(nodes) * _error(sampled, spec))
            for spec, fit in allowed.items()
            if fit.issuperset(nodes)
        ]
        if formats:
            found[nodes] = [*formats, WeightFormat(None, sum(tensor.nbytes for _, tensor in weights), 0.0)]
    return found


def with_measured(
    formats: Mapping[Nodes, Sequence[WeightFormat]], measured: Mapping[Nodes, Mapping[QuantSpec, float]]
) -> Mapping[Nodes, Sequence[WeightFormat]]:
    """Return formats with measured errors; the error of another format is in proportion to that of the nearest one.

    >>> few, more = QuantSpec("int4", (32,)), QuantSpec("int8", (32,))
    >>> formats = {("a",): [WeightFormat(few, 1, 0.01), WeightFormat(more, 2, 0.0001)]}
    >>> [one.nsr for one in with_measured(formats, {("a",): {few: 0.2}})["a",]]
    [0.2, 0.002]
    """
    found = {}
    for nodes, some in formats.items():
        own = {one.spec: one.nsr for one in some}
        known = [(own[spec], nsr) for spec, nsr in measured.get(nodes, {}).items() if own.get(spec)]
        found[nodes] = [replace(one, nsr=_in_proportion(one.nsr, known)) for one in some]
    return found


def _in_proportion(error: float, known: Sequence[tuple[float, float]]) -> float:
    if not (error and known):
        return error
    near, nsr = min(known, key=lambda one: abs(math.log(one[0] / error)))
    return nsr * error / near


def _stored(weights: Sequence[tuple[Weight, Constant]], spec: QuantSpec) -> int:
    return sum(sum(stored_bytes(replace(weight, spec=spec), tensor.shape)) for weight, tensor in weights)


def _pairs(decision: Decision, tensors: Sequence[Constant]) -> Iterator[tuple[Weight, Constant]]:
    return zip(decision.weights, tensors, strict=True)


def _allowed(
    planner: Planner, weighted: Mapping[str, Decision], target: Target, expresses: Callable[[Plan], bool]
) -> Mapping[QuantSpec, frozenset[str]]:
    """Return the nodes that can have a spec in the mode of the scheme, by spec."""
    wanted: dict[QuantSpec, list[str]] = defaultdict(list)
    for node, decision in weighted.items():
        for spec in candidate_specs(decision.weights[0].spec, target):
            wanted[spec].append(node)
    found = {}
    for spec, nodes in wanted.items():
        plan = planner({node: _demotion(weighted[node], spec) for node in nodes})
        fit = frozenset(node for node in nodes if _has(plan.by_node[node], weighted[node].mode, spec))
        if fit and expresses(plan):
            found[spec] = fit
    return found


def _has(decision: Decision, mode: Mode, spec: QuantSpec) -> bool:
    return decision.mode is mode and bool(decision.weights) and all(one.spec == spec for one in decision.weights)


def _sampled(weight: Weight, tensor: Constant) -> tuple[Weight, np.ndarray]:
    """Return evenly spaced channels of a weight, which have the same blocks as in the whole weight."""
    channels = tensor.shape[weight.axis]
    count = min(max(round(_SAMPLED_VALUES * channels / max(weight.elements, 1)), 1), channels)
    places = np.linspace(0, channels - 1, count).round().astype(np.intp)
    return weight, np.asarray(np.take(tensor.values, places, weight.axis), np.float32)


def _error(sampled: Sequence[tuple[Weight, np.ndarray]], spec: QuantSpec) -> float:
    """Return the squared error of weights in a spec, relative to their squares."""
    lost = signal = 0.0
    for weight, values in sampled:
        decoded = encode_weight(values, replace(weight, spec=spec)).dequantize().reshape(values.shape)
        lost += float(np.square(values - decoded, dtype=np.float64).sum())
        signal += float(np.square(values, dtype=np.float64).sum())
    return lost / signal if signal else 0.0


def _groups(weighted: Mapping[str, Decision], values: Mapping[str, Sequence[Constant]]) -> list[Nodes]:
    alike: dict[Hashable, list[str]] = defaultdict(list)
    for node, decision in weighted.items():
        alike[tuple(look_of(*pair) for pair in _pairs(decision, values[node]))].append(node)
    return [tuple(nodes) for nodes in alike.values()]


def _demotion(decision: Decision, spec: QuantSpec | None) -> Demotion:
    own = decision.weights[0].spec
    if spec is None:
        return Demotion(Mode.FLOAT, _FLOAT, finer=_FLOAT)
    bits, before = format_named(spec.format).bits, format_named(own.format).bits
    reason = _FINER if bits > before else _COARSER
    return Demotion(decision.mode, reason, weight=spec, finer=reason if bits > before else "")


# The least error in some bytes


@dataclass(frozen=True)
class Allocation:
    """A format for each weight.

    Attributes:
        specs: of each node's weights; None for float.
        bytes: of all these weights.
        nsr: predicted noise-to-signal ratio.
    """

    specs: Mapping[str, QuantSpec | None]
    bytes: int
    nsr: float


@dataclass(frozen=True, eq=False)
class FormatFrontier:
    """The formats of weights by their bytes and error.

    Attributes:
        hulls: formats of each group of nodes on their convex hull, smallest first.
        steps: groups that take their next format, the step of highest gain for its bytes first.
    """

    hulls: Mapping[Nodes, Sequence[WeightFormat]]
    steps: Sequence[Nodes]

    @classmethod
    def of(cls, formats: Mapping[Nodes, Sequence[WeightFormat]]) -> FormatFrontier:
        """Return the frontier of the formats of each group of nodes."""
        hulls = {nodes: convex_hull(some) for nodes, some in formats.items()}
        gains = [(_gain(*pair), nodes) for nodes, hull in hulls.items() for pair in pairwise(hull)]
        # Gains fall along a hull, and a stable sort keeps the order of equal ones.
        return cls(hulls, [nodes for _, nodes in sorted(gains, key=lambda one: -one[0])])

    @property
    def smallest(self) -> int:
        """Bytes of all weights in their smallest formats."""
        return sum(hull[0].bytes for hull in self.hulls.values())

    @property
    def finest(self) -> Allocation:
        """All weights in their formats of least error besides float."""
        return self._taken({nodes: max(len(hull) - 2, 0) for nodes, hull in self.hulls.items()})

    @property
    def largest(self) -> int:
        """Bytes of all weights in float."""
        return sum(hull[-1].bytes for hull in self.hulls.values())

    def within(self, most: float) -> Allocation:
        """Return the formats of least predicted error in some bytes; the smallest if none fit.

        A large weight, such as an embedding, may leave much of the bytes to others that need them less. So each format
        of the largest weights is tried, with the best formats of the others.
        """
        size = {nodes: hull[-1].bytes for nodes, hull in self.hulls.items()}
        large = sorted(size, key=lambda nodes: -size[nodes])[:_LARGE_WEIGHTS]
        tried = [self._filled(most, {})]
        tried += [self._filled(most, {nodes: place}) for nodes in large for place in range(len(self.hulls[nodes]))]
        fit = [one for one in tried if one.bytes <= most]
        return min(fit or tried, key=lambda one: (one.nsr, one.bytes) if fit else (one.bytes, one.nsr))

    def bytes_for(self, nsr: float) -> int:
        """Return about the fewest bytes with a predicted ratio of at most `nsr`."""
        low, high = self.smallest, self.largest
        if self.within(low).nsr <= nsr:
            return low
        while high > _SAME_SIZE * low:
            middle = math.isqrt(low * high)
            low, high = (low, middle) if self.within(middle).nsr <= nsr else (middle, high)
        return high

    def points(self, overhead: float, worse: float, aim: float) -> tuple[SizePoint, ...]:
        """Return sizes of the file for a report, one of them for a goal.

        Args:
            overhead: bytes of the file besides these weights.
            worse: measured over predicted ratio; NaN if nothing is measured.
            aim: SQNR in decibels of a point.
        """
        sizes = {int(one) for one in np.geomspace(self.smallest, self.largest, _SHOWN_POINTS)}
        if math.isfinite(worse):
            sizes.add(self.bytes_for(ratio_of_sqnr(aim) / worse))
        taken = map(self.within, sorted(sizes))
        return tuple(
            SizePoint(
                math.ceil(one.bytes + overhead),
                None if math.isnan(worse) else sqnr_of_ratio(max(one.nsr, 0.0) * worse),
            )
            for one in taken
        )

    def _filled(self, most: float, fixed: Mapping[Nodes, int]) -> Allocation:
        """Take the steps that fit, with some groups at a place of their hull."""
        places = {**dict.fromkeys(self.hulls, 0), **fixed}
        spent = sum(self.hulls[nodes][place].bytes for nodes, place in places.items())
        closed = set(fixed)
        for nodes in self.steps:
            if nodes in closed:
                continue
            hull, place = self.hulls[nodes], places[nodes]
            more = hull[place + 1].bytes - hull[place].bytes
            if spent + more > most:
                # Later steps of these weights gain less for their bytes.
                closed.add(nodes)
                continue
            places[nodes], spent = place + 1, spent + more
        return self._taken(places)

    def _taken(self, places: Mapping[Nodes, int]) -> Allocation:
        taken = {nodes: self.hulls[nodes][place] for nodes, place in places.items()}
        specs = {node: one.spec for nodes, one in taken.items() for node in nodes}
        return Allocation(specs, sum(one.bytes for one in taken.values()), sum(one.nsr for one in taken.values()))


def convex_hull(formats: Sequence[WeightFormat]) -> list[WeightFormat]:
    """Return the formats on the lower convex hull of bytes and error, smallest first.

    >>> formats = [WeightFormat(None, *one) for one in ((4, 0.0), (1, 9.0), (2, 8.0), (3, 1.0))]
    >>> [one.bytes for one in convex_hull(formats)]
    [1, 3, 4]
    """
    hull: list[WeightFormat] = []
    for one in sorted(formats, key=lambda one: (one.bytes, one.nsr)):
        if hull and one.nsr >= hull[-1].nsr:
            continue
        while len(hull) > 1 and _gain(*hull[-2:]) <= _gain(hull[-1], one):
            hull.pop()
        hull.append(one)
    return hull


def _gain(old: WeightFormat, new: WeightFormat) -> float:
    return (old.nsr - new.nsr) / (new.bytes - old.bytes)


# Plans of these formats, whose models are built

CERTIFICATE_BYTES = 6000
"""Bytes that a certificate and notes of the plan may add to a model."""


@dataclass(frozen=True, eq=False)
class BitAllocator:
    """Chooses the formats of all weights by building models.

    Attributes:
        planner: makes a plan from demotions.
        formats: the formats to choose from, before their errors are measured.
        overhead: bytes besides these weights, as far as they are known.
        measure: returns the noise-to-signal ratio of the weights of some nodes of a plan; None if there are no samples.
        sqnr: measures a plan, in decibels; None if there are no samples.
        size: returns the bytes of a plan's file; None if models are too large to build several.
    """

    planner: Planner
    formats: Mapping[Nodes, Sequence[WeightFormat]]
    overhead: float
    measure: Callable[[Plan, Set[str]], Mapping[str, float]] | None
    sqnr: Callable[[Plan], float] | None
    size: Callable[[Plan], float] | None

    def within(self, most: float, aim: float) -> tuple[Plan, tuple[SizePoint, ...]]:
        """Return the plan of least error in a file of `most` bytes, and sizes for a report.

        It is the smallest plan if no file is as small. `aim` is an SQNR in decibels whose size is reported.
        """
        overhead = self.overhead
        if self.size is None:
            overhead += _NODE_BYTES * len(self.formats) + _FREE_SHARE * most
        frontier = self._frontier(lambda one: one.within(most - overhead))
        for _ in range(_MOST_FITS):
            taken = frontier.within(most - overhead)
            plan = self._plan(taken)
            if self.size is None:
                break
            overhead, before = self.size(plan) - taken.bytes, overhead
            if overhead <= before and frontier.within(most - overhead).specs == taken.specs:
                break
        measured = -math.inf if self.sqnr is None else self.sqnr(plan)
        full = self.planner({})
        if self.sqnr is not None and self.size is not None and self.size(full) <= most and self.sqnr(full) > measured:
            plan = full
        return plan, frontier.points(overhead, _worse(measured, taken), aim)

    def smallest(self, aim: float, is_late: Callable[[], bool], most: int) -> tuple[Plan, tuple[SizePoint, ...]]:
        """Return the plan of the smallest file that reaches `aim` in decibels, and sizes for a report.

        At most `most` models are built. If none reaches it, all weights stay float; if it is late, they have the most
        bits.
        """
        assert self.sqnr is not None
        frontier = self._frontier(lambda one: one.within(one.bytes_for(ratio_of_sqnr(aim))))
        worse, overhead = 1.0, self.overhead
        low, high = frontier.smallest - 1, frontier.largest
        best: Plan | None = None
        for number in range(most):
            if high <= _SAME_SIZE * low or is_late():
                break
            guess = frontier.bytes_for(ratio_of_sqnr(aim) / worse) if number < _PREDICTED else 0
            taken = frontier.within(guess if low < guess < high else math.isqrt(low * high))
            measured = self.sqnr(plan := self._plan(taken))
            if math.isfinite(measured) and taken.nsr:
                worse = _worse(measured, taken)
            overhead = self.size(plan) - taken.bytes if self.size is not None else overhead
            low, high, best = (low, taken.bytes, plan) if measured >= aim else (max(low, taken.bytes), high, best)
        if best is None:
            best = self._plan(frontier.finest if is_late() else frontier.within(frontier.largest))
        return best, frontier.points(overhead, worse, aim)

    @cached_property
    def sensitivities(self) -> Mapping[str, float]:
        """The noise-to-signal ratio of each node in the scheme's format; empty if there are no samples."""
        everything = frozenset(chain.from_iterable(self.formats))
        return {} if self.measure is None else self.measure(self.planner({}), everything)

    def _frontier(self, choose: Callable[[FormatFrontier], Allocation]) -> FormatFrontier:
        """Measure the scheme's formats, then those that are chosen by what is known."""
        frontier, measured = FormatFrontier.of(self.formats), dict[Nodes, dict[QuantSpec, float]]()
        if self.measure is None:
            return frontier
        plan, nsr = self.planner({}), self.sensitivities
        for number in range(_MEASURED_PLANS):
            specs = {
                nodes: plan.by_node[nodes[0]].weights[0].spec
                for nodes in self.formats
                if plan.by_node[nodes[0]].weights
            }
            new = {nodes: spec for nodes, spec in specs.items() if spec not in measured.get(nodes, {})}
            if not new:
                break
            if number:
                nsr = self.measure(plan, frozenset(chain.from_iterable(new)))
            for nodes, spec in new.items():
                measured.setdefault(nodes, {})[spec] = sum(nsr.get(node, 0.0) for node in nodes)
            frontier = FormatFrontier.of(with_measured(self.formats, measured))
            plan = self._plan(choose(frontier))
        return frontier

    def _plan(self, taken: Allocation) -> Plan:
        full = self._decisions
        changed = {node: spec for node, spec in taken.specs.items() if full[node].weights[0].spec != spec}
        return self.planner({node: _demotion(full[node], spec) for node, spec in changed.items()})

    @cached_property
    def _decisions(self) -> Mapping[str, Decision]:
        return self.planner({}).by_node


def _worse(measured: float, taken: Allocation) -> float:
    """Return the measured over the predicted ratio; NaN if one is unknown."""
    return ratio_of_sqnr(measured) / taken.nsr if math.isfinite(measured) and taken.nsr > 0 else math.nan
