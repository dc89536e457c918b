"""What moves elements: transposes, reshapes, slices, broadcasts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto

from fuzzing.builder import F16, F32, F64, Builder
from fuzzing.idioms.writing import binary, conv, either, idiom, odd, operand, weight


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
    x = b.find((3, 4), known=True)
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
        # Where a Slice that steps backwards to no end stops, ONNX and onnxruntime do not agree.
        backwards = [] if end > b.shape(x)[axis] else [[-1]]
        x = b.slice(x, [start], [end], [axis], b.pick([None, None, [1], [2], *backwards]))
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


@idiom("DropWheres", opsets=(9, 24), turns=2)
def wheres(b: Builder) -> Any:
    x = b.find(known=True)
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
