"""Normalizations, factors and shifts of channels."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzzing.builder import F16, F32, F64, Builder, RefusedError
from fuzzing.idioms.writing import (
    batch_norm,
    binary,
    channels,
    conv,
    conv_transpose,
    gemm,
    idiom,
    matmul,
    odd,
    operand,
    product,
    weight,
)


@idiom("FuseLayerNormalization", "FoldAffineIntoNormalization", "DivideBySquareRoot", turns=2)
def layer_norm(b: Builder) -> Any:
    x = b.find((2, 3, 4)) if b.chance(0.4) else b.input(2, int(b.pick([1, 3])), 4, fixed=0.9)
    axes = b.pick([[-1]] * 5 + [[b.rank(x) - 1], [0], [-2, -1]])
    centred = b.op("Sub", x, b.reduce("ReduceMean", x, axes))
    again = b.op("Sub", x, b.reduce("ReduceMean", x, axes)) if b.chance(0.2) else centred
    square = b.op("Pow", again, b.scalar(2.0, x)) if b.chance(0.5) else b.op("Mul", again, again)
    moved = binary(b, "Add", b.reduce("ReduceMean", square, axes), b.scalar(odd(b, 1e-5, 1e-3, share=0.05), x))
    return _affine(b, _over_root(b, centred, moved))


@idiom("FuseRmsNormalization", "FoldAffineIntoNormalization", "DivideBySquareRoot", turns=2)
def rms_norm(b: Builder) -> Any:
    x = b.find((2, 3, 4)) if b.chance(0.4) else b.input(2, int(b.pick([1, 3])), 4, fixed=0.9)
    axes = b.pick([[-1]] * 5 + [[b.rank(x) - 1], [0]])
    square = b.op("Pow", x, b.scalar(2.0, x)) if b.chance(0.5) else b.op("Mul", x, x)
    moved = binary(b, "Add", b.reduce("ReduceMean", square, axes), b.scalar(odd(b, 1e-5, 1e-3, share=0.05), x))
    return _affine(b, _over_root(b, x, moved))


def _over_root(b: Builder, data: str, square: str) -> str:
    root = b.op("Sqrt", square)
    form = b.pick("abc")
    if form == "a":
        return b.op("Div", data, root)
    made = b.op("Reciprocal", root) if form == "b" else b.op("Div", b.scalar(1.0, root), root)
    return binary(b, "Mul", made, b.pick([data] * 6 + [root, made]))


def _affine(b: Builder, data: str) -> str:
    for op in b.pick([("Mul", "Add"), ("Mul",), ("Add",), (), ("Mul", "Mul", "Add")]):
        values = weight(b, b.shape(data)[-1]) if b.chance(0.7) else operand(b, data)
        data = binary(b, op, data, b.constant(values))
    return data


@idiom("DivideBySquareRoot")
def reciprocal_root(b: Builder) -> Any:
    return _over_root(b, b.find(), b.op("Abs", b.find()))


@idiom("FoldAffineIntoNormalization", opsets=(17, 24))
def affine_of_norm(b: Builder) -> Any:
    x = b.find((2, 3))
    size = b.shape(x)[-1]
    scale = np.full(size, odd(b, 1.0, 300.0), F32).astype(b.dtype) if b.chance(0.5) else weight(b, size)
    if b.opset >= 23 and b.chance(0.5):
        made = b.op("RMSNormalization", x, b.constant(scale), axis=b.pick([-1, None]))
    else:
        extra = [b.constant(weight(b, size))] if b.chance(0.5) else []
        axis = b.pick([-1, -1, b.rank(x) - 1])
        made = b.op("LayerNormalization", x, b.constant(scale), *extra, axis=axis)
    for op in b.pick([("Mul",), ("Add",), ("Mul", "Add"), ("Add", "Mul")]):
        values = b.pick([weight(b, size), operand(b, made), np.full(size, odd(b, 2.0, 300.0), F64)])
        with np.errstate(over="ignore"):
            made = binary(b, op, made, b.constant(values.astype(b.dtype)))
    return made


@idiom("FuseBatchNorm", "FoldIntoBatchNorm", dtypes=(F32, F32, F32, F16, F64))
def batch_norms(b: Builder) -> Any:
    x = product(b) if b.chance(0.5) else b.find((3, 4))
    if b.rank(x) < 2:
        raise RefusedError("it has no channels")
    for _ in range(int(b.pick([1, 2, 3]))):
        kind = b.word("norm norm Mul Add")
        factor = channels(b, b.shape(x)[1], last=b.rank(x) < 4)
        x = batch_norm(b, x) if kind == "norm" else binary(b, kind, x, factor)
    return x


@idiom("FuseBatchNorm")
def scaled_product(b: Builder) -> Any:
    x = product(b)
    for op in b.pick([("Mul",), ("Add",), ("Mul", "Add"), ("Div",), ("Sub", "Mul")]):
        x = b.op(op, x, b.constant(operand(b, x)))
    return x


@idiom("FoldIntoNextProduct", dtypes=(F32, F32, F32, F16, F64))
def into_next_product(b: Builder) -> Any:
    x = b.find((2, 3, 4))
    image = b.rank(x) == 4
    if b.chance(0.5):
        x = b.op("Relu", x)
    for _ in range(int(b.pick([1, 1, 2]))):
        kind = b.pick(["Mul", "Add", "norm"])
        if kind == "norm":
            x = batch_norm(b, x)
        else:
            x = binary(b, kind, x, channels(b, b.shape(x)[1 if image else -1], last=not image))
    if image:
        return conv(b, x) if b.chance(0.7) else conv_transpose(b, x)
    return gemm(b, x) if b.rank(x) == 2 and b.chance(0.5) else matmul(b, x)


@idiom("LiftChannelFactors", dtypes=(F32, F32, F16))
def channel_factors(b: Builder) -> Any:
    x = b.find(4)
    first = conv(b, x, pads=[0, 0, 0, 0], strides=[1, 1])
    form = b.word("Concat Concat AveragePool GlobalAveragePool GlobalMaxPool MaxPool")
    if form == "Concat":
        kernel = b.values[first].shape
        other = b.op(
            "Conv",
            x,
            b.constant(
                weight(b, 2, b.shape(x)[1], *(w - k + 1 for w, k in zip(b.shape(x)[2:], kernel[2:], strict=True)))
            ),
        )
        made = b.op("Concat", first, other, axis=b.pick([1, 1, -3]))
    elif form.startswith("Global"):
        made = b.op(form, first)
    else:
        made = b.op(form, first, kernel_shape=[2, 2], pads=b.pick([None, [1, 1, 1, 1]]))
    kind = b.pick(["Mul", "Add", "norm"])
    if kind == "norm":
        return batch_norm(b, made)
    values = b.constant(np.abs(weight(b, b.shape(made)[1], 1, 1))) if b.chance(0.5) else channels(b, b.shape(made)[1])
    return binary(b, kind, made, values)
