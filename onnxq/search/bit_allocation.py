"""Mixed precision: the bits and block size of each weight, by the error that they add for their bytes.

Each weight has a few formats, each with its bytes and the error that it adds at the worst output. Errors of weights add
up. So at a price of error each weight by itself takes the format of least bytes plus price times error, and a rising
price takes the steps along the convex hulls of all weights in turn (Sinha and Zoltners, "The Multiple-Choice Knapsack
Problem", Operations Research 1979).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter, itemgetter

import numpy as np

from onnxq.algorithms.encoders import encode_weight
from onnxq.config.scheme import Method, Mode, QuantSpec, Scheme
from onnxq.ir import Constant, all_nodes
from onnxq.numerics.affine import ratio_of_sqnr, sqnr_of_ratio
from onnxq.numerics.formats import format_named
from onnxq.planning.plan import Decision, Demotion, Plan, Weight
from onnxq.planning.weights import look_of, readable, stored_bytes
from onnxq.runtime.targets import Target
from onnxq.search.prepared_model import PreparedModel
from onnxq.search.results import SizePoint

CERTIFICATE_BYTES = 6000
"""Bytes that a certificate and notes of the plan may add to a model."""
SAME_SIZE = 1.003
"""Two sizes of weights within this ratio count as equal: a step of one weight changes the size by as much."""

_FINER = "its error counts more than its size"
_FLOAT = f"{_FINER}, even with 8 bits"
_COARSER = "its error counts less than its size"
# Formats of one kind by their bits, and block extents that fill the large gaps between the bytes of two widths.
_SIGNED, _UNSIGNED = {2: "int2", 4: "int4", 8: "int8-narrow"}, {2: "uint2", 4: "uint4", 8: "uint8"}
_EXTENTS = (16, 32, 64, 128)
# Values of a weight whose error is computed; the error of more values is the same within a few percent.
_SAMPLED_VALUES = 1 << 17
# Large weights each of whose formats is tried, as a step of one may not fit where small ones have filled the size.
_LARGE_WEIGHTS = 8
# Sizes that a report shows.
_SHOWN_SIZES = 16

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
    return next((family for family in (_SIGNED, _UNSIGNED) if spec.format in (*family.values(), "int8")), None)


# Formats of each weight, with their bytes and error


@dataclass(frozen=True)
class WeightFormat:
    """A format that weights can have.

    Attributes:
        spec: of the weights; None for float.
        bytes: that the weights take in the file, with their scales.
        error: noise-to-signal ratio that they add at the worst output; before it is measured, that of the weights.
    """

    spec: QuantSpec | None
    bytes: int
    error: float


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


def weight_formats(model: PreparedModel) -> Mapping[Nodes, Sequence[WeightFormat]]:
    """Return the formats that weights can have, with the error of the weights, by the nodes that share them."""
    decisions = {
        decision.node: decision
        for decision in model.plan({}).decisions
        if decision.weights and _is_mixable(decision.weights[0].spec)
    }
    tensors = {
        node.name: [node.inputs[weight.index] for weight in decisions[node.name].weights]
        for _, node in all_nodes(model.graph)
        if node.name in decisions
    }
    sharing: dict[Hashable, list[str]] = defaultdict(list)
    for node, decision in decisions.items():
        sharing[tuple(map(look_of, decision.weights, tensors[node]))].append(node)
    allowed = _allowed(model, decisions)
    formats: dict[Nodes, Sequence[WeightFormat]] = {}
    for nodes in map(tuple, sharing.values()):
        weights = list(zip(decisions[nodes[0]].weights, tensors[nodes[0]], strict=True))
        sampled = [(weight, _sampled(weight, tensor)) for weight, tensor in weights]
        options = [
            WeightFormat(spec, _bytes_of(weights, spec), len(nodes) * _error(sampled, spec))
            for spec, taking in allowed.items()
            if taking.issuperset(nodes)
        ]
        if options:
            formats[nodes] = (*options, WeightFormat(None, sum(tensor.nbytes for _, tensor in weights), 0.0))
    return formats


def _allowed(model: PreparedModel, decisions: Mapping[str, Decision]) -> Mapping[QuantSpec, frozenset[str]]:
    """Return the nodes that can have a spec in the mode of the scheme, by spec."""
    wanted: dict[QuantSpec, list[str]] = defaultdict(list)
    for node, decision in decisions.items():
        for spec in candidate_specs(decision.weights[0].spec, model.target):
            wanted[spec].append(node)
    allowed = {}
    for spec, nodes in wanted.items():
        plan = model.plan({node: _demotion(decisions[node], spec) for node in nodes})
        taking = frozenset(
            node
            for node in nodes
            if plan.by_node[node].mode is decisions[node].mode
            and {weight.spec for weight in plan.by_node[node].weights} == {spec}
        )
        if taking and model.expresses(plan):
            allowed[spec] = taking
    return allowed


def _bytes_of(weights: Sequence[tuple[Weight, Constant]], spec: QuantSpec) -> int:
    return sum(sum(stored_bytes(replace(weight, spec=spec), tensor.shape)) for weight, tensor in weights)


def _sampled(weight: Weight, tensor: Constant) -> np.ndarray:
    """Return evenly spaced channels of a weight, which have the same blocks as in the whole weight."""
    channels = tensor.shape[weight.axis]
    count = min(max(round(_SAMPLED_VALUES * channels / max(weight.elements, 1)), 1), channels)
    indices = np.linspace(0, channels - 1, count).round().astype(np.intp)
    return np.asarray(np.take(tensor.values, indices, weight.axis), np.float32)


def _error(sampled: Sequence[tuple[Weight, np.ndarray]], spec: QuantSpec) -> float:
    """Return the squared error of weights in a spec, relative to their squares."""
    lost = signal = 0.0
    for weight, values in sampled:
        decoded = encode_weight(values, replace(weight, spec=spec)).dequantize().reshape(values.shape)
        lost += float(np.square(values - decoded, dtype=np.float64).sum())
        signal += float(np.square(values, dtype=np.float64).sum())
    return lost / signal if signal else 0.0


def with_measured(
    formats: Mapping[Nodes, Sequence[WeightFormat]], measured: Mapping[Nodes, Mapping[QuantSpec, float]]
) -> Mapping[Nodes, Sequence[WeightFormat]]:
    """Return formats with measured errors; the error of another format is in proportion to that of the nearest one.

    >>> few, more = QuantSpec("int4", (32,)), QuantSpec("int8", (32,))
    >>> formats = {("a",): [WeightFormat(few, 1, 0.01), WeightFormat(more, 2, 0.0001)]}
    >>> [format.error for format in with_measured(formats, {("a",): {few: 0.2}})["a",]]
    [0.2, 0.002]
    """
    scaled = {}
    for nodes, some in formats.items():
        errors = {format.spec: format.error for format in some}
        pairs = [(errors[spec], error) for spec, error in measured.get(nodes, {}).items() if errors.get(spec)]
        scaled[nodes] = [replace(format, error=_in_proportion(format.error, pairs)) for format in some]
    return scaled


def _in_proportion(error: float, pairs: Sequence[tuple[float, float]]) -> float:
    if not (error and pairs):
        return error
    near, measured = min(pairs, key=lambda pair: abs(math.log(pair[0] / error)))
    return measured * error / near


# The least error in a size


@dataclass(frozen=True, eq=False)
class Allocation:
    """A format for each weight."""

    formats: Mapping[Nodes, WeightFormat]

    @cached_property
    def bytes(self) -> int:
        """Bytes of all weights."""
        return sum(format.bytes for format in self.formats.values())

    @cached_property
    def error(self) -> float:
        """Expected noise-to-signal ratio."""
        return math.fsum(format.error for format in self.formats.values())


@dataclass(frozen=True, eq=False)
class FormatFrontier:
    """The formats of weights that are best at some price of error.

    Attributes:
        hulls: formats of each weight on the convex hull of bytes and error, smallest first.
        steps: weights that take their next format, in the order of the prices at which they do.
    """

    hulls: Mapping[Nodes, Sequence[WeightFormat]]
    steps: Sequence[Nodes]

    @classmethod
    def of(cls, formats: Mapping[Nodes, Sequence[WeightFormat]]) -> FormatFrontier:
        """Return the frontier of the formats of each weight."""
        hulls = {nodes: convex_hull(some) for nodes, some in formats.items()}
        steps = [(_gain(*pair), nodes) for nodes, hull in hulls.items() for pair in pairwise(hull)]
        # Gains fall along a hull, and a stable sort keeps the order of equal ones.
        return cls(hulls, [nodes for _, nodes in sorted(steps, key=itemgetter(0), reverse=True)])

    def within(self, most: float) -> Allocation:
        """Return the formats of least error in some bytes; the smallest if none fit.

        A large weight, such as an embedding, may leave much of the bytes to others that need them less. So each format
        of the largest weights is tried, with the best formats of the others.
        """
        large = sorted(self.hulls, key=lambda nodes: -self.hulls[nodes][-1].bytes)[:_LARGE_WEIGHTS]
        fixed = [{}, *({nodes: index} for nodes in large for index in range(len(self.hulls[nodes])))]
        tried = [self._filled(most, indices) for indices in fixed]
        fitting = [allocation for allocation in tried if allocation.bytes <= most]
        return min(fitting, key=attrgetter("error", "bytes")) if fitting else min(tried, key=attrgetter("bytes"))

    def reaching(self, error: float) -> Allocation:
        """Return about the smallest formats with at most some error; all floats if there are none, or it is NaN."""
        low, high = self.within(0).bytes, self.floats.bytes
        while high > SAME_SIZE * low:
            middle = math.isqrt(low * high)
            low, high = (low, middle) if self.within(middle).error <= error else (middle, high)
        smallest = self.within(low)
        return smallest if smallest.error <= error else self.within(high)

    def _filled(self, most: float, fixed: Mapping[Nodes, int]) -> Allocation:
        """Take the steps that fit, with some weights at a place of their hull."""
        indices = {**dict.fromkeys(self.hulls, 0), **fixed}
        spent, closed = sum(self.hulls[nodes][index].bytes for nodes, index in indices.items()), set(fixed)
        for nodes in self.steps:
            if nodes in closed:
                continue
            hull, index = self.hulls[nodes], indices[nodes]
            more = hull[index + 1].bytes - hull[index].bytes
            if spent + more > most:
                # Later steps of these weights gain less for their bytes.
                closed.add(nodes)
            else:
                indices[nodes], spent = index + 1, spent + more
        return Allocation({nodes: self.hulls[nodes][index] for nodes, index in indices.items()})

    @property
    def floats(self) -> Allocation:
        """All weights in float."""
        return Allocation({nodes: hull[-1] for nodes, hull in self.hulls.items()})

    @property
    def finest(self) -> Allocation:
        """All weights in their formats of least error besides float."""
        return Allocation({nodes: hull[max(len(hull) - 2, 0)] for nodes, hull in self.hulls.items()})

    def points(self, overhead: float, worse: float, aim: float) -> tuple[SizePoint, ...]:
        """Return sizes of the file for a report, one of them for a goal.

        Args:
            overhead: bytes of the file besides these weights.
            worse: measured over expected error; NaN if nothing is measured.
            aim: SQNR in decibels of a point.
        """
        sizes = np.geomspace(self.within(0).bytes, self.floats.bytes, _SHOWN_SIZES)
        allocations = list(map(self.within, sizes))
        if not math.isnan(worse):
            allocations.append(self.reaching(ratio_of_sqnr(aim) / worse))
        errors = {allocation.bytes: allocation.error for allocation in allocations}
        return tuple(
            SizePoint(math.ceil(size + overhead), None if math.isnan(worse) else sqnr_of_ratio(error * worse))
            for size, error in sorted(errors.items())
        )


def convex_hull(formats: Sequence[WeightFormat]) -> list[WeightFormat]:
    """Return the formats on the lower convex hull of bytes and error, smallest first.

    >>> formats = [WeightFormat(None, *pair) for pair in ((4, 0.0), (1, 9.0), (2, 8.0), (3, 1.0))]
    >>> [format.bytes for format in convex_hull(formats)]
    [1, 3, 4]
    """
    hull: list[WeightFormat] = []
    for format in sorted(formats, key=attrgetter("bytes", "error")):
        if hull and format.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain(*hull[-2:]) <= _gain(hull[-1], format):
            hull.pop()
        hull.append(format)
    return hull


def _gain(old: WeightFormat, new: WeightFormat) -> float:
    return (old.error - new.error) / (new.bytes - old.bytes)


def plan_of(model: PreparedModel, allocation: Allocation) -> Plan:
    """Return the plan whose weights have these formats."""
    decisions = model.plan({}).by_node
    specs = {node: format.spec for nodes, format in allocation.formats.items() for node in nodes}
    changed = {node: spec for node, spec in specs.items() if decisions[node].weights[0].spec != spec}
    return model.plan({node: _demotion(decisions[node], spec) for node, spec in changed.items()})


def _demotion(decision: Decision, spec: QuantSpec | None) -> Demotion:
    if spec is None:
        return Demotion(Mode.FLOAT, _FLOAT, finer=_FLOAT)
    is_finer = format_named(spec.format).bits > format_named(decision.weights[0].spec.format).bits
    reason = _FINER if is_finer else _COARSER
    return Demotion(decision.mode, reason, weight=spec, finer=reason if is_finer else "")
