"""AWQ: divide channels of float activations at their producer, and multiply the columns of the weights behind it.

Each column of a low-bit weight has about the same error, but its effect grows with the activations it multiplies. AWQ
multiplies columns with large activations before they are quantized, and divides the activations. The division is free:
the constants of the normalization or Mul in front absorb it (Lin et al., "AWQ: Activation-aware Weight Quantization for
LLM Compression and Acceleration", 2023).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from numpy.typing import NDArray

from onnxq.algorithms.encoders import tied_to_tables
from onnxq.algorithms.equalization import FLOAT_DATA, ChannelScales
from onnxq.ir import Graph, Node, Variable, is_constant, optional_input, producer
from onnxq.ops import facts_of
from onnxq.planning.plan import Plan

_WEIGHT: Final = 1
# Inputs that scale or shift the channels of the first output.
_PROPORTIONAL: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {"LayerNormalization": (1, 2), "RMSNormalization": (1,), "Mul": (0, 1)}
)


@dataclass(frozen=True, eq=False)
class ScalableTensor:
    """A tensor whose channels along the last axis can be divided at no cost.

    Attributes:
        constants: inputs of its producer that absorb the division, each with one number for each channel.
        readers: the matrix multiplications that read it, all with quantized weights.
    """

    tensor: Variable
    constants: tuple[int, ...]
    readers: tuple[Node, ...]

    @property
    def maker(self) -> Node:
        """The producer of the tensor."""
        return producer(self.tensor)  # type: ignore[return-value]

    def divided(self, factors: ChannelScales) -> dict[tuple[str, int], NDArray[Any]]:
        """Return the divided constants, by node and input."""
        values = {index: self.maker.inputs[index].values for index in self.constants}
        return {
            (self.maker.name, index): ChannelScales(one.ndim - 1, factors.values).divide(one)
            for index, one in values.items()
        }


def scalable_tensors(graph: Graph, plan: Plan) -> Mapping[str, ScalableTensor]:
    """Return the tensors of the main graph whose channels can be divided, by name.

    All their readers multiply them, in float, by weights that the plan quantizes and that no table is tied to.
    """
    tied = tied_to_tables(graph, plan)
    scalable = (_divisible(node, plan, tied) for node in graph.nodes if node.op in _PROPORTIONAL and not node.domain)
    return {divided.tensor.name: divided for divided in scalable if divided is not None}


def _divisible(maker: Node, plan: Plan, tied: Container[tuple[str, int]]) -> ScalableTensor | None:
    tensor = maker.outputs[0]
    readers = tuple(tensor.outputs)
    if (
        not readers
        or tensor.name in plan.by_tensor
        or tensor.graph_output_of
        or not tensor.shape
        or not all(_multiplies(reader, tensor, plan) and (reader.name, _WEIGHT) not in tied for reader in readers)
    ):
        return None
    last = len(tensor.shape) - 1
    if maker.op != "Mul" and maker.attrs.get("axis", -1) not in (-1, last):
        return None
    present = [index for index in _PROPORTIONAL[maker.op] if optional_input(maker, index) is not None]
    constants = tuple(index for index in present if maker.op != "Mul" or is_constant(maker.inputs[index]))
    channels = {_summed(reader) for reader in readers}
    fits = all(
        is_constant(divisor) and {divisor.shape[-1:], (divisor.values.size,)} == {(tensor.shape[last],)}
        for divisor in map(maker.inputs.__getitem__, constants)
    )
    return (
        ScalableTensor(tensor, constants, readers) if constants and fits and channels == {tensor.shape[last]} else None
    )


def _multiplies(reader: Node, tensor: Variable, plan: Plan) -> bool:
    """Whether `reader` multiplies the tensor's last axis, in float, by a quantized weight that no other node reads."""
    decision = plan.by_node.get(reader.name)
    if not facts_of(reader).product or decision is None or decision.mode not in FLOAT_DATA:
        return False
    weight = reader.inputs[_WEIGHT]
    alone = reader.inputs[0] is tensor and is_constant(weight) and len(weight.outputs) == 1 and len(weight.shape) == 2
    return (
        alone and not reader.attrs.get("transA", 0) and [quantized.index for quantized in decision.weights] == [_WEIGHT]
    )


def _summed(reader: Node) -> int:
    return int(reader.inputs[_WEIGHT].shape[1 if reader.attrs.get("transB", 0) else 0])
