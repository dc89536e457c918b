"""What other quantizers wrote, and what tells that its float model is back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
)

from onnxq.ir import Graph, all_graphs, constants
from onnxq.ops import ALREADY_QUANTIZED
from onnxq.pipeline.dequantization import dequantize
from onnxq.runtime.sessions import open_session, run

Array = NDArray[Any]

SUMS = 4e-6
"""Products are summed in another order: 64 products of float32, each rounded to 2**-24, relative to the largest sum."""

CONVOLUTIONS = """(float[1,3,12,12] x) => (float[1,10] y) {
    [first] a = Conv <pads = [1,1,1,1]> (x, w1, b1)
    [relu] b = Relu(a)
    [second] c = Conv <pads = [1,1,1,1]> (b, w2, b2)
    [sum] d = Add(c, b)
    [clip] e = Clip(d, low, high)
    [pool] f = MaxPool <kernel_shape = [2,2], strides = [2,2]> (e)
    [sigmoid] g = Sigmoid(f)
    [leaky] h = LeakyRelu(f)
    [product] i = Mul(g, h)
    [join] j = Concat <axis = 1> (i, h)
    [average] k = AveragePool <kernel_shape = [2,2]> (j)
    [mean] l = GlobalAveragePool(k)
    [flat] m = Flatten(l)
    [gemm] n = Gemm(m, w3, b3)
    [matmul] o = MatMul(n, w4)
    [soft] y = Softmax(o)
}"""
EMBEDDING = """(int64[N,4] x) => (float[4,N,5] y, float[1,N,6] last) {
    [rows] a = Gather(table, x)
    [turn] b = Transpose <perm = [1,0,2]> (a)
    [lstm] c, last, d = LSTM <hidden_size = 6> (b, wl, rl, bl)
    [flat] e = Squeeze(c, axes)
    [matmul] y = MatMul(e, w)
}"""
PRODUCTS = """(float[5,64] x) => (float[5,48] y) {
    [one] a = MatMul(x, w1)
    [relu] b = Relu(a)
    [two] y = MatMul(b, w2)
}"""


class Samples(CalibrationDataReader):
    """Normally distributed samples of a model's only input."""

    def __init__(self, model: ModelProto, count: int = 8) -> None:
        self.left = iter([sample(model, seed) for seed in range(count)])

    def get_next(self) -> dict[str, Array] | None:
        return next(self.left, None)


def sample(model: ModelProto, seed: int) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    (info,) = model.graph.input
    shape = [dimension.dim_value or 3 for dimension in info.type.tensor_type.shape.dim]
    if info.type.tensor_type.elem_type == onnx.TensorProto.INT64:
        return {info.name: generator.integers(0, 20, shape)}
    return {info.name: generator.normal(size=shape).astype(np.float32)}


def with_weights_of(graph: Graph, original: ModelProto) -> ModelProto:
    """The float model as it was, but with dequantized weights under their old names."""
    changed = onnx.ModelProto()
    changed.CopyFrom(original)
    weights = {tensor.name: tensor.tensor_data for tensor in constants(graph)}
    for tensor in changed.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and tensor.dims:
            tensor.CopyFrom(weights[tensor.name].to_proto(tensor.name))
    return changed


def difference(expected: ModelProto | Path, found: Path) -> float:
    """The largest error of any output on a sample, relative to that output's largest magnitude."""
    inputs = sample(onnx.load(found, load_external_data=False), 99)
    runs = [run(open_session(model, threads=1, optimize=False), inputs) for model in (expected, found)]
    return max(float(np.abs(one - other).max() / np.abs(one).max()) for one, other in zip(*runs, strict=True))


def ops(graph: Graph) -> list[str]:
    return [node.op for scope in all_graphs(graph) for node in scope.nodes]


def tensors_of(quantized: Path) -> list[Array]:
    """Every float tensor that onnxruntime computes when it runs the model on a sample."""
    model = onnx.shape_inference.infer_shapes(onnx.load(quantized))
    inputs = sample(model, 0)
    floats = [info for info in model.graph.value_info if info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    del model.graph.output[:]
    model.graph.output.extend(floats)
    return run(open_session(model, optimize=False), inputs)


def decoded_by_onnxruntime(quantized: Path) -> list[Array]:
    """What its DequantizeLinear makes of 8-bit weights that lie beside a scale named after them."""
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(quantized).graph.initializer}
    found = []
    for name, integers in stored.items():
        base = name.removesuffix("_quantized").removesuffix(".codes")
        # Conv keeps a scale for each filter, the others for each column.
        axis = 0 if integers.ndim == 4 else integers.ndim - 1
        scale = next((stored[key] for key in (f"{base}_scale", f"{base}.scale") if key in stored), None)
        if base == name or scale is None or integers.dtype.name not in ("int8", "uint8"):
            continue
        if scale.dtype != np.float32 or scale.size not in (1, integers.shape[axis]):
            continue
        parts = [integers, scale, *(stored[key] for key in (f"{base}_zero_point",) if key in stored)]
        flat = [array.reshape(-1) if array.size > 1 else array.reshape(()) for array in parts[1:]]
        node = helper.make_node("DequantizeLinear", ["codes", "scale", "zero"][: len(parts)], ["y"], axis=axis)
        tensors = [numpy_helper.from_array(a, n) for a, n in zip((integers, *flat), node.input, strict=True)]
        graph = helper.make_graph([node], "g", [], [helper.make_empty_tensor_value_info("y")], tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        (decoded,) = run(open_session(model, optimize=False), {})
        # DynamicQuantizeLSTM reads its weights transposed.
        found.append(decoded.transpose(0, 2, 1) if integers.ndim == 3 else decoded)
    return found


def bits(array: Array) -> tuple[object, ...]:
    return array.dtype.str, array.shape, array.tobytes()


def check(quantized: Path, output: Path, known: Callable[[Path], list[Array]]) -> Graph:
    """The model keeps its face, holds no quantized operator and no weight that onnxruntime would not decode so."""
    graph = dequantize(quantized, output)
    before, after = (onnx.load(path).graph for path in (quantized, output))
    onnx.checker.check_model(output, full_check=True)
    assert list(after.input) == list(before.input)
    assert list(after.output) == list(before.output)
    assert not ALREADY_QUANTIZED & set(ops(graph))
    assert [tensor for tensor in constants(graph) if tensor.dtype.itemsize == 1] == []
    exact = set(map(bits, [*map(numpy_helper.to_array, before.initializer), *known(quantized)]))
    for tensor in constants(graph):
        if tensor.dtype == np.float32 and len(tensor.shape) > 1:
            assert bits(np.asarray(tensor.values)) in exact, tensor.name
    return graph
