"""QuantizeDynamically writes standard integer products, which onnxruntime fuses, and shares what they read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import difference, model, ops, outputs, sample, values
from onnx import GraphProto, ModelProto

from onnxq.algorithms.encode import encode
from onnxq.config.scheme import Granularity, Mode, Rule, Scheme, Spec
from onnxq.ir import as_graph, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import NameNodes, QuantizeDynamically, RemoveUnused
from onnxq.planning.planner import make_plan
from onnxq.runtime.targets import target_named


def dynamic(made: ModelProto, weight: Spec | None = None) -> ModelProto:
    """Make every node dynamic that can be; a second time there is nothing left to do."""
    graph = as_graph(made)
    NameNodes().apply(graph)
    infer_shapes(graph)
    scheme = Scheme((Rule(Mode.DYNAMIC, weight=weight),))
    plan = make_plan(graph, scheme, target_named("onnxruntime-cpu"))
    step = QuantizeDynamically(plan, encode(plan, graph))
    assert step.apply(graph)
    assert not step.apply(graph)
    RemoveUnused().apply(graph)
    found = to_model(graph)
    onnx.checker.check_model(found, full_check=True)
    return found


MATMUL = model("g (float[4,32] x) => (float[4,16] y) { [n] y = MatMul(x, w) }", w=values(32, 16))
GEMM = model(
    "g (float[4,32] x) => (float[4,16] y) { [n] y = Gemm <transB = 1> (x, w, b) }", w=values(16, 32), b=values(16)
)
TWO = model(
    "g (float[4,32] x) => (float[4,16] y, float[4,16] z) { [a] y = MatMul(x, w) [b] z = MatMul(x, v) }",
    w=values(32, 16),
    v=values(32, 16),
)
IN_BODY = model(
    """g (float[4,32] x, bool c) => (float[4,16] y) {
        y = If (c) <
            then_branch = yes () => (float[4,16] u) { [inner] u = MatMul(x, w) },
            else_branch = no () => (float[4,16] v) { [other] v = MatMul(x, w) }>
    }""",
    w=values(32, 16),
)


@pytest.mark.parametrize("made", [MATMUL, GEMM, TWO, IN_BODY], ids=["MatMul", "Gemm", "two", "body"])
@pytest.mark.parametrize("per", [Granularity.TENSOR, Granularity.CHANNEL])
def test_results_stay_close(made: ModelProto, per: Granularity) -> None:
    inputs = sample(made, 0)
    found = dynamic(made, Spec("int8-narrow", per))
    assert difference(outputs(made, inputs), outputs(found, inputs)) < 0.05


def test_the_codes_are_those_that_the_standard_defines() -> None:
    # Neighbours of different signs, so that no two products are too much for 16 bits.
    weight = np.abs(values(32, 16)) * np.float32([[1], [-1]] * 16)
    made = model("g (float[4,32] x) => (float[4,16] y) { [n] y = MatMul(x, w) }", w=weight)
    found = dynamic(made, Spec("int8-narrow", Granularity.CHANNEL))
    x = sample(made, 1)["x"]
    scale = np.abs(weight).max(axis=0) / np.float32(127)
    codes = np.rint(weight / scale)
    low, high = min(x.min(), 0), max(x.max(), 0)
    step = np.float32((high - low) / np.float32(255))
    zero = np.rint(-low / step)
    data = np.clip(np.rint(x / step) + zero, 0, 255) - zero
    assert np.allclose(outputs(found, {"x": x})["y"], (data @ codes) * (step * scale), rtol=1e-5, atol=1e-6)


def test_products_of_the_same_data_share_its_codes() -> None:
    assert Counter(node.op_type for node in dynamic(TWO).graph.node)["DynamicQuantizeLinear"] == 1


@pytest.mark.parametrize(("made", "kernel"), [(MATMUL, "DynamicQuantizeMatMul"), (GEMM, "DynamicQuantizeMatMul")])
def test_a_runtime_fuses_all_of_it_into_one_kernel(
    made: ModelProto, kernel: str, running_graph: Callable[[Path], GraphProto], tmp_path: Path
) -> None:
    onnx.save(dynamic(made), tmp_path / "m.onnx")
    assert [node.op_type for node in running_graph(tmp_path / "m.onnx").node] == [kernel]


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (model("g (float[4,4] x) => (float[4,4] y) { [n] y = Relu(x) }"), "Relu has no dynamic integer kernel"),
        (
            model("g (float[4,32] x) => (float[4,16] y) { [n] y = Gemm <alpha = 0.5> (x, w) }", w=values(32, 16)),
            "Gemm with alpha, beta or transA has no integer kernel",
        ),
        (
            model("g (float[2,4,32] x) => (float[2,4,16] y) { [n] y = MatMul(x, w) }", w=values(2, 32, 16)),
            r"a MatMul weight of shape [2, 32, 16] has no dynamic integer kernel",
        ),
    ],
)
def test_what_cannot_be_dynamic_says_why(made: ModelProto, sentence: str) -> None:
    graph = as_graph(made)
    infer_shapes(graph)
    plan = make_plan(graph, Scheme((Rule(Mode.DYNAMIC),)), target_named("onnxruntime-cpu"))
    assert sentence in plan.by_node["n"].reason
    assert plan.count(Mode.DYNAMIC) == 0
    assert not QuantizeDynamically(plan, encode(plan, graph)).apply(graph)
    assert ops(graph) == [node.op_type for node in made.graph.node]
