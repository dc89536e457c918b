"""Factors of channels in a module: codes are of what was divided, and other weights as the float model has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from onnxq.algorithms.codes import Codes
from onnxq.algorithms.migration import Factors, read_factors, weighted_maker
from onnxq.algorithms.sites import sites
from onnxq.config.scheme import Mode
from onnxq.ir import Constant, Graph, Node, nodes
from onnxq.planning.plan import Decision, Plan
from onnxq.training.factors import Own, Shared, Times
from onnxq.training.quantizers import FakeQuantize


class Channels(nn.Module):
    """The factors that the codes of a plan have.

    Attributes:
        own: those of each tensor that has any, by name.
    """

    def __init__(self, graph: Graph, plan: Plan, codes: Codes) -> None:
        """Take the codes, and the prepared graph and plan that they are of."""
        super().__init__()
        self._begun, self._coded = codes.factors, codes.activations
        self.own = dict(_owners(graph, plan, codes.factors))
        self.shared = nn.ModuleList(dict.fromkeys(own.shared for own in self.own.values()))
        self._makers = {
            maker.name: self.own[tensor.name]
            for _, node in nodes(graph)
            for tensor in node.outputs
            if tensor.name in self.own
            and tensor.name in plan.by_tensor
            and (maker := weighted_maker(tensor, plan)) is not None
        }

    def factors(self) -> Mapping[str, Factors]:
        """Return the factors that are written, by tensor."""
        return {name: own.now() for name, own in self.own.items()}

    def made(self, node: Node) -> Own | None:
        """Return the factors of what a product makes."""
        return self._makers.get(node.name)

    def times(self, node: Node, decision: Decision, index: int) -> Times | None:
        """Return what codes of a weight are of, in units of the weight; None where it has no factors around."""
        divided = read_factors(node, decision, self._begun, self._coded) is not None
        data = decision.data if decision.mode is Mode.STATIC else node.inputs[0].name
        read, made = self.own[data] if divided else None, self.made(node)
        if read is None and made is None:
            return None
        return Times(
            None if read is None else read.in_weight(node, index, read=True),
            None if made is None else made.in_weight(node, index, read=False),
        )

    def divided(self, tensor: Constant) -> NDArray[np.floating]:
        """Return the values of a constant that become codes."""
        own = self.own.get(tensor.name)
        return tensor.values if own is None else own.now().divide(tensor.values)

    def coded(self, name: str, values: Tensor, quantizer: FakeQuantize) -> Tensor:
        """Return what the codes of an activation stand for: divided before, and multiplied behind."""
        own = self.own.get(name)
        if own is None:
            return quantizer(values)
        factors = own().reshape([-1 if axis == own.axis else 1 for axis in range(values.ndim)])
        return quantizer(values / factors) * factors


def _owners(graph: Graph, plan: Plan, factors: Mapping[str, Factors]) -> Iterator[tuple[str, Own]]:
    """Yield the factors of each tensor that has any; those of sites learn."""
    left = dict(factors)
    for site in sites(graph, plan).found if factors else ():
        begun = np.ones(len(site.free))
        named = {tensor: places for tensor, places in site.tensors.items() if tensor in factors}
        for tensor, channels in named.items():
            begun[channels.places] = left.pop(tensor).values
        shared = Shared(begun, site.free & (len(named) == len(site.tensors)))
        for tensor, channels in named.items():
            yield tensor, Own(shared, torch.from_numpy(channels.places), channels.axis)
    for tensor, one in left.items():
        count = len(one.values)
        yield tensor, Own(Shared(one.values, np.zeros(count, bool)), torch.arange(count), one.axis)
