"""Models whose constants are folded."""

from __future__ import annotations

from model_texts import Array, difference, outputs, sample
from onnx import ModelProto

from onnxq.ir import Graph, as_graph, constants
from onnxq.onnx_api import infer_shapes
from onnxq.passes import FoldConstants
from onnxq.rewrite import Changes


def fold(made: ModelProto, *, infer: bool = True) -> tuple[Graph, Changes]:
    """Apply the pass, check that the outputs stay and that a second time there is nothing to do."""
    graph = as_graph(made)
    if infer:
        infer_shapes(graph)
    changes = FoldConstants().apply(graph)
    again = FoldConstants().apply(graph)
    assert not again
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= 1e-6
    return graph, changes


def value(graph: Graph, name: str) -> Array:
    (found,) = (tensor for tensor in constants(graph) if tensor.name == name)
    return found.values
