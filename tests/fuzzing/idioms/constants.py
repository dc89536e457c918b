"""Constants, shapes that are computed, and what does nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from fuzzing.builder import F16, F32, I64, Builder
from fuzzing.idioms.writing import idiom, lengths, odd, weight


@idiom("DropNoOps", "MergeEqual")
def no_ops(b: Builder) -> Any:
    x = b.find() if b.chance(0.8) else b.constant(b.normal(2, 3))
    for _ in range(int(b.pick([1, 2]))):
        if b.chance(0.5):
            x = b.op("Identity", x)
        elif b.opset < 12:
            x = b.op("Dropout", x, ratio=0.3)
        else:
            ratio = b.constant(np.asarray(0.3, F32))
            x = b.op(
                "Dropout",
                x,
                *([ratio, b.constant(np.asarray(False))] if b.chance(0.5) else [ratio] if b.chance(0.5) else []),
            )
    if b.chance(0.3):
        b.returned.append(x)
    return b.op("Neg", x) if b.chance(0.5) else x


@idiom("ShareInitializers", "MergeEqual")
def equal_weights(b: Builder) -> Any:
    x = b.find((2, 3))
    matrix = weight(b, b.shape(x)[-1], 3)
    name, other = b.fresh("c"), b.fresh("c")
    for one in (name, other):
        b.stored[one] = b.values[one] = matrix
    first, second = b.op("MatMul", x, name), b.op("MatMul", x, other)
    return b.op(b.pick(["Add", "Mul"]), b.op("Relu", first), second)


@idiom("DeduplicateTransposedWeights", "ShareInitializers", dtypes=(F32, F32, F16))
def tied_weights(b: Builder) -> Any:
    matrix = b.normal(4, 3)
    rows = b.op("Gather", b.constant(matrix, plain=1.0), b.input(2, dtype=I64, values=np.array([0, 3], I64)), axis=0)
    twin = b.constant(np.ascontiguousarray(b.pick([matrix.T, matrix.T, matrix.reshape(3, 4)])), plain=1.0)
    return b.op("MatMul", rows, twin)


@idiom("NarrowConstants", dtypes=(F32,))
def wide_constants(b: Builder) -> Any:
    values = b.random.integers(-4, 5, (12, 12)).astype(F32)
    if b.chance(0.3):
        values[0, 0] = odd(b, 0.1, 1e30)
    return b.op(b.pick(["Add", "MatMul"]), b.input(int(b.pick([1, 12])), 12), b.constant(values, plain=1.0))


@idiom("StripMetadata", "NameNodes")
def exporters_notes(b: Builder) -> Any:
    x = b.find(4, dtype=F32)
    made = b.op(
        "Conv", x, b.constant(b.normal(2, b.shape(x)[1], 1, 1, dtype=F32)), group=1, dilations=[1, 1], strides=[1, 1]
    )
    b.nodes[-1].doc_string = "File model.py, line 7, in forward"
    b.op("LeakyRelu", made, alpha=b.pick([0.01, 0.2]))
    b.nodes[-1].name = b.pick(["", "leaky"])
    return b.op("Relu", made)


@idiom("FlushDenormals", dtypes=(F32,))
def denormal_weights(b: Builder) -> Any:
    x = b.find(2)
    values = b.normal(b.shape(x)[1], 3)
    values[b.random.random(values.shape) < 0.3] = 1e-40
    return b.op("MatMul", x, b.constant(values))


# Constants and shapes


@idiom("FoldConstants", "LiftConstants", "RemoveUnused", "NameNodes")
def computed_constants(b: Builder) -> Any:
    shape = b.pick([(), (1,), (3,), (2, 3)])
    made = b.constant(weight(b, *shape))
    for _ in range(int(b.pick([1, 2, 3]))):
        form = b.word("unary binary Reshape Cast Concat Transpose")
        if form == "unary":
            made = b.op(b.word("Neg Abs Exp Floor Relu Reciprocal"), made)
        elif form == "binary":
            made = b.op(b.word("Add Mul Div Sub Max"), made, b.constant(weight(b)))
        elif form == "Reshape":
            made = b.reshape(made, [-1])
        elif form == "Cast":
            made = b.op(
                "Cast", b.op("Cast", made, to=TensorProto.INT64), to=helper.np_dtype_to_tensor_dtype(np.dtype(b.dtype))
            )
        elif b.rank(made):
            made = b.op("Concat", made, made, axis=0) if form == "Concat" else b.op("Transpose", made)
    if b.chance(0.4):
        b.returned.append(made)
    b.op("Neg", b.find())
    return b.op(b.pick(["Add", "Mul"]), b.find(1), made) if b.rank(made) == 0 else made


@idiom("FoldShapes", "FoldConstants", dtypes=(F32, F32, F16))
def shape_arithmetic(b: Builder) -> Any:
    x = (
        b.input(*[int(b.pick([1, 2, 3, 4])) for _ in range(int(b.pick([2, 3])))], fixed=0.3)
        if b.chance(0.7)
        else b.find((2, 3))
    )
    shape, rank = b.shape(x), b.rank(x)
    form = b.word("reshape flatten expand slice range zeros product other boxes")
    if form == "reshape":
        order = [int(axis) for axis in b.random.permutation(rank)]
        return b.reshape(x, b.op("Concat", *lengths(b, x, order), axis=0))
    if form == "flatten":
        first = lengths(b, x, [0])
        return b.reshape(x, b.op("Concat", *first, b.numbers(-1), axis=0))
    if form == "product":
        found = lengths(b, x, range(rank))
        total = b.op("Mul", found[0], found[1])
        return b.reshape(x, b.op("Concat", total, *found[2:], axis=0))
    if form == "expand" and b.opset >= 8:
        other = b.input(1, fixed=1.0)
        return b.op("Expand", other, b.op("Concat", *lengths(b, x, range(rank)), axis=0))
    if form == "slice" and b.opset >= 10:
        axis = int(b.random.integers(rank))
        end = lengths(b, b.pick([x, b.find((2, 3))]), [0])[0]
        if b.chance(0.4):
            end = b.op(b.pick(["Sub", "Add"]), end, b.numbers(1))
        cut = b.op("Slice", x, b.numbers(0), end, b.numbers(axis))
        if b.chance(0.5) and b.opset >= 8:
            return b.op("Expand", cut, b.op("Shape", x))
        return cut
    if form == "range" and b.opset >= 11:
        shape_ = b.op("Shape", x)
        count = b.op("Gather", shape_, b.constant(np.asarray(0, I64)), axis=0)
        return b.op("Range", b.constant(np.asarray(0, I64)), count, b.constant(np.asarray(1, I64)))
    if form == "zeros" and b.opset >= 9:
        filling = numpy_helper.from_array(np.array([odd(b, 0.0, 1.0)]).astype(b.dtype))
        made = b.op("ConstantOfShape", b.op("Concat", *lengths(b, x, range(rank)), axis=0), value=filling)
        return b.op("Add", x, made)
    if form == "boxes":
        other = b.input(int(np.prod(shape[1:])), fixed=0.2)
        return b.reshape(x, b.op("Concat", *lengths(b, x, [0]), *lengths(b, other, [0]), axis=0))
    other = b.input(*shape[::-1], fixed=0.3)
    return b.reshape(x, b.op("Concat", *lengths(b, other, range(rank)), axis=0))
