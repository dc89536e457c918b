"""The opset that a decoder asks for is enough, and no more than its newest type or operator needs."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from lowering.combinations import OPERATORS, specs
from onnxq.algorithms.encode import encode
from onnxq.config.scheme import Granularity, Mode, QuantSpec, Rounding, Storage
from onnxq.ir import as_graph, remove_unused, to_model
from onnxq.lowering import AllowedOps, minimum_opset
from onnxq.passes import CompressWeights, DecodeWeights, ReplaceWithContrib
from onnxq.planning.plan import Plan
from onnxq.planning.weights import decide_weights, weight_opset

# The newest operators of every other kind; float6 needs an opset that onnxruntime does not load.
CHECKED = [spec for spec in specs()[0] if not spec.format.startswith("float6")][::7]


TEXTS = {
    "MatMul": "(float[3, 24] x) => (float[3, 20] y) { [node] y = MatMul(x, w) }",
    "Gather": "(int64[3] i) => (float[3, 24] y) { [node] y = Gather(w, i) }",
    "Conv": "(float[1, 12, 3, 1] x) => (float[1, 10, 1, 1] y) { [node] y = Conv(x, w) }",
}


@pytest.mark.parametrize("emit", AllowedOps)
@pytest.mark.parametrize("op", TEXTS)
def test_models_are_valid_at_the_opset_that_is_asked_for(op: str, emit: AllowedOps) -> None:
    shape = OPERATORS[op][1]
    weight = np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)
    made = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> main {TEXTS[op]}')
    made.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    checked = 0
    for spec in CHECKED:
        graph = as_graph(made)
        decision = decide_weights(graph.nodes[0], Mode.WEIGHT_ONLY, spec, "asked for", in_body=False)
        plan = Plan((decision,), (), "scheme", "target")
        graph.opset = weight_opset(plan, emit) or 17
        codes = encode(plan, graph)
        contrib = [ReplaceWithContrib(plan, codes, emit)] if emit.has_own else []
        for step in (*contrib, DecodeWeights(plan, codes, emit)):
            step.apply(graph)
        checked += bool(CompressWeights(plan, codes, emit).apply(graph)) or decision.mode is Mode.WEIGHT_ONLY
        remove_unused(graph)
        onnx.checker.check_model(to_model(graph), full_check=True)
    assert checked > 100


@pytest.mark.parametrize(
    ("spec", "op", "emit", "folded", "opset"),
    [
        (QuantSpec("int8", Granularity.CHANNEL), "Conv", AllowedOps.QDQ, True, 7),
        (QuantSpec("int8", Granularity.CHANNEL), "MatMul", AllowedOps.QDQ, False, 13),
        (QuantSpec("int8", (32,)), "Conv", AllowedOps.QDQ, True, 11),
        (QuantSpec("int8", (32,)), "MatMul", AllowedOps.QDQ, False, 21),
        (QuantSpec("int8", (32,)), "MatMul", AllowedOps.ORT, False, 7),
        (QuantSpec("int4", (32,)), "Conv", AllowedOps.QDQ, True, 21),
        (QuantSpec("int4", (32,)), "Gather", AllowedOps.QDQ, False, 18),
        (QuantSpec("int4", (32,), storage=Storage.WORDS), "Conv", AllowedOps.QDQ, True, 18),
        (QuantSpec("int2", (32,)), "MatMul", AllowedOps.QDQ, False, 25),
        (QuantSpec("float8e4m3fn"), "Conv", AllowedOps.QDQ, True, 19),
        (QuantSpec("float8e4m3fn"), "Gather", AllowedOps.QDQ, False, 7),
        (QuantSpec("float4e2m1", (32,)), "Conv", AllowedOps.QDQ, True, 21),
        (QuantSpec("float4e2m1", (32,)), "Conv", AllowedOps.STRICT, True, 23),
        (QuantSpec("float6e2m3", (32,)), "Conv", AllowedOps.QDQ, True, 19),
        (QuantSpec("float6e2m3", (32,)), "Conv", AllowedOps.STRICT, True, 28),
        (QuantSpec("int8", (32,), scale="bfloat16"), "Conv", AllowedOps.QDQ, True, 13),
        (QuantSpec("int8", (32,), scale="float16"), "Conv", AllowedOps.QDQ, True, 11),
        (QuantSpec("int8", (32,), scale="e8m0", scale_rounding=Rounding.FLOOR), "MatMul", AllowedOps.ORT, False, 7),
        (QuantSpec("int8", (32,), scale="e8m0", scale_rounding=Rounding.FLOOR), "MatMul", AllowedOps.STRICT, False, 24),
    ],
    ids=str,
)
def test_the_opset_is_that_of_the_newest_part(
    spec: QuantSpec, op: str, emit: AllowedOps, folded: bool, opset: int
) -> None:
    assert minimum_opset(spec, op, emit, folded=folded) == opset
