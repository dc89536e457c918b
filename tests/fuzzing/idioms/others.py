"""Operators of onnxruntime, of old opsets, and any others."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzzing.builder import F16, F32, I64, Builder
from fuzzing.idioms.writing import batch_norm, either, idiom, odd, operand, product, weight


@idiom("UnfuseProducts", dtypes=(F32,))
def contrib(b: Builder) -> Any:
    x = b.find(2)
    matrix = b.constant(weight(b, b.shape(x)[1], 3))
    form = b.pick(["matmul", "gemm", "conv"])
    if form == "matmul":
        return b.op("FusedMatMul", x, matrix, domain="com.microsoft", alpha=b.pick([None, 0.5]))
    if form == "gemm":
        return b.op("FusedGemm", x, matrix, b.constant(weight(b, 3)), domain="com.microsoft", activation="Relu")
    image = b.find(4)
    kernel = b.constant(weight(b, 2, b.shape(image)[1], 3, 3))
    return b.op("FusedConv", image, kernel, domain="com.microsoft", activation="Relu", kernel_shape=[3, 3])


@idiom("UpgradeOpset", opsets=(7, 17), dtypes=(F32, F32, F16))
def old_operators(b: Builder) -> Any:
    x = b.find((2, 3, 4))
    form = b.word("Pad Softmax TopK Upsample Reduce Hardmax Clip Dropout Squeeze BN")
    if form == "Pad":
        pads = [int(b.pick([0, 1])) for _ in range(2 * b.rank(x))]
        return (
            b.op("Pad", x, pads=pads, mode=b.pick(["edge", "constant"]), value=0.0)
            if b.opset < 11
            else b.pad(x, pads, mode="edge")
        )
    if form in ("Softmax", "Hardmax"):
        return b.op(form, x, axis=int(b.random.integers(b.rank(x))))
    if form == "TopK":
        return b.ops("TopK", x, outputs=2, k=1)[0] if b.opset < 10 else b.ops("TopK", x, b.numbers(1), outputs=2)[0]
    if form == "Upsample" and b.rank(x) == 4 and b.opset < 9:
        return b.op("Upsample", x, scales=[1.0, 1.0, 2.0, 2.0])
    if form == "BN" and b.rank(x) > 2:
        return batch_norm(b, x)
    if form == "Clip":
        return b.clip(x, -1.0, 1.0)
    return b.reduce(b.word("ReduceMax ReduceSum ReduceL2 ReduceProd"), x, [0])


_UNARY = (
    "Abs Ceil Cos Elu Erf Exp Floor HardSigmoid Log Neg Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign "
    "Sqrt Tan Tanh"
)


@idiom()
def plain(b: Builder) -> Any:
    """Add any operators, for rules to meet what they are not made for."""
    for _ in range(int(b.pick([1, 2, 4]))):
        x = b.find()
        form = b.word(
            "unary binary compare reduce topk gather nonzero argmax where pool product cumsum tile onehot resize"
        )
        if form == "unary":
            b.op(b.word(_UNARY), x)
        elif form == "binary":
            b.op(b.word("Add Div Mul Pow Sub Max Min"), *either(b, x, b.constant(operand(b, x))))
        elif form == "compare":
            b.op(b.pick(["Greater", "Less"]), x, b.constant(operand(b, x)))
        elif form == "reduce":
            b.reduce(
                b.word("ReduceMean ReduceMax ReduceMin ReduceSum ReduceProd ReduceL1"),
                x,
                [0] if b.rank(x) else None,
            )
        elif form == "topk" and b.rank(x):
            b.ops("TopK", x, b.numbers(1), outputs=2) if b.opset > 9 else None
        elif form == "gather" and b.rank(x):
            b.op("Gather", x, b.constant(np.asarray(b.pick([0, [0], [[0, -1]]]), I64)), axis=b.rank(x) - 1)
        elif form == "nonzero":
            b.op("NonZero", x)
        elif form == "argmax" and b.rank(x):
            b.op(b.pick(["ArgMax", "ArgMin"]), x, axis=0)
        elif form == "where" and b.opset >= 9:
            b.op("Where", b.op("Greater", x, b.scalar(0.0, x)), x, b.scalar(odd(b, 0.0, -1.0), x))
        elif form == "pool" and b.rank(x) == 4:
            b.op(b.pick(["MaxPool", "AveragePool"]), x, kernel_shape=[2, 2], strides=[1, 1])
        elif form == "product":
            product(b)
        elif form == "cumsum" and b.opset >= 11 and b.rank(x):
            b.op("CumSum", x, b.constant(np.asarray(0, I64)))
        elif form == "tile" and b.rank(x):
            b.op("Tile", x, b.numbers(*[int(b.pick([1, 2])) for _ in range(b.rank(x))]))
        elif form == "resize" and b.opset >= 13 and b.rank(x) == 4:
            b.op("Resize", x, None, b.constant(np.array([1, 1, 2, 2], F32)), mode="nearest")
