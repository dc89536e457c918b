"""Fold what scales and shifts channels into the weight and bias in front of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onnxq.ir import (
    Graph,
    Names,
    Node,
    Variable,
    constant,
    is_fixed,
    joined_origins,
    only_reader,
    optional,
    producer,
    remove_nodes,
    scopes,
)
from onnxq.rewrite import Changes, Pass
from onnxq.rewrite.soundness import Uses, affine_of, stays_in_range, stored

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]


class FuseBatchNorm(Pass):
    """Fold a BatchNormalization into the Conv, ConvTranspose, Gemm or MatMul that alone feeds it.

    The same written as Mul, Div, Add or Sub by a constant per channel is folded too. A shift behind a MatMul, which
    has no bias, becomes one Add. Leaves it when the producer has another consumer or stands in another graph, when a
    weight is not constant, in training mode, when the constant varies along another axis, when factors or the new
    weight may leave the range of its type, and when a last bit may decide something. Works in the main graph and in
    control-flow bodies. Computed in float64 and stored in the weight's type.
    """

    def apply(self, graph: Graph) -> Changes:
        """Fold; ``changed`` holds the names of the folded nodes, ``left`` those of BatchNormalizations."""
        names, uses = Names(graph), Uses(graph)
        changed, left = [], []
        for scope in scopes(graph):
            inside = set(scope.nodes)
            folded: list[Node] = []
            for node in list(scope.nodes):
                if node.op not in _AFFINE or node.domain:
                    continue
                found = _foldable(node, inside) if graph.opset >= _BROADCASTS else "its operands lie along an axis"
                if not isinstance(found, str) and uses.decides(node.outputs):
                    found = "its last bit may decide what reads it"
                if not isinstance(found, str) and uses.is_like_a_table(found.producer.inputs[1]):
                    found = f"the weight of {found.producer.name} may be a table that is looked up too"
                if isinstance(found, str):
                    if node.op == "BatchNormalization":
                        left.append((node.name, found))
                    continue
                if not _fold(found, node, names):
                    folded.append(node)
                changed.append(node.name)
            remove_nodes(scope, folded)
        return Changes(tuple(changed), tuple(left))


# Before, Add and Mul had an axis, and BatchNormalization was in training mode unless it said otherwise.
_BROADCASTS = 7
_AFFINE = frozenset({"BatchNormalization", "Mul", "Div", "Add", "Sub"})
_PRODUCERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


class _Folded(NamedTuple):
    """A producer with its weight and bias after folding; the bias of a MatMul is what an Add behind it must add."""

    producer: Node
    weight: Array
    bias: Array


def _foldable(node: Node, inside: set[Node]) -> _Folded | str:
    """Return what folding the node makes of its producer, or why that cannot be."""
    source = _data_input(node)
    if source is None:
        return "its factor or data is not as expected: exactly one of its inputs is constant"
    maker = producer(source)
    if maker is None or maker.op not in _PRODUCERS or maker.domain:
        return "no Conv, ConvTranspose, Gemm or MatMul stands in front of it"
    if maker not in inside:
        return f"{maker.name} stands in the graph around it"
    if only_reader(source) is None:
        return f"{maker.name} has another consumer"
    if obstacle := _producer_obstacle(maker):
        return obstacle
    affine = _batch_norm(node, source, maker) if node.op == "BatchNormalization" else _elementwise(node, maker)
    if isinstance(affine, str):
        return affine
    factor, shift = affine
    channels = _channels(maker)
    if factor.size not in (1, channels) or shift.size not in (1, channels):
        return f"it has {max(factor.size, shift.size)} values for {channels} channels"
    if maker.op == "MatMul" and node.op in ("Add", "Sub"):
        return "MatMul has no bias to add to"
    if not stays_in_range(factor, maker.inputs[1].dtype):
        return "its factors are too far from 1"
    folded = _folded(maker, np.broadcast_to(factor.reshape(-1), channels), np.broadcast_to(shift.reshape(-1), channels))
    return f"the weight or bias of {maker.name} would leave the range of its type" if folded is None else folded


def _data_input(node: Node) -> Variable | None:
    if len(node.inputs) != (5 if node.op == "BatchNormalization" else 2):
        return None
    if node.op == "BatchNormalization":
        return node.inputs[0] if isinstance(node.inputs[0], Variable) else None
    first, second = node.inputs
    if isinstance(first, Variable) and is_fixed(second):
        return first
    if isinstance(second, Variable) and is_fixed(first) and node.op in ("Mul", "Add"):
        return second
    return None


def _producer_obstacle(producer: Node) -> str:
    if len(producer.inputs) < 2:
        return f"{producer.name} has no weight"
    weight, bias = producer.inputs[1], _bias(producer)
    if not is_fixed(weight) or not (bias is None or is_fixed(bias)):
        return f"the weight of {producer.name} is not constant"
    if weight.dtype.kind != "f":
        return f"the weight of {producer.name} is not floating point"
    if len(weight.shape) < 2 or (producer.op == "MatMul" and len(weight.shape) != 2):
        return f"the weight of {producer.name} has rank {len(weight.shape)}"
    if producer.op == "Gemm" and (producer.attrs.get("alpha", 1.0) != 1.0 or producer.attrs.get("beta", 1.0) != 1.0):
        return f"{producer.name} has alpha or beta"
    groups = producer.attrs.get("group", 1)
    if groups < 1 or weight.shape[0] % groups:
        return f"the groups of {producer.name} do not divide its weight"
    channels = _channels(producer)
    # A bias of shape [channels, 1] has a value for each row of a Gemm instead.
    if bias is not None and (bias.shape[-1:] != (channels,) or int(np.prod(bias.shape)) != channels):
        return f"the bias of {producer.name} is not one value for each channel"
    return ""


def _bias(producer: Node) -> Any:
    return optional(producer, 2)


def _channels(producer: Node) -> int:
    shape = producer.inputs[1].shape
    if producer.op == "Conv":
        return int(shape[0])
    if producer.op == "ConvTranspose":
        return int(shape[1]) * int(producer.attrs.get("group", 1))
    return int(shape[0 if producer.op == "Gemm" and producer.attrs.get("transB", 0) else 1])


def _batch_norm(node: Node, source: Variable, producer: Node) -> tuple[Doubles, Doubles] | str:
    if producer.op == "MatMul" and (source.shape is None or len(source.shape) != 2):
        return "its channel axis is not the last one"
    return affine_of(node)


def _elementwise(node: Node, producer: Node) -> tuple[Doubles, Doubles] | str:
    operand = next(tensor for tensor in node.inputs if is_fixed(tensor))
    if operand.dtype.kind != "f":
        return "its constant is not floating point"
    rank, axis_from_end = len(producer.inputs[1].shape), 1
    if producer.op in ("Conv", "ConvTranspose"):
        axis_from_end = rank - 1
    elif producer.op == "MatMul":
        # The result has the rank of the data; unless that is known, a constant of rank 2 may raise it.
        shape = producer.outputs[0].shape
        rank = len(shape) if shape is not None else 1
    wide = [len(operand.shape) - index for index, extent in enumerate(operand.shape) if extent != 1]
    if len(operand.shape) > rank or any(position != axis_from_end for position in wide):
        return "its constant varies along another axis than the channels"
    value = np.asarray(operand.values, np.float64)
    one, zero = np.ones(1), np.zeros(1)
    if node.op == "Div" and not value.all():
        return "it divides by zero"
    if node.op in ("Mul", "Div"):
        return (value if node.op == "Mul" else 1.0 / value), zero
    return one, (value if node.op == "Add" else -value)


@np.errstate(over="ignore", invalid="ignore")
def _folded(producer: Node, factor: Doubles, shift: Doubles) -> _Folded | None:
    """Return the new weight and bias, or None if their type cannot hold them."""
    weight, bias = producer.inputs[1], _bias(producer)
    before = np.asarray(bias.values, np.float64).reshape(-1) if bias is not None else np.zeros(1)
    values, along = np.asarray(weight.values, np.float64), _along_channels(producer, factor)
    scaled = stored(values * along, weight.dtype, values, along)
    added = stored(before * factor + shift, weight.dtype, *(() if shift.any() else (before, factor)))
    return None if scaled is None or added is None else _Folded(producer, scaled, added)


def _along_channels(producer: Node, factor: Doubles) -> Doubles:
    """Shape one factor for each output channel so that it multiplies the weight."""
    full = producer.inputs[1].shape
    shape = [1] * len(full)
    if producer.op == "ConvTranspose":
        # Rows of the weight are input channels; each group of them feeds its own output channels.
        groups = int(producer.attrs.get("group", 1))
        rows = np.repeat(factor.reshape(groups, -1), full[0] // groups, axis=0)
        return rows.reshape(full[0], full[1], *shape[2:])
    axis = 0 if producer.op == "Conv" or producer.attrs.get("transB", 0) else len(shape) - 1
    shape[axis] = -1
    return factor.reshape(shape)


def _fold(folded: _Folded, node: Node, names: Names) -> bool:
    """Put the new weight and bias in place; return whether ``node`` remains, as the Add behind a MatMul."""
    producer = folded.producer
    weight, bias = producer.inputs[1], _bias(producer)
    producer.inputs[1] = constant(names.fresh(f"{weight.name}.fused"), folded.weight)
    if producer.op == "MatMul":
        if folded.bias.any():
            added = constant(names.fresh(f"{node.name}.shift"), folded.bias)
            node.origins = joined_origins((node,))
            node.op, node.attrs = "Add", {}
            node.inputs, node.outputs = [producer.outputs[0], added], node.outputs[:1]
            return True
    elif bias is not None or folded.bias.any():
        name = f"{bias.name}.fused" if bias is not None else f"{weight.name}.bias"
        producer.inputs = [*producer.inputs[:2], constant(names.fresh(name), folded.bias)]
    output = node.outputs[0]
    node.outputs.clear()
    producer.outputs[0] = output
    producer.origins = joined_origins((producer, node))
    return False
