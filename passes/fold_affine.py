"""Fold factors and shifts of channels into the weights and biases around them."""

from __future__ import annotations

import math
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    all_graphs,
    constant,
    is_constant,
    join_origins,
    optional_input,
    producer,
    remove_nodes,
    replace_uses,
    sole_consumer,
)
from onnxq.passes.activations import is_gelu_before_halving
from onnxq.rewrite import (
    Changes,
    Match,
    NodePattern,
    OpsetPatternBuilder,
    Pass,
    RewriteContext,
    RewriteRule,
)
from onnxq.rewrite.soundness import Uses, affine_of, keeps_digits, rank, stays_in_range, stored

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]

# Before this opset, Add and Mul had an axis, and BatchNormalization was in training mode by default.
_BROADCASTS = 7
_WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")
_PRODUCTS = frozenset({*_WITH_BIAS, "MatMul"})


# Weights --------------------------------------------------------------------------------------------------------------


def _times(tensor: Constant, factor: Doubles | float) -> Any:
    """Return a constant times factors, or None if its type cannot hold the result."""
    values = np.asarray(tensor.values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return stored(values * factor, tensor.dtype, values, factor)


def _scaled_and_shifted(before: Doubles, factor: Doubles, shift: Doubles, dtype: Any) -> Array | None:
    with np.errstate(over="ignore", invalid="ignore"):
        return stored(before * factor + shift, dtype, *(() if shift.any() else (before, factor)))


def _varies_along(operand: Constant, rank: int, place: int) -> bool:
    """Whether a constant has one value, or one for each entry of axis ``place``, which counts from the end."""
    wide = [axis - len(operand.shape) for axis, size in enumerate(operand.shape) if size != 1]
    return len(operand.shape) <= rank and all(axis == place for axis in wide)


def _affine(op: str, operand: Constant) -> tuple[Doubles, Doubles]:
    values = np.asarray(operand.values, np.float64).reshape(-1)
    if op in ("Mul", "Div"):
        return (values if op == "Mul" else 1.0 / values), np.zeros(values.shape)
    return np.ones(values.shape), (values if op == "Add" else -values)


def _output_axis(product: Node) -> int:
    """Return the weight axis of the output channels; not for ConvTranspose."""
    return 0 if product.op == "Conv" or product.attrs.get("transB", 0) else 1


def _channels_made(product: Node) -> int:
    size = int(product.inputs[1].shape[_output_axis(product)])
    return size * int(product.attrs.get("group", 1)) if product.op == "ConvTranspose" else size


def _channels_read(product: Node) -> int:
    size = int(product.inputs[1].shape[1 - _output_axis(product)])
    return size * int(product.attrs.get("group", 1)) if product.op == "Conv" else size


def _along_outputs(product: Node, values: Doubles) -> Doubles:
    """Reshape one value for each output channel so that it multiplies the weight."""
    shape = product.inputs[1].shape
    if product.op == "ConvTranspose":
        # Rows of the weight are input channels; each group of them feeds its own output channels.
        groups = int(product.attrs.get("group", 1))
        rows = np.repeat(values.reshape(groups, -1), shape[0] // groups, axis=0)
        return rows.reshape(*shape[:2], *[1] * (len(shape) - 2))
    return values.reshape([-1 if axis == _output_axis(product) else 1 for axis in range(len(shape))])


def _along_inputs(product: Node, values: Doubles) -> Doubles:
    """Reshape one value for each input channel so that it multiplies the weight."""
    shape = product.inputs[1].shape
    if product.op == "Conv":
        groups = int(product.attrs.get("group", 1))
        rows = np.repeat(values.reshape(groups, -1), shape[0] // groups, axis=0)
        return rows.reshape(*shape[:2], *[1] * (len(shape) - 2))
    return values.reshape([-1 if axis == 1 - _output_axis(product) else 1 for axis in range(len(shape))])


# Into the compute node in front ---------------------------------------------------------------------------------------


class FuseBatchNorm(Pass):
    """Fold a BatchNormalization into the Conv, ConvTranspose, Gemm or MatMul that alone feeds it.

    ``BatchNormalization(Conv(x, W, B), s, b, m, v) -> Conv(x, W * k, (B - m) * k + b) with k = s / sqrt(v + eps)``

    Mul, Div, Add and Sub by a constant per channel fold too. MatMul has no bias, so a shift of BatchNormalization
    behind it becomes one Add. The result is computed in float64. Not in training mode, or if

    - the producer has another consumer, stands in another graph, or has a computed weight or bias,
    - the constant varies along another axis, or the weight may be tied to a lookup table,
    - factors or the new weight may leave the range of their type, or a discrete operator depends on the last bit.
    """

    def apply(self, graph: Graph) -> Changes:
        names, uses = Names(graph), Uses(graph)
        changed, left = [], []
        for scope in all_graphs(graph):
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
                if not _fold_into_producer(found, node, names):
                    folded.append(node)
                changed.append(node.name)
            remove_nodes(scope, folded)
        return Changes(tuple(changed), tuple(left))


_AFFINE = frozenset({"BatchNormalization", "Mul", "Div", "Add", "Sub"})


class _Folded(NamedTuple):
    """A producer with its weight and bias after folding. The bias of a MatMul needs an Add behind it."""

    producer: Node
    weight: Array
    bias: Array


def _foldable(node: Node, inside: set[Node]) -> _Folded | str:
    source = _data_input(node)
    if source is None:
        return "its factor or data is not as expected: exactly one of its inputs is constant"
    maker = producer(source)
    if maker is None or maker.op not in _PRODUCTS or maker.domain:
        return "no Conv, ConvTranspose, Gemm or MatMul stands in front of it"
    if maker not in inside:
        return f"{maker.name} stands in the graph around it"
    if sole_consumer(source) is None:
        return f"{maker.name} has another consumer"
    if obstacle := _producer_obstacle(maker):
        return obstacle
    affine = _batch_norm(node, source, maker) if node.op == "BatchNormalization" else _elementwise(node, maker)
    if isinstance(affine, str):
        return affine
    factor, shift = affine
    channels = _channels_made(maker)
    if factor.size not in (1, channels) or shift.size not in (1, channels):
        return f"it has {max(factor.size, shift.size)} values for {channels} channels"
    if maker.op == "MatMul" and node.op in ("Add", "Sub"):
        return "MatMul has no bias to add to"
    if not stays_in_range(factor, maker.inputs[1].dtype):
        return "its factors are too far from 1"
    folded = _folded_into_producer(
        maker, np.broadcast_to(factor.reshape(-1), channels), np.broadcast_to(shift.reshape(-1), channels)
    )
    return f"the weight or bias of {maker.name} would leave the range of its type" if folded is None else folded


def _data_input(node: Node) -> Variable | None:
    if len(node.inputs) != (5 if node.op == "BatchNormalization" else 2):
        return None
    if node.op == "BatchNormalization":
        return node.inputs[0] if isinstance(node.inputs[0], Variable) else None
    first, second = node.inputs
    if isinstance(first, Variable) and is_constant(second):
        return first
    if isinstance(second, Variable) and is_constant(first) and node.op in ("Mul", "Add"):
        return second
    return None


def _producer_obstacle(producer: Node) -> str:
    if len(producer.inputs) < 2:
        return f"{producer.name} has no weight"
    weight, bias = producer.inputs[1], _bias(producer)
    if not is_constant(weight) or not (bias is None or is_constant(bias)):
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
    channels = _channels_made(producer)
    # A bias of shape [channels, 1] has a value for each row of a Gemm instead.
    if bias is not None and (bias.shape[-1:] != (channels,) or int(np.prod(bias.shape)) != channels):
        return f"the bias of {producer.name} is not one value for each channel"
    return ""


def _bias(producer: Node) -> Any:
    return optional_input(producer, 2)


def _batch_norm(node: Node, source: Variable, producer: Node) -> tuple[Doubles, Doubles] | str:
    if producer.op == "MatMul" and (source.shape is None or len(source.shape) != 2):
        return "its channel axis is not the last one"
    return affine_of(node)


def _elementwise(node: Node, producer: Node) -> tuple[Doubles, Doubles] | str:
    operand = next(tensor for tensor in node.inputs if is_constant(tensor))
    if operand.dtype.kind != "f":
        return "its constant is not floating point"
    rank, place = len(producer.inputs[1].shape), -1
    if producer.op in ("Conv", "ConvTranspose"):
        place = 1 - rank
    elif producer.op == "MatMul":
        # The result has the rank of the data. If that is unknown, a constant of rank 2 may raise it.
        shape = producer.outputs[0].shape
        rank = len(shape) if shape is not None else 1
    if not _varies_along(operand, rank, place):
        return "its constant varies along another axis than the channels"
    return "it divides by zero" if node.op == "Div" and not operand.values.all() else _affine(node.op, operand)


def _folded_into_producer(producer: Node, factor: Doubles, shift: Doubles) -> _Folded | None:
    weight, bias = producer.inputs[1], _bias(producer)
    before = np.asarray(bias.values, np.float64).reshape(-1) if bias is not None else np.zeros(1)
    scaled = _times(weight, _along_outputs(producer, factor))
    added = _scaled_and_shifted(before, factor, shift, weight.dtype)
    return None if scaled is None or added is None else _Folded(producer, scaled, added)


def _fold_into_producer(folded: _Folded, node: Node, names: Names) -> bool:
    """Replace weight and bias; return whether ``node`` remains as the Add behind a MatMul."""
    producer = folded.producer
    weight, bias = producer.inputs[1], _bias(producer)
    producer.inputs[1] = constant(names.unique(f"{weight.name}.fused"), folded.weight)
    if producer.op == "MatMul":
        if folded.bias.any():
            added = constant(names.unique(f"{node.name}.shift"), folded.bias)
            node.origins = join_origins((node,))
            node.op, node.attrs = "Add", {}
            node.inputs, node.outputs = [producer.outputs[0], added], node.outputs[:1]
            return True
    elif bias is not None or folded.bias.any():
        name = f"{bias.name}.fused" if bias is not None else f"{weight.name}.bias"
        producer.inputs = [*producer.inputs[:2], constant(names.unique(name), folded.bias)]
    output = node.outputs[0]
    node.outputs.clear()
    producer.outputs[0] = output
    producer.origins = join_origins((producer, node))
    return False


# Into a BatchNormalization in front -----------------------------------------------------------------------------------


class FoldIntoBatchNorm(RewriteRule):
    """Fold Mul, Add and BatchNormalization behind a BatchNormalization into its scale and bias.

    ``Add(Mul(BatchNormalization(x, s, b, m, v), k), c) -> BatchNormalization(x, s * k, b * k + c, m, v)``

    Not if the constant varies along another axis than the channels, or the result may leave the range of its type.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        names = ("scale", "bias", "mean", "variance")
        norm = op.BatchNormalization(op.any("x"), *map(op.constant, names), name="norm")
        again = [op.constant(name) for name in ("scale2", "bias2", "mean2", "variance2")]
        return (
            op.Mul(norm, op.constant("factor")),
            op.Add(norm, op.constant("shift")),
            op.BatchNormalization(norm, *again, name="second"),
        )

    def check(self, match: Match) -> str:
        if match.opset < _BROADCASTS:
            return "operands of this opset lie along an axis"
        folded = _folded_into_norm(match)
        return folded if isinstance(folded, str) else ""

    def rounds(self, match: Match) -> bool:
        return True

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        folded = _folded_into_norm(match)
        assert not isinstance(folded, str), "looked at before"
        operands = new.constant(folded[0], "scale"), new.constant(folded[1], "bias")
        return new.like(match.norm, match.x, *operands, match.mean, match.variance)


def _folded_into_norm(match: Match) -> tuple[Array, Array] | str:
    if isinstance(own := affine_of(match.norm), str):
        return own
    if match.x.dtype is None or match.x.shape is None or len(match.x.shape) < 2:
        return "the type of its data is not known"
    if isinstance(affine := _affine_behind_norm(match), str):
        return affine
    factor, shift = affine
    if not stays_in_range(factor, match.scale.dtype):
        return "its factors are too far from 1"
    bias = np.asarray(match.bias.values, np.float64)
    made = _times(match.scale, factor)
    added = _scaled_and_shifted(bias, np.broadcast_to(factor, bias.shape), shift, match.bias.dtype)
    # Runtimes divide the scale by the standard deviation of its channel.
    if made is None or added is None or stored(own[0] * factor, match.scale.dtype) is None:
        return "its scale or bias would leave the range"
    return made, added


def _affine_behind_norm(match: Match) -> tuple[Doubles, Doubles] | str:
    rank, channels = len(match.x.shape), match.scale.shape[0]
    if "second" in match.values:
        affine = affine_of(match.second)
    else:
        operand = match.values["factor" if match.root.op == "Mul" else "shift"]
        if not _varies_along(operand, rank, 1 - rank):
            return "its constant does not vary along the channels alone"
        affine = _affine(match.root.op, operand)
    sizes = (channels,) if "second" in match.values else (1, channels)
    return affine if isinstance(affine, str) or affine[0].size in sizes else "it has another number of channels"


# Into the compute node behind -----------------------------------------------------------------------------------------


class FoldIntoNextProduct(RewriteRule):
    """Fold Mul, Add and BatchNormalization in front of a convolution, Gemm or MatMul into its weight and bias.

    ``Conv(Add(Mul(x, k), c), W, B) -> Conv(x, W * k, B + W c)``

    Not if the compute node in front can take them, and not inside Gelu, which runtimes fuse. A shift stays in front of
    a MatMul, which has no bias, a ConvTranspose, and a convolution that pads.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        x, w, b = op.any("x"), op.constant("w"), op.optional("b")
        affine = (
            op.Mul(x, op.constant("factor"), name="affine"),
            op.Add(x, op.constant("shift"), name="affine"),
            op.BatchNormalization(x, *map(op.constant, ("scale", "bias", "mean", "variance")), name="affine"),
        )
        return (
            *(getattr(op, name)(one, w, b, name="product") for name in _WITH_BIAS for one in affine),
            op.MatMul(affine[0], w, name="product"),
        )

    def check(self, match: Match) -> str:
        if match.opset < _BROADCASTS:
            return "operands of this opset lie along an axis"
        producer = match.x.inputs[0] if match.x.inputs else None
        if isinstance(match.x, Constant) or (producer is not None and _takes(producer, match.x)):
            return "what is in front can take it"
        if is_gelu_before_halving(match.x):
            return "it is a part of Gelu"
        if reason := _product_obstacle(match):
            return reason
        folded = _folded_into_next(match)
        return folded if isinstance(folded, str) else ""

    def rounds(self, match: Match) -> bool:
        return True

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        folded = _folded_into_next(match)
        assert not isinstance(folded, str), "looked at before"
        weight, bias = folded
        added = [match.values.get("b")] if match.product.op != "MatMul" else []
        if bias is not None:
            added = [new.constant(bias, "bias")]
        while added and added[-1] is None:
            added.pop()
        return new.like(match.product, match.x, new.constant(weight, "weight"), *added)


def _takes(producer: Node, made: Tensor) -> bool:
    if producer.op not in _PRODUCTS or producer.domain or len(made.outputs) > 1 or made.graph_output_of:
        return False
    return isinstance(producer.inputs[1], Constant)


def _product_obstacle(match: Match) -> str:
    product, weight = match.product, match.w
    if weight.dtype.kind != "f" or len(weight.outputs) > 1:
        return f"others read the weight of {product.name}, or it is not floating point"
    if product.op in ("Conv", "ConvTranspose"):
        return "" if len(weight.shape) > 2 else f"the weight of {product.name} has rank {len(weight.shape)}"
    if len(weight.shape) != 2 or product.attrs.get("transA", 0):
        return f"{product.name} is no product of rows and a matrix"
    tied = match.uses is not None and match.uses.is_like_a_table(weight)
    return f"the weight of {product.name} may be a table that is looked up too" if tied else ""


def _shift_obstacle(match: Match) -> str:
    product, bias = match.product, match.values.get("b")
    if product.op == "ConvTranspose":
        return f"{product.name} would have to shift its border otherwise"
    if product.op == "Conv" and (
        any(product.attrs.get("pads", ())) or product.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    ):
        return f"{product.name} pads"
    if product.op == "Gemm" and (product.attrs.get("alpha", 1.0), product.attrs.get("beta", 1.0)) != (1.0, 1.0):
        return f"{product.name} has alpha or beta"
    if bias is not None and (not isinstance(bias, Constant) or bias.overridable_input is not None):
        return f"the bias of {product.name} is not constant"
    one = bias is None or bias.shape == (_channels_made(product),)
    return "" if one else f"the bias of {product.name} is not one value for each channel"


def _affine_in_front(match: Match) -> tuple[Doubles, Doubles] | str:
    channels = _channels_read(match.product)
    if match.affine.op == "BatchNormalization":
        if match.product.op == "Gemm" and (match.x.shape is None or len(match.x.shape) != 2):
            return "its channel axis is not the last one"
        affine = affine_of(match.affine)
        same = isinstance(affine, str) or affine[0].size == channels
        return affine if same else "it has another number of channels"
    operand = match.factor if match.affine.op == "Mul" else match.shift
    rank, place = len(match.w.shape), -1
    if match.product.op in ("Conv", "ConvTranspose"):
        place = 1 - rank
    elif match.product.op == "MatMul":
        rank = 1 if match.x.shape is None else len(match.x.shape)
    if operand.dtype.kind != "f" or not _varies_along(operand, rank, place):
        return "its constant does not vary along the channels alone"
    factor, shift = _affine(match.affine.op, operand)
    if factor.size not in (1, channels):
        return "it has another number of channels"
    data = match.x.shape
    if len(operand.shape) > (1 if data is None else len(data)) or (
        factor.size > 1 and (data is None or data[place] != channels)
    ):
        return "its data is not known to have these channels before"
    return np.broadcast_to(factor, channels), np.broadcast_to(shift, channels)


def _folded_into_next(match: Match) -> tuple[Array, Array | None] | str:
    product, weight, old = match.product, match.w, match.values.get("b")
    if isinstance(affine := _affine_in_front(match), str):
        return affine
    factor, shift = affine
    if shift.any() and (reason := _shift_obstacle(match)):
        return reason
    if not stays_in_range(factor, weight.dtype) or not keeps_digits(shift, weight.dtype):
        return "its factors are too far from 1, or its shifts are too large"
    scaled, bias = _times(weight, _along_inputs(product, factor)), None
    if shift.any():
        values = np.asarray(weight.values, np.float64)
        others = tuple(axis for axis in range(values.ndim) if axis != _output_axis(product))
        before = 0.0 if old is None else np.asarray(old.values, np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            bias = stored(before + (values * _along_inputs(product, shift)).sum(axis=others), weight.dtype)
    if scaled is None or (shift.any() and bias is None):
        return "the weight would leave the range of its type"
    return scaled, bias


# In front of Concat and pooling ---------------------------------------------------------------------------------------


class LiftChannelFactors(RewriteRule):
    """Move Mul, Add and BatchNormalization by constants from behind a Concat or pooling to its inputs.

    ``Mul(Concat(a, b), [k, l]) -> Concat(Mul(a, k), Mul(b, l))``

    Convolutions in front can then fold them. Not if an input is not the output of a convolution that feeds it alone.
    Behind a maximum, factors must be positive. A shift stays behind a mean that counts padding.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        pools = ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool")
        carriers = [
            op.Concat(op.any("x"), ..., axis=1, name="carrier"),
            *(getattr(op, name)(op.any("x"), name="carrier") for name in pools),
        ]
        parameters = [op.constant(name) for name in ("scale", "bias", "mean", "variance")]
        return tuple(
            affine
            for one in carriers
            for affine in (
                op.Mul(one, op.constant("factor")),
                op.Add(one, op.constant("shift")),
                op.BatchNormalization(one, *parameters),
            )
        )

    def check(self, match: Match) -> str:
        root, carrier = match.root, match.carrier
        if match.opset < _BROADCASTS:
            return "operands of this opset lie along an axis"
        if root.attrs.get("training_mode", 0) or len(root.outputs) > 1 or any(out.name for out in carrier.outputs[1:]):
            return "it is in training mode, or there are other outputs"
        sizes = [_lifted_channels(tensor) for tensor in carrier.inputs]
        if not all(sizes):
            return f"not all that {carrier.name} reads comes from convolutions of its own"
        rank = len(carrier.inputs[0].inputs[0].inputs[1].shape)
        parameters = [tensor for tensor in root.inputs if tensor is not carrier.outputs[0]]
        place = -1 if root.op == "BatchNormalization" else 1 - rank
        for tensor in parameters:
            count = prod(tensor.shape)
            one = count == 1 and root.op != "BatchNormalization"
            if not _varies_along(tensor, rank, place) or not (one or count == sum(sizes) > 1):
                return "its constants do not vary along the channels alone"
        return "" if carrier.op == "Concat" else _pooling_obstacle(match)

    def rounds(self, match: Match) -> bool:
        return match.carrier.op in ("AveragePool", "GlobalAveragePool")

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        carrier, root = match.carrier, match.root
        ends = np.cumsum([0, *map(_lifted_channels, carrier.inputs)]).tolist()
        parts = []
        for tensor, (first, last) in zip(carrier.inputs, pairwise(ends), strict=True):
            operands = [
                tensor if read is carrier.outputs[0] else new.constant(_part(read, first, last), read.name)
                for read in root.inputs
            ]
            parts.append(new.call("", root.op, *operands, **root.attrs))
        return new.like(carrier, *parts)


def _lifted_channels(tensor: Tensor) -> int:
    producer = tensor.inputs[0] if tensor.inputs else None
    if producer is None or producer.domain or producer.op not in ("Conv", "ConvTranspose") or len(producer.inputs) < 2:
        return 0
    if len(tensor.outputs) > 1 or tensor.graph_output_of:
        return 0
    if not all(
        isinstance(read, Constant) and read.overridable_input is None for read in producer.inputs[1:] if read.name
    ):
        return 0
    return _channels_made(producer)


def _part(constant: Constant, first: int, last: int) -> Any:
    values = constant.values
    wide = [axis for axis, size in enumerate(values.shape) if size != 1]
    return values.take(range(first, last), axis=wide[0]) if wide else values


def _pooling_obstacle(match: Match) -> str:
    pool, root = match.carrier, match.root
    affine = affine_of(root) if root.op == "BatchNormalization" else None
    if isinstance(affine, str):
        return affine
    factor = affine[0] if affine is not None else np.asarray(match.factor.values if root.op == "Mul" else 1.0)
    if not stays_in_range(factor, match.carrier.inputs[0].inputs[0].inputs[1].dtype):
        return "its factors are too far from 1"
    if pool.op in ("MaxPool", "GlobalMaxPool"):
        return "" if (factor > 0).all() else "not all of its factors are positive"
    counts = pool.attrs.get("count_include_pad", 0)
    return f"{pool.name} counts padding" if counts and root.op != "Mul" else ""


# Scalars behind a compute node, at a distance -------------------------------------------------------------------------

_LAYOUT = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_FARTHEST = 16


class FoldScalesIntoProducts(Pass):
    """Fold a Mul or Div by a scalar into the weight and bias of a compute node at some distance in front of it.

    ``Mul(Transpose(MatMul(x, W)), k) -> Transpose(MatMul(x, W * k))``

    A scalar passes through layout operators, the Add of a bias, and a MatMul of two computed tensors. The scale of an
    attention reaches its query like this. Each tensor on the path must have one consumer, and so must the weight. Paths
    end after 16 nodes, which keeps the pass linear. Not if the weight may be tied to a lookup table, or a value may
    leave the range of its type. Not if a discrete operator depends on the last bit.
    """

    def apply(self, graph: Graph) -> Changes:
        names, uses = Names(graph), Uses(graph)
        changed: list[str] = []
        for scope in all_graphs(graph) if graph.opset >= _BROADCASTS else ():
            inside, folded = set(scope.nodes), []
            for node in scope.nodes:
                if node.op not in ("Mul", "Div") or node.domain or (len(node.inputs), len(node.outputs)) != (2, 1):
                    continue
                scaled = _scaled_data(node)
                terms = _terms(scaled[0], inside, _FARTHEST) if scaled is not None else None
                if scaled is None or terms is None or uses.decides(node.outputs):
                    continue
                if any(uses.is_like_a_table(one.inputs[index]) for one, index in terms):
                    continue
                if not _fold_scale(terms, scaled[1], names):
                    continue
                # At once, because the next node on the path checks the consumers.
                node.inputs.clear()
                replace_uses(node.outputs[0], scaled[0])
                folded.append(node)
                changed.append(node.name)
            remove_nodes(scope, folded)
        return Changes(tuple(changed))


def _scaled_data(node: Node) -> tuple[Variable, float] | None:
    """Return the data of a scaling node and its scalar, unless the shape or a graph output would change."""
    data, number = node.inputs
    if node.op == "Mul" and isinstance(data, Constant):
        data, number = number, data
    if not isinstance(data, Variable) or not _is_weight(number) or node.outputs[0].graph_output_of:
        return None
    if any(extent != 1 for extent in number.shape) or len(number.shape) > len(data.shape or ()):
        return None
    value = float(number.values.item())
    if not math.isfinite(value) or value == 0 or not stays_in_range(value, number.dtype):
        return None
    return data, value if node.op == "Mul" else 1 / value


def _terms(tensor: Any, inside: set[Node], farthest: int) -> list[tuple[Node, int]] | None:
    """Return node and input index of each constant to scale, or None if the scalar cannot pass."""
    producer = tensor.inputs[0] if isinstance(tensor, Variable) and tensor.inputs else None
    if producer not in inside or producer.domain or len(tensor.outputs) != 1 or tensor.graph_output_of or not farthest:
        return None
    if producer.op in _LAYOUT and producer.inputs:
        return _terms(producer.inputs[0], inside, farthest - 1)
    if producer.op == "Add" and len(producer.inputs) == 2:
        for index in (0, 1):
            bias, source = producer.inputs[index], producer.inputs[1 - index]
            if _is_weight(bias):
                terms = _terms(source, inside, farthest - 1)
                return None if terms is None else [*terms, (producer, index)]
        return None
    if producer.op in _PRODUCTS and len(producer.inputs) > 1:
        return _product_terms(producer, inside, farthest)
    return None


def _product_terms(product: Node, inside: set[Node], farthest: int) -> list[tuple[Node, int]] | None:
    for index in (1, 0):
        weight = product.inputs[index]
        if _is_weight(weight):
            constants = [index, *([2] if len(product.inputs) > 2 and product.inputs[2].name else [])]
            alone = len(weight.outputs) == 1 and all(_is_weight(product.inputs[index]) for index in constants)
            return [(product, index) for index in constants] if alone else None
    if product.op == "MatMul":
        for source in product.inputs:
            if (terms := _terms(source, inside, farthest // 2)) is not None:
                return terms
    return None


def _is_weight(tensor: Any) -> bool:
    return isinstance(tensor, Constant) and tensor.overridable_input is None and tensor.dtype.kind == "f"


def _fold_scale(terms: list[tuple[Node, int]], factor: float, names: Names) -> bool:
    scaled: list[Array] = []
    for node, index in terms:
        values = _times(node.inputs[index], factor)
        if values is None:
            return False
        scaled.append(values)
    for (node, index), values in zip(terms, scaled, strict=True):
        node.inputs[index] = Constant(names.unique(f"{node.inputs[index].name}.scaled"), values)
    return True


# Factors of Gemm ------------------------------------------------------------------------------------------------------

_BIAS_IS_OPTIONAL = 11


class FoldGemmFactors(RewriteRule):
    """Fold Gemm's alpha into a constant weight and beta into a constant bias; replace transA by a Transpose.

    ``Gemm(X, W, B, alpha, beta, transA=1) -> Gemm(Transpose(X), alpha * W, beta * B)``

    Not if the weight may be tied to a lookup table, or a factor is too far from 1.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Gemm(op.any("x"), op.constant("weight"), op.optional("bias"), name="gemm")

    def check(self, match: Match) -> str:
        alpha, beta, transposed = _factors(match)
        if (alpha, beta, transposed) == (1.0, 1.0, False):
            return "it has no alpha, beta or transA"
        if match.weight.dtype.kind != "f":
            return "its weight is not floating point"
        tied = match.uses is not None and match.uses.is_like_a_table(match.weight)
        if alpha != 1.0 and (tied or any(reader.op == "Gather" for reader in match.weight.outputs)):
            return "its weight is a table that is looked up too"
        if beta not in (0.0, 1.0) and match.bias is not None and not is_constant(match.bias):
            return "its beta scales a bias that is computed at run time"
        if beta == 0.0 and match.opset < _BIAS_IS_OPTIONAL:
            return "Gemm needs a bias at this opset"
        if alpha == 0.0 or not stays_in_range([alpha, beta], match.weight.dtype):
            return "its factors are too far from 1"
        lost = (alpha != 1.0 and _times(match.weight, alpha) is None) or (
            beta not in (0.0, 1.0) and _times(match.bias, beta) is None
        )
        return "its weight or bias would leave the range of its type" if lost else ""

    def rounds(self, match: Match) -> bool:
        return True

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        alpha, beta, transposed = _factors(match)
        data = new.Transpose(match.x, perm=[1, 0]) if transposed else match.x
        weight = match.weight if alpha == 1.0 else new.constant(_times(match.weight, alpha), "weight")
        bias = match.bias if beta != 0.0 else None
        if bias is not None and beta != 1.0:
            bias = new.constant(_times(bias, beta), "bias")
        operands = (data, weight) if bias is None else (data, weight, bias)
        return new.like(match.gemm, *operands, alpha=None, beta=None, transA=None)


def _factors(match: Match) -> tuple[float, float, bool]:
    attributes = match.gemm.attrs
    beta = float(attributes.get("beta", 1.0)) if match.bias is not None else 1.0
    return float(attributes.get("alpha", 1.0)), beta, bool(attributes.get("transA", 0))


class MergeScalesOfProduct(RewriteRule):
    """Merge the scalar factors of both inputs of a MatMul.

    ``MatMul(Mul(a, s), Mul(b, t)) -> MatMul(Mul(a, s * t), b)``

    The scale stays on an input, because the unscaled result of the MatMul may leave the range of its type. Not if both
    scales are above 1.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.MatMul(op.Mul(op.any("a"), op.scalar("first")), op.Mul(op.any("b"), op.scalar("second")))

    def check(self, match: Match) -> str:
        if match.first.dtype.kind != "f":
            return "its scales are not floating point"
        if any(len(scale.shape) > (rank(data) or 0) for data, scale in _scaled(match)):
            return "a scale may have more dimensions than its data"
        if not stays_in_range(_scales(match), match.first.dtype) or _scale(match) is None:
            return "a scale is too far from 1"
        return "" if min(map(abs, _scales(match))) <= 1 else "neither of its scales makes its data smaller"

    def rounds(self, match: Match) -> bool:
        return True

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        scale = _scale(match)
        if abs(_scales(match)[1]) <= 1:
            return new.like(match.root, new.Mul(match.a, scale), match.b)
        return new.like(match.root, match.a, new.Mul(match.b, scale))


def _scaled(match: Match) -> tuple[tuple[Any, Any], ...]:
    return (match.a, match.first), (match.b, match.second)


def _scales(match: Match) -> tuple[float, float]:
    return float(match.first.values.item()), float(match.second.values.item())


@np.errstate(over="ignore", invalid="ignore")
def _scale(match: Match) -> Any:
    first, second = _scales(match)
    return stored(first * second, match.first.dtype, first, second)
