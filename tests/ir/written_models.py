"""Models that are written, with their data beside them or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper, parser

from onnxq.ir import load, read_model, save

WEIGHTS = {
    name: np.random.default_rng(index).normal(size=(40, 40)).astype(np.float32) for index, name in enumerate("uvw")
}


def model() -> ModelProto:
    made = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,40] x, bool c) => (float[N,40] y) {
        a = MatMul(x, u)
        b = MatMul(a, v)
        y = If (c) <then_branch = t () => (p) { p = MatMul(b, w) }, else_branch = e () => (q) { q = Add(b, bias) }>
        }"""
    )
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in WEIGHTS.items())
    made.graph.initializer.append(numpy_helper.from_array(np.ones(40, np.float32), "bias"))
    return made


def external_model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save(read_model(model()), folder / "m.onnx", external_data=True)
    return folder / "m.onnx"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def whole(path: Path) -> ModelProto:
    """Read a model with its data through onnx, which marks every tensor that it has read in."""
    model = onnx.load(path)
    for tensor in (
        *model.graph.initializer,
        *(proto.t for node in model.graph.node for proto in node.attribute if proto.HasField("t")),
    ):
        tensor.ClearField("data_location")
    return model


def assert_weights(path: Path) -> None:
    graph = load(path)
    for initializer in graph.initializers:
        expected = WEIGHTS.get(initializer.name, np.ones(40, np.float32))
        np.testing.assert_array_equal(initializer.values, expected)
