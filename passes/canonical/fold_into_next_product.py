"""Factors and shifts of channels that no product in front can take, in the weights of the one behind."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxq.ir import Constant, Node, Tensor
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.gelu_parts import is_gelu_before_halving
from onnxq.rewrite.soundness import affine_of, keeps_digits, stays_in_range, stored

Doubles: TypeAlias = npt.NDArray[np.float64]

_WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")
_PRODUCTS = frozenset({*_WITH_BIAS, "MatMul"})


class FoldIntoNextProduct(RewriteRule):
    """What scales and shifts channels in front of a convolution or Gemm becomes a part of its weight and bias.

    That is Mul, Add and BatchNormalization by constants, unless the product in front of them can take them, or they
    are a part of Gelu, which runtimes compute as a whole. A shift stays in front of a convolution that pads, and in
    front of a MatMul, which has no bias.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for each of them in front of each product."""
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

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        if found.opset < 7:
            return "operands of this opset lie along an axis"
        producer = found.x.inputs[0] if found.x.inputs else None
        if isinstance(found.x, Constant) or (producer is not None and _takes(producer, found.x)):
            return "what is in front can take it"
        if is_gelu_before_halving(found.x):
            return "it is a part of Gelu"
        if reason := _product_obstacle(found):
            return reason
        affine = _affine(found)
        if isinstance(affine, str):
            return affine
        factor, shift = affine
        if shift.any() and (reason := _shift_obstacle(found)):
            return reason
        if not stays_in_range(factor, found.w.dtype) or not keeps_digits(shift, found.w.dtype):
            return "its factors are too far from 1, or its shifts are too large"
        return "" if _folded(found, factor, shift) is not None else "the weight would leave the range of its type"

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise."""
        return True

    def replacement(self, new: New, found: Match) -> Any:
        """Make the product with another weight and bias."""
        affine = _affine(found)
        assert not isinstance(affine, str), "looked at before"
        folded = _folded(found, *affine)
        assert folded is not None, "looked at before"
        weight, bias = folded
        added = [found.values.get("b")] if found.product.op != "MatMul" else []
        if affine[1].any():
            added = [new.constant(bias, "bias")]
        while added and added[-1] is None:
            added.pop()
        return new.like(found.product, found.x, new.constant(weight, "weight"), *added)


def _takes(producer: Node, made: Tensor) -> bool:
    """Whether a product has a weight to fold into, and nobody else reads what it makes."""
    if producer.op not in _PRODUCTS or producer.domain or len(made.outputs) > 1 or made.returned_by:
        return False
    return isinstance(producer.inputs[1], Constant)


def _product_obstacle(found: Match) -> str:
    product, weight = found.product, found.w
    if weight.dtype.kind != "f" or len(weight.outputs) > 1:
        return f"others read the weight of {product.name}, or it is not floating point"
    if product.op in ("Conv", "ConvTranspose"):
        return "" if len(weight.shape) > 2 else f"the weight of {product.name} has rank {len(weight.shape)}"
    if len(weight.shape) != 2 or product.attrs.get("transA", 0):
        return f"{product.name} is no product of rows and a matrix"
    tied = found.uses is not None and found.uses.is_like_a_table(weight)
    return f"the weight of {product.name} may be a table that is looked up too" if tied else ""


def _shift_obstacle(found: Match) -> str:
    product, bias = found.product, found.values.get("b")
    if product.op == "ConvTranspose":
        return f"{product.name} would have to shift its border otherwise"
    if product.op == "Conv" and (
        any(product.attrs.get("pads", ())) or product.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    ):
        return f"{product.name} pads"
    if product.op == "Gemm" and (product.attrs.get("alpha", 1.0), product.attrs.get("beta", 1.0)) != (1.0, 1.0):
        return f"{product.name} has alpha or beta"
    if bias is not None and (not isinstance(bias, Constant) or bias.input_source is not None):
        return f"the bias of {product.name} is not constant"
    one = bias is None or bias.shape == (_outputs(found),)
    return "" if one else f"the bias of {product.name} is not one value for each channel"


def _channels(found: Match) -> int:
    """Return how many channels the product reads."""
    shape, op = found.w.shape, found.product.op
    if op == "Conv":
        return int(shape[1]) * int(found.product.attrs.get("group", 1))
    return int(shape[1 if op == "Gemm" and found.product.attrs.get("transB", 0) else 0])


def _outputs(found: Match) -> int:
    shape = found.w.shape
    return int(shape[0 if found.product.op == "Conv" or found.product.attrs.get("transB", 0) else 1])


def _affine(found: Match) -> tuple[Doubles, Doubles] | str:
    """Return factor and shift of each channel, or why they are not known."""
    channels = _channels(found)
    if found.affine.op == "BatchNormalization":
        if found.product.op == "Gemm" and (found.x.shape is None or len(found.x.shape) != 2):
            return "its channel axis is not the last one"
        affine = affine_of(found.affine)
        same = isinstance(affine, str) or affine[0].size == channels
        return affine if same else "it has another number of channels"
    operand = found.factor if found.affine.op == "Mul" else found.shift
    rank, place = len(found.w.shape), -1
    if found.product.op in ("Conv", "ConvTranspose"):
        place = 1 - rank
    elif found.product.op == "MatMul":
        rank = 1 if found.x.shape is None else len(found.x.shape)
    wide = [axis - len(operand.shape) for axis, size in enumerate(operand.shape) if size != 1]
    if operand.dtype.kind != "f" or len(operand.shape) > rank or any(axis != place for axis in wide):
        return "its constant does not vary along the channels alone"
    values = np.asarray(operand.values, np.float64).reshape(-1)
    if values.size not in (1, channels):
        return "it has another number of channels"
    data = found.x.shape
    if len(operand.shape) > (1 if data is None else len(data)) or (
        values.size > 1 and (data is None or data[place] != channels)
    ):
        return "its data is not known to have these channels before"
    values = np.broadcast_to(values, channels)
    return (values, np.zeros(channels)) if found.affine.op == "Mul" else (np.ones(channels), values)


@np.errstate(over="ignore", invalid="ignore")
def _folded(found: Match, factor: Doubles, shift: Doubles) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """Return the new weight and bias, or None if their type cannot hold them."""
    weight = np.asarray(found.w.values, np.float64)
    old, added = found.values.get("b"), np.zeros(1)
    if shift.any():
        axis = 0 if found.product.op == "Conv" or found.product.attrs.get("transB", 0) else 1
        others = tuple(other for other in range(weight.ndim) if other != axis)
        before = 0.0 if old is None else np.asarray(old.values, np.float64)
        added = before + (weight * _along_inputs(found, shift)).sum(axis=others)
    along = _along_inputs(found, factor)
    scaled, bias = stored(weight * along, found.w.dtype, weight, along), stored(added, found.w.dtype)
    return None if scaled is None or bias is None else (scaled, bias)


def _along_inputs(found: Match, values: Doubles) -> Doubles:
    """Shape one value for each channel that is read so that it multiplies the weight."""
    shape, op = found.w.shape, found.product.op
    rest = [1] * (len(shape) - 2)
    if op == "Conv":
        group = int(found.product.attrs.get("group", 1))
        return np.repeat(values.reshape(group, -1), shape[0] // group, axis=0).reshape(*shape[:2], *rest)
    first = op == "ConvTranspose" or not found.product.attrs.get("transB", 0)
    return values.reshape(-1, 1, *rest) if first else values.reshape(1, -1)
