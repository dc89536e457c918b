"""One LSTM, and the same of integers."""

from __future__ import annotations

import numpy as np
from model_texts import (
    Array,
    apply_once,
    model,
    named_graph,
    values,
)
from onnx import ModelProto

from onnxq.algorithms.encode import encode
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rule, Scheme
from onnxq.ir import Graph
from onnxq.lowering import AllowedOps
from onnxq.passes import QuantizeDynamically, QuantizeRecurrentCells, RemoveUnused
from onnxq.planning.planner import make_plan
from onnxq.rewrite import Changes
from onnxq.runtime.targets import target_named

STEPS, BATCH, SIZE, HIDDEN = 6, 3, 24, 16
PER_CHANNEL = QuantSpec("int8-narrow", Granularity.CHANNEL)
PER_TENSOR = QuantSpec("int8-narrow", Granularity.TENSOR)
STORED = ("codes", "scale", "zero_point")


def cell(
    attributes: str = "", given: str = "b", *, inputs: str = "", directions: int = 1, **stored: Array
) -> ModelProto:
    """An LSTM whose inputs behind the weights are ``given``, as in ``b, , h``; known ones hold random values."""
    kinds = {
        "b": values(directions, 8 * HIDDEN, seed=1),
        "h": values(directions, BATCH, HIDDEN, seed=2),
        "c": values(directions, BATCH, HIDDEN, seed=3),
        "p": values(directions, 3 * HIDDEN, seed=4),
        "lengths": np.array([STEPS, 2, 0], np.int32),
    }
    read = [name.strip() for name in given.split(",")]
    weights = {
        "w": values(directions, 4 * HIDDEN, SIZE, seed=5, scale=0.2),
        "r": values(directions, 4 * HIDDEN, HIDDEN, seed=6, scale=0.2),
    }
    text = f"""g (float[{STEPS}, {BATCH}, {SIZE}] x{inputs}) => (float y, float last, float state) {{
        [cell] y, last, state = LSTM <hidden_size = {HIDDEN}{attributes}> (x, w, r, {given})
    }}"""
    made = model(text, **{**weights, **{name: kinds[name] for name in read if name in kinds}, **stored})
    for output in made.graph.output:
        output.type.tensor_type.ClearField("shape")
    return made


def quantized(
    made: ModelProto, weight: QuantSpec | None = None, target: str = "onnxruntime-cpu"
) -> tuple[Graph, Changes]:
    """Replace every cell that a plan makes dynamic; a second time there is nothing left to do."""
    graph = named_graph(made)
    scheme = Scheme((Rule(Mode.DYNAMIC, weight=weight),))
    plan = make_plan(graph, scheme, target_named(target), emit=AllowedOps.ORT)
    encodings = encode(plan, graph)
    changes = apply_once(QuantizeRecurrentCells(plan, encodings), graph)
    assert not QuantizeDynamically(plan, encodings).apply(graph)
    RemoveUnused().apply(graph)
    return graph, changes
