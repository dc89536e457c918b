"""Migration: each channel of a tensor has codes of its own fineness, which the layers around it make up for.

A tensor's channels use little of its one range. Codes of ``x / v`` with a factor v <= 1 for each channel use more of
it, and cost nothing where the layers with weights on both sides take the factors in: rows of the weight that makes the
tensor are divided by them, columns of the weights that read it are multiplied by them (Nagel et al., "Data-Free
Quantization Through Weight Equalization and Bias Correction", 2019; Xiao et al., "SmoothQuant", 2022).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxq.config.scheme import Mode
from onnxq.ir import Graph, Node, Variable, nodes, operator_key, producer
from onnxq.ops import OPERATORS, Role, operator_of
from onnxq.planning.plan import Decision, Plan

FLOAT_DATA: Final = frozenset({Mode.WEIGHT_ONLY, Mode.STORAGE})
"""Modes in which weights of codes multiply floats."""


@dataclass(frozen=True, eq=False)
class Factors:
    """What the channels of a tensor are divided by before they become codes, or before weights of codes multiply them.

    Attributes:
        axis: of the channels, counted from the front.
        values: above 0, and of codes at most 1, float64 of shape (channels,).
    """

    axis: int
    values: NDArray[np.float64]

    @property
    def key(self) -> Hashable:
        """What tells factors apart."""
        return self.axis, self.values.tobytes()

    def divide(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return an array with its channels divided, in its type."""
        shape = [-1 if place == self.axis else 1 for place in range(array.ndim)]
        return np.asarray((array / self.values.reshape(shape)).astype(array.dtype))

    def multiply(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return an array with its channels multiplied, in its type: what was divided as it was."""
        return Factors(self.axis, 1 / self.values).divide(array)


@dataclass(frozen=True, eq=False)
class Migration:
    """The factors of each tensor that has any, by name; they hold for every plan, as each tensor stands for itself."""

    factors: Mapping[str, Factors] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def key(self) -> Hashable:
        """What tells migrations apart."""
        return tuple((name, factors.key) for name, factors in sorted(self.factors.items()))

    def select(self, tensors: Collection[str]) -> Migration:
        """Return the factors of some tensors alone."""
        return Migration({name: factors for name, factors in self.factors.items() if name in tensors})


NOTHING = Migration()
"""No tensor has factors."""


@dataclass(frozen=True, eq=False)
class Around:
    """The factors on both sides of a product.

    Attributes:
        read: of its data, which the columns of its weight make up for.
        made: of what it makes, which its rows and its bias are divided by.
    """

    read: Factors | None = None
    made: Factors | None = None

    def __bool__(self) -> bool:
        return self.read is not None or self.made is not None

    @property
    def key(self) -> Hashable:
        """What tells them apart."""
        return self.read and self.read.key, self.made and self.made.key

    def weight(self, node: Node, index: int, values: NDArray[Any]) -> NDArray[Any]:
        """Return the float weight that a product has then, in its shape and type.

        >>> around = Around(Factors(1, np.array([0.5, 1.0])), Factors(1, np.array([1.0, 1.0, 0.25])))
        >>> around.weight(Node("Gemm", "g", {"transB": 1}), 1, np.ones((3, 2)))
        array([[0.5, 1. ],
               [0.5, 1. ],
               [2. , 4. ]])
        """
        if not self:
            return values
        axes, shape = OPERATORS[operator_key(node)].weights[index], values.shape
        rows, summed = axes.channels(node) % len(shape), axes.reduction(node) % len(shape)
        found = values.astype(np.float64)
        if self.read is not None:
            groups = len(self.read.values) // shape[summed]
            copies = shape[rows] // groups if groups > 1 else 1
            own = np.repeat(self.read.values.reshape(groups, shape[summed]), copies, axis=0)
            grid = [1] * len(shape)
            grid[rows], grid[summed] = own.shape
            # Rows come first in what was repeated, wherever they lie in the weight.
            found *= (own if rows < summed else own.T).reshape(grid)
        if self.made is not None:
            found /= self.made.values.reshape([-1 if place == rows else 1 for place in range(len(shape))])
        return found.astype(values.dtype)

    def bias(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the bias that a product has then, in its shape and type."""
        if self.made is None:
            return values
        return np.asarray((values / self.made.values.reshape(values.shape)).astype(values.dtype))

    def own_weight(self, node: Node, index: int, values: NDArray[Any]) -> NDArray[Any]:
        """Return a weight that stands for one in the float model, as it is there: what `weight` does, undone."""
        return np.asarray((values / self.weight(node, index, np.ones(values.shape))).astype(values.dtype))

    def own_bias(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return a bias that stands for one in the float model, as it is there: what `bias` does, undone."""
        return np.asarray((values / self.bias(np.ones(values.shape))).astype(values.dtype))

    def means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean of each channel of the data that its codes stand for."""
        return values if self.read is None else values / self.read.values


def read_factors(
    node: Node, decision: Decision, factors: Mapping[str, Factors], coded: Collection[str]
) -> Factors | None:
    """Return the factors of the data that a product multiplies, codes or not; None where it has none.

    Args:
        node: the product.
        decision: what becomes of it.
        factors: by tensor.
        coded: names of the tensors that become codes: who reads one in float reads it as it was before it was divided.
    """
    if decision.mode is Mode.STATIC:
        return factors.get(decision.data)
    data = node.inputs[0].name
    return factors.get(data) if decision.mode in FLOAT_DATA and data not in coded else None


def makers_of_divided(graph: Graph, plan: Plan, migration: Migration) -> Mapping[str, Factors]:
    """Return the factors that the rows of products are divided by, by node name."""
    return {
        maker.name: migration.factors[tensor.name]
        for tensor in _with_factors(graph, migration)
        if (maker := weighted_maker(tensor, plan)) is not None
    }


def divided_tensors(graph: Graph, plan: Plan, migration: Migration) -> frozenset[str]:
    """Return the tensors with factors that come divided: from products, or from nodes that pass codes on."""
    return frozenset(
        tensor.name
        for tensor in _with_factors(graph, migration)
        if plan.by_tensor[tensor.name].every_consumer or weighted_maker(tensor, plan) is not None
    )


def weighted_maker(tensor: Variable, plan: Plan) -> Node | None:
    """Return the product of codes whose rows can take the factors of a tensor in, or None.

    A clamp may stand between them that the quantizer stands for. Nobody may read in float what comes divided.
    """
    maker, activation = producer(tensor), plan.by_tensor.get(tensor.name)
    if maker is not None and (operator := operator_of(maker)) is not None and operator.role is Role.CLAMP:
        before = maker.inputs[0]
        if len(before.outputs) != 1 or before.returned_by or before.name in plan.by_tensor:
            return None
        maker = producer(before)
    if maker is None or activation is None or not is_static(plan, maker) or not plan.by_node[maker.name].weights:
        return None
    if activation.every_consumer:
        return maker
    alone = not tensor.returned_by and all(is_static(plan, reader) for reader in tensor.outputs)
    return maker if alone and producer(tensor) is maker else None


def is_static(plan: Plan, node: Node) -> bool:
    """Whether a node computes with codes."""
    decision = plan.by_node.get(node.name)
    return decision is not None and decision.mode is Mode.STATIC


def _with_factors(graph: Graph, migration: Migration) -> Iterator[Variable]:
    """Yield the tensors with factors that nodes make, in graph order."""
    if migration.factors:
        yield from (tensor for _, node in nodes(graph) for tensor in node.outputs if tensor.name in migration.factors)
