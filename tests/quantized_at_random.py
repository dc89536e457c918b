"""Small random float models, quantized with random settings by the quantizers of onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

Array = NDArray[Any]
_IMAGE = (
    "Conv",
    "Conv",
    "Conv",
    "Depthwise",
    "MaxPool",
    "AveragePool",
    "Concat",
    "Split",
    "Pad",
    "Resize",
    "Transpose",
)
_VECTOR = ("Gemm", "MatMul", "MatMul", "MatMul", "Softmax", "LayerNormalization", "Slice", "Reshape", "Mean")
_BOTH = ("Relu", "Clip", "Clip", "Sigmoid", "LeakyRelu", "Add", "Mul", "HardSwish", "Tanh", "Branch", "Where")


class Samples(CalibrationDataReader):  # type: ignore[misc]
    """The samples of a list, one after the other."""

    def __init__(self, samples: list[dict[str, Array]]) -> None:
        self.left = iter(samples)

    def get_next(self) -> dict[str, Array] | None:
        return next(self.left, None)


@dataclass
class _Network:
    random: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    stored: list[TensorProto] = field(default_factory=list)
    shape: list[int] = field(default_factory=list)
    last: str = "x"

    def weight(self, *shape: int, value: Array | None = None) -> str:
        name = f"w{len(self.stored)}"
        size = max(1, int(np.prod(shape[1:])) if len(shape) > 1 else 4)
        array = self.random.normal(0, size**-0.5, shape).astype(np.float32) if value is None else value
        self.stored.append(numpy_helper.from_array(array, name))
        return name

    def put(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"t{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=f"n{len(self.nodes)}", **attributes))
        self.last = names[0]
        return names[0]

    def step(self) -> None:
        image = len(self.shape) == 4
        op = str(self.random.choice((*(_IMAGE if image else _VECTOR), *_BOTH)))
        getattr(self, f"_{op.lower()}", self._plain)(op)

    def _plain(self, op: str) -> None:
        self.put(op, self.last, **({"alpha": 0.1} if op == "LeakyRelu" else {}))

    def _conv(self, op: str) -> None:
        out = int(self.random.choice([4, 8]))
        inputs = [self.last, self.weight(out, self.shape[1], 3, 3)]
        self.put("Conv", *inputs, *([self.weight(out)] if self.random.random() < 0.7 else []), pads=[1, 1, 1, 1])
        self.shape[1] = out

    def _depthwise(self, op: str) -> None:
        channels = self.shape[1]
        self.put("Conv", self.last, self.weight(channels, 1, 3, 3), pads=[1, 1, 1, 1], group=channels)

    def _maxpool(self, op: str) -> None:
        self.put(op, self.last, kernel_shape=[3, 3], pads=[1, 1, 1, 1])

    _averagepool = _maxpool

    def _concat(self, op: str) -> None:
        before = self.last
        other = self.put("Conv", before, self.weight(4, self.shape[1], 1, 1))
        self.put(op, before, other, axis=1)
        self.shape[1] += 4

    def _split(self, op: str) -> None:
        if self.shape[1] % 2:
            return
        one = self.put(op, self.last, outputs=2, axis=1)
        self.shape[1] //= 2
        self.put("Add", one, one.replace("_0", "_1"))

    def _pad(self, op: str) -> None:
        margins = self.weight(value=np.array([0, 0, 1, 0, 0, 0, 0, 1]))
        filling = self.weight(value=np.array(self.random.choice([0.0, 0.5]), np.float32))
        self.put(op, self.last, margins, filling)
        self.shape[2] += 1
        self.shape[3] += 1

    def _resize(self, op: str) -> None:
        if self.shape[2] > 12:
            return
        factors = self.weight(value=np.array([1, 1, 2, 2], np.float32))
        self.put(op, self.last, "", factors, mode="nearest")
        self.shape[2:] = [2 * size for size in self.shape[2:]]

    def _transpose(self, op: str) -> None:
        self.put(op, self.last, perm=[0, 1, 3, 2])
        self.shape[2:] = self.shape[:1:-1]

    def _gemm(self, op: str) -> None:
        self.put("Flatten", self.last, axis=len(self.shape) - 1)
        rows, width = int(np.prod(self.shape[:-1])), self.shape[-1]
        self.put(op, self.last, self.weight(6, width), self.weight(6), transB=1)
        self.shape = [rows, 6]

    def _matmul(self, op: str) -> None:
        out = int(self.random.choice([5, 8]))
        self.put(op, self.last, self.weight(self.shape[-1], out))
        self.shape[-1] = out
        if self.random.random() < 0.5:
            self.put("Add", self.last, self.weight(out))

    def _softmax(self, op: str) -> None:
        self.put(op, self.last, axis=-1)

    def _layernormalization(self, op: str) -> None:
        self.put(op, self.last, self.weight(self.shape[-1]), self.weight(self.shape[-1]))

    def _slice(self, op: str) -> None:
        if self.shape[-1] < 3:
            return
        one, end, axis = (self.weight(value=np.array([value])) for value in (1, 99, -1))
        self.put(op, self.last, one, end, axis)
        self.shape[-1] -= 1

    def _reshape(self, op: str) -> None:
        before, size, width = self.last, int(np.prod(self.shape)), self.shape[-1]
        minus, target = self.weight(value=np.array([-1])), self.weight(value=np.array([-1, width]))
        if self.random.random() < 0.5:
            axis = self.weight(value=np.array([len(self.shape) - 1]))
            target = self.put("Concat", minus, self.put("Gather", self.put("Shape", before), axis), axis=0)
        self.put(op, before, target)
        self.shape = [size // width, width]

    def _mean(self, op: str) -> None:
        self.put("ReduceMean", self.last, axes=[0], keepdims=1)
        self.shape[0] = 1

    def _clip(self, op: str) -> None:
        ends = 0.0, float(self.random.choice([1, 2.5, 6]))
        self.put(op, self.last, *(self.weight(value=np.array(end, np.float32)) for end in ends))

    def _add(self, op: str) -> None:
        before = self.last
        self.put(op, before, self.put("Tanh", before))

    def _mul(self, op: str) -> None:
        before = self.last
        self.put(op, before, self.put("Sigmoid", before))

    def _branch(self, op: str) -> None:
        before = self.last
        self.put("Sub", self.put("Sigmoid", before), self.put("Neg", before))

    def _where(self, op: str) -> None:
        before = self.last
        zero = self.weight(value=np.array(0, np.float32))
        self.put(op, self.put("Greater", before, zero), before, self.put("Tanh", before))


def float_model(seed: int) -> ModelProto:
    """A chain of five to eight steps over an image, rows of vectors, or rows of a table."""
    random = np.random.default_rng(seed)
    network = _Network(random)
    kind = ("image", "rows", "table")[seed % 3]
    start = {"image": [1, 4, 6, 6], "rows": [2, 5, 8], "table": [2, 5]}[kind]
    network.shape = list(start)
    if kind == "table":
        network.last = network.put("Gather", network.weight(20, 8), "x")
        network.shape.append(8)
    for _ in range(int(random.integers(5, 9))):
        network.step()
    type_ = TensorProto.INT64 if kind == "table" else TensorProto.FLOAT
    graph = helper.make_graph(
        network.nodes,
        "g",
        [helper.make_tensor_value_info("x", type_, start)],
        [helper.make_tensor_value_info(network.last, TensorProto.FLOAT, network.shape)],
        network.stored,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def samples_of(model: ModelProto, seed: int) -> list[dict[str, Array]]:
    random = np.random.default_rng(seed)
    info = model.graph.input[0].type.tensor_type
    shape = [dimension.dim_value for dimension in info.shape.dim]
    if info.elem_type == TensorProto.INT64:
        return [{"x": random.integers(0, 20, shape)} for _ in range(6)]
    return [{"x": random.normal(size=shape).astype(np.float32)} for _ in range(6)]


def quantized_at_random(
    model: ModelProto, samples: list[dict[str, Array]], seed: int, folder: Path
) -> tuple[Path, int]:
    """Quantize a model with settings that a seed chooses; return the file and the bits that activations have."""
    random = np.random.default_rng(seed)
    onnx.save(model, folder / "float.onnx")
    output = folder / "quantized.onnx"
    per_channel = bool(random.random() < 0.5)
    weights = [QuantType.QInt8, QuantType.QUInt8][random.integers(2)]
    if random.random() < 0.3:
        wanted = ["Conv", "MatMul", "Gather", "Transpose"]
        quantize_dynamic(folder / "float.onnx", output, wanted, per_channel=per_channel, weight_type=weights)
        return output, 8
    format = [QuantFormat.QDQ, QuantFormat.QDQ, QuantFormat.QOperator][random.integers(3)]
    types = [QuantType.QInt8, QuantType.QUInt8]
    if format is QuantFormat.QDQ:
        types += [QuantType.QInt16, QuantType.QUInt16]
    activations = types[random.integers(len(types))]
    options = {
        "ActivationSymmetric": bool(random.random() < 0.3),
        "AddQDQPairToWeight": bool(random.random() < 0.3),
        "DedicatedQDQPair": bool(random.random() < 0.3),
        "ForceQuantizeNoInputCheck": bool(random.random() < 0.3),
        "QuantizeBias": bool(random.random() < 0.7),
        "UseQDQContribOps": "16" in activations.name or bool(random.random() < 0.3),
    }
    quantize_static(
        folder / "float.onnx",
        output,
        Samples(samples),
        quant_format=format,
        activation_type=activations,
        weight_type=QuantType.QInt8 if per_channel or activations is QuantType.QInt8 else weights,
        per_channel=per_channel,
        extra_options=options,
    )
    return output, 16 if "16" in activations.name else 8
