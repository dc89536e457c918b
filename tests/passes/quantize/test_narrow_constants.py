"""NarrowConstants stores floats in 16 bits where that loses nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from model_texts import Array, apply_once, difference, model, ops, outputs, sample, values
from onnx import TensorProto

from onnxq.ir import Graph, as_graph, constants, onnx_dtype
from onnxq.passes import NarrowConstants

TEXT = "g (float[4,128] x) => (float[4,128] y) { h = Add(x, w) y = Mul(h, w) }"


def of_half(*shape: int, dtype: type = np.float16) -> Array:
    return values(*shape).astype(dtype).astype(np.float32)


def types(graph: Graph) -> dict[str, int]:
    """The types of the constants that nodes read."""
    return {tensor.name: onnx_dtype(tensor) for tensor in constants(graph) if tensor.outputs}


def test_what_was_float16_is_stored_so_once_and_decoded_to_the_same_bits() -> None:
    made = model(TEXT, w=of_half(128))
    graph = as_graph(made)
    assert apply_once(NarrowConstants(), graph).changed == ("w",)
    assert ops(graph) == ["Cast", "Add", "Mul"]
    assert types(graph) == {"w.narrow": TensorProto.FLOAT16}
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_bfloat16_is_kept_as_such() -> None:
    graph = as_graph(model(TEXT, w=of_half(128, dtype=ml_dtypes.bfloat16)))
    apply_once(NarrowConstants(TensorProto.BFLOAT16), graph)
    assert types(graph) == {"w.narrow": TensorProto.BFLOAT16}


def test_constants_of_bodies_are_decoded_where_they_are_declared() -> None:
    made = model(
        """g (float[4,128] x, bool c) => (float[4,128] y) {
            y = If (c) <then_branch = t () => (float[4,128] u) { u = Add(x, w) },
                        else_branch = e () => (float[4,128] v) { v = Sub(x, w) }>
        }""",
        w=of_half(128),
    )
    graph = as_graph(made)
    apply_once(NarrowConstants(), graph)
    assert ops(graph) == ["Cast", "If", "Add", "Sub"]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        (TEXT, values(128)),
        (TEXT, np.full(128, 1e6, np.float32)),
        ("g (float[4,64] x) => (float[4,64] y) { y = Add(x, w) }", of_half(64)),
        ("g (float[4,128] x, float[128] w) => (float[4,128] y) { y = Add(x, w) }", of_half(128)),
        ("g (int8[4,128] x) => (float[4,128] y) { y = DequantizeLinear(x, w) }", of_half(128)),
        ("g (float[4,128] x) => (float[4,128] y, float[128] w) { y = Neg(x) }", of_half(128)),
    ],
    ids=["other values", "too large", "few values", "overridable", "scales", "an output"],
)
def test_the_rest_is_left(text: str, stored: Array) -> None:
    graph = as_graph(model(text, w=stored))
    assert not NarrowConstants().apply(graph)
