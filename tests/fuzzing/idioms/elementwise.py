"""Activation functions, arithmetic and casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from fuzzing.builder import F16, F32, F64, I64, Builder
from fuzzing.idioms.writing import binary, either, idiom, odd, operand, weight


@idiom("FuseGelu", "UnifyGeluArgument", turns=3)
def gelu(b: Builder) -> Any:
    x = b.find((1, 2, 3, 4, 4))
    if b.chance(0.6):
        inner = b.op("Erf", b.op("Div", x, b.scalar(odd(b, math.sqrt(2), share=0.05), x)))
        if b.chance(0.3):
            inner = b.op("Erf", binary(b, "Mul", x, b.scalar(1 / math.sqrt(2), x)))
    else:
        cube = b.op("Pow", x, b.scalar(3.0, x))
        if b.chance(0.5):
            cube = binary(b, "Mul", binary(b, "Mul", x, x), x)
        sum_ = binary(b, "Add", x, binary(b, "Mul", cube, b.scalar(0.044715, x)))
        inner = b.op("Tanh", binary(b, "Mul", sum_, b.scalar(math.sqrt(2 / math.pi), x)))
    one = binary(b, "Add", inner, b.scalar(1.0, x))
    half = b.scalar(odd(b, 0.5, share=0.05), x)
    form = b.pick("abc")
    if form == "a":
        return binary(b, "Mul", one, binary(b, "Mul", x, half))
    if form == "b":
        return binary(b, "Mul", binary(b, "Mul", one, x), half)
    return binary(b, "Mul", binary(b, "Mul", one, half), x)


@idiom("UnifyGeluArgument")
def gelu_argument(b: Builder) -> Any:
    x = b.find()
    if b.chance(0.3):
        return b.op("Erf", binary(b, "Mul", x, b.scalar(1 / math.sqrt(2), x)))
    number, slope, one = b.scalar(0.044715, x), b.scalar(math.sqrt(2 / math.pi), x), b.scalar(1.0, x)
    square = binary(b, "Mul", binary(b, "Mul", x, x), number)
    moved = binary(b, "Add", square, one)
    if b.chance(0.5):
        return b.op("Tanh", binary(b, "Mul", binary(b, "Mul", x, slope), moved))
    return b.op("Tanh", binary(b, "Mul", x, binary(b, "Mul", moved, slope)))


@idiom("UseHardSigmoid", "JoinHardSwishes")
def hard_swish(b: Builder) -> Any:
    x = b.find()
    if b.chance(0.3):
        slope, middle = b.pick([1 / 6, 1 / 6, 0.2]), b.pick([0.5, 0.5, 0.4])
        return binary(b, "Mul", x, b.op("HardSigmoid", x, alpha=slope, beta=middle))
    limited = b.clip(binary(b, "Add", x, b.scalar(odd(b, 3.0, share=0.1), x)), 0.0, odd(b, 6.0, share=0.1))
    scaled: Callable[[str], str] = lambda value: binary(b, "Mul", value, b.scalar(1 / 6, x))  # noqa: E731
    if b.chance(0.5):
        scaled = lambda value: b.op("Div", value, b.scalar(6.0, x))  # noqa: E731
    form = b.pick("abcd")
    if form == "a":
        return scaled(limited)
    if form == "b":
        return scaled(binary(b, "Mul", x, limited))
    return binary(b, "Mul", x, scaled(limited)) if form == "c" else binary(b, "Mul", scaled(x), limited)


@idiom("UseHardSigmoid", "JoinHardSwishes", opsets=(7, 24), dtypes=(F32, F32, F16))
def hard_swish_node(b: Builder) -> Any:
    x = b.find()
    if b.opset >= 14 and b.chance(0.6):
        return b.op("HardSwish", x)
    return binary(b, "Mul", x, b.op("HardSigmoid", x, alpha=1 / 6, beta=0.5))


@idiom("UseLeakyRelu", "SplitPRelus", turns=3)
def leaky(b: Builder) -> Any:
    x = b.find((2, 3, 4) if b.chance(0.8) else (1, 2))
    shape = b.shape(x)
    slopes: list[tuple[int, ...]] = [
        (),
        (1,),
        (shape[1] if len(shape) > 1 else 1, *[1] * (len(shape) - 2)),
        shape[-1:],
        shape,
    ]
    values = weight(b, *b.pick(slopes))
    values = b.pick([values, np.full_like(values, odd(b, 0.1, 0.25, 2.0, 0.0)), np.abs(values) + 1, -np.abs(values)])
    slope = b.constant(values.astype(b.dtype))
    form = b.pick("ppabcdefm")
    if form == "p":
        return b.op("PRelu", x, slope)
    if form == "m":
        return binary(b, "Max", x, binary(b, "Mul", x, slope))
    positive = b.op("Relu", x)
    if form == "a":
        return binary(b, "Add", positive, binary(b, "Mul", b.op("Relu", b.op("Neg", x)), slope))
    if form == "b":
        return b.op("Sub", positive, binary(b, "Mul", b.op("Relu", b.op("Neg", x)), slope))
    if form in "cd":
        below = binary(b, "Min", x, b.scalar(0.0, x)) if form == "c" else b.clip(x, None, 0.0)
        return binary(b, "Add", positive, binary(b, "Mul", below, slope))
    doubled, half = b.op("Sub", x, b.op("Abs", x)), b.scalar(0.5, x)
    inner = binary(b, "Mul", binary(b, "Mul", doubled, slope), half)
    if form == "f":
        inner = binary(b, "Mul", binary(b, "Mul", doubled, half), slope)
    return binary(b, "Add", positive, inner)


@idiom("SplitSwishes", opsets=(24, 24))
def swish(b: Builder) -> Any:
    return b.op("Swish", b.find(), alpha=b.pick([None, 1.0, 1.702, -0.5]))


@idiom("MergeEqual")
def silu(b: Builder) -> Any:
    x = b.find()
    gate = b.op("Sigmoid", x)
    twice = b.op("Sigmoid", x) if b.chance(0.5) else gate
    return binary(b, "Add", binary(b, "Mul", x, gate), twice)


@idiom("MergeClamps")
def clamps(b: Builder) -> Any:
    x = b.find()
    for _ in range(int(b.pick([1, 2, 2, 3]))):
        kind = b.word("Max Min Clip Relu")
        low, high = odd(b, 0.0, -1.0, 2.0, share=0.35), odd(b, 6.0, 1.0, 0.0, share=0.35)
        if kind == "Relu":
            x = b.op("Relu", x)
        elif kind == "Clip":
            x = b.clip(x, *b.pick([(low, high), (low, None), (None, high)]))
        else:
            limit = b.constant(operand(b, x)) if b.chance(0.15) else b.scalar(low if kind == "Max" else high, x)
            x = b.op(kind, *either(b, x, limit))
    if b.chance(0.3):
        return b.op("IsInf", x) if b.opset >= 10 and b.dtype != F16 else b.op("Softmax", x)
    return x


# Elementwise arithmetic


@idiom("MergeScalars", dtypes=(F32, F32, F16, F64))
def scalars(b: Builder) -> Any:
    x = b.find()
    op = b.pick(["Mul", "Add"])
    for _ in range(int(b.pick([1, 2, 3]))):
        x = binary(b, op, x, b.scalar(odd(b, 0.5, 2.0, 1.0 if op == "Mul" else 0.0, -1.0, share=0.3), x))
    return x


@idiom("UseAddAndMul", dtypes=(F32, F32, F16, F64))
def quotients(b: Builder) -> Any:
    x = b.find()
    form = b.word("Div Div Div Sub Sum Mean")
    if form in ("Sum", "Mean"):
        others = [b.pick([x, b.constant(operand(b, x))]) for _ in range(int(b.pick([0, 1, 2])))]
        return b.op(b.word("Sum Mean Max Min"), x, *others)
    values = operand(b, x) if b.chance(0.3) else np.full((), odd(b, 41.0, 3.0, 255.0, 2.0, 0.1)).astype(b.dtype)
    made = b.op(form, x, b.constant(values))
    return decision(b, made) if b.chance(0.6) else made


def decision(b: Builder, x: str) -> str:
    """Add operators to which the last bit of a number may matter, behind some that keep it."""
    for _ in range(int(b.pick([0, 0, 1, 2]))):
        kind = b.word("Relu Reshape Neg Transpose MaxPool Identity Max Concat Mul2")
        if kind == "Reshape":
            x = b.reshape(x, [-1])
        elif kind == "MaxPool":
            x = b.op("MaxPool", x, kernel_shape=[2, 2]) if b.rank(x) == 4 and min(b.shape(x)) > 1 else x
        elif kind == "Max":
            x = b.op("Max", x, b.scalar(0.0, x))
        elif kind == "Concat":
            x = b.op("Concat", x, x, axis=0) if b.rank(x) else x
        else:
            x = b.op("Mul", x, b.scalar(2.0, x)) if kind == "Mul2" else b.op(kind, x)
    kind = b.word("Floor Ceil Cast Equal Less ArgMax Round Bool NonZero Sign")
    if kind == "Cast":
        return b.op("Cast", x, to=b.pick([TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL]))
    if kind == "Bool":
        return b.op("Cast", x, to=TensorProto.BOOL)
    if kind in ("Equal", "Less"):
        return b.op(kind if b.opset > 10 else "Less", x, b.scalar(b.pick([1.0, 0.5, 3.0]), x))
    if kind == "ArgMax":
        return b.op("ArgMax", x, axis=0, keepdims=1) if b.rank(x) else x
    if kind in ("Round", "Sign") and b.opset < 11:
        kind = "Floor"
    return b.op(kind, x)


@idiom("MergeCasts", "WidenFloats")
def casts(b: Builder) -> Any:
    x = b.find() if b.chance(0.6) else b.input(3, dtype=b.pick([np.int32, I64, np.int8, np.uint8, np.bool_]))
    types = [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64,
             TensorProto.UINT8, TensorProto.BOOL, TensorProto.INT8]  # fmt: skip
    for _ in range(int(b.pick([1, 2, 2, 3]))):
        x = b.op("Cast", x, to=b.pick(types))
    return x


@idiom("WidenFloats", opsets=(13, 24), dtypes=(F32,))
def brain_floats(b: Builder) -> Any:
    x = b.find()
    rank = b.rank(x)
    first, moved, back = b.fresh(), b.fresh(), b.fresh()
    move = b.pick([helper.make_node("Identity", [first], [moved]), helper.make_node("Transpose", [first], [moved])])
    if rank == 0:
        move = helper.make_node("Identity", [first], [moved])
    nodes = [
        helper.make_node("Cast", [x], [first], to=TensorProto.BFLOAT16),
        move,
        helper.make_node("Cast", [moved], [back], to=TensorProto.FLOAT),
    ]
    b.emit(nodes, [back])
    return back


@idiom("ReplaceCastLike", opsets=(15, 24))
def cast_like(b: Builder) -> Any:
    like = b.pick([b.constant(np.zeros(1, I64)), b.constant(np.zeros((), F32)), b.find(), b.constant(np.array([True]))])
    return b.op("CastLike", b.find(), like)
