"""Factors and shifts of channels behind Concat or pooling, whose products could take them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from onnxq.ir import Constant, Tensor
from onnxq.rewrite import Call, Match, New, Operators, RewriteRule
from onnxq.rewrite.soundness import affine_of, stays_in_range


class LiftChannelFactors(RewriteRule):
    """What scales and shifts channels behind a Concat or pooling is done in front of it, where convolutions take it.

    That is Mul, Add and BatchNormalization by constants. It stays if anything that is joined or pooled does not come
    from a convolution of its own; behind a maximum, unless its factors are positive; and a shift behind a mean that
    counts padding.
    """

    def pattern(self, op: Operators) -> tuple[Call, ...]:
        """Look for each of them behind each operator."""
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

    def obstacle(self, found: Match) -> str:
        """Return why it stays."""
        root, carrier = found.root, found.carrier
        if found.opset < 7:
            return "operands of this opset lie along an axis"
        if root.attrs.get("training_mode", 0) or len(root.outputs) > 1 or any(out.name for out in carrier.outputs[1:]):
            return "it is in training mode, or there are other outputs"
        sizes = [_channels(tensor) for tensor in carrier.inputs]
        if not all(sizes):
            return f"not all that {carrier.name} reads comes from convolutions of its own"
        rank = len(carrier.inputs[0].inputs[0].inputs[1].shape)
        parameters = [tensor for tensor in root.inputs if tensor is not carrier.outputs[0]]
        place = -1 if root.op == "BatchNormalization" else 1 - rank
        for tensor in parameters:
            wide = [axis - len(tensor.shape) for axis, size in enumerate(tensor.shape) if size != 1]
            one = not wide and root.op != "BatchNormalization"
            if len(tensor.shape) > rank or not (one or (wide == [place] and tensor.shape[place] == sum(sizes))):
                return "its constants do not vary along the channels alone"
        return "" if carrier.op == "Concat" else _pooling_obstacle(found)

    def rounds(self, found: Match) -> bool:
        """Return whether it rounds otherwise, as means do."""
        return found.carrier.op in ("AveragePool", "GlobalAveragePool")

    def replacement(self, new: New, found: Match) -> Any:
        """Make a part of it for each input, and the Concat or pooling behind."""
        carrier, root = found.carrier, found.root
        ends = np.cumsum([0, *map(_channels, carrier.inputs)]).tolist()
        parts = []
        for tensor, (first, last) in zip(carrier.inputs, pairwise(ends), strict=True):
            operands = [
                tensor if read is carrier.outputs[0] else new.constant(_part(read, first, last), read.name)
                for read in root.inputs
            ]
            parts.append(new.call("", root.op, *operands, **root.attrs))
        return new.like(carrier, *parts)


def _channels(tensor: Tensor) -> int:
    """Return how many channels a convolution makes that can take factors, else 0."""
    producer = tensor.inputs[0] if tensor.inputs else None
    if producer is None or producer.domain or producer.op not in ("Conv", "ConvTranspose") or len(producer.inputs) < 2:
        return 0
    if len(tensor.outputs) > 1 or tensor.returned_by:
        return 0
    if not all(isinstance(read, Constant) and read.input_source is None for read in producer.inputs[1:] if read.name):
        return 0
    shape, group = producer.inputs[1].shape, int(producer.attrs.get("group", 1))
    return int(shape[0]) if producer.op == "Conv" else int(shape[1]) * group


def _part(constant: Constant, first: int, last: int) -> Any:
    """Return the constant of some channels; one number holds for all."""
    values = constant.values
    wide = [axis for axis, size in enumerate(values.shape) if size != 1]
    return values.take(range(first, last), axis=wide[0]) if wide else values


def _pooling_obstacle(found: Match) -> str:
    pool, root = found.carrier, found.root
    affine = affine_of(root) if root.op == "BatchNormalization" else None
    if isinstance(affine, str):
        return affine
    factor = affine[0] if affine is not None else np.asarray(found.factor.values if root.op == "Mul" else 1.0)
    if not stays_in_range(factor, found.carrier.inputs[0].inputs[0].inputs[1].dtype):
        return "its factors are too far from 1"
    if pool.op in ("MaxPool", "GlobalMaxPool"):
        return "" if (factor > 0).all() else "not all of its factors are positive"
    counts = pool.attrs.get("count_include_pad", 0)
    return f"{pool.name} counts padding" if counts and root.op != "Mul" else ""
