"""What models made to hurt are made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import ModelProto, numpy_helper, parser

PARTS = """
    [product] a = MatMul(x, w)
    [relu] b = Relu(a)
"""
TERABYTES = 1 << 40
HUGE = 10**9
IMAGE = {"s": np.array([1, 2, 4, 4]), "v": np.ones((2, 2, 3, 3), "f") / 9}

Builder = Callable[[], ModelProto]


def collected_in(models: dict[str, Builder]) -> Callable[[Builder], Builder]:
    """Return a decorator that puts what builds a model into a table by its name."""

    def collect(build: Builder) -> Builder:
        models[build.__name__] = build
        return build

    return collect


def sound(text: str = "y = Identity(b)", *, opset: int = 17, **weights: np.ndarray) -> ModelProto:
    """Return a model with a product that quantizes and some more nodes that make y."""
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> main (float[2,16] x) => (float[a,b] y) {{ {PARTS} {text} }}'
    )
    generator = np.random.default_rng(0)
    weights = {"w": generator.standard_normal((16, 16)).astype(np.float32) / 4, **weights}
    model.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in weights.items())
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)
