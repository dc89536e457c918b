"""Sites of migration: the tensors whose channels have to have the same factors, and where there can be none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.algorithms.migration import is_static, weighted_maker
from onnxq.ir import Constant, Graph, Node, Tensor, Variable, nodes
from onnxq.ops import Operator, Role, operator_of
from onnxq.planning.activations import Groups
from onnxq.planning.obstacles import data_inputs
from onnxq.planning.plan import Plan


@dataclass(frozen=True, eq=False)
class Channels:
    """The channels of one tensor of a site.

    Attributes:
        axis: of the channels, counted from the front.
        rank: how many axes the tensor has.
        places: the factor of the site that each channel has, int64 of shape (channels,).
    """

    axis: int
    rank: int
    places: NDArray[np.int64]


@dataclass(frozen=True)
class Reader:
    """A product of codes that multiplies a tensor of a site by a weight.

    Attributes:
        node: its name.
        tensor: its data.
        dense: whether it adds up channels, so that what is finer in the data is coarser in the weight.
    """

    node: str
    tensor: str
    dense: bool


@dataclass(frozen=True, eq=False)
class Site:
    """Tensors whose channels share factors, as nodes between codes pass them on.

    Attributes:
        tensors: the channels of each tensor by name, in graph order.
        inside: the tensors among them that bodies of control flow make.
        free: of each factor whether it may be other than 1, bool of shape (factors,).
        readers: the products that take the factors in.
    """

    tensors: Mapping[str, Channels]
    inside: frozenset[str]
    free: NDArray[np.bool_]
    readers: tuple[Reader, ...]

    @property
    def name(self) -> str:
        """The name of its first tensor."""
        return next(iter(self.tensors))

    @property
    def dense(self) -> bool:
        """Whether any reader adds up channels."""
        return any(reader.dense for reader in self.readers)


@dataclass(frozen=True, eq=False)
class Sites:
    """Every site of a plan.

    Attributes:
        found: the sites, in graph order.
        blocked: for tensors all or some of whose channels keep the factor 1, why, by name.
    """

    found: tuple[Site, ...]
    blocked: Mapping[str, str]


def sites(graph: Graph, plan: Plan) -> Sites:
    """Return the sites of a plan, which should be the one in which every node is static that can be.

    Channels start at products and pass through the static nodes behind them. Tensors of products that share a weight
    with others have no factors, as each would need codes of its own.

    Args:
        graph: the prepared graph.
        plan: made for it.
    """
    survey = _Survey(graph, plan)
    for _, node in nodes(graph):
        survey.visit(node)
    return survey.result()


@dataclass(frozen=True, eq=False)
class _Place:
    """Where the channels of a tensor lie, and the first of the numbers that tell all channels apart."""

    axis: int
    rank: int
    channels: int
    start: int

    @property
    def numbers(self) -> NDArray[np.int64]:
        return np.arange(self.start, self.start + self.channels)


class _Survey:
    """What is known while the nodes are visited in graph order."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self._places: dict[str, _Place] = {}
        self._total = 0
        self._links: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._groups = Groups[str]()
        self._blocked: dict[str, str] = {}
        self._readers: list[Reader] = []

    def visit(self, node: Node) -> None:
        """Follow channels through a node."""
        operator = operator_of(node)
        # Quantizers stand for the clamps that are static.
        if operator is None or not is_static(self._plan, node) or operator.role is Role.CLAMP:
            return
        if operator.role is Role.COMPUTE:
            self._product(node, operator)
        else:
            self._pass(node, operator)

    def _product(self, node: Node, operator: Operator) -> None:
        data, weight = node.inputs[0], node.inputs[1]
        rank = _rank(node, operator)
        if operator.channels is None or not rank:
            self._block(data, f"{node.op} reads it, whose channels are not known")
            return
        summed = weight.shape[operator.weights[1].reduction(node)]
        self._place(data, operator.channels % rank, summed * int(node.attrs.get("group", 1)), rank)
        self._readers.append(Reader(node.name, data.name, dense=summed > 1))
        made = self._made(node)
        for tensor in made:
            # A product keeps the number of axes, and so does a clamp.
            self._place(tensor, operator.channels % rank, weight.shape[operator.weights[1].channels(node)], rank)
        if len(set(weight.outputs)) > 1:
            for tensor in (data, *made):
                self._block(tensor, f"{node.name} shares its weight with others")

    def _made(self, node: Node) -> list[Variable]:
        """Return the tensors whose factors a product takes in, behind a clamp that vanishes too."""
        near = [*node.outputs, *(behind for one in node.outputs for reader in one.outputs for behind in reader.outputs)]
        return [tensor for tensor in near if weighted_maker(tensor, self._plan) is node]

    def _pass(self, node: Node, operator: Operator) -> None:
        outputs = [self._behind_clamp(tensor) for tensor in node.outputs]
        for index, tensor in enumerate(node.inputs):
            if tensor not in data_inputs(node) or (
                isinstance(tensor, Constant) and not self._constant(node, operator, index)
            ):
                continue
            place = self._places.get(tensor.name)
            if place is None:
                for one in (tensor, *outputs):
                    self._block(one, f"{node.name} passes on channels that are not known")
                continue
            found = operator.passage(node, index, place.axis) if operator.passage else "has no channels of its own"
            if isinstance(found, str):
                self._block(tensor, f"in {node.name} it {found}")
                continue
            for passage in found:
                output = outputs[passage.output]
                extent = (output.shape or [None])[passage.axis]
                if not isinstance(extent, int):
                    self._block(tensor, f"{node.name} passes it on to an unknown number of channels")
                    continue
                numbers = self._place(output, passage.axis, extent, len(output.shape or ()))
                there = numbers[passage.first : passage.first + len(passage.of)]
                self._links.append((place.numbers[passage.of], there))
                self._groups.join(tensor.name, output.name)
        for output in outputs:
            if output.name not in self._places or not operator.passage:
                self._block(output, f"{node.name} makes it, which takes no factors in")

    def _constant(self, node: Node, operator: Operator, index: int) -> bool:
        """Place the channels of a constant beside data, and tell whether it shares factors with that."""
        values, other = node.inputs[index], node.inputs[1 - index]
        place = self._places.get(other.name)
        # Data passes with its factors whatever it is multiplied by; what is added needs the same ones.
        if place is None or operator.passage is None or operator.multiplies:
            return False
        axis = place.axis - place.rank + len(values.shape)
        if len(node.outputs[0].shape or ()) != place.rank or axis < 0 or values.shape[axis] != place.channels:
            self._block(other, f"{node.name} takes one number together with all its channels")
            return False
        self._place(values, axis, place.channels, len(values.shape))
        return True

    def _behind_clamp(self, tensor: Variable) -> Variable:
        """Return what carries the codes of an output: itself, or what comes out of a clamp that vanishes."""
        if tensor.name in self._plan.by_tensor or len(tensor.outputs) != 1:
            return tensor
        behind: Variable = tensor.outputs[0].outputs[0]
        return behind

    def _place(self, tensor: Tensor, axis: int, channels: int, rank: int) -> NDArray[np.int64]:
        """Say where the channels of a tensor lie, and return their numbers."""
        place = self._places.get(tensor.name)
        if place is None:
            place = self._places[tensor.name] = _Place(axis, rank, channels, self._total)
            self._total += channels
            if tensor.name not in self._plan.by_tensor:
                self._block(tensor, "it is no codes")
        elif (place.axis, place.channels) != (axis, channels):
            self._block(tensor, "its readers do not agree on which axis its channels lie along")
            # Numbers of nobody.
            self._total += channels
            return np.arange(self._total - channels, self._total)
        return place.numbers

    def _block(self, tensor: Tensor, reason: str) -> None:
        self._blocked.setdefault(tensor.name, reason)

    def result(self) -> Sites:
        """Return the sites that were found, without those in which nothing is free."""
        classes = _classes(self._total, self._links)
        pinned = np.zeros(self._total, bool)
        for name in self._blocked.keys() & self._places.keys():
            pinned[classes[self._places[name].numbers]] = True
        members: dict[str, list[str]] = {}
        for name in self._places:
            members.setdefault(self._groups.find(name), []).append(name)
        outer = {tensor.name for node in self._graph.nodes for tensor in (*node.inputs, *node.outputs)}
        found = []
        for names in members.values():
            own = [self._places[name] for name in names]
            roots, places = np.unique(np.concatenate([classes[place.numbers] for place in own]), return_inverse=True)
            bounds = np.cumsum([0, *(place.channels for place in own)])
            free = ~pinned[roots]
            if not free.any() or len(roots) < 2:
                continue
            tensors = {
                name: Channels(place.axis, place.rank, places[first : first + place.channels])
                for name, place, first in zip(names, own, bounds, strict=False)
            }
            readers = tuple(reader for reader in self._readers if reader.tensor in tensors)
            found.append(Site(tensors, frozenset(names) - outer, free, readers))
        return Sites(tuple(found), self._blocked)


def _rank(node: Node, operator: Operator) -> int:
    """Return how many axes the data of a product has, or 0 when that is unknown."""
    # Weights of convolutions and of Gemm have as many axes as their data.
    return len((node.inputs[0].shape if operator.bias is None else node.inputs[1].shape) or ())


def _classes(total: int, links: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> NDArray[np.int64]:
    """Return the least number that each number is linked to, directly or through others.

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
