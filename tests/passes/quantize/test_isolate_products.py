"""IsolateProducts hides what stands behind a product where onnxruntime would not multiply the product's codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from model_texts import apply_once, difference, model, ops, outputs, sample, values
from onnx import defs

from onnxq.algorithms.encode import encode
from onnxq.config.scheme import Mode, Rule, Scheme, Spec
from onnxq.ir import Graph, as_graph, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import DecodeWeights, IsolateProducts
from onnxq.planning.plan import Plan
from onnxq.planning.planner import make_plan
from onnxq.runtime.sessions import open_session
from onnxq.runtime.targets import target_named

# The oldest supported onnxruntime multiplies no codes in a Gemm.
NEW_RUNTIME = defs.onnx_opset_version() > 24
SCHEME = Scheme((Rule(Mode.WEIGHT_ONLY, weight=Spec("int4", (16,))),))


def graph_of(body: str, dtype: type = np.float32) -> tuple[Graph, Plan]:
    name = "float16" if dtype is np.float16 else "float"
    made = model(
        f"g ({name}[3, 32] x) => ({name}[3, 16] y) {{ {body} }}",
        opset=21, ir_version=10, w=values(32, 32, dtype=dtype), v=values(32, 16, dtype=dtype),
        b=values(32, dtype=dtype), row=values(1, 32, dtype=dtype),
        low=np.array(-0.25, dtype), high=np.array(0.5, dtype),
    )  # fmt: skip
    graph = as_graph(made)
    infer_shapes(graph)
    return graph, make_plan(graph, SCHEME, target_named("onnxruntime-cpu"))


FIRST = {
    "product": "[p] a = MatMul(x, w)",
    "gemm": "[p] a = Gemm(x, w, b)",
    "sum": "[p] m = MatMul(x, w) [s] a = Add(m, b)",
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize(
    ("clamp", "written"),
    [
        ("Relu(a)", ["Max"]),
        ("Clip(a, low, high)", ["Max", "Min"]),
        ("Clip(a, low)", ["Max"]),
        ("Clip(a, , high)", ["Min"]),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_product_behind_a_clamp_is_multiplied_as_codes(
    first: str, clamp: str, written: list[str], dtype: type, tmp_path: Path
) -> None:
    body = f"{FIRST[first]} [c] r = {clamp} [q] y = MatMul(r, v)"
    graph, plan = graph_of(body, dtype)
    before = to_model(graph)
    assert apply_once(IsolateProducts(plan), graph).changed == ("c",)
    assert [op for op in ops(graph) if op in ("Max", "Min", "Relu", "Clip")] == written
    inputs = sample(before)
    # Between float16 operators the runtime keeps float32, more or less often.
    assert difference(outputs(graph, inputs), outputs(before, inputs)) <= (0 if dtype is np.float32 else 1e-3)
    DecodeWeights(plan, encode(plan, graph)).apply(graph)
    open_session(to_model(graph), optimized_copy=tmp_path / "runs.onnx")
    runs = [node.op_type for node in onnx.load(tmp_path / "runs.onnx").graph.node]
    assert runs.count("MatMulNBits") == 2 or not NEW_RUNTIME


@pytest.mark.parametrize(
    "body",
    [
        "[p] a = MatMul(x, v) [c] y = Relu(a)",
        "[p] a = MatMul(x, w) [t] t = Tanh(a) [c] r = Relu(t) [q] y = MatMul(r, v)",
        "[p] a = MatMul(x, w) [c] r = Relu(a) [s] s = Add(r, a) [q] y = MatMul(s, v)",
        "[n] a = Neg(x) [c] r = Relu(a) [q] y = MatMul(r, v)",
    ],
    ids=["last", "not behind", "not alone", "no product"],
)
def test_other_clamps_are_left(body: str) -> None:
    graph, plan = graph_of(body)
    assert not apply_once(IsolateProducts(plan), graph)
    assert "Relu" in ops(graph)


@pytest.mark.parametrize("other", ["r", "row", "x"], ids=["residual", "row", "input"])
@pytest.mark.parametrize("clamp", ["Relu", "Tanh"])
def test_a_sum_of_matrices_stays_apart_from_the_product(other: str, clamp: str, tmp_path: Path) -> None:
    body = f"[n] r = Neg(x) [p] a = MatMul(x, w) [s] t = Add(a, {other}) [c] u = {clamp}(t) [q] y = MatMul(u, v)"
    graph, plan = graph_of(body)
    before = to_model(graph)
    assert apply_once(IsolateProducts(plan), graph).changed == ("s",)
    assert "Sum" in ops(graph)
    assert difference(outputs(graph, sample(before)), outputs(before, sample(before))) == 0
    DecodeWeights(plan, encode(plan, graph)).apply(graph)
    open_session(to_model(graph), optimized_copy=tmp_path / "runs.onnx")
    runs = [node.op_type for node in onnx.load(tmp_path / "runs.onnx").graph.node]
    assert runs.count("MatMulNBits") == 2 or not NEW_RUNTIME


def test_a_vector_is_still_added_by_the_product() -> None:
    graph, plan = graph_of("[p] a = MatMul(x, w) [s] t = Add(a, b) [c] u = Tanh(t) [q] y = MatMul(u, v)")
    assert not apply_once(IsolateProducts(plan), graph)


IN_BODIES = {
    "clamp": "t = Relu(m) u = Neg(t)",
    "two clamps": "t = Clip(m, low, high) u = Neg(t)",
    "bias": "s = Add(m, b) t = Relu(s) u = Neg(t)",
    "matrix": "s = Add(m, x) u = Neg(s)",
}


@pytest.mark.parametrize("body", IN_BODIES)
@pytest.mark.parametrize("preset", ["int8", "int4-block32"])
def test_what_stands_in_a_body_is_not_taken_for_the_end_of_a_product_around_it(
    body: str, preset: str, build, quantize_to, tmp_path: Path
) -> None:
    made = build(
        f"""(float[4,64] x, bool c) => (float[4,64] y) {{
            [p] m = MatMul(x, w)
            y = If (c) <
                then_branch = yes () => (float[4,64] u) {{ {IN_BODIES[body]} }},
                else_branch = no () => (float[4,64] v) {{ v = Neg(x) }}>
        }}""",
        w=(64, 64), b=(64,), low=np.float32([-0.25]).reshape(()), high=np.float32([0.5]).reshape(()),
    )  # fmt: skip
    generator = np.random.default_rng(0)
    samples = [
        {"x": generator.standard_normal((4, 64)).astype(np.float32), "c": np.array(index % 2 == 0)}
        for index in range(4)
    ]
    report = quantize_to(made, tmp_path / "q.onnx", scheme=preset, samples=samples).report
    assert report.plan.by_node["p"].mode is (Mode.STATIC if preset == "int8" else Mode.WEIGHT_ONLY)
    assert report.agreement.worst_sqnr > 10


CHAINS = {
    "plain": "[a] p = MatMul(x, w0) [b] q = MatMul(p, w1) [c] y = MatMul(q, w2)",
    "clamps": "[a] p = MatMul(x, w0) [r] pr = Relu(p) [b] q = MatMul(pr, w1) [s] qr = Relu(q) [c] y = MatMul(qr, w2)",
    "biases": "[a] p0 = MatMul(x, w0) [d] p = Add(p0, b0) [b] q0 = MatMul(p, w1) [e] q = Add(q0, b1)"
    "[c] y = MatMul(q, w2)",
    "matrices": "[a] p = MatMul(x, w0) [b] q0 = MatMul(p, w1) [e] q = Add(q0, p) [c] y = MatMul(q, w2)",
    "readers": "[a] p = MatMul(x, w0) [t] t = Tanh(p) [b] q0 = MatMul(p, w1) [m] q = Mul(q0, t) [c] y = MatMul(q, w2)",
}


@pytest.mark.skipif(not NEW_RUNTIME, reason="the oldest supported onnxruntime multiplies no codes of 8 bits")
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("modes", ["sss", "sww", "sws", "sdw", "wss", "wsw", "wws", "dsd", "dws"])
def test_products_of_codes_in_different_modes_keep_their_kernels(
    chain: str, modes: str, build, quantize_to, running_graph, tmp_path: Path
) -> None:
    made = build(
        f"(float[1,64] x) => (float[1,64] y) {{ {CHAINS[chain]} }}",
        w0=(64, 64), w1=(64, 64), w2=(64, 64), b0=(64,), b1=(64,),
    )  # fmt: skip
    kinds = {"s": Mode.STATIC, "d": Mode.DYNAMIC, "w": Mode.WEIGHT_ONLY}
    codes = Spec("int8-narrow", (128,))
    rules = [
        Rule(kinds[kind], nodes=(node,), weight=codes if kind == "w" else None)
        for node, kind in zip("abc", modes, strict=True)
    ]
    path = tmp_path / "q.onnx"
    quantized = quantize_to(made, path, scheme=Scheme((*rules, Rule(Mode.STATIC))))
    assert [quantized.report.plan.by_node[node].mode for node in "abc"] == [kinds[kind] for kind in modes]
    runs = [node.op_type for node in running_graph(path).node]
    assert not {"MatMul", "Gemm"} & set(runs)
    assert runs.count("MatMulNBits") == modes.count("w")
