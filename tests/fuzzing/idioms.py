"""What exporters write and rules look for, each with variations that a rule must leave as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from fuzzing.builder import F16, F32, F64, I64, Builder, RefusedError, edges

IDIOMS: dict[str, Idiom] = {}


@dataclass(frozen=True)
class Idiom:
    """A way to write something.

    Attributes:
        write: adds it to a graph.
        rules: the passes and rules that it is for.
        opsets: the first and last version of the default domain that it is for.
        dtypes: types of its floats.
    """

    write: Callable[[Builder], Any]
    rules: tuple[str, ...]
    opsets: tuple[int, int]
    dtypes: tuple[Any, ...]


def idiom(*rules: str, opsets: tuple[int, int] = (7, 24), dtypes: tuple[Any, ...] = (F32, F32, F16, F64)) -> Any:
    """Register a function that writes an idiom."""

    def keep(write: Callable[[Builder], Any]) -> Callable[[Builder], Any]:
        IDIOMS[write.__name__] = Idiom(write, rules, opsets, dtypes)
        return write

    return keep


# Numbers


def odd(b: Builder, *usual: float, share: float = 0.2) -> float:
    """Return one of the usual numbers, or now and then one at an edge."""
    return float(
        b.pick(edges(b.pick(("huge", "tiny", "special", "grid")), b.dtype)) if b.chance(share) else b.pick(usual)
    )


def weight(b: Builder, *shape: int) -> Any:
    """Return the values of a weight, now and then at an edge of its type."""
    values = b.normal(*shape)
    if not b.calm and b.chance(0.1) and values.size:
        places = b.random.random(shape) < 0.3
        some = b.random.choice(edges(b.pick(("huge", "tiny", "grid")), b.dtype), shape)
        with np.errstate(over="ignore"):
            values[places] = some.astype(b.dtype)[places]
    return values


def operand(b: Builder, data: str) -> Any:
    """Return the values of a constant that is broadcast to data, in one of the usual shapes or an unusual one."""
    shape = b.shape(data)
    channel = [1] * len(shape)
    if len(shape) > 1:
        channel[1] = shape[1]
    options = [(), (1,), shape[-1:], tuple(channel), tuple(channel[1:]), shape, (1, *shape)]
    return weight(b, *b.pick(options[:6] if b.chance(0.9) else options))


def either(b: Builder, one: str, other: str) -> tuple[str, str]:
    """Return two operands in either order."""
    return (one, other) if b.chance(0.5) else (other, one)


def binary(b: Builder, op: str, one: str, other: str) -> str:
    """Add an operator whose operands may change places."""
    return b.op(op, *either(b, one, other))


def channels(b: Builder, count: int, last: bool = False) -> str:
    """Store a number for each channel, or one for all."""
    shape = (
        b.pick([(count, 1, 1), (1, count, 1, 1), (1, 1, 1), (), (1,)])
        if not last
        else b.pick([(count,), (1, count), ()])
    )
    return b.constant(weight(b, *shape))


# Products


def conv(b: Builder, data: str, out: int | None = None, **attributes: Any) -> str:
    """Add a convolution of a constant weight."""
    count, size = b.shape(data)[1], int(b.pick([1, 2, 3]))
    group = count if b.chance(0.15) else 1
    out = out or int(b.pick([1, 2, 4])) * group
    if out % group:
        group = 1
    kernel = weight(b, out, count // group, *[size] * (b.rank(data) - 2))
    inputs = [b.constant(kernel), *([b.constant(weight(b, out))] if b.chance(0.6) else [])]
    usual: dict[str, Any] = {"group": group} if group > 1 else {}
    if b.chance(0.4) and "auto_pad" not in attributes and "pads" not in attributes:
        usual["pads"] = [size // 2] * 2 * (b.rank(data) - 2)
    if b.chance(0.2):
        usual["strides"] = [2] * (b.rank(data) - 2)
    return b.op("Conv", data, *inputs, **{**usual, **attributes})


def conv_transpose(b: Builder, data: str, **attributes: Any) -> str:
    """Add a transposed convolution of a constant weight."""
    count, size = b.shape(data)[1], int(b.pick([1, 2, 3]))
    out = int(b.pick([1, 2, 3]))
    inputs = [b.constant(weight(b, count, out, size, size)), *([b.constant(weight(b, out))] if b.chance(0.6) else [])]
    return b.op("ConvTranspose", data, *inputs, **{"strides": [b.pick([1, size])] * 2, **attributes})


def matmul(b: Builder, data: str, out: int | None = None) -> str:
    """Add a product with a constant matrix."""
    matrix = weight(b, b.shape(data)[-1], out or int(b.pick([1, 2, 4])))
    if b.chance(0.1):
        matrix = matrix[None]
    return b.op("MatMul", data, b.constant(matrix))


def gemm(b: Builder, data: str, out: int | None = None, **attributes: Any) -> str:
    """Add a Gemm of a constant weight."""
    attributes = {name: value for name, value in attributes.items() if value is not None}
    rows, out = b.shape(data)[1 - attributes.get("transA", 0)], out or int(b.pick([1, 3, 4]))
    turned = int(b.chance(0.5))
    inputs = [b.constant(weight(b, *((out, rows) if turned else (rows, out))))]
    if b.chance(0.7) or b.opset < 11:
        inputs.append(b.constant(weight(b, *b.pick([(out,), (1, out), (1,), ()]))))
    return b.op("Gemm", data, *inputs, **({"transB": 1} if turned else {}), **attributes)


def product(b: Builder) -> str:
    """Add any product of a constant weight."""
    kind = b.word("conv conv transpose matmul gemm")
    if kind == "conv":
        return conv(b, b.find(4))
    if kind == "transpose":
        return conv_transpose(b, b.find(4))
    return matmul(b, b.find((2, 3))) if kind == "matmul" else gemm(b, b.find(2))


def batch_norm(b: Builder, data: str, **attributes: Any) -> str:
    """Add a BatchNormalization, of single values where the opset has that."""
    shape: tuple[int, ...] = (b.shape(data)[1],)
    if b.opset < 9 and b.chance(0.3):
        shape, attributes = b.shape(data)[1:], {**attributes, "spatial": 0}
    parts = [weight(b, *shape), weight(b, *shape), weight(b, *shape), b.random.uniform(0.1, 2, shape).astype(b.dtype)]
    if b.chance(0.2):
        parts[3] *= b.dtype(odd(b, 0.0, 1e-4, 1e4, share=0.0))
    return b.op("BatchNormalization", data, *map(b.constant, parts), epsilon=b.pick([None, 1e-3, 1e-5]), **attributes)


# Activation functions


@idiom("FuseGelu", "UnifyGeluArgument")
def gelu(b: Builder) -> Any:
    x = b.find()
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


@idiom("UseHardSwish")
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


@idiom("UseHardSwish", "JoinHardSwishes", "SplitHardSwishes", opsets=(7, 24), dtypes=(F32, F32, F16))
def hard_swish_node(b: Builder) -> Any:
    x = b.find()
    if b.opset >= 14 and b.chance(0.6):
        return b.op("HardSwish", x)
    return binary(b, "Mul", x, b.op("HardSigmoid", x, alpha=1 / 6, beta=0.5))


@idiom("UseLeakyRelu", "SplitPRelus")
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


# Normalizations


@idiom("FuseLayerNormalization", "FoldAffineIntoNormalization", "DivideBySquareRoot")
def layer_norm(b: Builder) -> Any:
    x = b.find((2, 3, 4)) if b.chance(0.4) else b.input(2, int(b.pick([1, 3])), 4, fixed=0.9)
    axes = b.pick([[-1]] * 5 + [[b.rank(x) - 1], [0], [-2, -1]])
    centred = b.op("Sub", x, b.reduce("ReduceMean", x, axes))
    again = b.op("Sub", x, b.reduce("ReduceMean", x, axes)) if b.chance(0.2) else centred
    square = b.op("Pow", again, b.scalar(2.0, x)) if b.chance(0.5) else b.op("Mul", again, again)
    moved = binary(b, "Add", b.reduce("ReduceMean", square, axes), b.scalar(odd(b, 1e-5, 1e-3, share=0.05), x))
    return _affine(b, _over_root(b, centred, moved))


@idiom("FuseRmsNormalization", "FoldAffineIntoNormalization", "DivideBySquareRoot")
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


# Products written otherwise


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
            target = b.op("Concat", *_lengths(b, x, range(b.rank(x) - 1)), b.numbers(out), axis=0)
            return b.reshape(made, target)
        return b.reshape(made, b.pick([[*rows, out], [*rows, out], [-1, *rows[1:], out], [0, -1], [-1]]))
    return made


@idiom("ReplaceMatMulBetweenReshapes", "ReplaceGemmBetweenReshapes", dtypes=(F32, F32, F16))
def rows_and_back(b: Builder) -> Any:
    x = b.input(2, 3, 4)
    matrix, bias = b.constant(weight(b, 4, 5)), b.constant(weight(b, 5))
    flat = b.reshape(x, b.pick([[-1, 4], [6, 4]]))
    made = b.op("Gemm", flat, matrix, bias) if b.chance(0.5) else binary(b, "Add", b.op("MatMul", flat, matrix), bias)
    return b.reshape(made, b.pick([[2, 3, 5], [-1, 3, 5], [2, -1, 5], [3, 2, 5]]))


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


@idiom("MergeScalesOfProduct", dtypes=(F32, F64))
def scales_of_product(b: Builder) -> Any:
    x = b.find((2, 3))
    first = binary(b, "Mul", x, b.scalar(odd(b, 0.5, 1e-10), x))
    other = b.op("Transpose", b.pick([x, first]), perm=[*range(b.rank(x) - 2), b.rank(x) - 1, b.rank(x) - 2])
    second = binary(b, "Mul", other, b.scalar(odd(b, 0.5, 1e-10), x))
    return b.op("MatMul", first, second)


@idiom("FoldScalesIntoProducts", dtypes=(F32, F32, F16, F64))
def scale_behind_product(b: Builder) -> Any:
    x = product(b)
    if b.chance(0.5):
        x = b.op("Transpose", x, perm=list(b.random.permutation(b.rank(x)).tolist()))
    if b.chance(0.3):
        x = b.reshape(x, [-1])
    return b.op(b.pick(["Mul", "Div"]), x, b.scalar(odd(b, 0.5, 3.0), x))


@idiom("ReplaceEinsum", opsets=(12, 24), dtypes=(F32, F32, F64))
def einsum(b: Builder) -> Any:
    equation = b.word(
        "ij,jk->ik bij,jk->bik bij,bjk->bik bhid,bhjd->bhij ij,kj->ik bij,kjl->bikl bi,i->b ij,ij->ij bijd,djk->bijk "
        "ij,jk->ki ab,cb->ca i,j->ij bij,bij->b ij,jk"
    )
    lengths = {letter: int(b.pick([1, 2, 3])) for letter in "abcdhijkl"}
    first, second = equation.split("->")[0].split(",")
    tensors = [b.input(*(lengths[letter] for letter in first)), b.input(*(lengths[letter] for letter in second))]
    if b.chance(0.4):
        tensors[1] = b.constant(weight(b, *b.shape(tensors[1])))
    if b.chance(0.1):
        tensors[0] = b.constant(weight(b, *b.shape(tensors[0])))
    return b.op("Einsum", *tensors, equation=equation)


@idiom("FoldTransposeIntoWeight", dtypes=(F32, F32, F16))
def flattened_image(b: Builder) -> Any:
    x = b.find((3, 4))
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


# Moving data


def _permutation(b: Builder, rank: int) -> list[int]:
    if rank == 4 and b.chance(0.7):
        return list(b.pick([[0, 2, 3, 1], [0, 3, 1, 2]]))
    return [int(place) for place in b.random.permutation(rank)]


def inverse(order: list[int]) -> list[int]:
    return [order.index(place) for place in range(len(order))]


@idiom("SinkTransposes", "MergeTransposes", dtypes=(F32, F32, F16, F64))
def layouts(b: Builder) -> Any:
    x = b.find((2, 3, 4)) if b.chance(0.6) else b.input(*b.pick([(1, 3, 3), (2, 2, 2, 2), (1, 3, 3, 3), (3, 3)]))
    order = _permutation(b, b.rank(x))
    region = [b.op("Transpose", x, perm=order)]
    for _ in range(int(b.pick([1, 2, 3, 4]))):
        region.append(_layout_free(b, region, x))
    back = binary(b, "Add", region[-1], x) if b.shape(region[-1]) == b.shape(x) and b.chance(0.3) else region[-1]
    if b.rank(back) == len(order) and b.chance(0.85):
        back = b.op("Transpose", back, perm=inverse(order) if b.chance(0.8) else _permutation(b, len(order)))
    return conv(b, back, auto_pad="SAME_UPPER") if b.rank(back) == 4 and b.chance(0.3) else back


def _layout_free(b: Builder, region: list[str], outside: str) -> str:
    x = region[-1]
    kind = b.word("unary unary binary self outside Concat Split Pad Slice reduce again PRelu Softmax Clip")
    rank = b.rank(x)
    if kind == "binary":
        return binary(b, b.word("Add Mul Sub Div"), x, b.constant(operand(b, x)))
    if kind == "self":
        return b.op(b.pick(["Add", "Mul", "Max"]), x, b.pick(region))
    if kind == "outside":
        return binary(b, b.pick(["Add", "Mul"]), x, b.pick([outside, *region]))
    if kind == "again" and rank:
        return b.op("Transpose", x, perm=_permutation(b, rank))
    if not rank:
        return b.op("Neg", x)
    axis = int(b.random.integers(rank)) - (rank if b.chance(0.3) else 0)
    if kind == "Concat":
        return b.op("Concat", x, b.pick([x, b.constant(b.normal(*b.shape(x)))]), axis=axis)
    if kind == "Split" and b.shape(x)[axis] > 1:
        return str(b.pick(b.split(x, [1, b.shape(x)[axis] - 1], axis)))
    if kind == "Pad":
        return b.pad(x, [int(b.pick([0, 0, 1])) for _ in range(2 * rank)])
    if kind == "Slice":
        return b.slice(x, [0], [max(1, b.shape(x)[axis] - 1)], [axis])
    if kind == "reduce":
        return b.reduce(b.pick(["ReduceMean", "ReduceSum", "ReduceMax"]), x, [axis], keepdims=int(b.chance(0.8)))
    if kind == "PRelu":
        return b.op("PRelu", x, b.constant(operand(b, x)))
    if kind == "Softmax":
        return b.op("Softmax", x, axis=axis if b.opset >= 13 else axis % rank)
    if kind == "Clip":
        return b.clip(x, 0.0, 1.0)
    return b.op(b.word("Relu Sigmoid Neg Tanh Exp Abs Sqrt"), x)


@idiom("MergeTransposes", "MergeEqual")
def transposes(b: Builder) -> Any:
    x = b.find((2, 3, 4)) if b.chance(0.7) else b.input(*b.pick([(1, 3, 1), (2, 1, 1, 3), (1, 4)]))
    for _ in range(int(b.pick([1, 2, 2]))):
        x = b.op("Transpose", x, perm=_permutation(b, b.rank(x)) if b.chance(0.8) else None)
    return x


@idiom("MergeReshapes", "FoldShapes")
def reshapes(b: Builder) -> Any:
    x = b.find((1, 2, 3, 4))
    for _ in range(int(b.pick([1, 2, 2, 3]))):
        x = _reshaped(b, x)
    return x


def _reshaped(b: Builder, x: str) -> str:
    shape, rank = list(b.shape(x)), b.rank(x)
    kind = b.word("Reshape Reshape Flatten Squeeze Unsqueeze Unsqueeze")
    if kind == "Flatten":
        return b.op("Flatten", x, axis=int(b.random.integers(rank + 1)))
    if kind == "Unsqueeze":
        count = int(b.pick([1, 1, 2]))
        return b.unsqueeze(
            x,
            [
                int(axis)
                for axis in b.random.choice(rank + count, count, replace=False) - (rank + count if b.chance(0.2) else 0)
            ],
        )
    if kind == "Squeeze" and 1 in shape:
        return b.squeeze(x, None if b.chance(0.2) else [shape.index(1)])
    options = [[-1], [0, -1], [-1, *shape[1:]], shape[::-1], [*shape, 1], [0] * rank, [int(np.prod(shape))], [1, -1]]
    return b.reshape(x, b.pick(options), allowzero=1 if b.opset >= 14 and b.chance(0.05) else None)


@idiom("MergeTransposeBetweenReshapes", dtypes=(F32, F32, F64))
def batched_transpose(b: Builder) -> Any:
    x = b.find((3, 4))
    shape = list(b.shape(x))
    rows = b.pick([[-1, *shape[-2:]], [int(np.prod(shape[:-2])), *shape[-2:]], [-1, shape[-2], shape[-1]]])
    turned = b.op("Transpose", b.reshape(x, rows), perm=[0, 2, 1])
    wrong = [*shape[:-2], shape[-2], shape[-1]]
    return b.reshape(turned, b.pick([[*shape[:-2], shape[-1], shape[-2]]] * 4 + [wrong]))


@idiom("MergeSlices")
def slices(b: Builder) -> Any:
    x = b.find((2, 3, 4))
    for _ in range(int(b.pick([1, 2, 2]))):
        axis = int(b.random.integers(b.rank(x)))
        axis -= b.rank(x) if b.chance(0.3) else 0
        start, end = b.pick(
            [(0, 2**31 - 1), (0, 2**63 - 1), (1, 3), (0, -1), (0, b.shape(x)[axis]), (-2, 9), (0, 1), (-9, 9)]
        )
        x = b.slice(x, [start], [end], [axis], b.pick([None, None, [1], [2], [-1]]))
    return x


@idiom("MergeConcats", "SimplifySplits")
def concats(b: Builder) -> Any:
    x = b.find((1, 2, 3, 4))
    axis = int(b.random.integers(b.rank(x)))
    other = b.op("Neg", x)
    inner = b.op("Concat", *b.pick([(x, other), (x,), (x, x, other)]), axis=b.pick([axis, axis - b.rank(x)]))
    return b.op("Concat", *b.pick([(inner, x), (other, inner), (inner,), (inner, inner)]), axis=axis)


@idiom("SimplifySplits")
def splits(b: Builder) -> Any:
    x = b.find((1, 2, 3, 4))
    axis = int(b.random.integers(b.rank(x)))
    length = b.shape(x)[axis]
    sizes = b.pick([[length], [1, length - 1], [length - 1, 1], [0, length], [length // 2, length - length // 2]])
    axis -= b.rank(x) if b.chance(0.3) else 0
    if b.chance(0.2) and length % 2 == 0:
        parts = b.ops("Split", x, outputs=2, axis=axis, **({"num_outputs": 2} if b.opset >= 18 else {}))
    else:
        parts = b.split(x, sizes, axis)
    for part in parts if b.chance(0.3) else ():
        b.op("Neg", part)
    if b.chance(0.6):
        b.hidden.update(parts[:-1])
    return parts[-1]


@idiom("DropExpands", "FoldShapes", opsets=(8, 24), dtypes=(F32, F32, F16, F64))
def expands(b: Builder) -> Any:
    x = b.find((1, 2, 3)) if b.chance(0.6) else b.input(*b.pick([(1,), (1, 3), (3,), (2, 1)]))
    shape = b.shape(x)
    wide = tuple(int(b.pick([2, 3, 4])) if length == 1 else length for length in shape)
    target = b.pick([shape, wide, (2, *wide), (1,) * len(shape)])
    if b.chance(0.3):
        other = b.input(*wide)
        made = b.op("Expand", x, b.op("Shape", other))
    else:
        made = b.op("Expand", x, b.numbers(*target))
    form = b.word("none binary binary PRelu Where compare")
    if form == "none":
        return made
    full = b.shape(made)
    operand_ = b.constant(weight(b, *b.pick([full, full[-1:], (1,), ()])))
    if b.chance(0.4):
        operand_ = b.input(*b.pick([full, full[-1:], (1,) * len(full)]))
    if form == "PRelu":
        return b.op("PRelu", made, operand_)
    if form == "Where" and b.opset >= 9:
        return b.op("Where", b.op("Cast", operand_, to=TensorProto.BOOL), *either(b, made, operand_))
    if form == "compare" and b.opset >= 9:
        return b.op(b.pick(["Less", "Greater"]), *either(b, made, operand_))
    return b.op(b.word("Add Sub Mul Div Pow"), *either(b, made, operand_))


@idiom("DropWheres", opsets=(9, 24))
def wheres(b: Builder) -> Any:
    x = b.find()
    shape = b.shape(x)
    truth = b.constant(np.full(b.pick([(), (1,), shape, (1, *shape)]), b.chance(0.5)))
    if b.chance(0.2):
        truth = b.constant(b.random.random(shape) < 0.5)
    other = b.constant(operand(b, x)) if b.chance(0.5) else b.scalar(odd(b, -1e4, -math.inf), x)
    return b.op("Where", truth, *either(b, x, other))


@idiom("FoldConstants", "FoldShapes", opsets=(9, 24))
def masks(b: Builder) -> Any:
    scores = b.op("MatMul", *[b.input(2, 3, 3, fixed=0.3)] * 2)
    size = b.shape(scores)[-1]
    kept = b.constant(np.tril(np.ones((size, size), np.bool_)))
    low = b.scalar(b.pick([-3.4028234663852886e38, -math.inf, -1e4, -1e9]), scores)
    masked = b.op("Where", kept, scores, low)
    return b.op("Softmax", masked, axis=2)


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


@idiom("StoreOnce", "ShareInitializers", dtypes=(F32, F32, F16))
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


@idiom("StripMetadata", "NameNodes", "DropDefaults")
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


def _lengths(b: Builder, x: str, axes: Any) -> list[str]:
    """Add what computes lengths of axes, each a vector of one number."""
    shape = b.op("Shape", x)
    found = []
    for axis in axes:
        if b.chance(0.5):
            found.append(b.op("Gather", shape, b.numbers(axis), axis=0))
        else:
            one = b.op("Gather", shape, b.constant(np.asarray(axis, I64)), axis=0)
            found.append(b.unsqueeze(one, [0]))
    return found


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
        return b.reshape(x, b.op("Concat", *_lengths(b, x, order), axis=0))
    if form == "flatten":
        first = _lengths(b, x, [0])
        return b.reshape(x, b.op("Concat", *first, b.numbers(-1), axis=0))
    if form == "product":
        lengths = _lengths(b, x, range(rank))
        total = b.op("Mul", lengths[0], lengths[1])
        return b.reshape(x, b.op("Concat", total, *lengths[2:], axis=0))
    if form == "expand" and b.opset >= 8:
        other = b.input(1, fixed=1.0)
        return b.op("Expand", other, b.op("Concat", *_lengths(b, x, range(rank)), axis=0))
    if form == "slice" and b.opset >= 10:
        axis = int(b.random.integers(rank))
        end = _lengths(b, b.pick([x, b.find((2, 3))]), [0])[0]
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
        made = b.op("ConstantOfShape", b.op("Concat", *_lengths(b, x, range(rank)), axis=0), value=filling)
        return b.op("Add", x, made)
    if form == "boxes":
        other = b.input(int(np.prod(shape[1:])), fixed=0.2)
        return b.reshape(x, b.op("Concat", *_lengths(b, x, [0]), *_lengths(b, other, [0]), axis=0))
    other = b.input(*shape[::-1], fixed=0.3)
    return b.reshape(x, b.op("Concat", *_lengths(b, other, range(rank)), axis=0))


# Recurrent layers


def _cell(b: Builder, kind: str, **attributes: Any) -> Any:
    gates, hidden = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], int(b.pick([2, 3]))
    length, batch, size = int(b.pick([1, 3])), int(b.pick([1, 2])), int(b.pick([2, 4]))
    x = b.input(length, batch, size)
    directions = int(b.pick([1, 1, 2]))
    inputs: list[str | None] = [
        x,
        b.constant(b.normal(directions, gates * hidden, size)),
        b.constant(b.normal(directions, gates * hidden, hidden)),
    ]
    inputs.append(b.constant(b.normal(directions, 2 * gates * hidden)) if b.chance(0.5) else None)
    inputs.append(None)
    states = []
    for _ in range(2 if kind == "LSTM" else 1):
        form = b.word("none zeros zeros filled computed")
        shape = (directions, batch, hidden)
        if form == "computed" and b.opset >= 9:
            filling = numpy_helper.from_array(np.array([b.pick([0.0, 0.0, 1.0, -0.0])]).astype(b.dtype))
            target = b.op("Concat", b.numbers(directions), *_lengths(b, x, [1]), b.numbers(hidden), axis=0)
            states.append(b.op("ConstantOfShape", target, value=filling))
        else:
            states.append(
                None
                if form == "none"
                else b.constant(np.zeros(shape, b.dtype) if form == "zeros" else b.normal(*shape))
            )
    inputs += states
    while inputs[-1] is None:
        inputs.pop()
    direction = "bidirectional" if directions == 2 else b.pick([None, "forward", "reverse"])
    outputs = b.ops(
        kind, *inputs, outputs=3 if kind == "LSTM" else 2, hidden_size=hidden, direction=direction, **attributes
    )
    return b.squeeze(outputs[0], [1]) if directions == 1 else b.op("Transpose", outputs[0], perm=[0, 2, 1, 3])


@idiom("DropInitialStates", dtypes=(F32,))
def recurrent(b: Builder) -> Any:
    return _cell(b, b.pick(["LSTM", "GRU", "RNN"]))


@idiom("ScanCells", "DropInitialStates", dtypes=(F32,))
def gated(b: Builder) -> Any:
    return _cell(b, "GRU", linear_before_reset=b.pick([1, 1, 1, 0]))


# Bodies


def _few(b: Builder, x: str) -> str:
    """Add a few operators of which most rules are made."""
    for _ in range(int(b.pick([1, 2, 3]))):
        form = b.word("unary binary clamp idiom capture Identity")
        if form == "unary":
            x = b.op(b.word("Relu Sigmoid Neg Tanh"), x)
        elif form == "binary":
            x = b.op(b.word("Add Mul Sub Div"), x, b.constant(operand(b, x) if b.chance(0.5) else b.normal()))
        elif form == "clamp":
            x = b.clip(x, b.pick([None, 0.0]), 6.0)
        elif form == "capture":
            alike = [
                name for name in b.sources() if b.shape(name) in (b.shape(x), ()) and b.value(name).dtype == b.dtype
            ]
            x = b.op(b.pick(["Add", "Mul"]), x, b.pick([x, *alike]))
        elif form == "Identity":
            x = b.op("Identity", x)
        else:
            x = b.op("Mul", x, b.op("Sigmoid", x))
    return x


def _constant_in_body(b: Builder) -> str:
    """Add what is computed in a body from its own constants and those around it."""
    around = b.pick([name for name in b.sources() if b.value(name).dtype == b.dtype] or [b.find()])
    own = b.constant(b.normal(*b.shape(around)))
    form = b.word("Clip Add Mul Max")
    if form == "Clip" and b.opset >= 11 and b.rank(around) == 0:
        return b.op("Clip", b.constant(b.normal(2)), around)
    return b.op("Mul" if form == "Clip" else form, own, around)


@idiom("InlineIfs", "FoldConstants", "LiftConstants", "NameTensors", "FixInitializers")
def branches(b: Builder) -> Any:
    x = b.find()
    if b.chance(0.5):
        total = b.op("Add", b.constant(b.normal()), b.constant(b.normal()))
        if b.chance(0.7):
            b.returned.append(total)
        x = total if b.chance(0.5) else x
    truth = (
        b.constant(np.asarray(b.chance(0.5)))
        if b.chance(0.5)
        else b.input(dtype=np.bool_, values=np.asarray(b.chance(0.5)))
    )
    bodies = []
    for _ in range(2):
        body = b.body()
        made = _constant_in_body(body) if b.chance(0.3) else body.op("Identity", x) if b.chance(0.2) else _few(body, x)
        bodies.append((body, made))
    then, other = (body.graph([made], declared=b.chance(0.5)) for body, made in bodies)
    return b.op("If", truth, then_branch=then, else_branch=other)


@idiom("LiftInvariants", "FoldConstants", dtypes=(F32, F32, F64))
def loops(b: Builder) -> Any:
    starts = [b.find((1, 2)) for _ in range(int(b.pick([1, 2, 3])))]
    body = b.body()
    step, going = body.formal(np.asarray(0, I64), "i"), body.formal(np.asarray(True), "go")
    states = [body.formal(b.value(start)) for start in starts]
    following, scanned = [], []
    for state in states:
        form = b.word("same same identity changed")
        if form == "changed":
            made = _few_keeping(body, state, states)
        else:
            made = body.op("Identity", state) if form == "identity" or b.chance(0.7) else state
        following.append(made)
        if b.chance(0.3):
            scanned.append(state)
    if b.chance(0.3):
        scanned.append(body.op("Cast", step, to=TensorProto.FLOAT))
    if b.chance(0.3) and following:
        scanned.append(body.op("Neg", states[0]))
    # The same tensor twice among outputs is one that onnx refuses.
    outputs = [body.op("Identity", going)]
    for name in (*following, *scanned):
        outputs.append(body.op("Identity", name) if name in outputs else name)
    graph = body.graph(outputs, declared=b.chance(0.5))
    count = b.constant(np.asarray(b.pick([3, 2, 0]), I64))
    first = b.pick([None, b.constant(np.asarray(True))])
    made = b.ops("Loop", count, first, *starts, outputs=len(following) + len(scanned), body=graph)
    for name in made[: len(following)] if b.chance(0.5) else ():
        b.op("Neg", name)
    return made[-1]


def _few_keeping(b: Builder, x: str, states: list[str]) -> str:
    """Add a few operators that keep the shape."""
    others = [state for state in states if b.shape(state) == b.shape(x)]
    for _ in range(int(b.pick([1, 2]))):
        x = b.op("Add", x, b.pick(others)) if b.chance(0.5) else b.op(b.pick(["Relu", "Tanh", "Neg"]), x)
    return x


@idiom("LiftInvariants", "NameTensors", opsets=(9, 24), dtypes=(F32, F32, F64))
def scans(b: Builder) -> Any:
    sequence = b.input(3, 2)
    starts = [b.input(2) for _ in range(int(b.pick([1, 2])))]
    body = b.body()
    states = [body.formal(b.value(start)) for start in starts]
    row = body.formal(b.value(sequence)[0])
    following = [
        body.op("Identity", state) if b.chance(0.5) else _few_keeping(body, state, [*states, row]) for state in states
    ]
    made = body.op(b.pick(["Add", "Mul"]), row, b.pick(states))
    graph = body.graph([*following, made])
    outputs = b.ops("Scan", *starts, sequence, outputs=len(starts) + 1, body=graph, num_scan_inputs=1)
    return outputs[-1]


@idiom("InlineFunctions", opsets=(13, 24), dtypes=(F32, F32, F64))
def functions(b: Builder) -> Any:
    x = b.find()
    name = b.fresh("Function")
    body = b.body()
    given = body.formal(b.value(x))
    inner = body.op("Mul", given, body.op("Sigmoid", given))
    made = body.op(b.pick(["Relu", "Neg", "Abs"]), inner)
    imports = [helper.make_opsetid("", b.opset)]
    b.functions.append(helper.make_function("local", name, [given], [made], body.nodes, imports))
    return b.op(name, x, domain="local")


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
