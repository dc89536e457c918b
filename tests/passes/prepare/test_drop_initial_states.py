"""DropInitialStates leaves out zeros that recurrent layers begin with anyway."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import Array, apply_once, difference, model, named_graph, nodes, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.passes import DropInitialStates, RemoveUnused

WEIGHTS = {"LSTM": 4, "GRU": 3, "RNN": 1}
ZEROS = np.zeros((1, 2, 5), np.float32)


def layer(op: str, states: str, before: str = "", **constants: Array) -> ModelProto:
    gates = WEIGHTS[op]
    return model(
        f"g (float[7, 2, 3] x) => (float[7, 1, 2, 5] y) {{ {before} y = {op}<hidden_size=5>(x, w, r, , {states}) }}",
        w=values(1, gates * 5, 3), r=values(1, gates * 5, 5), **constants,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "inputs"),
    [
        (layer("LSTM", ", h, c", h=ZEROS, c=ZEROS), 3),
        (layer("LSTM", ", h, c", h=ZEROS, c=values(1, 2, 5)), 7),
        (layer("LSTM", ", h, c", h=values(1, 2, 5), c=ZEROS), 6),
        (layer("GRU", ", h", h=ZEROS), 3),
        (layer("RNN", ", h", h=ZEROS), 3),
        (layer("RNN", ", h", h=values(1, 2, 5)), 6),
        (layer("GRU", "lengths, h", lengths=np.array([7, 4], np.int32), h=ZEROS), 5),
        (layer("GRU", ", h", "h = Expand(z, shape)", z=np.zeros(1, np.float32), shape=np.array([1, 2, 5])), 3),
        (layer("GRU", ", h", "h = ConstantOfShape(shape)", shape=np.array([1, 2, 5])), 3),
        (layer("GRU", ", h", "h = ConstantOfShape<value = float[1] {2}>(shape)", shape=np.array([1, 2, 5])), 6),
    ],
)
def test_states(made: ModelProto, inputs: int) -> None:
    graph = named_graph(made)
    apply_once(DropInitialStates(), graph)
    RemoveUnused().apply(graph)
    (node,) = (node for node in nodes(graph) if node.op in WEIGHTS)
    assert len(node.inputs) == inputs
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


def test_what_made_the_zeros_is_no_longer_needed() -> None:
    before = "s = Shape(x) b = Slice(s, one, two) k = Concat<axis=0>(one, b, five) h = Expand(z, k)"
    made = layer(
        "LSTM", ", h, h", before, z=np.zeros((1, 1, 1), np.float32),
        one=np.array([1]), two=np.array([2]), five=np.array([5]),
    )  # fmt: skip
    graph = named_graph(made)
    DropInitialStates().apply(graph)
    RemoveUnused().apply(graph)
    assert ops(graph) == ["LSTM"]
