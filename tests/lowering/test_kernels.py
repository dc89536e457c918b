"""The ways to write weights."""

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
from onnxq.lowering import (
    AllowedOps,
    is_kernel_block,
    kernel_supports,
    minimum_opset,
)
from onnxq.passes import CompressWeights, DecodeWeights, ReplaceWithContrib
from onnxq.planning.plan import Plan
from onnxq.planning.weights import decide_weights, format_opset


def test_their_names_are_those_of_the_command_line() -> None:
    assert list(AllowedOps) == ["fastest", "qdq", "ort"]


def test_standard_onnx_has_no_operators_of_the_runtimes_own() -> None:
    assert [emit for emit in AllowedOps if emit.has_own] == ["fastest", "ort"]


SPECS = [
    QuantSpec("int4", (16,)),
    QuantSpec("int4", (32,), scale="bfloat16"),
    QuantSpec("uint4", (32,), symmetric=False),
    QuantSpec("int8-narrow", (64,)),
    QuantSpec("uint8", (16,), symmetric=False),
    QuantSpec("int2", (16,), scale="ue4m3", two_level=True),
    QuantSpec("uint2", (32,), symmetric=False, scale="e8m0"),
]


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        *((spec, True) for spec in SPECS),
        (QuantSpec("int4", (8,)), False),
        (QuantSpec("int4", (48,)), False),
        (QuantSpec("int4", (2, 16)), False),
        (QuantSpec("int4", Granularity.CHANNEL), False),
        (QuantSpec("int4", (32,), storage=Storage.WORDS), False),
        (QuantSpec("int16", (32,)), False),
        (QuantSpec("float4e2m1", (32,)), False),
    ],
    ids=str,
)
def test_they_take_small_integers_in_blocks_of_a_power_of_two(spec: QuantSpec, fits: bool) -> None:
    assert kernel_supports(spec, "MatMul") is kernel_supports(spec, "Gather") is fits
    assert not kernel_supports(spec, "Conv")
    assert is_kernel_block(spec.granularity) or not fits


# The opset that a decoder asks for is enough, and no more than its newest type or operator needs.

# The newest operators of every other kind; float6 needs an opset that onnxruntime does not load.
CHECKED = [spec for spec in specs()[0] if not spec.format.startswith("float6")][::29]


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
        graph.opset = format_opset(plan, emit) or 17
        encodings = encode(plan, graph)
        contrib = [ReplaceWithContrib(plan, encodings, emit)] if emit.has_own else []
        for step in (*contrib, DecodeWeights(plan, encodings)):
            step.apply(graph)
        checked += bool(CompressWeights(plan, encodings).apply(graph)) or decision.mode is Mode.WEIGHT_ONLY
        remove_unused(graph)
        onnx.checker.check_model(to_model(graph), full_check=True)
    assert checked > 20


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
        (QuantSpec("float6e2m3", (32,)), "Conv", AllowedOps.QDQ, True, 19),
        (QuantSpec("int8", (32,), scale="bfloat16"), "Conv", AllowedOps.QDQ, True, 13),
        (QuantSpec("int8", (32,), scale="float16"), "Conv", AllowedOps.QDQ, True, 11),
        (QuantSpec("int8", (32,), scale="e8m0", scale_rounding=Rounding.FLOOR), "MatMul", AllowedOps.ORT, False, 7),
    ],
    ids=str,
)
def test_the_opset_is_that_of_the_newest_part(
    spec: QuantSpec, op: str, emit: AllowedOps, folded: bool, opset: int
) -> None:
    assert minimum_opset(spec, op, emit, folded=folded) == opset
