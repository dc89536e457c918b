"""Operators of onnxruntime, of old opsets, and any others."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper

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


@idiom("WidenFloats", "MergeCasts", opsets=(13, 24), dtypes=(F16,))
def half_types(b: Builder) -> Any:
    """Add a rounding to the other 16-bit type, which something may decide by."""
    x = b.find((1, 2))
    moved, back = b.fresh(), b.fresh()
    brain = helper.make_node("Cast", [x], [b.fresh()], to=TensorProto.BFLOAT16)
    move = helper.make_node(b.pick(["Identity", "Concat"]), [brain.output[0]], [moved])
    if move.op_type == "Concat":
        move.attribute.append(helper.make_attribute("axis", 0))
    narrow = helper.make_node("Cast", [moved], [back], to=b.pick([TensorProto.FLOAT16, TensorProto.FLOAT16, 1]))
    b.emit([brain, move, narrow], [back])
    return b.op(b.word("Floor Round Neg Relu Sign"), back)


@idiom("WidenFloats", "NameTensors", opsets=(18, 24), dtypes=(F16, F16, F32))
def inner_composites(b: Builder) -> Any:
    """Add a sequence or an optional on the way, whose type the model declares or not."""
    x = b.op(b.pick(["Relu", "Neg"]), b.find((2, 3)))
    packed, got = b.fresh(), b.fresh()
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(b.dtype))
    first = b.constant(np.asarray(0, I64))
    form = b.word("split construct insert optional")
    if form == "optional":
        inner = helper.make_tensor_type_proto(elem, None)
        declared = helper.make_optional_type_proto(inner)
        # The type as an attribute as well.
        typed = {"type": inner} if b.chance(0.5) else {}
        pack = [helper.make_node("Optional", [x], [packed], **typed)]
        take = helper.make_node("OptionalGetElement", [packed], [got])
    else:
        declared = helper.make_sequence_type_proto(helper.make_tensor_type_proto(elem, None))
        if form == "split":
            pack = [helper.make_node("SplitToSequence", [x], [packed], axis=0)]
        elif form == "construct":
            pack = [helper.make_node("SequenceConstruct", [x, x], [packed])]
        else:
            empty = helper.make_node("SequenceEmpty", [], [b.fresh()], dtype=elem)
            pack = [empty, helper.make_node("SequenceInsert", [empty.output[0], x], [packed])]
        if b.chance(0.5):
            take = helper.make_node("SequenceAt", [packed, first], [got])
        else:
            take = helper.make_node("ConcatFromSequence", [packed], [got], axis=0)
    b.emit([*pack, take], [got])
    if b.chance(0.7):
        b.declared.append(helper.make_value_info(packed, declared))
    return b.op(b.pick(["Neg", "Abs"]), got)


@idiom("UseAddAndMul", "MergeScalars", dtypes=(F32,))
def unknown_operators(b: Builder) -> Any:
    """Add an operator that the table does not list and that a last bit decides."""
    x = b.find(1)
    scaled = b.op("Div", x, b.constant(np.asarray(b.pick([41.0, 3.0, 0.1]), F32)))
    if b.chance(0.5):
        scaled = b.op("Mul", scaled, b.constant(np.asarray(b.pick([41.0, 3.0, 0.1]), F32)))
    if b.chance(0.5):
        return b.op("Cast", b.op("Binarizer", scaled, domain="ai.onnx.ml", threshold=1.0), to=TensorProto.INT64)
    return b.op("Cast", b.ops("Unique", scaled, outputs=3, domain="com.microsoft")[0], to=TensorProto.INT64)


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
