"""Whatever public function is given a model in memory, the caller's own stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from conftest import Build
from onnx import ModelProto

import onnxq
from onnxq.ir import Graph, all_graphs, read_model, to_model
from onnxq.rewrite import Changes, Pass

MODEL = """(float[N,16] x, bool c) => (float[N,16] y) {
    one = Constant <value = float {2}> ()
    [scaled] s = Mul(x, one)
    [dot] m = MatMul(s, w)
    [shift] a = Add(m, b)
    [branch] y = If (c) <
        then_branch = yes () => (t) { k = Constant <value = float {3}> () t = Mul(a, k) },
        else_branch = no () => (e) { e = Identity(a) }
    >
}"""
SAMPLES = [{"x": np.float32(np.eye(4, 16) * (index + 1)), "c": np.array(bool(index % 2))} for index in range(4)]


class Ruin(Pass):
    """Edit whatever there is to edit."""

    def apply(self, graph: Graph) -> Changes:
        for scope in all_graphs(graph):
            for node in scope.nodes:
                node.name = f"{node.name}.ruined"
                for tensor in node.inputs:
                    if isinstance(tensor, gs.Constant):
                        tensor.values = tensor.values * 1.0
        graph.set_metadata("ruined", "yes")
        graph.doc_string = "ruined"
        return Changes(("everything",))


def _quantized(model: Any) -> object:
    return onnxq.quantize(
        model,
        SAMPLES,
        prepare=[Ruin()],
        goal=onnxq.Goal(force=True),
        budget=onnxq.Budget(search="off", latency_seconds=0),
    )


FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "plan": lambda model: onnxq.plan(model, prepare=[Ruin()]),
    "calibrate": lambda model: onnxq.calibrate(model, SAMPLES, prepare=[Ruin()]),
    "quantize": _quantized,
    "prepare": onnxq.prepare,
    "run_passes": lambda model: onnxq.run_passes(model, [Ruin(), "LiftConstants"], verify_each=onnxq.Verify()),
}


@pytest.fixture(scope="module")
def model(build: Build) -> ModelProto:
    return build(MODEL, w=(16, 16), b=(16,))


@pytest.fixture(scope="module")
def quantized(model: ModelProto) -> ModelProto:
    return to_model(_quantized(model).graph)  # type: ignore[attr-defined]


def everything(graph: Graph) -> list[object]:
    """Every node and tensor of a graph with its name, in order."""
    found: list[object] = []
    for scope in all_graphs(graph):
        found += [scope, *scope.inputs, *scope.outputs, *scope.initializers]
        for node in scope.nodes:
            found += [node, node.name, node.op, *node.inputs, *node.outputs, *(one.name for one in node.outputs)]
    return found


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_callers_graph_and_proto_stay_as_they_were(function: Callable[[Any], object], model: ModelProto) -> None:
    _check_untouched(function, model)


def test_a_callers_quantized_graph_and_proto_stay_as_they_were(quantized: ModelProto) -> None:
    _check_untouched(onnxq.dequantize, quantized)


def test_saving_leaves_a_graph_as_it_is(model: ModelProto, tmp_path: Path) -> None:
    _check_untouched(lambda given: onnxq.save(given, tmp_path / "m.onnx") if isinstance(given, Graph) else None, model)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_plain_graph_stays_as_it_was(function: Callable[[Any], object], model: ModelProto) -> None:
    graph = gs.import_onnx(model)  # noqa: TID251 - what users hand over
    before = [(node.name, node.op, [tensor.name for tensor in node.inputs]) for node in graph.nodes]
    function(graph)
    assert [(node.name, node.op, [tensor.name for tensor in node.inputs]) for node in graph.nodes] == before
    assert all(type(node) is gs.Node for node in graph.nodes)


def _check_untouched(function: Callable[[Any], object], model: ModelProto) -> None:
    proto = ModelProto()
    proto.CopyFrom(model)
    graph = read_model(proto)
    known, written = everything(graph), to_model(graph).SerializeToString(deterministic=True)
    for given in (graph, proto):
        function(given)
    assert proto == model
    assert everything(graph) == known
    assert to_model(graph).SerializeToString(deterministic=True) == written
