"""MatMul, Gemm and Einsum, and the products inside of operators of onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from model_texts import apply_once, named_graph, nodes, ops, values
from onnx import helper
from rule_cases import Case, Rule, table

from onnxq.ir import Graph
from onnxq.passes import (
    FlattenBatchedWeight,
    FoldShapes,
    ReplaceEinsum,
    ReplaceGemmBetweenReshapes,
    ReplaceMatMulBetweenReshapes,
    ReplaceMatMulOfMatrices,
    UnfuseProducts,
)

EXTENTS = {"b": "2", "s": "N", "q": "3", "k": "5", "h": "2", "d": "4", "n": "2", "i": "3", "j": "4", "m": "6"}
contract = Rule(ReplaceEinsum())


def einsum(equation: str, constant: str = "", expected: str = "", *, kind: str = "float", extra: str = "",
           **options: object) -> Case:  # fmt: skip
    """The equation with the operand of that name (x or w) as a constant."""
    terms = equation.replace(" ", "").partition("->")[0]
    operands = dict(zip("xw", terms.split(","), strict=True))
    fed = ", ".join(f"{kind}[{', '.join(EXTENTS[axis] for axis in term)}] {name}"
                    for name, term in operands.items() if name != constant)  # fmt: skip
    stored = {
        name: values(*(int(EXTENTS[axis]) for axis in term)) for name, term in operands.items() if name == constant
    }
    body = f'y = Einsum <equation = "{equation}"> (x, w) {extra}'
    return contract(body, expected, inputs=fed, **stored, **options)


def named_product(graph: Graph) -> bool:
    return [node.op for node in graph.nodes if node.name == "Einsum_y"] == ["MatMul"]


EINSUMS = [
    *(einsum(equation, constant, expected, holds=named_product) for equation, constant, expected in [
        ("bsj,jk->bsk", "w", "MatMul"),
        ("bsj,kj->bsk", "w", "MatMul"),
        ("bsd,hnd->bshn", "w", "MatMul Reshape"),
        ("bshd,hdm->bsm", "w", "Reshape MatMul"),
        ("bshd, hdnm -> bsnm", "w", "Reshape MatMul Reshape"),
        ("bsj,jk->bks", "w", "MatMul Transpose"),
        ("bjs,jk->bsk", "w", "Transpose MatMul"),
        ("jk,bsj->bsk", "x", "MatMul"),
        ("qd,kd->qk", "", "Transpose MatMul"),
        ("bhqd,bhkd->bhqk", "", "Transpose MatMul"),
        ("bhqk,bhkd->bhqd", "", "MatMul"),
        ("bqhd,bkhd->bhqk", "", "Transpose Transpose MatMul"),
        ("bhqk,bkhd->bqhd", "", "Transpose MatMul Transpose"),
        ("bhkd,bhqk->bhqd", "", "MatMul"),
        ("hqd,hdk->hqk", "w", "MatMul"),
        ("bis,bsj->bij", "", "MatMul")]),
    einsum("ij,ij->ij", stays="it has no rows, no columns"),
    einsum("ij,km->ijkm", stays="it has no rows, no columns"),
    einsum("ij,jk->k", stays="no product of two tensors"),
    einsum("bsqd,bhd->bsqh", stays="several axes"),
    einsum("ij,jk->ik", kind="int32", runs=False, stays="not known well enough"),
    contract('y = Einsum <equation = "bis,bsj->bij"> (x, w)', inputs="float[2, 3, N] x, float[2, M, 4] w",
             stays="the extents that it sums over are not known to be the same"),
    einsum("bsj,kj->bsk", "w", extra="z = Neg(w)", stays="others read its weight as it is"),
]  # fmt: skip

matrices = Rule(ReplaceMatMulOfMatrices(), "float[N, 8] x", w=values(8, 4))
windows = Rule((ReplaceGemmBetweenReshapes(), ReplaceMatMulBetweenReshapes()), "float[2, 2, 2, 8] x", rows=[2, 4, 8],
               w=values(8, 4), b=values(4))  # fmt: skip
BIASED = "p = MatMul(x, w) y = Add(b, p)"
WINDOWS = "r = Reshape(x, rows) p = MatMul(r, w) s = Add(b, p) y = Reshape(s, to)"
between = ReplaceMatMulBetweenReshapes()


def biased(position: int, *names: str) -> object:
    """Whether the Gemm at a position has one bias for each channel, and the nodes from there on these names."""
    return lambda graph: (
        graph.nodes[position].inputs[2].shape == (4,) and [node.name for node in graph.nodes[position:]] == list(names)
    )


TO_GEMM = [
    *(matrices(BIASED, "Gemm", b=values(*bias), holds=biased(0, "MatMul_p"))
      for bias in [(4,), (1, 4), (1,), (), (1, 1)]),
    matrices(f"[m] {BIASED.replace('y =', '[a] y =')}", "Gemm", b=values(4),
             holds=lambda graph: graph.nodes[0].origins == (("m", "MatMul"), ("a", "Add"))),
    matrices(BIASED, inputs="float[2, N, 8] x", b=values(4), stays="not known to be a matrix"),
    matrices(BIASED, inputs="float[2, 8] x", b=values(2, 1), stays="not one value for each channel"),
    matrices(BIASED, inputs="double[N, 8] x", w=values(8, 4, dtype=np.float64), b=values(4, dtype=np.float64),
             stays="it is of type float64"),
    *(windows(WINDOWS, "Reshape Gemm Reshape", to=to, b=values(*bias), holds=biased(1, "MatMul_p", "Reshape_y"))
      for to, bias in [([4, 2, 2, 2], (4,)), ([-1, 4], (4,)), ([4, 2, 2, 2], (1, 1, 4)), ([2, 2, 4, 2], (4,))]),
    *(windows(WINDOWS, step=between, to=to, runs=False, **options)
      for to, options in [
          ([2, 2, 2, 4], {"stays": "its result may have the shape of its data"}),
          ([0, 2, 2, 4], {"stays": "copied from the data"}),
          ([2, 4, 2, 2], {"stays": "not one value for each channel", "b": values(4, 1)}),
          ([2, 4, 2, 2], {"stays": "its weight is no matrix", "w": values(2, 8, 4)})]),
]  # fmt: skip

rows = Rule(windows.step, "float[2, 3, 8] x", rows=[-1, 8], w=values(8, 4), t=values(4, 8), v=values(8, 4, seed=1),
            b=values(4), wide=values(1, 4), to=[2, 3, 4], last=[4])  # fmt: skip
ROWS = "r = Reshape(x, rows) p = Gemm%s y = Reshape(p, to)"
alone = ReplaceGemmBetweenReshapes()


def flat(graph: Graph) -> bool:
    """Whether the product has the name of the Gemm, and biases are vectors."""
    product = [node.op for node in graph.nodes if node.name == "Gemm_p"] == ["MatMul"]
    return product and all(len(node.inputs[1].shape) < 2 for node in graph.nodes if node.op == "Add")


TO_MATMUL = [
    rows(ROWS % "(r, w, b)", "MatMul Add", holds=flat),
    rows(ROWS % "(r, w)", "MatMul", holds=flat),
    rows(ROWS % "(r, w, wide)", "MatMul Add", holds=flat),
    rows(ROWS % "<transB = 1> (r, t, b)", "MatMul Add", holds=flat),
    rows(ROWS % "(r, w, b)", "MatMul Add", inputs="float[2, 3, 5, 8] x", to=[2, 3, 5, 4], holds=flat),
    rows(ROWS % "(r, w, b)" + " q = Gemm(r, v) z = Reshape(q, to)", "MatMul Add MatMul"),
    rows(ROWS % "(r, w, b)", step=alone, inputs="float[M, 3, 8] x", to=[-1, 3, 4],
         stays="does not have the shape of its data"),
    rows(ROWS % "(r, w, b)", step=alone, to=[3, 2, 4], stays="does not have the shape of its data"),
    rows(ROWS % "(r, w, column)", step=alone, column=values(6, 1), stays="not one value for each channel"),
    rows(ROWS % "<transB = 1> (r, t, b)" + " z = Neg(t)", step=alone, stays="others read its weight"),
    rows(ROWS % "(r, w, b)", step=alone, inputs="float[2, 3, 2, 4] x", stays="its data needs a Reshape anyway"),
]  # fmt: skip


def test_heads_are_merged_without_a_computed_target() -> None:
    case = rows("""r = Reshape(x, rows) p = Gemm(r, w, b) s = Shape <start = 0, end = 2> (x)
        target = Concat <axis = 0> (s, last) y = Reshape(p, target)""", inputs="float[B, S, 2, 4] x")  # fmt: skip
    graph = named_graph(case.made)
    # The shape of the result is known once shapes are folded.
    FoldShapes().apply(graph)
    assert case.step.apply(graph).changed
    assert "Gemm" not in ops(graph)
    [target] = [node.inputs[1].values.tolist() for node in nodes(graph, "Reshape")]
    assert target == [0, 0, 8]


batched = Rule(FlattenBatchedWeight(), "float[2, N, 8] x")
FLATTENED = [
    *(batched("y = MatMul(x, w)", "MatMul", inputs=f"float[{data}] x", w=values(*weight),
              holds=lambda graph: graph.nodes[0].inputs[1].shape == (8, 4))
      for data, weight in [("2, N, 8", (1, 8, 4)), ("2, 3, N, 8", (1, 1, 8, 4)), ("2, 3, N, 8", (1, 8, 4))]),
    batched("y = MatMul(x, w)", inputs="float[N, 8] x", w=values(1, 8, 4), stays="fewer dimensions"),
    batched("y = MatMul(x, w)", w=values(2, 8, 4), stays="not 1"),
    batched("y = MatMul(x, w)", w=values(8, 4), stays="no leading dimensions"),
    batched("z = Neg(w) y = MatMul(x, w)", w=values(1, 8, 4), stays="others than products"),
]  # fmt: skip

FED = {"x": values(2, 5, 8, seed=1), "r": values(5, 8, seed=2), "i": values(2, 3, 9, 9, seed=3),
       "m": np.array([[1] * 5, [1, 1, 1, 0, 0]], np.int32), "n": np.array([5, 3], np.int32),
       "o": np.ones((2, 1), np.int32)}  # fmt: skip
STORED = {"w": (8, 24), "v": (8, 16), "t": (16, 8), "b": (24,), "c": (16,), "k": (4, 3, 3, 3), "e": (4,)}
fused = Rule(UnfuseProducts(), "float[2,5,8] x, float[5,8] r, float[2,3,9,9] i, int32[2,5] m, int32[2] n, int32[2,1] o",
             **{name: values(*shape) for name, shape in STORED.items()})  # fmt: skip
ATTENTION = "MatMul Add Split MultiHeadAttention"


def unfused(body: str, expected: str = "", **options: object) -> Case:
    domains, body = '"com.microsoft" : 1', body.replace("ms.", "com.microsoft.")
    return fused(f"[p] {body}" if "[p]" not in body else body, expected, domains=domains, feed=FED, **options)


UNFUSED = [
    *(unfused(body, expected, changed="p") for body, expected in [
        ("y = ms.FusedMatMul (x, v)", "MatMul"),
        ("y = ms.FusedMatMul <alpha = 0.5> (x, v)", "MatMul"),
        ("y = ms.FusedMatMul <transB = 1, alpha = 2.0> (x, t)", "MatMul"),
        ('y = ms.FusedGemm <activation = "Sigmoid", transB = 1, alpha = 0.5> (r, t, c)', "Gemm Sigmoid"),
        ('y = ms.FusedGemm <activation = "Relu"> (r, v, c)', "Gemm Relu"),
        ('y = ms.FusedConv <activation = "Tanh", kernel_shape = [3, 3]> (i, k, e)', "Conv Tanh"),
        ('z = Conv (i, k) [p] y = ms.FusedConv <activation = "Relu", kernel_shape = [3, 3]> (i, k, e, z)',
         "Conv Conv Add Relu"),
        ("y = ms.Attention <num_heads = 2, unidirectional = 1> (x, w, b, m)", ATTENTION),
        ("y = ms.Attention <num_heads = 2, scale = 0.1, qkv_hidden_sizes = [6, 6, 12]> (x, w, b, m)", ATTENTION)]),
    unfused("y = ms.Attention <num_heads = 2> (x, w, b)", ATTENTION, changed="p",
            holds=lambda graph: {node.origins for node in graph.nodes} == {(("p", "Attention"),)}),
    *(unfused(body, stays=reason, runs=False) for body, reason in [
        ("y = ms.FusedMatMul <transB = 1> (x, r)", "it transposes or scales a tensor that is computed at run time"),
        ('y = ms.FusedGemm <activation = "LeakyRelu"> (r, v, c)', "its activation LeakyRelu has parameters"),
        ("y = ms.Attention <num_heads = 2> (x, x, b)", "its weight is no constant matrix"),
        ("y, z = ms.Attention <num_heads = 2> (x, w, b)", "it has a past, or rotary embeddings"),
        ("y = ms.Attention <num_heads = 2, do_rotary = 1> (x, w, b)", "it has a past, or rotary embeddings"),
        ("y = ms.Attention <num_heads = 2> (x, w, b, n)", "MultiHeadAttention may not know its mask"),
        ("y = ms.Attention <num_heads = 2> (x, w, b, o)", "MultiHeadAttention may not know its mask"),
        ("y = ms.Attention <num_heads = 2, qkv_hidden_sizes = [8, 8]> (x, w, b)", "its weight has 24 columns")]),
    unfused("y = ms.Attention <num_heads = 2> (x, w, b)", opset=12, runs=False,
            stays="Split takes sizes from opset 13 on"),
]  # fmt: skip


@table(EINSUMS, TO_GEMM, TO_MATMUL, FLATTENED, UNFUSED)
def test_rules(case: Case) -> None:
    case.check()


def test_a_weight_that_is_in_order_is_not_copied() -> None:
    graph = named_graph(einsum("bsj,jk->bsk", "w").made)
    weight = graph.nodes[0].inputs[1]
    ReplaceEinsum().apply(graph)
    assert graph.nodes[0].inputs[1] is weight


def test_a_node_without_outputs_is_no_matter() -> None:
    graph = named_graph(unfused("y = Relu (x) [p] q = ms.FusedMatMul (x, v)").made)
    graph.nodes[1].outputs.clear()
    assert not apply_once(UnfuseProducts(), graph)


def test_attention_of_a_fused_network_multiplies_integers(quantize_to, running_graph, tmp_path: Path) -> None:
    model = unfused("a = ms.Attention <num_heads = 2> (x, w, b, m) [q] y = ms.FusedMatMul (a, v)").made
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [2, 5, 16]))

    quantize_to(model, tmp_path / "q.onnx", samples=[FED])

    operators = [node.op_type for node in running_graph(tmp_path / "q.onnx").node]
    assert operators.count("QGemm") + operators.count("MatMulIntegerToFloat") == 2
