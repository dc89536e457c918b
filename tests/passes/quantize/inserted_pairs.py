"""Pairs that are inserted into small graphs, and who reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from model_texts import difference, node_named, nodes, outputs, sample
from onnx import ModelProto

from onnxq.algorithms.encodings import Encodings
from onnxq.config.scheme import Mode, QuantSpec
from onnxq.ir import Graph, as_graph, to_model
from onnxq.numerics.affine import QuantParams
from onnxq.onnx_api import infer_shapes
from onnxq.passes import InsertQuantizeDequantize
from onnxq.planning.plan import Activation, Decision, Plan
from onnxq.rewrite import Changes

AFFINE = QuantSpec("uint8", symmetric=False)
SYMMETRIC = QuantSpec("int8")
FINE = QuantParams(np.asarray(np.float32(0.02)), np.asarray(np.uint8(128)))


def plan(activations: Sequence[Activation], static: Sequence[str] = ()) -> Plan:
    decisions = tuple(Decision(name, "", Mode.STATIC, "integer kernel") for name in static)
    return Plan(decisions, tuple(activations), "scheme", "target")


def activation(tensor: str, *, every_consumer: bool = False, spec: QuantSpec = AFFINE) -> Activation:
    return Activation(tensor, spec, tensor, every_consumer=every_consumer)


def insert(made: ModelProto, activations: Sequence[Activation], static: Sequence[str] = ()) -> tuple[Graph, Changes]:
    """Apply the pass twice: the pairs are exactly those of the plan, and the model still does what it did."""
    graph = as_graph(made)
    infer_shapes(graph)
    step = InsertQuantizeDequantize(plan(activations, static), Encodings({item.tensor: FINE for item in activations}))
    changes = step.apply(graph)
    assert not step.apply(graph)
    assert len(nodes(graph, "QuantizeLinear")) == len(nodes(graph, "DequantizeLinear")) == len(changes.changed)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 0.1
    return graph, changes


def read(graph: Graph, node: str) -> list[str]:
    return [tensor.name for tensor in node_named(graph, node).inputs]
