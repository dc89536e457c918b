"""What idioms are made of: where they are registered, numbers, and layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuzzing.builder import F16, F32, F64, I64, Builder, edges

IDIOMS: dict[str, Idiom] = {}


@dataclass(frozen=True)
class Idiom:
    """A way to write something.

    Attributes:
        write: adds it to a graph.
        rules: the passes and rules that it is for.
        opsets: the first and last version of the default domain that it is for.
        dtypes: types of its floats.
        turns: how often it comes while others come once.
    """

    write: Callable[[Builder], Any]
    rules: tuple[str, ...]
    opsets: tuple[int, int]
    dtypes: tuple[Any, ...]
    turns: int = 1


def idiom(
    *rules: str,
    opsets: tuple[int, int] = (7, 24),
    dtypes: tuple[Any, ...] = (F32, F32, F16, F64),
    turns: int = 1,
) -> Any:
    """Register a function that writes an idiom."""

    def keep(write: Callable[[Builder], Any]) -> Callable[[Builder], Any]:
        IDIOMS[write.__name__] = Idiom(write, rules, opsets, dtypes, turns)
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


def lengths(b: Builder, x: str, axes: Any) -> list[str]:
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
