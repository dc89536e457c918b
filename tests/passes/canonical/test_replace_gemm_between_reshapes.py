"""A Gemm that only works on rows of a tensor becomes MatMul and Add."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.passes import ReplaceGemmBetweenReshapes, ReplaceMatMulBetweenReshapes
from onnxq.rewrite import RewriteRules

BOTH = RewriteRules((ReplaceGemmBetweenReshapes(), ReplaceMatMulBetweenReshapes()))


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
def test_a_refusal_has_its_reason(made: ModelProto, reason: str) -> None:
    ((_, found),) = ReplaceGemmBetweenReshapes().apply(named_graph(made)).skipped
    assert reason in found


HEADS = """g (float[B, S, 2, 4] x) => (float[B, S, 4] y) {
    r = Reshape(x, rows) p = Gemm(r, w, b) s = Shape <start = 0, end = 2> (x)
    to = Concat <axis = 0> (s, last) y = Reshape(p, to) }"""


def test_heads_are_merged_without_a_computed_target() -> None:
    made = model(HEADS, rows=np.array([-1, 8]), w=values(8, 4), b=values(4), last=np.array([4]))
    graph = named_graph(made)
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
