"""Factors of channels in a module: codes are of what was divided, and all that learns is as the float model has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from onnxq.encoding.codes import Codes
from onnxq.encoding.migration import Around, Migration, makers_of_divided, read_factors
from onnxq.graph import Constant, Graph, Node
from onnxq.planning.plan import Decision, Plan
from onnxq.training.quantizers import FakeQuantize


class Channels:
    """The factors that the codes of a plan have, which stay."""

    def __init__(self, graph: Graph, plan: Plan, codes: Codes) -> None:
        """Take the codes, and the prepared graph and plan that they are of."""
        self._factors, self._coded = codes.factors, codes.activations
        self._makers = makers_of_divided(graph, plan, Migration(codes.factors).select(plan.by_tensor))

    def around(self, node: Node, decision: Decision) -> Around:
        """Return the factors of what a product reads and makes."""
        return Around(read_factors(node, decision, self._factors, self._coded), self._makers.get(node.name))

    def divided(self, tensor: Constant) -> np.ndarray[Any, Any]:
        """Return the values of a constant that become codes."""
        factors = self._factors.get(tensor.name)
        return tensor.values if factors is None else factors.divide(tensor.values)

    def coded(self, name: str, values: Tensor, quantizer: FakeQuantize) -> Tensor:
        """Return what the codes of an activation stand for: divided before, and multiplied behind."""
        factors = self._factors.get(name)
        if factors is None:
            return quantizer(values)
        own = torch.from_numpy(factors.values.astype(np.float32)).to(values.device)
        own = own.reshape([-1 if axis == factors.axis else 1 for axis in range(values.ndim)])
        return quantizer(values / own) * own
