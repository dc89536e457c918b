"""UnfuseProducts writes the products of onnxruntime's own operators as those of ONNX."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_texts import apply_once, difference, ops, outputs, values
from onnx import ModelProto, helper, numpy_helper, parser

from onnxq.ir import Graph, as_graph
from onnxq.onnx_api import infer_shapes
from onnxq.passes import UnfuseProducts

FED = "float[2,5,8] x, float[5,8] r, float[2,3,9,9] i, int32[2,5] m, int32[2] n, int32[2,1] o"
STORED = {"w": (8, 24), "v": (8, 16), "t": (16, 8), "b": (24,), "c": (16,), "k": (4, 3, 3, 3), "e": (4,)}


def made(body: str, opset: int = 17) -> ModelProto:
    text = f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> g ({FED}) => (y) {{ {body} }}'
    model = parser.parse_model(text.replace("ms.", "com.microsoft."))
    for name, shape in STORED.items():
        model.graph.initializer.append(numpy_helper.from_array(values(*shape), name))
    return model


def graph_of(body: str, opset: int = 17) -> Graph:
    graph = as_graph(made(body, opset))
    infer_shapes(graph)
    return graph


def inputs() -> dict[str, np.ndarray]:
    mask = np.ones((2, 5), np.int32)
    mask[1, 3:] = 0
    fed = {"x": values(2, 5, 8, seed=1), "r": values(5, 8, seed=2), "i": values(2, 3, 9, 9, seed=3), "m": mask}
    return {**fed, "n": np.array([5, 3], np.int32), "o": np.ones((2, 1), np.int32)}


@pytest.mark.parametrize(
    ("body", "written"),
    [
        ("[p] y = ms.FusedMatMul (x, v)", ["MatMul"]),
        ("[p] y = ms.FusedMatMul <alpha = 0.5> (x, v)", ["MatMul"]),
        ("[p] y = ms.FusedMatMul <transB = 1, alpha = 2.0> (x, t)", ["MatMul"]),
        ('[p] y = ms.FusedGemm <activation = "Sigmoid", transB = 1, alpha = 0.5> (r, t, c)', ["Gemm", "Sigmoid"]),
        ('[p] y = ms.FusedGemm <activation = "Relu"> (r, v, c)', ["Gemm", "Relu"]),
        ('[p] y = ms.FusedConv <activation = "Tanh", kernel_shape = [3, 3]> (i, k, e)', ["Conv", "Tanh"]),
        (
            'z = Conv (i, k) [p] y = ms.FusedConv <activation = "Relu", kernel_shape = [3, 3]> (i, k, e, z)',
            ["Conv", "Conv", "Add", "Relu"],
        ),
        ("[p] y = ms.Attention <num_heads = 2> (x, w, b)", ["MatMul", "Add", "Split", "MultiHeadAttention"]),
        (
            "[p] y = ms.Attention <num_heads = 2, unidirectional = 1> (x, w, b, m)",
            ["MatMul", "Add", "Split", "MultiHeadAttention"],
        ),
        (
            "[p] y = ms.Attention <num_heads = 2, scale = 0.1, qkv_hidden_sizes = [6, 6, 12]> (x, w, b, m)",
            ["MatMul", "Add", "Split", "MultiHeadAttention"],
        ),
    ],
)
def test_the_product_stands_for_itself(body: str, written: list[str]) -> None:
    graph = graph_of(body)
    expected = outputs(made(body), inputs())

    assert apply_once(UnfuseProducts(), graph).changed == ("p",)

    assert ops(graph) == written
    assert [tensor.name for tensor in graph.outputs] == ["y"]
    assert difference(outputs(graph, inputs()), expected) < 2e-6


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("[p] y = ms.FusedMatMul <transB = 1> (x, r)", "it transposes or scales what is computed at run time"),
        ("[p] y = ms.FusedMatMul (x)", "it lacks an input"),
        ('[p] y = ms.FusedGemm <activation = "LeakyRelu"> (r, v, c)', "its activation LeakyRelu has parameters"),
        ("[p] y = ms.Attention <num_heads = 2> (x, x, b)", "its weight is no constant matrix"),
        ("[p] y, z = ms.Attention <num_heads = 2> (x, w, b)", "it remembers what it was given before, or turns"),
        ("[p] y = ms.Attention <num_heads = 2, do_rotary = 1> (x, w, b)", "it remembers what it was given before"),
        ("[p] y = ms.Attention <num_heads = 2> (x, w, b, n)", "MultiHeadAttention may not know its mask"),
        ("[p] y = ms.Attention <num_heads = 2> (x, w, b, o)", "MultiHeadAttention may not know its mask"),
        ("[p] y = ms.Attention <num_heads = 2, qkv_hidden_sizes = [8, 8]> (x, w, b)", "its weight has 24 columns"),
    ],
)
def test_other_forms_are_left_with_the_reason(body: str, reason: str) -> None:
    changes = apply_once(UnfuseProducts(), graph_of(body))
    assert not changes
    assert [name for name, _ in changes.skipped] == ["p"]
    assert changes.skipped[0][1].startswith(reason)


def test_all_that_is_made_of_a_node_stands_for_it() -> None:
    graph = graph_of("[p] y = ms.Attention <num_heads = 2> (x, w, b)")
    UnfuseProducts().apply(graph)
    assert {node.origins for node in graph.nodes} == {(("p", "Attention"),)}


def test_a_node_without_outputs_is_no_matter() -> None:
    graph = graph_of("y = Relu (x) [p] q = ms.FusedMatMul (x, v)")
    graph.nodes[1].outputs.clear()
    assert not apply_once(UnfuseProducts(), graph)


def test_an_opset_whose_split_takes_no_sizes_is_left() -> None:
    changes = UnfuseProducts().apply(graph_of("[p] y = ms.Attention <num_heads = 2> (x, w, b)", opset=12))
    assert changes.skipped == (("p", "Split takes sizes from opset 13 on"),)


def test_attention_of_a_fused_network_multiplies_integers(quantize_to, running_graph, tmp_path: Path) -> None:
    model = made("[p] a = ms.Attention <num_heads = 2> (x, w, b, m) [q] y = ms.FusedMatMul (a, v)")
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [2, 5, 16]))

    quantize_to(model, tmp_path / "q.onnx", samples=[inputs()])

    found = [node.op_type for node in running_graph(tmp_path / "q.onnx").node]
    assert found.count("QGemm") + found.count("MatMulIntegerToFloat") == 2
