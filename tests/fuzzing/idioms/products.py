"""Products, convolutions and pooling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fuzzing.builder import F16, F32, F64, Builder
from fuzzing.idioms.writing import binary, conv, conv_transpose, gemm, idiom, lengths, matmul, odd, product, weight


@idiom("FoldGemmFactors", dtypes=(F32, F32, F16, F64))
def gemm_factors(b: Builder) -> Any:
    x = b.find(2)
    factors = {"alpha": odd(b, 0.5, 2.0, 1e-6, 1.0), "beta": odd(b, 0.0, 0.5, 1.0, 1e-6)}
    attributes = {name: value for name, value in factors.items() if b.chance(0.6) and np.isfinite(value)}
    attributes = {name: value for name, value in attributes.items() if abs(value) < 3.4e38}
    if b.chance(0.3):
        attributes["transA"] = 1
    return gemm(b, x, **attributes)


@idiom("FlattenBatchedWeight", dtypes=(F32, F32, F64))
def batched_weight(b: Builder) -> Any:
    x = b.find((2, 3, 4))
    leading = b.pick([(1,), (1, 1), (2,)])
    return b.op("MatMul", x, b.constant(weight(b, *leading, b.shape(x)[-1], 3)))


@idiom(
    "ReplaceMatMulOfMatrices", "ReplaceMatMulBetweenReshapes", "ReplaceGemmBetweenReshapes", dtypes=(F32, F32, F16, F64)
)
def product_and_bias(b: Builder) -> Any:
    x = b.find((2, 3, 4))
    size, rows, out = b.shape(x)[-1], b.shape(x)[:-1], int(b.pick([1, 2, 3]))
    flat = b.reshape(x, b.pick([[-1, size], [int(np.prod(rows)), size]])) if b.rank(x) > 2 and b.chance(0.9) else x
    matrix, bias = b.constant(weight(b, size, out)), b.constant(weight(b, *b.pick([(out,)] * 5 + [(1,), (1, out), ()])))
    if b.rank(flat) == 2 and b.chance(0.5):
        made = b.op("Gemm", flat, matrix, bias)
    else:
        made = binary(b, "Add", b.op("MatMul", flat, matrix), bias)
    if flat != x or b.chance(0.3):
        if b.chance(0.4):
            target = b.op("Concat", *lengths(b, x, range(b.rank(x) - 1)), b.numbers(out), axis=0)
            return b.reshape(made, target)
        return b.reshape(made, b.pick([[*rows, out], [*rows, out], [-1, *rows[1:], out], [0, -1], [-1]]))
    return made


@idiom("ReplaceMatMulBetweenReshapes", "ReplaceGemmBetweenReshapes", dtypes=(F32, F32, F16), turns=3)
def rows_and_back(b: Builder) -> Any:
    x = b.input(2, 3, 4, fixed=0.9)
    matrix, bias = b.constant(weight(b, 4, 5)), b.constant(weight(b, 5))
    flat = b.reshape(x, b.pick([[-1, 4], [6, 4]]))
    made = b.op("Gemm", flat, matrix, bias) if b.chance(0.5) else binary(b, "Add", b.op("MatMul", flat, matrix), bias)
    return b.reshape(made, b.pick([[2, 3, 5], [2, 3, 5], [-1, 3, 5], [2, -1, 5], [3, 2, 5]]))


@idiom("MergeScalesOfProduct", "FoldScalesIntoProducts", "MergeScalars", dtypes=(F32, F32, F64, F16))
def attention(b: Builder) -> Any:
    x = b.find((2, 3))
    if b.chance(0.5):
        query, key = matmul(b, x, 4), matmul(b, x, 4)
    else:
        query, key = x, b.find(b.rank(x))
    order = [*range(b.rank(key) - 2), b.rank(key) - 1, b.rank(key) - 2]
    scales = [odd(b, 0.5, 0.125, 1e-10, share=0.1) for _ in range(2)]
    form = b.pick("abcd")
    if form in "ab":
        query = binary(b, "Mul", query, b.scalar(scales[0], query))
    key = b.op("Transpose", key, perm=order) if b.chance(0.8) else key
    if form == "b":
        key = binary(b, "Mul", b.pick([key, key, key, query]), b.scalar(scales[1], key))
    scores = b.op("MatMul", query, key)
    if form in "cd":
        scores = b.op(b.pick(["Mul", "Div"]), scores, b.scalar(scales[0], scores))
    return b.op("Softmax", scores, axis=-1) if b.chance(0.4) else scores


@idiom("MergeScalesOfProduct", dtypes=(F32, F64), turns=2)
def scales_of_product(b: Builder) -> Any:
    x = b.find((2, 3))
    first = binary(b, "Mul", x, b.scalar(odd(b, 0.5, 1e-10), x))
    other = b.op("Transpose", b.pick([x, first]), perm=[*range(b.rank(x) - 2), b.rank(x) - 1, b.rank(x) - 2])
    second = binary(b, "Mul", other, b.scalar(odd(b, 0.5, 1e-10), x))
    return b.op("MatMul", first, second)


@idiom("FoldScalesIntoProducts", dtypes=(F32, F32, F16, F64), turns=3)
def scale_behind_product(b: Builder) -> Any:
    x = product(b)
    if b.chance(0.5):
        x = b.op("Transpose", x, perm=list(b.random.permutation(b.rank(x)).tolist()))
    if b.chance(0.3):
        x = b.reshape(x, [-1])
    return b.op(b.pick(["Mul", "Div"]), x, b.scalar(odd(b, 0.5, 3.0), x))


@idiom("ReplaceEinsum", opsets=(12, 24), dtypes=(F32, F32, F64), turns=2)
def einsum(b: Builder) -> Any:
    equation = b.word(
        "ij,jk->ik bij,jk->bik bij,bjk->bik bhid,bhjd->bhij ij,kj->ik bij,kjl->bikl bi,i->b ij,ij->ij bijd,djk->bijk "
        "ij,jk->ki ab,cb->ca i,j->ij bij,bij->b ij,jk"
    )
    lengths = {letter: int(b.pick([1, 2, 2, 3, 3, 4])) for letter in "abcdhijkl"}
    first, second = equation.split("->")[0].split(",")
    tensors = [b.input(*(lengths[letter] for letter in term), fixed=0.9) for term in (first, second)]
    if b.chance(0.4):
        tensors[1] = b.constant(weight(b, *b.shape(tensors[1])))
    if b.chance(0.1):
        tensors[0] = b.constant(weight(b, *b.shape(tensors[0])))
    return b.op("Einsum", *tensors, equation=equation)


@idiom("FoldTransposeIntoWeight", dtypes=(F32, F32, F16), turns=2)
def flattened_image(b: Builder) -> Any:
    x = b.find((3, 4), known=True)
    order = (
        b.pick([[0, 2, 3, 1], [0, 3, 1, 2], [0, 1, 3, 2], [1, 0, 2, 3]])
        if b.rank(x) == 4
        else b.pick([[0, 2, 1], [1, 0, 2]])
    )
    turned = b.op("Transpose", x, perm=order)
    size = int(np.prod(b.shape(turned)[1:]))
    flat = (
        b.op("Flatten", turned, axis=1)
        if b.chance(0.5)
        else b.reshape(turned, b.pick([[-1, size], [0, -1], [0, size]]))
    )
    return gemm(b, flat) if b.chance(0.5) else matmul(b, flat)


@idiom("ConvolvePooled", "UseGlobalAveragePool", dtypes=(F32, F32, F32, F16))
def classifier(b: Builder) -> Any:
    x = b.find(4) if b.chance(0.7) else b.input(1, 3, 4, 4)
    pooled = global_pool(b, x)
    flat = pooled
    if b.rank(pooled) == 4:
        kind = b.pick(["flatten", "squeeze", "reshape"])
        if kind == "squeeze":
            flat = b.squeeze(pooled, b.pick([[2, 3], [-1, -2]]))
        else:
            flat = (
                b.op("Flatten", pooled, axis=1)
                if kind == "flatten"
                else b.reshape(pooled, b.pick([[0, -1], [-1, b.shape(pooled)[1]]]))
            )
    made = gemm(b, flat)
    if b.chance(0.3):
        return b.unsqueeze(flat, [2, 3]) if b.chance(0.5) else b.reshape(flat, [0, b.shape(flat)[1], 1, 1])
    return made


def global_pool(b: Builder, x: str) -> str:
    kind = b.word("mean mean window pool other")
    if kind == "mean":
        return b.reduce("ReduceMean", x, b.pick([[2, 3], [-1, -2], [3]]), keepdims=int(b.chance(0.5)))
    if kind == "window":
        return b.op("AveragePool", x, kernel_shape=list(b.shape(x)[2:]), count_include_pad=b.pick([None, 1]))
    if kind == "pool":
        return b.op("GlobalAveragePool", x)
    return b.op("AveragePool", x, kernel_shape=[2, 2])


@idiom("ConvolvePooled", dtypes=(F32, F32, F16))
def pooled_product(b: Builder) -> Any:
    x = b.input(int(b.pick([1, 1, 2])), 3, 4, 4)
    pooled = b.op("GlobalAveragePool", b.op("Relu", x) if b.chance(0.5) else x)
    made = gemm(b, b.op("Flatten", pooled, axis=1), alpha=b.pick([None, None, 0.5]))
    return b.op("Add", pooled, pooled) if b.chance(0.2) else made


@idiom("UseGlobalAveragePool", dtypes=(F32, F32, F16))
def image_mean(b: Builder) -> Any:
    x = global_pool(b, b.find(4))
    if b.rank(x) == 2:
        return b.unsqueeze(x, [2, 3])
    return b.squeeze(x, b.pick([[2, 3], None])) if b.chance(0.5) else b.reshape(x, b.pick([[0, -1], [0, 0], [-1]]))


@idiom("ConvolveTransposed", dtypes=(F32, F32, F16))
def upscaling(b: Builder) -> Any:
    x = b.find(4)
    size = int(b.pick([2, 2, 3]))
    kernel = b.constant(weight(b, b.shape(x)[1], int(b.pick([1, 2, 16])), size, size))
    bias = [b.constant(weight(b, b.value(kernel).shape[1]))] if b.chance(0.5) else []
    made = b.op("ConvTranspose", x, kernel, *bias, strides=[size, size], kernel_shape=b.pick([None, [size, size]]))
    return b.op(b.word("Relu Sigmoid Tanh LeakyRelu"), made) if b.chance(0.6) else made


@idiom("FoldPads", dtypes=(F32, F32, F16))
def padded(b: Builder) -> Any:
    x = b.find(4)
    if b.chance(0.4):
        x = b.op(b.pick(["Relu", "Sigmoid", "Abs"]), x)
    before, after = [int(b.pick([0, 1, 2])) for _ in range(2)], [int(b.pick([0, 1, 2])) for _ in range(2)]
    batch = [0, 0] if b.chance(0.9) else [0, 1]
    pads = [*batch, *before, 0, 0, *after] if b.chance(0.85) else [0] * 8
    value = odd(b, 0.0, share=0.1) if b.chance(0.8) else -math.inf
    if value and abs(value) > 3.4028234e38:
        value = -math.inf
    x = b.pad(x, pads, value, b.pick(["constant"] * 6 + ["edge", "reflect"]))
    form = b.word("conv conv transpose AveragePool MaxPool none")
    if form == "conv":
        return conv(b, x, auto_pad=b.pick([None, None, "VALID", "SAME_UPPER"]))
    if form == "transpose":
        return conv_transpose(b, x, pads=b.pick([[0, 0, 0, 0], [2, 2, 2, 2], [1, 1, 1, 1]]))
    if form == "none":
        return x
    counts = {"count_include_pad": b.pick([None, 1])} if form == "AveragePool" else {}
    return b.op(
        form, x, kernel_shape=[3, 3], pads=b.pick([None, [1, 1, 1, 1]]), strides=b.pick([None, [2, 2]]), **counts
    )


@idiom("ResolveAutomaticPadding", dtypes=(F32, F32, F16))
def automatic_padding(b: Builder) -> Any:
    x = b.find(4)
    mode = b.word("SAME_UPPER SAME_LOWER VALID NOTSET")
    strides = b.pick([None, [2, 2], [1, 2]])
    form = b.word("conv conv transpose MaxPool AveragePool")
    if form == "conv":
        return conv(b, x, auto_pad=mode, strides=strides)
    if form == "transpose":
        return conv_transpose(b, x, auto_pad=mode)
    return b.op(form, x, auto_pad=mode, kernel_shape=[2, 3], strides=strides)
