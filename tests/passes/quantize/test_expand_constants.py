"""ExpandConstants stores once what a constant repeats along an axis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import Array, model, named_graph, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.ir import Graph, as_graph, constants, to_model
from onnxq.passes import ExpandConstants, RemoveUnused
from onnxq.rewrite import Changes


def expanded(made: ModelProto) -> tuple[Graph, Changes]:
    """Apply the pass, and check that the outputs stay and that a second time there is nothing to do."""
    graph = named_graph(made)
    changes = ExpandConstants().apply(graph)
    assert not ExpandConstants().apply(graph)
    RemoveUnused().apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for name, output in outputs(made, sample(made)).items():
        np.testing.assert_array_equal(outputs(graph, sample(made))[name], output, strict=True)
    return graph, changes


def stored(graph: Graph) -> int:
    return sum(tensor.nbytes for tensor in constants(graph) if tensor.outputs)


ROW = values(1, 64)
NOT_A_NUMBER = np.full((64, 128), np.nan, np.float32)
SIGNS = np.where(np.arange(64)[:, None] % 2, np.float32(0), np.float32(-0.0)) * np.ones((64, 128), np.float32)


@pytest.mark.parametrize(
    ("constant", "most"),
    [
        (np.zeros((64, 128), np.float32), 24),
        (np.full((64, 128), 2.5, np.float32), 24),
        (NOT_A_NUMBER, 24),
        (np.repeat(ROW, 128, 0), 280),
        (np.repeat(ROW.T, 128, 1), 280),
        (np.broadcast_to(values(8, 1, 16), (8, 64, 16)), 540),
        (SIGNS, 280),
        (np.full((64, 64), -1e4, np.float64), 24),
    ],
    ids=["zeros", "a number", "NaN", "rows", "columns", "the axis between", "zeros of both signs", "doubles"],
)
def test_what_repeats_is_stored_once(constant: Array, most: int) -> None:
    kind = {"float32": "float", "float64": "double"}[constant.dtype.name]
    made = model(f"g ({kind}[1] x) => ({kind} y) {{ y = Mul(w, x) }}", w=np.ascontiguousarray(constant))
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph, changes = expanded(made)
    assert changes.changed == ("w",)
    assert sorted(ops(graph)) == ["Expand", "Mul"]
    assert stored(graph) <= most


@pytest.mark.parametrize(
    ("body", "constant"),
    [
        ("y = Mul(w, x)", values(64, 128)),
        ("y = Mul(w, x)", np.zeros((8, 8), np.float32)),
        ("y = Mul(w, x)", np.repeat(values(2, 64), 64, 0)),
        ("v = QuantizeLinear(x, s)  y = DequantizeLinear <axis = 0> (codes, w)", np.ones(8192, np.float32)),
    ],
    ids=["ordinary", "small", "repeated otherwise", "scales of codes"],
)
def test_others_are_left(body: str, constant: Array) -> None:
    made = model(
        f"g (float[1] x) => (float y) {{ {body} }}",
        w=constant, s=np.array(1, np.float32), codes=np.zeros(8192, np.int8),
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.ClearField("shape")
    assert not ExpandConstants().apply(named_graph(made))


def test_what_a_body_reads_is_expanded_around_it() -> None:
    made = model(
        """g (bool c, float[1] x) => (float[64, 128] y) {
            y = If (c) <then_branch = one () => (float[64, 128] t) { t = Add(w, x) },
                        else_branch = two () => (float[64, 128] e) { e = Sub(w, x) }>
        }""",
        w=np.zeros((64, 128), np.float32),
    )
    graph, _ = expanded(made)
    assert [node.op for node in graph.nodes] == ["Expand", "If"]


@pytest.mark.parametrize(
    "body",
    [
        "y = MatMul(x, w)",
        "y = MatMul(w, u)",
        "y = Gemm <transB = 1> (x, u, w)",
        "s = Unsqueeze(x, a)  r, h, c = LSTM <hidden_size = 32> (s, w, v)  y = Squeeze(h, a)",
        "y = Conv(x, w)",
    ],
    ids=["product", "constant data of a product", "bias", "cell", "convolution"],
)
def test_weights_and_biases_stay_initializers(body: str) -> None:
    shapes = {
        "Conv": (128, 64, 1, 1),
        "LSTM": (1, 128, 64),
        "w, u": (64, 128),
        "Gemm": (1, 4096),
        "MatMul(x": (64, 128),
    }
    shape = next(shape for name, shape in shapes.items() if name in body)
    made = model(
        f"g (float x) => (float y) {{ {body} }}",
        w=np.zeros(shape, np.float32), u=values(4096, 64), v=values(1, 128, 32), a=np.array([0]),
    )  # fmt: skip
    assert not ExpandConstants().apply(as_graph(made))


def test_onnxruntime_folds_them(tmp_path: Path, running_graph: Callable[[Path], onnx.GraphProto]) -> None:
    made = model(
        "g (float[512, 2048] x) => (float[512, 2048] y) { y = Mul(x, w) }", w=np.full((512, 2048), 0.25, np.float32)
    )
    graph = named_graph(made)
    ExpandConstants().apply(graph)
    RemoveUnused().apply(graph)
    onnx.save(to_model(graph), tmp_path / "small.onnx")
    assert (tmp_path / "small.onnx").stat().st_size < 1000
    assert [node.op_type for node in running_graph(tmp_path / "small.onnx").node] == ["Mul"]
