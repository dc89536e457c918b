"""MatMul, Gemm and Einsum, and the products inside of operators of onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, ops, outputs, sample, values
from onnx import ModelProto, helper, numpy_helper, parser

from onnxq.ir import Graph, as_graph
from onnxq.onnx_api import infer_shapes
from onnxq.passes import (
    FlattenBatchedWeight,
    FoldShapes,
    ReplaceEinsum,
    ReplaceGemmBetweenReshapes,
    ReplaceMatMulBetweenReshapes,
    ReplaceMatMulOfMatrices,
    UnfuseProducts,
)
from onnxq.rewrite import RewriteRules

# ReplaceEinsum --------------------------------------------------------------------------------------------------------

EXTENTS = {"b": "2", "s": "N", "q": "3", "k": "5", "h": "2", "d": "4", "n": "2", "i": "3", "j": "4", "m": "6"}


def dims(term: str) -> str:
    return ", ".join(EXTENTS[name] for name in term)


def einsum(equation: str, *, constant: str = "", kind: str = "float") -> ModelProto:
    """The equation with the operand of that name (x or w) as a constant."""
    terms, result = equation.replace(" ", "").split("->")
    first, second = terms.split(",")
    inputs = [f"{kind}[{dims(term)}] {name}" for name, term in (("x", first), ("w", second)) if name != constant]
    term = {"x": first, "w": second}.get(constant)
    given = {} if term is None else {constant: values(*(int(EXTENTS[name]) for name in term))}
    return model(
        f"""g ({", ".join(inputs)}) => ({kind}[{dims(result)}] y) {{ y = Einsum <equation = "{equation}"> (x, w) }}""",
        **given,
    )


@pytest.mark.parametrize(
    ("equation", "constant", "expected"),
    [
        ("bsj,jk->bsk", "w", ["MatMul"]),
        ("bsj,kj->bsk", "w", ["MatMul"]),
        ("bsd,hnd->bshn", "w", ["MatMul", "Reshape"]),
        ("bshd,hdm->bsm", "w", ["Reshape", "MatMul"]),
        ("bshd, hdnm -> bsnm", "w", ["Reshape", "MatMul", "Reshape"]),
        ("bsj,jk->bks", "w", ["MatMul", "Transpose"]),
        ("bjs,jk->bsk", "w", ["Transpose", "MatMul"]),
        ("jk,bsj->bsk", "x", ["MatMul"]),
        ("qd,kd->qk", "", ["Transpose", "MatMul"]),
        ("bhqd,bhkd->bhqk", "", ["Transpose", "MatMul"]),
        ("bhqk,bhkd->bhqd", "", ["MatMul"]),
        ("bqhd,bkhd->bhqk", "", ["Transpose", "Transpose", "MatMul"]),
        ("bhqk,bkhd->bqhd", "", ["Transpose", "MatMul", "Transpose"]),
        ("bhkd,bhqk->bhqd", "", ["MatMul"]),
        ("hqd,hdk->hqk", "w", ["MatMul"]),
    ],
)
def test_becomes_a_product(equation: str, constant: str, expected: list[str]) -> None:
    made = einsum(equation, constant=constant)
    graph = named_graph(made)
    apply_once(ReplaceEinsum(), graph)
    assert ops(graph) == expected
    assert [node.op for node in graph.nodes if node.name == "Einsum_y"] == ["MatMul"]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (einsum("ij,ij->ij"), "it has no rows, no columns"),
        (einsum("ij,km->ijkm"), "it has no rows, no columns"),
        (einsum("ij,jk->k"), "no product of two tensors"),
        (einsum("bsqd,bhd->bsqh"), "several axes"),
        (einsum("bis,bsj->bij"), ""),
        (einsum("ij,jk->ik", kind="int32"), "not known well enough"),
    ],
)
def test_replace_einsum_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    changes = ReplaceEinsum().apply(named_graph(made))
    assert [reason in found for _, found in changes.skipped] == ([True] if reason else [])
    assert bool(changes) == (not reason)


def test_extents_that_may_differ_are_left() -> None:
    made = einsum("bis,bsj->bij")
    made.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "M"
    ((_, reason),) = ReplaceEinsum().apply(named_graph(made)).skipped
    assert reason == "the extents that it sums over are not known to be the same"


def test_a_weight_that_is_in_order_is_not_copied() -> None:
    graph = named_graph(einsum("bsj,jk->bsk", constant="w"))
    weight = graph.nodes[0].inputs[1]
    ReplaceEinsum().apply(graph)
    assert graph.nodes[0].inputs[1] is weight
    assert isinstance(weight.values, np.ndarray)


def test_a_weight_that_others_read_is_not_turned() -> None:
    made = einsum("bsj,kj->bsk", constant="w")
    made.graph.node.add(op_type="Neg", input=["w"], output=["other"])
    ((_, reason),) = ReplaceEinsum().apply(named_graph(made)).skipped
    assert reason == "others read its weight as it is"


# ReplaceMatMulOfMatrices ----------------------------------------------------------------------------------------------


def product_of_matrices(*bias: int, data: str = "N, 8", dtype: type = np.float32) -> ModelProto:
    kind = "float" if dtype is np.float32 else "double"
    return model(
        f"g ({kind}[{data}] x) => ({kind}[{data.replace('8', '4')}] y) {{ p = MatMul(x, w) y = Add(b, p) }}",
        w=values(8, 4, dtype=dtype), b=values(*bias, dtype=dtype),
    )  # fmt: skip


@pytest.mark.parametrize("bias", [(4,), (1, 4), (1,), (), (1, 1)])
def test_becomes_a_gemm(bias: tuple[int, ...]) -> None:
    made = product_of_matrices(*bias)
    graph = named_graph(made)
    apply_once(ReplaceMatMulOfMatrices(), graph)
    assert ops(graph) == ["Gemm"]
    assert graph.nodes[0].inputs[2].shape == (4,)
    assert graph.nodes[0].name == "MatMul_p"
    assert graph.nodes[0].origins == (("MatMul_p", "MatMul"), ("Add_y", "Add"))
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (product_of_matrices(4, data="2, N, 8"), "not known to be a matrix"),
        (product_of_matrices(2, 1, data="2, 8"), "not one value for each channel"),
        (product_of_matrices(4, dtype=np.float64), "it is of type float64"),
    ],
)
def test_replace_mat_mul_of_matrices_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = ReplaceMatMulOfMatrices().apply(named_graph(made)).skipped
    assert reason in found


# ReplaceMatMulBetweenReshapes -----------------------------------------------------------------------------------------

BOTH = RewriteRules((ReplaceGemmBetweenReshapes(), ReplaceMatMulBetweenReshapes()))


def windows(
    to: tuple[int, ...] = (4, 2, 2, 2), *, bias: tuple[int, ...] = (4,), weight: tuple[int, ...] = (8, 4)
) -> ModelProto:
    return model(
        f"""g (float[2, 2, 2, 8] x) => (float[{", ".join("abcd"[: len(to)])}] y) {{
            r = Reshape(x, rows) p = MatMul(r, w) s = Add(b, p) y = Reshape(s, to) }}""",
        rows=np.array([2, 4, 8]), w=values(*weight), b=values(*bias), to=np.array(to),
    )  # fmt: skip


@pytest.mark.parametrize("made", [windows(), windows((-1, 4)), windows(bias=(1, 1, 4)), windows((2, 2, 4, 2))])
def test_a_gemm_has_the_bias(made: ModelProto) -> None:
    graph = named_graph(made)
    apply_once(BOTH, graph)
    assert ops(graph) == ["Reshape", "Gemm", "Reshape"]
    assert graph.nodes[1].inputs[2].shape == (4,)
    assert [node.name for node in graph.nodes[1:]] == ["MatMul_p", "Reshape_y"]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (windows((2, 2, 2, 4)), "its result may have the shape of its data"),
        (windows((0, 2, 2, 4)), "copied from the data"),
        (windows((2, 4, 2, 2), bias=(4, 1)), "not one value for each channel"),
        (windows((2, 4, 2, 2), weight=(2, 8, 4)), "its weight is no matrix"),
    ],
)
def test_replace_mat_mul_between_reshapes_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = ReplaceMatMulBetweenReshapes().apply(named_graph(made)).skipped
    assert reason in found


# ReplaceGemmBetweenReshapes -------------------------------------------------------------------------------------------


def rows(
    attributes: str = "transB = 0",
    *,
    bias: tuple[int, ...] | None = (4,),
    weight: tuple[int, ...] = (8, 4),
    data: str = "2, 3, 8",
    result: str = "2, 3, 4",
    target: tuple[int, ...] = (2, 3, 4),
    tail: str = "",
) -> ModelProto:
    given = {} if bias is None else {"b": values(*bias)}
    return model(
        f"""g (float[{data}] x) => (float[{result}] y) {{
            r = Reshape(x, rows) p = Gemm <{attributes}> (r, w{", b" if given else ""}) y = Reshape(p, to) {tail} }}""",
        rows=np.array([-1, 8]), w=values(*weight), to=np.array(target), **given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (rows(), ["MatMul", "Add"]),
        (rows(bias=None), ["MatMul"]),
        (rows(bias=(1, 4)), ["MatMul", "Add"]),
        (rows("transB = 1", weight=(4, 8)), ["MatMul", "Add"]),
        (rows(data="2, 3, 5, 8", result="2, 3, 5, 4", target=(2, 3, 5, 4)), ["MatMul", "Add"]),
    ],
)
def test_rows_are_multiplied_where_they_stand(made: ModelProto, expected: list[str]) -> None:
    graph = named_graph(made)
    apply_once(BOTH, graph)
    assert ops(graph) == expected
    assert [node.op for node in graph.nodes if node.name == "Gemm_p"] == ["MatMul"]
    assert all(len(node.inputs[1].shape) < 2 for node in nodes(graph, "Add"))
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


def test_several_products_of_the_same_rows() -> None:
    made = model(
        """g (float[2, 3, 8] x) => (float[2, 3, 4] y, float[2, 3, 4] z) {
            r = Reshape(x, rows) p = Gemm(r, w, b) y = Reshape(p, to) q = Gemm(r, v) z = Reshape(q, to) }""",
        rows=np.array([-1, 8]), to=np.array([2, 3, 4]), w=values(8, 4), v=values(8, 4, seed=1), b=values(4),
    )  # fmt: skip
    graph = named_graph(made)
    apply_once(BOTH, graph)
    assert sorted(ops(graph)) == ["Add", "MatMul", "MatMul"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (rows(data="M, 3, 8", result="K, 3, 4", target=(-1, 3, 4)), "does not have the shape of its data"),
        (rows(result="3, 2, 4", target=(3, 2, 4)), "does not have the shape of its data"),
        (rows(bias=(6, 1)), "not one value for each channel"),
        (rows("transB = 1", weight=(4, 8), tail="other = Neg(w)"), "others read its weight"),
    ],
)
def test_replace_gemm_between_reshapes_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = ReplaceGemmBetweenReshapes().apply(named_graph(made)).skipped
    assert reason in found


HEADS = """g (float[B, S, 2, 4] x) => (float[B, S, 4] y) {
    r = Reshape(x, rows) p = Gemm(r, w, b) s = Shape <start = 0, end = 2> (x)
    to = Concat <axis = 0> (s, last) y = Reshape(p, to) }"""


def test_heads_are_merged_without_a_computed_target() -> None:
    made = model(HEADS, rows=np.array([-1, 8]), w=values(8, 4), b=values(4), last=np.array([4]))
    graph = named_graph(made)
    FoldShapes().apply(graph)
    apply_once(BOTH, graph)
    assert [node.op for node in graph.nodes if node.outputs[0].outputs or node.outputs[0].graph_output_of] == [
        "Shape", "Reshape", "MatMul", "Add",
    ]  # fmt: skip
    assert graph.nodes[-3].inputs[1].values.tolist() == [0, 0, 8]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


def test_heads_stay_where_the_target_is_constant() -> None:
    made = rows(data="2, 3, 2, 4")
    ((_, reason),) = ReplaceGemmBetweenReshapes().apply(named_graph(made)).skipped
    assert reason == "its data needs a Reshape anyway"


# FlattenBatchedWeight -------------------------------------------------------------------------------------------------


def batched_product(data: str, result: str, *weight: int, tail: str = "") -> ModelProto:
    return model(f"g (float[{data}] x) => (float[{result}] y) {{ {tail} y = MatMul(x, w) }}", w=values(*weight))


@pytest.mark.parametrize(
    "made",
    [batched_product("2, N, 8", "2, N, 4", 1, 8, 4), batched_product("2, 3, N, 8", "2, 3, N, 4", 1, 1, 8, 4),
     batched_product("2, 3, N, 8", "2, 3, N, 4", 1, 8, 4)],
)  # fmt: skip
def test_leading_ones_go(made: ModelProto) -> None:
    graph = named_graph(made)
    apply_once(FlattenBatchedWeight(), graph)
    assert graph.nodes[0].inputs[1].shape == (8, 4)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 1e-6


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (batched_product("N, 8", "1, N, 4", 1, 8, 4), "fewer dimensions"),
        (batched_product("2, N, 8", "2, N, 4", 2, 8, 4), "not 1"),
        (batched_product("2, N, 8", "2, N, 4", 8, 4), "no leading dimensions"),
        (batched_product("2, N, 8", "2, N, 4", 1, 8, 4, tail="other = Neg(w)"), "others than products"),
    ],
)
def test_flatten_batched_weight_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = FlattenBatchedWeight().apply(named_graph(made)).skipped
    assert reason in found


# UnfuseProducts -------------------------------------------------------------------------------------------------------

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
        ("[p] y = ms.FusedMatMul <transB = 1> (x, r)", "it transposes or scales a tensor that is computed at run time"),
        ('[p] y = ms.FusedGemm <activation = "LeakyRelu"> (r, v, c)', "its activation LeakyRelu has parameters"),
        ("[p] y = ms.Attention <num_heads = 2> (x, x, b)", "its weight is no constant matrix"),
        ("[p] y, z = ms.Attention <num_heads = 2> (x, w, b)", "it has a past, or rotary embeddings"),
        ("[p] y = ms.Attention <num_heads = 2, do_rotary = 1> (x, w, b)", "it has a past, or rotary embeddings"),
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
