"""InsertQuantizeDequantize around and inside bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from inserted_pairs import FINE, activation, insert, plan, read
from model_texts import difference, model, outputs, sample
from onnx import ModelProto

from onnxq.algorithms.encodings import Codes
from onnxq.ir import Graph, all_graphs, as_graph, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import InsertQuantizeDequantize
from onnxq.planning.plan import Activation
from onnxq.rewrite import Changes

CAPTURED = """g (float[4] x, bool c) => (float[4] y) {
    [p] t = Neg(x)
    y = If (c) <
        then_branch = yes () => (float[4] u) { [inner] u = Abs(t) },
        else_branch = no () => (float[4] v) { [other] v = Neg(t) }>
}"""


def test_a_body_reads_the_dequantized_tensor_where_every_consumer_does() -> None:
    graph, _ = insert(model(CAPTURED), [activation("t", every_consumer=True)])
    assert read(graph, "inner") == read(graph, "other") == ["t.copy"]
    assert read(graph, "t.share") == ["t.dequantized"]


def test_a_body_reads_the_float_tensor_otherwise() -> None:
    graph, changes = insert(model(CAPTURED), [activation("t")])
    assert changes == Changes((), (("t", "no node reads it"),))
    assert read(graph, "inner") == ["t"]


def scope_ops(graph: Graph) -> list[list[str]]:
    """Op types of each graph, the main graph first, those of control flow aside."""
    return [[node.op for node in scope.nodes if not node.subgraphs()] for scope in all_graphs(graph)]


@pytest.mark.parametrize("every_consumer", [True, False])
def test_static_nodes_of_bodies_decode_codes_that_are_made_outside(*, every_consumer: bool) -> None:
    graph, _ = insert_anywhere(model(CAPTURED), [activation("t", every_consumer=every_consumer)], ["inner", "other"])
    assert scope_ops(graph) == [["Neg", "QuantizeLinear"], ["DequantizeLinear", "Abs"], ["DequantizeLinear", "Neg"]]
    assert read(graph, "inner") == ["t.dequantized"]
    assert read(graph, "other") == ["t.dequantized.1"]
    assert read(graph, "t.dequantize.1") == ["t.codes", "t.scale", "t.zero_point"]


def test_float_nodes_of_bodies_read_floats_beside_static_ones() -> None:
    graph, _ = insert_anywhere(model(CAPTURED), [activation("t", every_consumer=True)], ["inner"])
    main = ["Neg", "QuantizeLinear", "DequantizeLinear"]
    assert scope_ops(graph) == [main, ["DequantizeLinear", "Abs"], ["Neg"]]
    assert (read(graph, "inner"), read(graph, "other")) == (["t.dequantized.1"], ["t.dequantized"])


IN_BODY = """g (float[4] x, int64 n) => (float[4] y) {
    y = Loop (n, go, x) <body = b (int64 i, bool g, float[4] s) => (bool h, float[4] t) {
        h = Identity(g) [a] r = Neg(s) [b] t = Abs(r)
    }>
}"""


def test_tensors_of_bodies_are_quantized_where_they_are_made() -> None:
    wanted = [activation("s"), activation("r", every_consumer=True), activation("t", every_consumer=True)]
    graph, changes = insert_anywhere(model(IN_BODY, go=np.array(True)), wanted, ["a", "b"])
    assert changes.changed == ("s", "r", "t")
    pair = ["QuantizeLinear", "DequantizeLinear"]
    assert scope_ops(graph) == [[], [*pair, "Identity", "Neg", *pair, "Abs", *pair]]
    body = next(scope for scope in all_graphs(graph) if scope.parent is not None)
    assert [tensor.name for tensor in body.inputs] == ["i", "g", "s"]
    assert body.outputs[1].inputs[0].name == "t.dequantize"


def insert_anywhere(
    made: ModelProto, activations: Sequence[Activation], static: Sequence[str]
) -> tuple[Graph, Changes]:
    """Apply the pass twice, and see that the model is valid and does what it did."""
    graph = as_graph(made)
    infer_shapes(graph)
    step = InsertQuantizeDequantize(plan(activations, static), Codes({item.tensor: FINE for item in activations}))
    changes = step.apply(graph)
    assert not step.apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for seed in (0, 1):
        inputs = {name: value if value.dtype != np.int64 else np.array(2) for name, value in sample(made, seed).items()}
        assert difference(outputs(graph, inputs), outputs(made, inputs)) < 0.1
    return graph, changes
