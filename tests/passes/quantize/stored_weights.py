"""Weights that are stored in small models, and what decodes them."""

from __future__ import annotations

from typing import Any

import onnx
from model_texts import apply_once, named_graph, node_named
from onnx import ModelProto, TensorProto

from onnxq.algorithms.encode import encode
from onnxq.config.presets import preset_named
from onnxq.config.scheme import Granularity, Mode, QuantSpec
from onnxq.ir import Graph, constants, to_model
from onnxq.passes import CompressWeights, RemoveUnused
from onnxq.planning.plan import Decision, Plan, Weight
from onnxq.planning.planner import make_plan
from onnxq.rewrite import Changes
from onnxq.runtime.targets import target_named

PER_CHANNEL = QuantSpec("int8-narrow", granularity=Granularity.CHANNEL)
PER_TENSOR = QuantSpec("int8-narrow")


def store(made: ModelProto | Graph) -> tuple[Graph, Changes]:
    """Store all weights that the preset for storage picks."""
    graph = named_graph(made)
    plan = make_plan(graph, preset_named("int8-storage"), target_named("onnxruntime-cpu"))
    changes = apply_once(CompressWeights(plan, encode(plan, graph)), graph)
    RemoveUnused().apply(graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    return graph, changes


def decoded_by(graph: Graph, node: str, index: int = 1) -> list[Any]:
    """The decoder in front of a node's input, first node first."""
    found: list[Any] = []
    tensor = node_named(graph, node).inputs[index]
    while tensor.inputs:
        found.insert(0, tensor.inputs[0])
        tensor = tensor.inputs[0].inputs[0]
    return found


def largest_float(graph: Graph) -> int:
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return max(tensor.nbytes for tensor in constants(graph) if tensor.tensor_data.onnx_dtype in floats)


def decisions(*weights: tuple[str, Weight]) -> Plan:
    return Plan(
        tuple(Decision(node, "", Mode.STORAGE, "asked for", (weight,)) for node, weight in weights),
        (),
        "scheme",
        "target",
    )
