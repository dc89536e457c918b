"""Equalization: divide the channels of a tensor so that each uses its range, and rescale the layers around it.

A tensor has one range, and many channels use little of it. The quantized values of `x / v` with a factor v <= 1 for
each channel use more. The division is free if the layers on both sides absorb the factors. Rows of the weight that
produces the tensor are divided by them, and columns of the weights that read it are multiplied by them (cross-layer
equalization: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019; SmoothQuant:
Xiao et al., 2022).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.encoders import tied_to_tables
from onnxq.config.scheme import Mode
from onnxq.ir import Constant, Graph, Node, Tensor, Variable, all_nodes, producer
from onnxq.numerics.affine import QuantParams
from onnxq.numerics.blocks import along
from onnxq.numerics.formats import format_named
from onnxq.ops import Operator, Role, facts_of
from onnxq.planning.activations import Groups
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Decision, Plan

FLOAT_DATA: Final = frozenset({Mode.WEIGHT_ONLY, Mode.STORAGE})
"""Modes in which quantized weights multiply float activations."""


@dataclass(frozen=True, eq=False)
class ChannelScales:
    """Divisors of the channels of a tensor, before it is quantized or multiplied by quantized weights.

    Attributes:
        axis: channel axis, counted from the front.
        values: float64 of shape (channels,), above 0. For quantized activations at most 1.
    """

    axis: int
    values: NDArray[np.float64]

    @property
    def key(self) -> Hashable:
        """A key that differs between different factors."""
        return self.axis, self.values.tobytes()

    def divide(self, array: NDArray[Any]) -> NDArray[Any]:
        """Divide the channels of an array; keep its type."""
        return np.asarray((array / along(self.values, self.axis, array.ndim)).astype(array.dtype))

    def multiply(self, array: NDArray[Any]) -> NDArray[Any]:
        """Multiply the channels of an array; the inverse of `divide`."""
        return ChannelScales(self.axis, 1 / self.values).divide(array)


@dataclass(frozen=True, eq=False)
class Equalization:
    """Factors by tensor name. They are valid for every plan, because each tensor is independent."""

    factors: Mapping[str, ChannelScales] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def key(self) -> Hashable:
        """A key that differs between different equalizations."""
        return tuple((name, factors.key) for name, factors in sorted(self.factors.items()))

    def select(self, tensors: Collection[str]) -> Equalization:
        """Return the factors of some tensors only."""
        return Equalization({name: factors for name, factors in self.factors.items() if name in tensors})


NOTHING = Equalization()
"""An equalization without factors."""


@dataclass(frozen=True, eq=False)
class WeightRescaling:
    """The factors on both sides of a compute node.

    Attributes:
        read: factors of its activations; the columns of its weight are multiplied by them.
        made: factors of its output; its rows and bias are divided by them.
    """

    read: ChannelScales | None = None
    made: ChannelScales | None = None

    def __bool__(self) -> bool:
        return self.read is not None or self.made is not None

    @property
    def key(self) -> Hashable:
        """A key that differs between different factors."""
        return self.read and self.read.key, self.made and self.made.key

    def weight(self, node: Node, index: int, values: NDArray[Any]) -> NDArray[Any]:
        """Rescale the float weight of a compute node; keep shape and type.

        >>> read, made = ChannelScales(1, np.array([0.5, 1.0])), ChannelScales(1, np.array([1.0, 1.0, 0.25]))
        >>> around = WeightRescaling(read, made)
        >>> around.weight(Node("Gemm", "g", {"transB": 1}), 1, np.ones((3, 2)))
        array([[0.5, 1. ],
               [0.5, 1. ],
               [2. , 4. ]])
        """
        if not self:
            return values
        axes, shape = facts_of(node).weights[index], values.shape
        rows, summed = axes.channels(node) % len(shape), axes.reduction(node) % len(shape)
        found = values.astype(np.float64)
        if self.read is not None:
            groups = len(self.read.values) // shape[summed]
            copies = shape[rows] // groups if groups > 1 else 1
            own = np.repeat(self.read.values.reshape(groups, shape[summed]), copies, axis=0)
            grid = [1] * len(shape)
            grid[rows], grid[summed] = own.shape
            # `own` has rows first, wherever they lie in the weight.
            found *= (own if rows < summed else own.T).reshape(grid)
        if self.made is not None:
            found /= along(self.made.values, rows, len(shape))
        return found.astype(values.dtype)

    def bias(self, values: NDArray[Any]) -> NDArray[Any]:
        """Rescale the bias of a compute node; keep shape and type."""
        if self.made is None:
            return values
        return np.asarray((values / self.made.values.reshape(values.shape)).astype(values.dtype))

    def own_weight(self, node: Node, index: int, values: NDArray[Any]) -> NDArray[Any]:
        """Undo `weight`: return a rescaled weight as the float model has it."""
        return np.asarray((values / self.weight(node, index, np.ones(values.shape))).astype(values.dtype))

    def own_bias(self, values: NDArray[Any]) -> NDArray[Any]:
        """Undo `bias`: return a rescaled bias as the float model has it."""
        return np.asarray((values / self.bias(np.ones(values.shape))).astype(values.dtype))

    def means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Divide the channel means of the activations."""
        return values if self.read is None else values / self.read.values


def read_factors(
    node: Node, decision: Decision, factors: Mapping[str, ChannelScales], quantized: Collection[str]
) -> ChannelScales | None:
    """Return the factors of the activations that a compute node multiplies, quantized or float; None if there are none.

    Args:
        node: the compute node.
        decision: its decision.
        factors: by tensor.
        quantized: names of the quantized tensors. A float reader of a quantized tensor reads undivided values.
    """
    if decision.mode is Mode.STATIC:
        return factors.get(decision.data)
    data = node.inputs[0].name
    return factors.get(data) if decision.mode in FLOAT_DATA and data not in quantized else None


def makers_of_divided(graph: Graph, plan: Plan, equalization: Equalization) -> Mapping[str, ChannelScales]:
    """Return the factors by which the rows of producers are divided, by node name."""
    return {
        maker.name: equalization.factors[tensor.name]
        for tensor in _with_factors(graph, equalization)
        if (maker := absorbing_producer(tensor, plan)) is not None
    }


def divided_tensors(graph: Graph, plan: Plan, equalization: Equalization) -> frozenset[str]:
    """Return the tensors with factors whose producers divide or pass divided values on."""
    return frozenset(
        tensor.name
        for tensor in _with_factors(graph, equalization)
        if plan.by_tensor[tensor.name].every_consumer or absorbing_producer(tensor, plan) is not None
    )


def absorbing_producer(tensor: Variable, plan: Plan) -> Node | None:
    """Return the static compute node whose rows can absorb the factors of a tensor, or None.

    A clamp may stand between them if the quantizer replaces it. No node may read the divided tensor in float.
    """
    maker, activation = producer(tensor), plan.by_tensor.get(tensor.name)
    if maker is not None and facts_of(maker).role is Role.CLAMP:
        before = maker.inputs[0]
        if len(before.outputs) != 1 or before.graph_output_of or before.name in plan.by_tensor:
            return None
        maker = producer(before)
    if maker is None or activation is None or not is_static(plan, maker) or not plan.by_node[maker.name].weights:
        return None
    if activation.every_consumer:
        return maker
    alone = not tensor.graph_output_of and all(is_static(plan, reader) for reader in tensor.outputs)
    return maker if alone and producer(tensor) is maker else None


def is_static(plan: Plan, node: Node) -> bool:
    """Whether a node computes with quantized values."""
    decision = plan.by_node.get(node.name)
    return decision is not None and decision.mode is Mode.STATIC


def _with_factors(graph: Graph, equalization: Equalization) -> Iterator[Variable]:
    if equalization.factors:
        yield from (
            tensor for _, node in all_nodes(graph) for tensor in node.outputs if tensor.name in equalization.factors
        )


# --- equalization groups --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GroupChannels:
    """The channels of one tensor of an equalization group.

    Attributes:
        axis: channel axis, counted from the front.
        rank: rank of the tensor.
        places: index of each channel's factor in the group, int64 of shape (channels,).
    """

    axis: int
    rank: int
    places: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EqualizationGroup:
    """Tensors whose channels share factors, because static nodes pass quantized values from one to the other.

    Attributes:
        tensors: the channels of each tensor by name, in graph order.
        inside: the tensors from bodies of control flow.
        free: whether each factor may differ from 1, bool of shape (factors,).
        dense: whether a reader sums over channels. Then finer activations mean a coarser weight.
    """

    tensors: Mapping[str, GroupChannels]
    inside: frozenset[str]
    free: NDArray[np.bool_]
    dense: bool


def find_groups(graph: Graph, plan: Plan) -> tuple[EqualizationGroup, ...]:
    """Return the equalization groups of a prepared graph, for a plan in which every node that can be static is static.

    Channels start at compute nodes and pass through the static nodes behind them. If compute nodes share a weight,
    their tensors have no factors, because each node would need its own quantized weight.

    Returns:
        The groups with at least one free factor, in graph order.
    """
    survey = _Survey(graph, plan)
    for _, node in all_nodes(graph):
        survey.visit(node)
    return tuple(survey.groups())


class _Survey:
    """The channels of quantized tensors, which have consecutive numbers, and which of them are the same."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self._channels: dict[str, GroupChannels] = {}
        self._total = 0
        self._links: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._joined = Groups[str]()
        self._blocked: set[str] = set()
        self._dense: set[str] = set()
        self._tied = tied_to_tables(graph, plan)

    def visit(self, node: Node) -> None:
        operator = facts_of(node)
        # The quantizer replaces a static clamp.
        if not is_static(self._plan, node) or operator.role is Role.CLAMP:
            return
        if operator.role is Role.COMPUTE:
            self._product(node, operator)
        else:
            self._pass(node, operator)

    def _product(self, node: Node, operator: Operator) -> None:
        data, weight = node.inputs[0], node.inputs[1]
        rank = _rank(node, operator)
        if operator.channels is None or not rank:
            self._block(data)
            return
        summed = weight.shape[operator.weights[1].reduction(node)]
        self._place(data, operator.channels % rank, summed * int(node.attrs.get("group", 1)), rank)
        if summed > 1:
            self._dense.add(data.name)
        made = self._made(node)
        for tensor in made:
            # Compute nodes and clamps keep the rank.
            self._place(tensor, operator.channels % rank, weight.shape[operator.weights[1].channels(node)], rank)
        if len(set(weight.outputs)) > 1 or (node.name, 1) in self._tied:
            self._block(data, *made)

    def _made(self, node: Node) -> list[Variable]:
        """Return the tensors whose factors a compute node absorbs, also behind a clamp that the quantizer replaces."""
        near = [
            *node.outputs,
            *(behind for output in node.outputs for reader in output.outputs for behind in reader.outputs),
        ]
        return [tensor for tensor in near if absorbing_producer(tensor, self._plan) is node]

    def _pass(self, node: Node, operator: Operator) -> None:
        outputs = [self._behind_clamp(tensor) for tensor in node.outputs]
        for index, tensor in enumerate(node.inputs):
            if tensor not in data_inputs(node) or (
                isinstance(tensor, Constant) and not self._constant(node, operator, index)
            ):
                continue
            channels = self._channels.get(tensor.name)
            if channels is None:
                self._block(tensor, *outputs)
                continue
            passages = operator.channel_map(node, index, channels.axis) if operator.channel_map else ""
            if isinstance(passages, str):
                # A sentence says why the operator takes no factors.
                self._block(tensor)
                continue
            for passage in passages:
                output = outputs[passage.output]
                extent = (output.shape or [None])[passage.axis]
                if not isinstance(extent, int):
                    self._block(tensor)
                    continue
                numbers = self._place(output, passage.axis, extent, len(output.shape or ()))
                there = numbers[passage.first : passage.first + len(passage.of)]
                self._links.append((channels.places[passage.of], there))
                self._joined.join(tensor.name, output.name)
        self._block(*(output for output in outputs if output.name not in self._channels or not operator.channel_map))

    def _constant(self, node: Node, operator: Operator, index: int) -> bool:
        """Place the channels of a constant operand; return whether it shares factors with the activations."""
        values, other = node.inputs[index], node.inputs[1 - index]
        channels = self._channels.get(other.name)
        # A multiplication by a constant passes the factors on. An added constant needs the same factors.
        if channels is None or operator.channel_map is None or operator.multiplies:
            return False
        axis, count = channels.axis - channels.rank + len(values.shape), len(channels.places)
        if len(node.outputs[0].shape or ()) != channels.rank or axis < 0 or values.shape[axis] != count:
            # It takes one number together with all its channels.
            self._block(other)
            return False
        self._place(values, axis, count, len(values.shape))
        return True

    def _behind_clamp(self, tensor: Variable) -> Variable:
        """Return the quantized tensor of an output: itself, or the output of a clamp that the quantizer replaces."""
        if tensor.name in self._plan.by_tensor or len(tensor.outputs) != 1:
            return tensor
        behind: Variable = tensor.outputs[0].outputs[0]
        return behind

    def _place(self, tensor: Tensor, axis: int, count: int, rank: int) -> NDArray[np.int64]:
        """Return the numbers of the channels of a tensor along an axis."""
        channels = self._channels.get(tensor.name)
        if channels is not None and (channels.axis, len(channels.places)) == (axis, count):
            return channels.places
        numbers = np.arange(self._total, self._total + count)
        self._total += count
        if channels is not None:
            # Its readers do not agree on the axis, and these numbers belong to no tensor.
            self._block(tensor)
            return numbers
        self._channels[tensor.name] = GroupChannels(axis, rank, numbers)
        if tensor.name not in self._plan.by_tensor:
            self._block(tensor)
        return numbers

    def _block(self, *tensors: Tensor) -> None:
        """Keep the factor 1 in all channels of tensors."""
        self._blocked |= {tensor.name for tensor in tensors}

    def groups(self) -> Iterator[EqualizationGroup]:
        """Yield the groups with at least one free factor."""
        classes = _classes(self._total, self._links)
        pinned = np.zeros(self._total, bool)
        for name in self._blocked & self._channels.keys():
            pinned[classes[self._channels[name].places]] = True
        members: dict[str, list[str]] = {}
        for name in self._channels:
            members.setdefault(self._joined.find(name), []).append(name)
        outer = {tensor.name for node in self._graph.nodes for tensor in (*node.inputs, *node.outputs)}
        for names in members.values():
            own = [self._channels[name] for name in names]
            roots, places = np.unique(
                np.concatenate([classes[channels.places] for channels in own]), return_inverse=True
            )
            bounds = np.cumsum([len(channels.places) for channels in own])[:-1]
            free = ~pinned[roots]
            if free.any() and len(roots) >= 2:
                pieces = zip(names, own, np.split(places, bounds), strict=True)
                tensors = {name: replace(channels, places=piece) for name, channels, piece in pieces}
                dense = not self._dense.isdisjoint(names)
                yield EqualizationGroup(tensors, frozenset(names) - outer, free, dense)


def _rank(node: Node, operator: Operator) -> int:
    """Return the rank of a compute node's activations; 0 if unknown."""
    # Weights of convolutions and Gemm have the rank of their activations.
    return len((node.inputs[0].shape if operator.bias is None else node.inputs[1].shape) or ())


def _classes(total: int, links: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> NDArray[np.int64]:
    """Return the smallest number that each number is linked to, directly or through others.

    >>> _classes(4, [(np.array([1, 2]), np.array([2, 3]))])
    array([0, 1, 1, 1])
    """
    labels = np.arange(total)
    one = np.concatenate([labels[:0], *(ends[0] for ends in links)])
    other = np.concatenate([labels[:0], *(ends[1] for ends in links)])
    while True:
        low, high = np.minimum(labels[one], labels[other]), np.maximum(labels[one], labels[other])
        if (low == high).all():
            return labels
        np.minimum.at(labels, high, low)
        while not (labels[labels] == labels).all():
            labels = labels[labels]


# --- channel scales from the share of the range that each channel uses ----------------------------------------------

Array = NDArray[np.float64]

SMALLEST = 0.25
"""Smallest factor before it is raised to a power: a gain of 2 bits of 8."""
# Exponents of the share of the range that a channel uses: where readers sum over channels, larger ones would coarsen
# their weights more than they gain.
_DENSE, _LOSSLESS = 0.5, 0.7
# Channels that use a smaller share are quantized to zero only. Their range in other samples is unknown.
_UNSEEN = 1 / 512
_TINY = 1e-9


def range_shares(
    site: EqualizationGroup, plan: Plan, parameters: Mapping[str, QuantParams], ends: Mapping[str, Array]
) -> Array:
    """Return the share of its tensor's range that each channel of a group uses, float64 of shape (factors,).

    If several tensors share a factor, the largest share counts. A channel that must keep the factor 1 has the share 1,
    a channel without values the share 0.

    Args:
        site: the group.
        plan: gives the formats of its tensors.
        parameters: scale and zero point by tensor name.
        ends: minimum and maximum of each channel by tensor name, of shape (channels, 2), or (0, 2) without values.
    """
    found = np.zeros(len(site.free))
    for name, channels in site.tensors.items():
        format, own = format_named(plan.by_tensor[name].spec.format), parameters[name]
        zero = 0.0 if own.zero_point is None else float(own.zero_point)
        low, high = ((float(end) - zero) * float(own.scale) for end in (format.minimum, format.maximum))
        seen = ends[name]
        if not len(seen):
            continue
        if len(seen) != len(channels.places):
            return np.ones(len(site.free))
        below = np.where(seen[:, 0] < 0, seen[:, 0] / min(low, -_TINY), 0.0)
        above = np.where(seen[:, 1] > 0, seen[:, 1] / max(high, _TINY), 0.0)
        np.maximum.at(found, channels.places, np.maximum(below, above))
    return np.where(site.free, found, 1.0)


def channel_scales_of(site: EqualizationGroup, shares: Array) -> Array:
    """Return the factors of a group, float64 of shape (factors,); all are 1 if nothing improves.

    Args:
        site: the group.
        shares: of its tensor's range that each channel uses; a channel that was always zero may use all of it.
    """
    # Shares are NaN if the samples are.
    used = np.nan_to_num(np.where(shares < _UNSEEN, 1.0, shares), nan=1.0)
    power = _DENSE if site.dense else _LOSSLESS
    return np.where(site.free, np.clip(used, SMALLEST, 1.0) ** power, 1.0)


def equalization_of(found: Mapping[EqualizationGroup, Array]) -> Equalization:
    """Return the equalization for the factors of each group."""
    return Equalization(
        {
            name: ChannelScales(channels.axis, factors[channels.places])
            for site, factors in found.items()
            if (factors < 1).any()
            for name, channels in site.tensors.items()
        }
    )


# --- channel scales that cost nothing at run time -------------------------------------------------------------------


def select_free_scales(graph: Graph, plan: Plan, equalization: Equalization) -> Equalization:
    """Return the factors that cost nothing: no extra node, and no scale for each activation channel.

    Other factors need a Mul where values are quantized or dequantized. The tensors of a group keep their factors
    together or not at all.
    """
    paid = _paid(graph, plan, equalization)
    free = (site for site in find_groups(graph, plan) if not site.tensors.keys() & paid)
    return equalization.select({name for site in free for name in site.tensors})


def costly_scales(graph: Graph, plan: Plan, equalization: Equalization) -> list[frozenset[str]]:
    """Return the tensors whose factors need a node or scales of their own, by equalization group."""
    paid = _paid(graph, plan, equalization)
    grouped = (frozenset(site.tensors) for site in find_groups(graph, plan) if site.tensors.keys() & paid)
    return [names & equalization.factors.keys() for names in grouped]


def _paid(graph: Graph, plan: Plan, equalization: Equalization) -> set[str]:
    divided = divided_tensors(graph, plan, equalization)
    tensors = {tensor.name: tensor for _, node in all_nodes(graph) for tensor in node.outputs}
    free = {name for name in divided if _read_quantized(tensors[name], plan)}
    return (equalization.factors.keys() & tensors.keys()) - free


def _read_quantized(tensor: Variable, plan: Plan) -> bool:
    return not tensor.graph_output_of and all(is_static(plan, reader) for reader in tensor.outputs)
