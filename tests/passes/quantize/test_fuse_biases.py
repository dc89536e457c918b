"""FuseBiases makes the products of codes Gemms, whose kernels add the bias."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_texts import apply_once, difference, model, nodes, ops, outputs, sample, values

from onnxq.ir import Graph, as_graph, to_model
from onnxq.onnx_api import infer_shapes
from onnxq.passes import FuseBiases
from onnxq.rewrite import Changes

SCALES = {"s": np.float32(0.02), "t": np.linspace(0.004, 0.006, 16).astype(np.float32)}
CODES = np.random.default_rng(0).integers(-127, 128, (32, 16)).astype(np.int8)


def graph_of(body: str, *, shape: str = "2, 5, 32", fed: str = "", **stored: np.ndarray) -> Graph:
    """A product of codes called p, and what stands behind it."""
    text = f"""g (float[{shape}] x{fed}) => (y) {{
      c = QuantizeLinear(x, s, z) d = DequantizeLinear(c, s, z) w = DequantizeLinear <axis = 1> (k, t)
      [product] p = MatMul(d, w) {body} }}"""
    given = {**SCALES, "z": np.uint8(128), "k": CODES, "b": values(16), **stored}
    graph = as_graph(model(text, **given))
    infer_shapes(graph)
    return graph


@pytest.mark.parametrize(
    ("shape", "written"),
    [
        ("32", ["Reshape", "Gemm", "Reshape"]),
        ("5, 32", ["Gemm"]),
        ("2, 5, 32", ["Reshape", "Gemm", "Reshape"]),
        ("N, 5, 32", ["Reshape", "Gemm", "Reshape"]),
        ("2, 3, N, 32", ["Reshape", "Gemm", "Reshape"]),
        ("N, M, 32", ["Reshape", "Shape", "Slice", "Concat", "Gemm", "Reshape"]),
    ],
)
@pytest.mark.parametrize("add", ["Add(p, b)", "Add(b, p)"])
def test_the_product_and_its_bias_become_a_gemm(shape: str, written: list[str], add: str) -> None:
    graph = graph_of(f"[sum] y = {add}", shape=shape)
    inputs = sample(to_model(graph))
    expected = outputs(graph, inputs)

    assert apply_once(FuseBiases(), graph) == Changes(("product",))

    assert [op for op in ops(graph) if not op.endswith("Linear")] == written
    assert [tensor.name for tensor in graph.outputs] == ["y"]
    # Half a step of the bias's codes.
    assert difference(outputs(graph, inputs), expected) < 1e-4


def test_products_of_the_same_data_share_its_matrix() -> None:
    graph = graph_of("[a] e = Add(p, b) [second] q = MatMul(d, w) [b] f = Add(q, b) y = Mul(e, f)", shape="N, M, 32")
    inputs = sample(to_model(graph))
    expected = outputs(graph, inputs)

    assert apply_once(FuseBiases(), graph).changed == ("product", "second")

    assert [len(nodes(graph, op)) for op in ("Reshape", "Shape", "Slice", "Gemm")] == [3, 1, 1, 2]
    assert difference(outputs(graph, inputs), expected) < 1e-4


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("[sum] y = Add(p, wrong)", "its bias is no vector of 16 values"),
        ("[sum] y = Add(p, tall)", "its bias has more axes than its data"),
        ("[sum] y = Add(p, huge)", "its bias is too large for its accumulator"),
    ],
)
def test_other_sums_are_left_with_the_reason(body: str, reason: str) -> None:
    stored = {"wrong": values(5, 1), "tall": values(1, 1, 1, 16), "huge": np.full(16, 1e9, np.float32)}
    graph = graph_of(body, **stored)

    assert apply_once(FuseBiases(), graph) == Changes((), (("product", reason),))


@pytest.mark.parametrize(
    "body",
    [
        "[sum] e = Add(p, b) y = Add(e, p)",
        "[sum] y = Add(p, x2)",
        "[sum] y = Sub(p, b)",
        "[sum] y = Add(p, p)",
    ],
)
def test_what_is_no_bias_of_a_product_alone_stays(body: str) -> None:
    assert not apply_once(FuseBiases(), graph_of(body, fed=", float[16] x2"))


def test_float_products_and_overridable_biases_stay() -> None:
    graph = as_graph(
        model("g (float[2, 5, 32] x) => (y) { p = MatMul(x, w) y = Add(p, b) }", w=values(32, 16), b=values(16))
    )
    assert not apply_once(FuseBiases(), graph)
    graph = graph_of("[sum] y = Add(p, b)")
    bias = next(tensor for tensor in graph.initializers if tensor.name == "b")
    bias.overridable_input = to_model(graph).graph.input[0]
    assert FuseBiases().apply(graph).left == (("product", "its bias can be overridden by an input"),)


@pytest.mark.parametrize("shape", ["32", "5, 32", "2, 5, 32"])
def test_data_of_unknown_rank_is_measured_when_it_runs(shape: str) -> None:
    graph = graph_of("[sum] y = Add(p, b)", shape=shape)
    inputs = sample(to_model(graph))
    expected = outputs(graph, inputs)
    for node in graph.nodes:
        for tensor in node.outputs:
            tensor.shape = None

    assert apply_once(FuseBiases(), graph) == Changes(("product",))

    assert "Shape" in ops(graph)
    assert difference(outputs(graph, inputs), expected) < 1e-4


def test_a_body_has_matrices_of_its_own() -> None:
    text = """g (float[2, 5, 32] x, bool o) => (y) {
      c = QuantizeLinear(x, s, z) w = DequantizeLinear <axis = 1> (k, t)
      y = If (o) <
        then_branch = a () => (u) { d = DequantizeLinear(c, s, z) [one] p = MatMul(d, w) u = Add(p, b) },
        else_branch = e () => (v) { f = DequantizeLinear(c, s, z) [two] q = MatMul(f, w) v = Add(q, b) }> }"""
    graph = as_graph(model(text, **SCALES, z=np.uint8(128), k=CODES, b=values(16)))
    infer_shapes(graph)
    inputs = {"x": values(2, 5, 32), "o": np.array(True)}
    expected = outputs(graph, inputs)

    assert apply_once(FuseBiases(), graph).changed == ("one", "two")

    assert difference(outputs(graph, inputs), expected) < 1e-4


@pytest.mark.parametrize("data", ["float[2,5,32] x", "float[N,M,32] x"])
@pytest.mark.parametrize(
    "behind",
    [
        "y = Identity(a)",
        "y = Relu(a)",
        "y = Tanh(a)",
        "h = Relu(a) y = MatMul(h, v)",
        "y = MatMul(a, v)",
        "y = Add(a, x)",
    ],
)
def test_one_kernel_multiplies_and_adds_whatever_follows(
    data: str, behind: str, build, quantize_to, running_graph, tmp_path: Path
) -> None:
    made = build(f"({data}) => (y) {{ p = MatMul(x, w) a = Add(p, b) {behind} }}", w=(32, 32), b=(32,), v=(32, 32))

    quantize_to(made, tmp_path / "q.onnx")

    found = [node.op_type for node in running_graph(tmp_path / "q.onnx").node]
    assert found.count("QGemm") == 1
    assert found.count("MatMulIntegerToFloat") == behind.count("MatMul")
    assert not {"DequantizeLinear", "Sum"} & set(found)
