"""One small network as exporters of channels-last frameworks write it, with images as (batch, height, width, channels).

Three files of the same weights: ``transposed`` goes to channels-first and back around every convolution and keeps each
normalisation as Mul and Add, each pad as a node and each weight as a Transpose of (height, width, in, out); ``merged``
has neighbouring Transposes taken out and pads inside, but still multiplies and adds channels last; ``direct`` is what a
channels-first exporter would have written behind one Transpose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

FORMS = ("transposed", "merged", "direct")
SIZE = 64
CLASSES = 100
_FIRST, _LAST = [0, 3, 1, 2], [0, 2, 3, 1]


@dataclass(frozen=True)
class Layer:
    """A convolution that pads as TensorFlow does, its normalisation, and ReLU6 unless it projects."""

    width: int
    kernel: int
    stride: int = 1
    depthwise: bool = False
    projects: bool = False


LAYERS = (
    Layer(32, 3, 2),
    Layer(32, 3, depthwise=True),
    Layer(64, 1, projects=True),
    Layer(128, 1),
    Layer(128, 3, 2, depthwise=True),
    Layer(96, 1, projects=True),
    Layer(192, 1),
    Layer(192, 3, 2, depthwise=True),
    Layer(160, 1, projects=True),
    Layer(384, 3),
)


@dataclass
class Writer:
    """Nodes and weights in the order they are added."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)

    def weight(self, values: Any, kind: Any = np.float32) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, kind), name))
        return name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name


def handwritten(form: str) -> onnx.ModelProto:
    """Write the network in one of `FORMS`."""
    random = np.random.default_rng(13)
    writer = Writer()
    x, channels, size = "image", 3, SIZE
    if form == "direct":
        x = writer.node("Transpose", x, perm=_FIRST)
    for layer in LAYERS:
        fan = layer.kernel**2 * (1 if layer.depthwise else channels)
        gain = 1 if layer.projects else 2
        weight = random.normal(size=(layer.kernel, layer.kernel, fan // layer.kernel**2, layer.width))
        scale, shift = random.uniform(0.7, 1.3, layer.width), random.normal(0, 0.1, layer.width)
        x = _convolution(writer, form, x, layer, weight * np.sqrt(gain / fan), size)
        x = _affine(writer, form, x, scale, shift)
        if not layer.projects:
            x = writer.node("Clip", x, writer.weight(0), writer.weight(6))
        channels, size = layer.width, -(-size // layer.stride)
    x = writer.node("ReduceMean", x, axes=[2, 3] if form == "direct" else [1, 2], keepdims=0)
    x = writer.node("MatMul", x, writer.weight(random.normal(size=(channels, CLASSES)) / 4))
    x = writer.node("Add", x, writer.weight(random.normal(0, 0.1, CLASSES)))
    writer.node("Softmax", x, axis=-1)
    writer.nodes[-1].output[0] = "scores"
    graph = helper.make_graph(
        writer.nodes,
        f"channels_last_{form}",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", SIZE, SIZE, 3])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
        writer.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def _convolution(writer: Writer, form: str, x: str, layer: Layer, weight: NDArray[Any], size: int) -> str:
    needed = max((-(-size // layer.stride) - 1) * layer.stride + layer.kernel - size, 0)
    before, behind = needed // 2, needed - needed // 2
    inside = [before, before, behind, behind]
    if form == "transposed":
        if needed:
            pads = writer.weight([0, before, before, 0, 0, behind, behind, 0], np.int64)
            x, inside = writer.node("Pad", x, pads), [0] * 4
        stored = writer.node("Transpose", writer.weight(weight), perm=[3, 2, 0, 1])
    else:
        stored = writer.weight(weight.transpose(3, 2, 0, 1))
    if form != "direct":
        x = writer.node("Transpose", x, perm=_FIRST)
    group = layer.width if layer.depthwise else 1
    kernel, strides = [layer.kernel] * 2, [layer.stride] * 2
    x = writer.node("Conv", x, stored, kernel_shape=kernel, strides=strides, pads=inside, group=group)
    return x if form == "direct" else writer.node("Transpose", x, perm=_LAST)


def _affine(writer: Writer, form: str, x: str, scale: NDArray[Any], shift: NDArray[Any]) -> str:
    if form == "direct":
        zero, one = np.zeros_like(scale), np.ones_like(scale)
        return writer.node("BatchNormalization", x, *map(writer.weight, (scale, shift, zero, one)), epsilon=0.0)
    return writer.node("Add", writer.node("Mul", x, writer.weight(scale)), writer.weight(shift))
