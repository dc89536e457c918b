"""Fold what scales and shifts channels into the weight and bias in front of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnxq.graph import Constant, Graph, Names, Node, Variable, constant, remove_nodes, scopes
from onnxq.passes.base import Changes, Pass

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FuseBatchNorm(Pass):
    """Fold a BatchNormalization into the Conv, ConvTranspose, Gemm or MatMul that alone feeds it.

    The same written as Mul, Div, Add or Sub by a constant per channel is folded too. A shift behind a MatMul, which
    has no bias, becomes one Add. Leaves it when the producer has another consumer, when a weight is not constant, in
    training mode, or when the constant varies along another axis. Works in the main graph and in control-flow bodies.
    Computed in float64 and stored in the weight's type.
    """

    def apply(self, graph: Graph) -> Changes:
        """Fold; ``changed`` holds the names of the folded nodes."""
        names = Names(graph)
        changed, left = [], []
        for scope in scopes(graph):
            outputs = set(scope.outputs)
            folded: list[Node] = []
            for node in list(scope.nodes):
                if node.op not in _AFFINE or node.domain:
                    continue
                found = _foldable(node, outputs)
                if isinstance(found, str):
                    if node.op == "BatchNormalization":
                        left.append((node.name, found))
                    continue
                producer, factor, shift = found
                remaining = _fold(producer, node, factor, shift, names)
                if not remaining:
                    folded.append(node)
                changed.append(node.name)
            remove_nodes(scope, folded)
        return Changes(tuple(changed), tuple(left))


_AFFINE = frozenset({"BatchNormalization", "Mul", "Div", "Add", "Sub"})
_PRODUCERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def _foldable(node: Node, outputs: set[Variable]) -> tuple[Node, Doubles, Doubles] | str:
    """Return the producer with a factor and shift for each channel, or why there is none."""
    source = _data_input(node)
    if source is None:
        return "its factor or data is not as expected: exactly one of its inputs is constant"
    producer = source.inputs[0] if source.inputs else None
    if producer is None or producer.op not in _PRODUCERS or producer.domain:
        return "no Conv, ConvTranspose, Gemm or MatMul stands in front of it"
    if len(source.outputs) != 1 or source in outputs:
        return f"{producer.name} has another consumer"
    weight = producer.inputs[1]
    bias = producer.inputs[2] if len(producer.inputs) > 2 and producer.inputs[2].name else None
    if not isinstance(weight, Constant) or not (bias is None or isinstance(bias, Constant)):
        return f"the weight of {producer.name} is not constant"
    if np.dtype(weight.dtype).kind != "f":
        return f"the weight of {producer.name} is not floating point"
    if producer.op == "Gemm" and (producer.attrs.get("alpha", 1.0) != 1.0 or producer.attrs.get("beta", 1.0) != 1.0):
        return f"{producer.name} has alpha or beta"
    if producer.op == "MatMul" and len(weight.shape) != 2:
        return f"the weight of {producer.name} has rank {len(weight.shape)}"
    channels = _channels(producer, weight)
    if producer.op == "Gemm" and bias is not None and int(np.prod(bias.shape)) != channels:
        return f"the bias of {producer.name} is not one value for each channel"
    affine = _batch_norm(node, source, producer) if node.op == "BatchNormalization" else _elementwise(node, producer)
    if isinstance(affine, str):
        return affine
    factor, shift = affine
    if factor.size not in (1, channels) or shift.size not in (1, channels):
        return f"it has {max(factor.size, shift.size)} values for {channels} channels"
    if producer.op == "MatMul" and node.op in ("Add", "Sub"):
        return "MatMul has no bias to add to"
    return producer, np.broadcast_to(factor.reshape(-1), channels), np.broadcast_to(shift.reshape(-1), channels)


def _data_input(node: Node) -> Variable | None:
    if node.op == "BatchNormalization":
        return node.inputs[0] if isinstance(node.inputs[0], Variable) else None
    first, second = node.inputs
    if isinstance(first, Variable) and isinstance(second, Constant):
        return first
    if isinstance(second, Variable) and isinstance(first, Constant) and node.op in ("Mul", "Add"):
        return second
    return None


def _channels(producer: Node, weight: Constant) -> int:
    if producer.op == "Conv":
        return int(weight.shape[0])
    if producer.op == "ConvTranspose":
        return int(weight.shape[1]) * int(producer.attrs.get("group", 1))
    return int(weight.shape[0 if producer.op == "Gemm" and producer.attrs.get("transB", 0) else 1])


def _batch_norm(node: Node, source: Variable, producer: Node) -> tuple[Doubles, Doubles] | str:
    if node.attrs.get("training_mode", 0) or any(output.name for output in node.outputs[1:]):
        return "it is in training mode"
    if not all(isinstance(tensor, Constant) for tensor in node.inputs[1:5]):
        return "its parameters are not constant"
    if producer.op == "MatMul" and (source.shape is None or len(source.shape) != 2):
        return "its channel axis is not the last one"
    scale, shift, mean, variance = (np.asarray(tensor.values, np.float64) for tensor in node.inputs[1:5])
    factor = scale / np.sqrt(variance + float(node.attrs.get("epsilon", 1e-5)))
    return factor, shift - mean * factor


def _elementwise(node: Node, producer: Node) -> tuple[Doubles, Doubles] | str:
    operand = next(tensor for tensor in node.inputs if isinstance(tensor, Constant))
    if np.dtype(operand.dtype).kind != "f":
        return "its constant is not floating point"
    rank = len(producer.inputs[1].shape)
    axis_from_end = rank - 1 if producer.op in ("Conv", "ConvTranspose") else 1
    shape = tuple(operand.shape)
    wide = [len(shape) - i for i, extent in enumerate(shape) if extent != 1]
    if len(shape) > rank or any(position != axis_from_end for position in wide):
        return "its constant varies along another axis than the channels"
    value = np.asarray(operand.values, np.float64)
    one, zero = np.ones(1), np.zeros(1)
    if node.op == "Div" and not value.all():
        return "it divides by zero"
    if node.op in ("Mul", "Div"):
        return (value if node.op == "Mul" else 1.0 / value), zero
    return one, (value if node.op == "Add" else -value)


def _fold(producer: Node, node: Node, factor: Doubles, shift: Doubles, names: Names) -> bool:
    """Fold ``node`` into ``producer``; return whether the node remains, as the Add of a shift behind a MatMul."""
    weight = producer.inputs[1]
    scaled = np.asarray(weight.values, np.float64) * _along_channels(producer, weight, factor)
    producer.inputs[1] = constant(names.fresh(f"{weight.name}.fused"), scaled.astype(weight.dtype))
    if producer.op == "MatMul":
        if shift.any():
            source = _data_input(node)
            added = constant(names.fresh(f"{node.name}.shift"), shift.astype(weight.dtype))
            node.op, node.attrs, node.inputs = "Add", {}, [source, added]
            return True
    else:
        bias = producer.inputs[2] if len(producer.inputs) > 2 and producer.inputs[2].name else None
        before = np.asarray(bias.values, np.float64).reshape(-1) if bias is not None else 0.0
        name = names.fresh(f"{bias.name}.fused" if bias is not None else f"{weight.name}.bias")
        if bias is not None or shift.any():
            fused = constant(name, (before * factor + shift).astype(weight.dtype))
            producer.inputs = [*producer.inputs[:2], fused]
    output = node.outputs[0]
    node.outputs.clear()
    producer.outputs[0] = output
    return False


def _along_channels(producer: Node, weight: Constant, factor: Doubles) -> Doubles:
    """Shape one factor for each output channel so that it multiplies the weight."""
    shape = [1] * len(weight.shape)
    if producer.op == "ConvTranspose":
        # Rows of the weight are input channels; each group of them feeds its own output channels.
        groups = int(producer.attrs.get("group", 1))
        rows = np.repeat(factor.reshape(groups, -1), weight.shape[0] // groups, axis=0)
        return rows.reshape(weight.shape[0], weight.shape[1], *shape[2:])
    axis = 0 if producer.op == "Conv" or producer.attrs.get("transB", 0) else len(shape) - 1
    shape[axis] = -1
    return factor.reshape(shape)
