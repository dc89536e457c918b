"""Numbers that scale what was multiplied before go into the weight of that product."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.passes import FoldScalesIntoProducts

ATTENTION = """g (float[2, N, 8] x) => (float[2, 2, N, N] y) {
    qm = MatMul(x, wq) q = Add(bq, qm) km = MatMul(x, wk) k = Add(km, bk)
    qr = Reshape(q, to) kr = Reshape(k, to)
    qt = Transpose <perm = [0, 2, 1, 3]> (qr) kt = Transpose <perm = [0, 2, 3, 1]> (kr)
    s = MatMul(qt, kt) d = Div(s, root) y = Softmax(d) }"""


def attention(text: str = ATTENTION) -> ModelProto:
    return model(
        text, wq=values(8, 8), bq=values(8), wk=values(8, 8, seed=1), bk=values(8, seed=1),
        to=np.array([0, 0, 2, 4]), root=np.array(2, np.float32),
    )  # fmt: skip


def test_the_scale_of_an_attention_goes_into_the_query() -> None:
    made = attention()
    graph = named_graph(made)
    apply_once(FoldScalesIntoProducts(), graph)
    assert "Div" not in ops(graph)
    assert np.allclose(graph.nodes[0].inputs[1].values, values(8, 8) / 2)
    assert np.allclose(graph.nodes[1].inputs[0].values, values(8) / 2)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


def test_or_into_the_key_where_others_read_the_query() -> None:
    made = attention(ATTENTION.replace("d = Div", "other = Neg(q) d = Div"))
    graph = named_graph(made)
    apply_once(FoldScalesIntoProducts(), graph)
    assert "Div" not in ops(graph)
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 2e-6


@pytest.mark.parametrize(
    "text",
    [
        "p = Gemm(x, w, b) r = Reshape(p, to) m = Mul(f, r) y = Neg(m)",
        "p = Gemm <alpha = 3.0, beta = 2.0> (x, w, b) r = Reshape(p, to) m = Mul(f, r) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, f) n = Mul(m, f) y = Neg(n)",
        "p = MatMul(w, x) r = Reshape(p, to) m = Div(r, f) y = Neg(m)",
    ],
)
def test_every_kind_of_product_takes_it(text: str) -> None:
    made = model(
        f"g (float[8, 8] x) => (float[2, 4, 8] y) {{ {text} }}",
        w=values(8, 8), b=values(8), f=np.array(0.3, np.float32), to=np.array([2, 4, 8]),
    )  # fmt: skip
    graph = named_graph(made)
    apply_once(FoldScalesIntoProducts(), graph)
    assert not {"Mul", "Div"} & set(ops(graph))
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6


@pytest.mark.parametrize(
    "text",
    [
        "p = MatMul(x, w) r = Neg(p) m = Mul(r, f) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, f) y = Add(m, r)",
        "p = MatMul(x, w) other = MatMul(w, x) r = Reshape(p, to) m = Mul(r, f) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, zero) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Mul(r, wide) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) m = Div(f, r) y = Neg(m)",
        "p = MatMul(x, w) a = Add(p, x) r = Reshape(a, to) m = Mul(r, f) y = Neg(m)",
        "p = MatMul(x, w) r = Reshape(p, to) y = Mul(r, f)",
    ],
)
def test_what_others_read_or_cannot_be_scaled_stays(text: str) -> None:
    made = model(
        f"g (float[8, 8] x) => (float[a, b, c] y) {{ {text} }}",
        w=values(8, 8), f=np.array(0.3, np.float32), zero=np.array(0, np.float32),
        wide=np.ones((1, 1, 1, 1), np.float32), to=np.array([2, 4, 8]),
    )  # fmt: skip
    assert not FoldScalesIntoProducts().apply(named_graph(made))


def test_works_in_a_body_and_not_across_its_border() -> None:
    made = model(
        """g (float[2, 8] x, bool k) => (float[8, 2] y) {
            p = MatMul(x, w) t = Transpose(p)
            y = If (k) <
                then_branch = yes () => (float[8, 2] b) {
                    m = MatMul(x, v) r = Transpose(m) a = Mul(r, f) b = Neg(a) },
                else_branch = no () => (float[8, 2] d) { c = Mul(t, f) d = Neg(c) }> }""",
        w=values(8, 8), v=values(8, 8, seed=1), f=np.array(0.5, np.float32),
    )  # fmt: skip
    graph = named_graph(made)
    assert len(apply_once(FoldScalesIntoProducts(), graph).changed) == 1
    assert ops(graph) == ["MatMul", "Transpose", "If", "MatMul", "Transpose", "Neg", "Mul", "Neg"]
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 2e-6
