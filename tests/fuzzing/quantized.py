"""Quantized models, as hands, onnxruntime's quantizers and ours write them, and the way back to floats."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

import onnxq
from fuzzing.builder import F32, I64, Builder, RefusedError
from fuzzing.comparing import with_noise
from fuzzing.idioms.writing import conv, gemm, matmul
from fuzzing.runtime import Feed, opened, run
from onnxq.config.presets import PRESETS
from onnxq.rewrite import PassResult, Pipeline

WRITERS: dict[str, Callable[[Builder], Any]] = {}
_LOUDER = 20.0
_LEAST_DB = 12.0
_ORDINARY = (
    "Add",
    "AveragePool",
    "Clip",
    "Concat",
    "GlobalAveragePool",
    "LeakyRelu",
    "MaxPool",
    "Mul",
    "Relu",
    "Sigmoid",
    "Softmax",
)


def writer(write: Callable[[Builder], Any]) -> Callable[[Builder], Any]:
    """Register a function that writes quantized nodes."""
    WRITERS[write.__name__] = write
    return write


# What hands write


def scale_of(b: Builder, data: Any, dtype: Any = np.uint8) -> tuple[str, str]:
    """Store a scale in whose range data lies, and its zero point."""
    largest = float(np.abs(data).max(initial=0.1))
    return b.constant(np.float32(largest / 100)), b.constant(dtype(128 if dtype is np.uint8 else b.pick([0, 3])))


def quantized(b: Builder, x: str, dtype: Any = None) -> tuple[str, str, str]:
    """Add a QuantizeLinear; return what it makes, the scale and the zero point."""
    scale, zero = scale_of(b, b.value(x), dtype or b.pick([np.uint8, np.int8]))
    return b.op("QuantizeLinear", x, scale, zero), scale, zero


def integers(b: Builder, *shape: int) -> tuple[str, str, str]:
    """Store a quantized weight with its scale and zero point."""
    dtype = b.pick([np.uint8, np.int8])
    values = b.random.integers(-60, 60, shape) + (128 if dtype is np.uint8 else 0)
    zero = b.constant(dtype(128 if dtype is np.uint8 else 0))
    return b.constant(values.astype(dtype), plain=0.9), b.constant(np.float32(0.01)), zero


@writer
def moved_codes(b: Builder) -> Any:
    """Move quantized values by operators whose other inputs are constant, or computed, or from shapes."""
    x = b.find((2, 3))
    q, scale, zero = quantized(b, x)
    for _ in range(int(b.pick([1, 2]))):
        form = b.word(
            "Reshape Shape Transpose Gather Slice Concat Unsqueeze Split Identity MaxPool Relu Expand Pad Where"
        )
        rank = b.rank(q)
        if form == "Reshape":
            q = b.reshape(q, b.op("Concat", b.numbers(-1), b.numbers(b.shape(q)[-1]), axis=0))
        elif form == "Shape":
            last = b.op("Gather", b.op("Shape", x if rank == b.rank(x) else q), b.numbers(0), axis=0)
            q = b.reshape(q, b.op("Concat", last, b.numbers(-1), axis=0))
        elif form == "Transpose":
            q = b.op("Transpose", q, perm=[int(axis) for axis in b.random.permutation(rank)])
        elif form == "Gather":
            q = b.op("Gather", q, b.unsqueeze(b.constant(np.asarray(0, I64)), [0]), axis=0)
        elif form == "Slice":
            q = b.op("Slice", q, b.numbers(0), b.op("Gather", b.numbers(5, 1), b.numbers(1)), b.numbers(rank - 1))
        elif form == "Concat":
            q = b.op("Concat", q, q, axis=0)
        elif form == "Unsqueeze":
            q = b.unsqueeze(q, [0])
        elif form == "Split" and b.shape(q)[0] > 1:
            q = b.split(q, [1, b.shape(q)[0] - 1], 0)[1]
        elif form == "Expand":
            q = b.op("Expand", q, b.numbers(2, *b.shape(q)))
        elif form == "Pad" and b.opset >= 13:
            q = b.op("Pad", q, b.numbers(*[1] * 2 * rank), zero)
        elif form == "Where":
            q = b.op("Where", b.constant(b.random.random(b.shape(q)) < 0.5), q, zero)
        else:
            q = b.op("Identity", q)
    if b.chance(0.15):
        scale = b.constant(b.value(scale) * 2)
    return b.op("DequantizeLinear", q, scale, zero)


@writer
def pairs(b: Builder) -> Any:
    """Put pairs of quantizers around float operators."""
    x = _dequantized(b, b.find((2, 4)))
    weight, scale, zero = integers(b, *((3, b.shape(x)[1], 1, 1) if b.rank(x) == 4 else (b.shape(x)[1], 3)))
    decoded = b.op("DequantizeLinear", weight, scale, zero)
    made = b.op("Conv" if b.rank(x) == 4 else "MatMul", x, decoded)
    if b.chance(0.5):
        made = b.op(b.pick(["Relu", "Sigmoid"]), made)
    if b.chance(0.4) and b.opset >= 11:
        made = b.clip(made, *b.pick([(0.0, 6.0), (None, 1.0), (-1.0, 1.0)]))
    return _dequantized(b, made)


def _dequantized(b: Builder, x: str) -> str:
    q, scale, zero = quantized(b, x)
    return b.op("DequantizeLinear", q, scale, zero)


@writer
def table(b: Builder) -> Any:
    """Look up rows of a quantized table, and move them."""
    weight, scale, zero = integers(b, 6, 4)
    indices = b.input(2, 2, dtype=I64, values=np.array([[0, 1], [2, 5]], I64))
    if b.chance(0.5):
        rows = b.op("Gather", b.op("DequantizeLinear", weight, scale, zero), indices, axis=0)
    else:
        rows = b.op("DequantizeLinear", b.op("Gather", weight, indices, axis=0), scale, zero)
    form = b.word("none Reshape Transpose pair MatMul")
    if form == "Reshape":
        return b.reshape(rows, [0, -1])
    if form == "Transpose":
        return b.op("Transpose", rows, perm=[1, 0, 2])
    if form == "pair":
        q, scale, zero = quantized(b, rows)
        return b.op("DequantizeLinear", b.op("Transpose", q, perm=[1, 0, 2]), scale, zero)
    return matmul(b, rows) if form == "MatMul" else rows


@writer
def integer_product(b: Builder) -> Any:
    """Multiply integers and scale what comes out, as dynamic quantizers write it."""
    x = b.find(2)
    weight, scale, zero = integers(b, b.shape(x)[1], 3)
    if b.chance(0.3):
        other, given, middle = integers(b, 6, b.shape(x)[1])
        q = b.op("Gather", other, b.input(3, dtype=I64, values=np.array([0, 1, 5], I64)), axis=0)
    elif b.chance(0.5):
        q, given, middle = b.ops("DynamicQuantizeLinear", x, outputs=3)
    else:
        q, given, middle = quantized(b, x, np.uint8)
    made = b.op("Cast", b.op("MatMulInteger", q, weight, middle, zero), to=TensorProto.FLOAT)
    if b.chance(0.7):
        made = b.op("Mul", made, b.op("Mul", given, scale))
    else:
        made = b.op("Mul", b.op("Mul", made, given), scale)
    return b.op("Add", made, b.constant(b.normal(3))) if b.chance(0.5) else made


@writer
def quantized_operators(b: Builder) -> Any:
    """Compute with quantized values in operators of their own."""
    x = b.find((2, 4))
    dtype = np.uint8
    q, scale, zero = quantized(b, x, dtype)
    weight, small, middle = integers(b, *((3, b.shape(x)[1], 1, 1) if b.rank(x) == 4 else (b.shape(x)[1], 3)))
    real = (b.value(weight).astype(F32) - b.value(middle).astype(F32)) * b.value(small)
    product = np.einsum("ncij,oc->noij", b.value(x), real[:, :, 0, 0]) if b.rank(x) == 4 else b.value(x) @ real
    result, point = scale_of(b, product, dtype)
    made = b.op(
        "QLinearConv" if b.rank(x) == 4 else "QLinearMatMul", q, scale, zero, weight, small, middle, result, point
    )
    if b.chance(0.3):
        result = b.constant(b.value(result) * 2)
    return b.op("DequantizeLinear", made, result, point)


@writer
def contrib_operators(b: Builder) -> Any:
    """Compute with quantized values in operators of onnxruntime."""
    x = b.find((2, 3))
    q, scale, zero = quantized(b, x, np.uint8)
    form = b.word("QLinearAdd QLinearMul QLinearSigmoid QLinearLeakyRelu")
    value = b.value(x)
    outcome = {
        "QLinearAdd": value + value,
        "QLinearMul": value * value,
        "QLinearSigmoid": np.ones(1),
        "QLinearLeakyRelu": value,
    }[form]
    result, point = scale_of(b, outcome, np.uint8)
    operands = [q, scale, zero] * (2 if form in ("QLinearAdd", "QLinearMul") else 1)
    attributes = {"alpha": 0.1} if form == "QLinearLeakyRelu" else {}
    made = b.op(form, *operands, result, point, domain="com.microsoft", **attributes)
    return b.op("DequantizeLinear", made, result, point)


@writer
def block_weights(b: Builder) -> Any:
    """Multiply by a weight of 4 bits in blocks."""
    x, rows = b.input(2, 32), 3
    packed = b.constant(b.random.integers(0, 256, (rows, 1, 16)).astype(np.uint8), plain=1.0)
    scales = b.constant(b.random.uniform(0.01, 0.1, rows).astype(F32), plain=1.0)
    return b.op("MatMulNBits", x, packed, scales, domain="com.microsoft", K=32, N=rows, bits=4, block_size=32)


def handmade(seed: int) -> tuple[ModelProto, Feed]:
    """Return a quantized model, and what it is fed.

    Raises:
        RefusedError: onnxruntime computes none of it.
    """
    random = np.random.default_rng([seed, 30])
    b = Builder(random, int(random.choice([11, 13, 13, 17, 19, 21])), F32)
    b.calm = True
    names = sorted(WRITERS)
    for name in (names[seed % len(names)], *(random.choice(names, 1) if random.random() < 0.5 else ())):
        with suppress(RefusedError):
            WRITERS[name](b)
    model = b.model()
    return model, {name: b.values[name] for name in b.inputs}


# What quantizers write


def network(seed: int) -> tuple[ModelProto, list[Feed]]:
    """Return a small float network of layers that are quantized, and samples."""
    random = np.random.default_rng([seed, 40])
    b = Builder(random, int(random.choice([13, 14, 17, 18, 21])), F32)
    b.calm, image = True, random.random() < 0.5
    x = b.input(1, 16, 6, 6, fixed=1.0) if image else b.input(4, 64, fixed=1.0)
    for _ in range(int(random.integers(1, 4))):
        with suppress(RefusedError):
            x = conv(b, x, 32) if b.rank(x) == 4 else b.pick([gemm, matmul])(b, x, 64)
            kind = b.pick(_ORDINARY)
            if kind in ("MaxPool", "AveragePool"):
                x = b.op(kind, x, kernel_shape=[2, 2], strides=[1, 1]) if b.rank(x) == 4 else x
            elif kind == "GlobalAveragePool":
                x = b.op("Flatten", b.op(kind, x)) if b.rank(x) == 4 else x
            elif kind == "Clip":
                x = b.clip(x, 0.0, 6.0)
            elif kind in ("Add", "Mul", "Concat"):
                x = b.op(kind, x, x, **({"axis": 1} if kind == "Concat" else {}))
            else:
                x = b.op(kind, x, **({"axis": 1} if kind == "Softmax" else {}))
    model = b.model()
    feeds = [{name: random.standard_normal(b.shape(name)).astype(F32) for name in b.inputs} for _ in range(4)]
    return model, feeds


def by_onnxruntime(model: ModelProto, feeds: list[Feed], seed: int) -> ModelProto:
    """Return what onnxruntime's quantizers make of a model."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(feeds)

        def get_next(self) -> Any:
            return next(self.left, None)

    random = np.random.default_rng([seed, 41])
    with tempfile.TemporaryDirectory(prefix="onnxq-fuzz-") as folder:
        source, target = Path(folder, "float.onnx"), Path(folder, "quantized.onnx")
        onnx.save(model, source)
        options: dict[str, Any] = {"per_channel": bool(random.random() < 0.5), "weight_type": QuantType.QInt8}
        if random.random() < 0.4:
            quantize_dynamic(source, target, **options)
        else:
            form = QuantFormat.QDQ if random.random() < 0.5 else QuantFormat.QOperator
            quantize_static(source, target, Reader(), quant_format=form, activation_type=QuantType.QUInt8, **options)
        return onnx.load(target)


@contextmanager
def recorded() -> Iterator[list[PassResult]]:
    """Collect what passes do, wherever they are applied."""
    found: list[PassResult] = []
    apply = Pipeline.apply

    def noted(self: Pipeline, graph: Any) -> tuple[PassResult, ...]:
        done = apply(self, graph)
        found.extend(done)
        return done

    with mock.patch.object(Pipeline, "apply", noted):
        yield found


def by_onnxq(model: ModelProto, feeds: list[Feed], preset: str) -> ModelProto:
    """Return what `onnxq.quantize` makes of a model as its preset says, whatever comes out."""
    with tempfile.TemporaryDirectory(prefix="onnxq-fuzz-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = Path(folder, "quantized.onnx")
        goal, budget = onnxq.Goal(force=True), onnxq.Budget(search="off", accuracy="off", latency_seconds=0)
        onnxq.quantize(model, [dict(feed) for feed in feeds], target, scheme=PRESETS[preset], goal=goal, budget=budget)
        return onnx.load(target)


# Comparing


def worse(model: ModelProto, other: ModelProto, feed: Feed, nsr: float) -> str:
    """Say how another model differs from the first by more than quantization explains; an empty string if it does not.

    Args:
        model: the first model.
        other: the other one.
        feed: what both are fed.
        nsr: the rounding of each value of the first one, relative to it, that is thought of as quantization.
    """
    before, after = run(opened(model), feed), run(opened(other), feed)
    try:
        noisy = run(opened(with_noise(model, nsr)), feed)
    # What is decided by a rounded number may not fit what follows.
    except Exception:  # noqa: BLE001
        return ""
    for index, (one, two, rounded) in enumerate(zip(before, after, noisy, strict=True)):
        if one.dtype != two.dtype or one.shape != two.shape:
            return f"output {index}: {one.dtype}{one.shape} became {two.dtype}{two.shape}"
        if one.dtype.kind != "f" or not np.isfinite(one).all():
            continue
        error, expected = np.abs(one - two), np.abs(one - rounded)
        size = np.linalg.norm(one.astype(np.float64)) or 1.0
        lost = np.linalg.norm(error.astype(np.float64)) / size
        if not np.isfinite(lost):
            return f"output {index} is not finite any more"
        if lost > 10 ** (-_LEAST_DB / 20) and lost > _LOUDER * np.linalg.norm(expected.astype(np.float64)) / size:
            return f"output {index} differs by {lost:.3g} of its size"
    return ""
