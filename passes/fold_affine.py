"""Fold factors and shifts of channels into the weights and biases around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from onnxq.ir import (
    Constant,
    Graph,
    Names,
    Node,
    Tensor,
    Variable,
    all_graphs,
    is_constant,
    producer,
    remove_nodes,
    replace_uses,
    sole_consumer,
    without_absent,
)
from onnxq.numerics.affine import Array
from onnxq.numerics.blocks import PIECE, along
from onnxq.ops import OPERATORS, Role, facts_of
from onnxq.passes.activations import is_gelu_before_halving
from onnxq.rewrite import (
    Changes,
    Match,
    NodePattern,
    OpsetPatternBuilder,
    Pass,
    RewriteContext,
    RewriteRule,
    RoundingRule,
)
from onnxq.rewrite.patterns import ValuePattern
from onnxq.rewrite.soundness import (
    FIRST_OPSET,
    Doubles,
    Uses,
    affine_of,
    is_float,
    keeps_digits,
    rank,
    stays_in_range,
    stored,
)
from onnxq.rewrite.views import VIEWS
from onnxq.system.resources import parallel_map

_WITH_BIAS = tuple(op for (domain, op), row in OPERATORS.items() if row.adds_bias and not domain)


# Weights --------------------------------------------------------------------------------------------------------------


def _times(tensor: Constant, factor: Doubles | float) -> Any:
    """Return a constant times factors, or None if its type cannot hold the result."""
    values = tensor.values
    if np.ndim(factor) or values.size <= PIECE:
        return _product(values, factor, tensor.dtype)
    # Of a large weight float64 holds a few pieces at a time.
    flat, scaled = values.reshape(-1), np.empty(values.size, tensor.dtype)
    places = [slice(start, start + PIECE) for start in range(0, flat.size, PIECE)]
    parts = parallel_map(lambda place: _product(flat[place], factor, tensor.dtype), places)
    for place, part in zip(places, parts, strict=True):
        if part is None:
            return None
        scaled[place] = part
    return scaled.reshape(values.shape)


def _product(values: Array, factor: Doubles | float, dtype: Any) -> Array | None:
    exact = np.asarray(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return stored(exact * factor, dtype, exact, factor)


def _scaled_and_shifted(before: Doubles, factor: Doubles, shift: Doubles, dtype: Any) -> Array | None:
    with np.errstate(over="ignore", invalid="ignore"):
        return stored(before * factor + shift, dtype, *(() if shift.any() else (before, factor)))


def _varies_along(operand: Constant, rank: int, place: int) -> bool:
    """Whether a constant has one value, or one for each entry of axis ``place``, which counts from the end."""
    wide = [axis - len(operand.shape) for axis, size in enumerate(operand.shape) if size != 1]
    return len(operand.shape) <= rank and all(axis == place for axis in wide)


def _affine_of(
    node: Node, operand: Constant | None, rank: int, place: int, channels: int
) -> tuple[Doubles, Doubles] | str:
    """Return the factor and shift of each channel that a node applies, or the reason why it has none.

    Args:
        node: a BatchNormalization, Mul, Div, Add or Sub.
        operand: the constant operand of the others than BatchNormalization.
        rank: number of dimensions of its data.
        place: axis of the channels, which counts from the end.
        channels: number of channels.
    """
    if node.op == "BatchNormalization" or operand is None:
        affine = affine_of(node)
        same = isinstance(affine, str) or affine[0].size == channels
        return affine if same else "it has another number of channels"
    if not is_float(operand) or not _varies_along(operand, rank, place):
        return "its constant does not vary along the channels alone"
    values = np.asarray(operand.values, np.float64).reshape(-1)
    if values.size not in (1, channels):
        return f"it has {values.size} values for {channels} channels"
    values = np.broadcast_to(values, channels)
    if node.op in ("Add", "Sub"):
        return np.ones(channels), (values if node.op == "Add" else -values)
    if node.op == "Div" and not values.all():
        return "it divides by zero"
    with np.errstate(over="ignore"):
        return (values if node.op == "Mul" else 1.0 / values), np.zeros(channels)


def _parameters(op: OpsetPatternBuilder, last: str = "") -> list[ValuePattern]:
    return [op.constant(f"{name}{last}") for name in ("scale", "bias", "mean", "variance")]


def _has_factors(gemm: Node) -> bool:
    return (gemm.attrs.get("alpha", 1.0), gemm.attrs.get("beta", 1.0)) != (1.0, 1.0)


def _axis_of(product: Node, *, outputs: bool) -> int:
    """Return the weight axis of the channels that a node makes or reads; those of a group if it has groups."""
    output_axis = 0 if product.op == "Conv" or product.attrs.get("transB", 0) else 1
    return output_axis if outputs else 1 - output_axis


def _is_grouped(product: Node, *, outputs: bool) -> bool:
    """Whether the weight has the channels that a node makes or reads for one group only."""
    return bool(product.op == ("ConvTranspose" if outputs else "Conv"))


def _channels(product: Node, *, outputs: bool) -> int:
    groups = int(product.attrs.get("group", 1)) if _is_grouped(product, outputs=outputs) else 1
    return int(product.inputs[1].shape[_axis_of(product, outputs=outputs)]) * groups


def _along(product: Node, values: Doubles, *, outputs: bool) -> Doubles:
    """Reshape one value for each channel that a node makes or reads so that it multiplies the weight."""
    shape = product.inputs[1].shape
    if _is_grouped(product, outputs=outputs):
        # Each group of rows has channels of its own.
        groups = int(product.attrs.get("group", 1))
        rows = np.repeat(values.reshape(groups, -1), shape[0] // groups, axis=0)
        return rows.reshape(*shape[:2], *[1] * (len(shape) - 2))
    return along(values, _axis_of(product, outputs=outputs), len(shape))


# Into the compute node in front ---------------------------------------------------------------------------------------


class FuseBatchNorm(RoundingRule):
    """``BatchNormalization(Conv(x, W, B), s, b, m, v) -> Conv(x, W * k, (B - m) * k + b) with k = s / sqrt(v + eps)``.

    Fold a BatchNormalization into the Conv, ConvTranspose, Gemm or MatMul that alone feeds it.

    Mul, Div, Add and Sub by a constant per channel fold too. MatMul has no bias, so a shift of BatchNormalization
    behind it becomes one Add. The result is computed in float64. Not in training mode, or if

    - the constant varies along another axis, or the weight may be tied to a lookup table,
    - factors or the new weight may leave the range of their type.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        x, w, b = op.any("x"), op.constant("w"), op.optional("b", constant=True)
        products = [getattr(op, name)(x, w, b, name="product") for name in _WITH_BIAS]
        variants = []
        for product in (*products, op.MatMul(x, w, name="product")):
            variants.append(op.BatchNormalization(product, *_parameters(op)))
            variants += [getattr(op, name)(product, op.constant("operand")) for name in ("Mul", "Div", "Add", "Sub")]
        # The last pattern matches the other BatchNormalizations, to report why they stay.
        return (*variants, op.BatchNormalization(x, ...))

    def check(self, match: Match) -> str:
        if "product" not in match.values:
            affine = affine_of(match.root)
            return affine if isinstance(affine, str) else "no product with constant weight and bias feeds it alone"
        product, weight, bias = match.product, match.w, match.values.get("b")
        dimensions = len(weight.shape)
        if not is_float(weight) or dimensions < 2 or (product.op == "MatMul" and dimensions != 2):
            return f"the weight of {product.name} is not floating point, or of rank {dimensions}"
        if product.op == "Gemm" and _has_factors(product):
            return f"{product.name} has alpha or beta"
        groups = product.attrs.get("group", 1)
        if groups < 1 or weight.shape[0] % groups:
            return f"the groups of {product.name} do not divide its weight"
        channels = _channels(product, outputs=True)
        # A bias of shape [channels, 1] has a value for each row of a Gemm instead.
        if bias is not None and (bias.shape[-1:] != (channels,) or prod(bias.shape) != channels):
            return f"the bias of {product.name} is not one value for each channel"
        if product.op == "MatMul" and match.root.op in ("Add", "Sub"):
            return "MatMul has no bias to add to"
        if match.uses is not None and match.uses.is_like_a_table(weight):
            return f"the weight of {product.name} may be a table that is looked up too"
        return ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        product, weight, bias = match.product, match.w, match.values.get("b")
        affine = self._affine(match)
        if isinstance(affine, str):
            return affine
        factor, shift = affine
        if not stays_in_range(factor, weight.dtype):
            return "its factors are too far from 1"
        before = np.zeros(1) if bias is None else np.asarray(bias.values, np.float64).reshape(-1)
        scaled = _times(weight, _along(product, factor, outputs=True))
        added = _scaled_and_shifted(before, factor, shift, weight.dtype)
        if scaled is None or added is None:
            return f"the weight or bias of {product.name} would leave the range of its type"
        weight = new.constant(scaled, "fused", of=weight)
        if product.op == "MatMul":
            scaled_product = new.like(product, match.x, weight)
            return new.Add(scaled_product, new.constant(added, "shift")) if added.any() else scaled_product
        if bias is None and not added.any():
            return new.like(product, match.x, weight)
        bias = new.constant(added, "bias", of=match.w) if bias is None else new.constant(added, "fused", of=bias)
        return new.like(product, match.x, weight, bias)

    def _affine(self, match: Match) -> tuple[Doubles, Doubles] | str:
        product, channels = match.product, _channels(match.product, outputs=True)
        output = match.product.outputs[0]
        if facts_of(product).convolves:
            dimensions = len(match.w.shape)
            return _affine_of(match.root, match.values.get("operand"), dimensions, 1 - dimensions, channels)
        if match.root.op == "BatchNormalization" and product.op == "MatMul" and rank(output) != 2:
            return "its channel axis is not the last one"
        # The result of a MatMul has the rank of its data. If that is unknown, a constant of rank 2 may raise it.
        dimensions = 2 if product.op == "Gemm" else 1 if output.shape is None else len(output.shape)
        return _affine_of(match.root, match.values.get("operand"), dimensions, -1, channels)


# Into a BatchNormalization in front -----------------------------------------------------------------------------------


class FoldIntoBatchNorm(RoundingRule):
    """``Add(Mul(BatchNormalization(x, s, b, m, v), k), c) -> BatchNormalization(x, s * k, b * k + c, m, v)``.

    Fold Mul, Add and BatchNormalization behind a BatchNormalization into its scale and bias.

    Not if the constant varies along another axis than the channels, or the result may leave the range of its type.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        norm = op.BatchNormalization(op.any("x"), *_parameters(op), name="norm")
        operand = op.constant("operand")
        return op.Mul(norm, operand), op.Add(norm, operand), op.BatchNormalization(norm, *_parameters(op, "2"))

    def check(self, match: Match) -> str:
        is_known = match.x.dtype is not None and (rank(match.x) or 0) >= 2
        return "" if is_known else "the type of its data is not known"

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        dimensions, channels = len(match.x.shape), match.scale.shape[0]
        own = affine_of(match.norm)
        affine = _affine_of(match.root, match.values.get("operand"), dimensions, 1 - dimensions, channels)
        if isinstance(own, str) or isinstance(affine, str):
            return own if isinstance(own, str) else affine
        factor, shift = affine
        if not stays_in_range(factor, match.scale.dtype):
            return "its factors are too far from 1"
        if shift.any() and not keeps_digits(own[1], match.bias.dtype):
            return "its own shift would round the added constant away"
        bias = np.asarray(match.bias.values, np.float64)
        scaled = _times(match.scale, factor)
        added = _scaled_and_shifted(bias, factor, shift, match.bias.dtype)
        # Runtimes divide the scale by the standard deviation of its channel.
        if scaled is None or added is None or stored(own[0] * factor, match.scale.dtype) is None:
            return "its scale or bias would leave the range"
        operands = new.constant(scaled, "scale"), new.constant(added, "bias")
        return new.like(match.norm, match.x, *operands, match.mean, match.variance)


# Into the compute node behind -----------------------------------------------------------------------------------------


class FoldIntoNextProduct(RoundingRule):
    """``Conv(Add(Mul(x, k), c), W, B) -> Conv(x, W * k, B + W c)``.

    Fold Mul, Add and BatchNormalization in front of a convolution, Gemm or MatMul into its weight and bias.

    Not if the compute node in front can take them, and not inside Gelu, which runtimes fuse. A shift stays in front of
    a MatMul, which has no bias, a ConvTranspose, and a convolution that pads.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        x, w, b = op.any("x"), op.constant("w"), op.optional("b")
        affine = (
            op.Mul(x, op.constant("operand"), name="affine"),
            op.Add(x, op.constant("operand"), name="affine"),
            op.BatchNormalization(x, *_parameters(op), name="affine"),
        )
        return (
            *(getattr(op, name)(factor, w, b, name="product") for name in _WITH_BIAS for factor in affine),
            op.MatMul(affine[0], w, name="product"),
        )

    def check(self, match: Match) -> str:
        if isinstance(match.x, Constant) or _takes(producer(match.x), match.x):
            return "the node before can take it"
        return "it is a part of Gelu" if is_gelu_before_halving(match.x) else _product_obstacle(match)

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        folded = _folded_into_next(match)
        if isinstance(folded, str):
            return folded
        weight, bias = folded
        added = [match.values.get("b")] if match.product.op != "MatMul" else []
        if bias is not None:
            added = [new.constant(bias, "bias")]
        return new.like(match.product, match.x, new.constant(weight, "weight"), *without_absent(added))


def _takes(maker: Node | None, output: Tensor) -> bool:
    if maker is None or facts_of(maker).role is not Role.COMPUTE or sole_consumer(output) is None:
        return False
    return isinstance(maker.inputs[1], Constant)


def _product_obstacle(match: Match) -> str:
    product, weight = match.product, match.w
    if not is_float(weight) or len(weight.outputs) > 1:
        return f"others read the weight of {product.name}, or it is not floating point"
    if facts_of(product).convolves:
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
    if product.op == "Gemm" and _has_factors(product):
        return f"{product.name} has alpha or beta"
    if bias is not None and not is_constant(bias):
        return f"the bias of {product.name} is not constant"
    is_vector = bias is None or bias.shape == (_channels(product, outputs=True),)
    return "" if is_vector else f"the bias of {product.name} is not one value for each channel"


def _affine_in_front(match: Match) -> tuple[Doubles, Doubles] | str:
    product, data, operand = match.product, match.x.shape, match.values.get("operand")
    if operand is None and product.op == "Gemm" and rank(match.x) != 2:
        return "its channel axis is not the last one"
    dimensions, place, channels = len(match.w.shape), -1, _channels(product, outputs=False)
    if facts_of(product).convolves:
        place = 1 - dimensions
    elif product.op == "MatMul":
        dimensions = 1 if data is None else len(data)
    if operand is not None and (
        len(operand.shape) > (1 if data is None else len(data))
        or (prod(operand.shape) > 1 and (data is None or data[place] != channels))
    ):
        return "its data is not known to have these channels before"
    return _affine_of(match.affine, operand, dimensions, place, channels)


def _folded_into_next(match: Match) -> tuple[Array, Array | None] | str:
    product, weight, old = match.product, match.w, match.values.get("b")
    if isinstance(affine := _affine_in_front(match), str):
        return affine
    factor, shift = affine
    if shift.any() and (reason := _shift_obstacle(match)):
        return reason
    if not stays_in_range(factor, weight.dtype) or not keeps_digits(shift, weight.dtype):
        return "its factors are too far from 1, or its shifts are too large"
    scaled, bias = _times(weight, _along(product, factor, outputs=False)), None
    if shift.any():
        values = np.asarray(weight.values, np.float64)
        others = tuple(axis for axis in range(values.ndim) if axis != _axis_of(product, outputs=True))
        before = 0.0 if old is None else np.asarray(old.values, np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            bias = stored(before + (values * _along(product, shift, outputs=False)).sum(axis=others), weight.dtype)
    if scaled is None or (shift.any() and bias is None):
        return "the weight would leave the range of its type"
    return scaled, bias


# In front of Concat and pooling ---------------------------------------------------------------------------------------


class LiftChannelFactors(RewriteRule):
    """``Mul(Concat(a, b), [k, l]) -> Concat(Mul(a, k), Mul(b, l))``.

    Move Mul, Add and BatchNormalization by constants from behind a Concat or pooling to its inputs.

    Convolutions in front can then fold them. Not if an input is not the output of a convolution that feeds it alone.
    Behind a maximum, factors must be positive. A shift stays behind a mean that counts padding.
    """

    def pattern(self, op: OpsetPatternBuilder) -> tuple[NodePattern, ...]:
        pools = ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool")
        carriers = [
            op.Concat(op.any("x"), ..., axis=1, name="carrier"),
            *(getattr(op, name)(op.any("x"), name="carrier") for name in pools),
        ]
        parameters = _parameters(op)
        return tuple(
            affine
            for carrier in carriers
            for affine in (
                op.Mul(carrier, op.constant("operand")),
                op.Add(carrier, op.constant("operand")),
                op.BatchNormalization(carrier, *parameters),
            )
        )

    def check(self, match: Match) -> str:
        root, carrier = match.root, match.carrier
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
            is_scalar = count == 1 and root.op != "BatchNormalization"
            if not _varies_along(tensor, rank, place) or not (is_scalar or count == sum(sizes) > 1):
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
    maker = producer(tensor)
    if maker is None or not facts_of(maker).convolves or len(maker.inputs) < 2:
        return 0
    alone = sole_consumer(tensor) is not None and all(is_constant(read) for read in maker.inputs[1:] if read.name)
    return _channels(maker, outputs=True) if alone else 0


def _part(constant: Constant, first: int, last: int) -> Any:
    values = constant.values
    wide = [axis for axis, size in enumerate(values.shape) if size != 1]
    return values.take(range(first, last), axis=wide[0]) if wide else values


def _pooling_obstacle(match: Match) -> str:
    pool, root = match.carrier, match.root
    affine = affine_of(root) if root.op == "BatchNormalization" else None
    if isinstance(affine, str):
        return affine
    factor = affine[0] if affine is not None else np.asarray(match.operand.values if root.op == "Mul" else 1.0)
    if not stays_in_range(factor, match.carrier.inputs[0].inputs[0].inputs[1].dtype):
        return "its factors are too far from 1"
    if pool.op in ("MaxPool", "GlobalMaxPool"):
        return "" if (factor > 0).all() else "not all of its factors are positive"
    counts = pool.attrs.get("count_include_pad", 0)
    return f"{pool.name} counts padding" if counts and root.op != "Mul" else ""


# Scalars behind a compute node, at a distance -------------------------------------------------------------------------

_LAYOUT = VIEWS - {"Slice"}
_FARTHEST = 16


class FoldScalesIntoProducts(Pass):
    """Fold a Mul or Div by a scalar into the weight and bias of a compute node at some distance in front of it.

    ``Mul(Transpose(MatMul(x, W)), k) -> Transpose(MatMul(x, W * k))``

    A scalar passes through layout operators, the Add of a bias, and a MatMul of two computed tensors. The scale of an
    attention reaches its query like this. Each tensor on the path must have one consumer, and so must the weight. Paths
    end after 16 nodes, which keeps the pass linear. Tensors on the path take other names, because their values change.
    Not if the weight may be tied to a lookup table, or a value may leave the range of its type. Not if a discrete
    operator depends on the last bit.
    """

    def apply(self, graph: Graph) -> Changes:
        names, uses = Names(graph), Uses(graph)
        changed: list[str] = []
        for scope in all_graphs(graph) if graph.opset >= FIRST_OPSET else ():
            inside, folded = set(scope.nodes), []
            for node in scope.nodes:
                if node.op not in ("Mul", "Div") or node.domain or (len(node.inputs), len(node.outputs)) != (2, 1):
                    continue
                scaled = _scaled_data(node)
                path = _path(scaled[0], inside, _FARTHEST) if scaled is not None else None
                if scaled is None or path is None or uses.decides(node.outputs):
                    continue
                if any(uses.is_like_a_table(consumer.inputs[index]) for consumer, index in path.constants):
                    continue
                if not _fold_scale(path.constants, scaled[1], names):
                    continue
                for tensor in path.tensors:
                    tensor.name = names.unique(f"{tensor.name}.scaled")
                scaled[0].name, node.outputs[0].name = node.outputs[0].name, scaled[0].name
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


class _Path(NamedTuple):
    """The way of a scalar back to constants, each a node and an input index, over tensors that it multiplies."""

    constants: tuple[tuple[Node, int], ...]
    tensors: tuple[Variable, ...] = ()


def _path(tensor: Any, inside: set[Node], farthest: int) -> _Path | None:
    """Return the path that ends in ``tensor``, or None if the scalar cannot pass."""
    maker = producer(tensor)
    if maker is None or maker not in inside or maker.domain or sole_consumer(tensor) is None or not farthest:
        return None
    before: _Path | None = None
    added: tuple[tuple[Node, int], ...] = ()
    if maker.op in _LAYOUT and maker.inputs:
        before = _path(maker.inputs[0], inside, farthest - 1)
    elif maker.op == "Add" and len(maker.inputs) == 2:
        biases = [index for index in (0, 1) if _is_weight(maker.inputs[index])]
        if biases:
            before, added = _path(maker.inputs[1 - biases[0]], inside, farthest - 1), ((maker, biases[0]),)
    elif facts_of(maker).role is Role.COMPUTE and len(maker.inputs) > 1:
        before = _path_behind_product(maker, inside, farthest)
    return None if before is None else _Path((*before.constants, *added), (*before.tensors, tensor))


def _path_behind_product(product: Node, inside: set[Node], farthest: int) -> _Path | None:
    for index in (1, 0):
        weight = product.inputs[index]
        if _is_weight(weight):
            constants = (index, *([2] if len(product.inputs) > 2 and product.inputs[2].name else []))
            alone = len(weight.outputs) == 1 and all(_is_weight(product.inputs[index]) for index in constants)
            return _Path(tuple((product, index) for index in constants)) if alone else None
    if product.op == "MatMul":
        for source in product.inputs:
            if (path := _path(source, inside, farthest // 2)) is not None:
                return path
    return None


def _is_weight(tensor: Any) -> bool:
    return is_constant(tensor) and is_float(tensor)


def _fold_scale(constants: Sequence[tuple[Node, int]], factor: float, names: Names) -> bool:
    scaled: list[Array] = []
    for node, index in constants:
        values = _times(node.inputs[index], factor)
        if values is None:
            return False
        scaled.append(values)
    for (node, index), values in zip(constants, scaled, strict=True):
        node.inputs[index] = names.store(f"{node.inputs[index].name}.scaled", values)
    return True


# Factors of Gemm ------------------------------------------------------------------------------------------------------

_BIAS_IS_OPTIONAL = 11


class FoldGemmFactors(RoundingRule):
    """``Gemm(X, W, B, alpha, beta, transA=1) -> Gemm(Transpose(X), alpha * W, beta * B)``.

    Fold Gemm's alpha into a constant weight and beta into a constant bias; replace transA by a Transpose.

    Not if the weight may be tied to a lookup table, or a factor is too far from 1.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.Gemm(op.any("x"), op.constant("weight"), op.optional("bias"), name="gemm")

    def check(self, match: Match) -> str:
        alpha, beta, transposed = _factors(match)
        if (alpha, beta, transposed) == (1.0, 1.0, False):
            return "it has no alpha, beta or transA"
        if not is_float(match.weight):
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
        return ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        alpha, beta, transposed = _factors(match)
        data = new.Transpose(match.x, perm=[1, 0]) if transposed else match.x
        operands = [data, match.weight, *([match.bias] if match.bias is not None and beta != 0.0 else [])]
        for index, factor, name in ((1, alpha, "weight"), (2, beta, "bias")):
            if index < len(operands) and factor != 1.0:
                values = _times(operands[index], factor)
                if values is None:
                    return "its weight or bias would leave the range of its type"
                operands[index] = new.constant(values, name)
        return new.like(match.gemm, *operands, alpha=None, beta=None, transA=None)


def _factors(match: Match) -> tuple[float, float, bool]:
    attributes = match.gemm.attrs
    beta = float(attributes.get("beta", 1.0)) if match.bias is not None else 1.0
    return float(attributes.get("alpha", 1.0)), beta, bool(attributes.get("transA", 0))


class MergeScalesOfProduct(RoundingRule):
    """``MatMul(Mul(a, s), Mul(b, t)) -> MatMul(Mul(a, s * t), b)``.

    Merge the scalar factors of both inputs of a MatMul.

    The scale stays on an input, because the unscaled result of the MatMul may leave the range of its type. Not if both
    scales are above 1.
    """

    def pattern(self, op: OpsetPatternBuilder) -> NodePattern:
        return op.MatMul(op.Mul(op.any("a"), op.scalar("first")), op.Mul(op.any("b"), op.scalar("second")))

    def check(self, match: Match) -> str:
        if not is_float(match.first):
            return "its scales are not floating point"
        scaled = ((match.a, match.first), (match.b, match.second))
        wide = any(len(scale.shape) > (rank(data) or 0) for data, scale in scaled)
        return "a scale may have more dimensions than its data" if wide else ""

    def rewrite(self, new: RewriteContext, match: Match) -> Any:
        first, second = float(match.first.values.item()), float(match.second.values.item())
        scale = stored(first * second, match.first.dtype, first, second)
        if scale is None or not stays_in_range([first, second], match.first.dtype):
            return "a scale is too far from 1"
        if min(abs(first), abs(second)) > 1:
            return "neither of its scales makes its data smaller"
        if abs(second) <= 1:
            return new.like(match.root, new.Mul(match.a, scale), match.b)
        return new.like(match.root, match.a, new.Mul(match.b, scale))
