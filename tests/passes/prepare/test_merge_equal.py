"""MergeEqual computes equal things once, and lets nobody notice."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import apply_once, difference, model, named_graph, ops, outputs, sample, values

from onnxq.passes import MergeEqual, RemoveUnused, ShareInitializers
from onnxq.rewrite import Pipeline

SIGNATURE = "g (float[4, 4] x, float[4, 4] z, bool c) => (float y)"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Exp(x) b = Exp(x) y = Sub(a, b)", ["Exp", "Sub"]),
        ("a = Exp(x) b = Neg(a) d = Exp(x) e = Neg(d) y = Div(b, e)", ["Exp", "Neg", "Div"]),
        ("a = Add(x, z) b = Add(z, x) y = Sub(a, b)", ["Add", "Sub"]),
        ("a = Sub(x, z) b = Sub(z, x) y = Add(a, b)", ["Sub", "Sub", "Add"]),
        ("a = Softmax<axis=0>(x) b = Softmax<axis=1>(x) y = Add(a, b)", ["Softmax", "Softmax", "Add"]),
        ("a = Transpose<perm=[1,0]>(x) b = Transpose<perm=[1,0]>(x) y = MatMul(a, b)", ["Transpose", "MatMul"]),
        ("a = LeakyRelu<alpha=0.0>(x) b = LeakyRelu<alpha=-0.0>(x) y = Add(a, b)", ["LeakyRelu", "LeakyRelu", "Add"]),
        ("a = MatMul(x, w) b = MatMul(x, v) y = Sub(a, b)", ["MatMul", "Sub"]),
        ("a = Exp(x) y = Exp(x)", ["Exp"]),
        ("a, b = Split(x) d, e = Split(x) y = Concat<axis=0>(a, e)", ["Split", "Concat"]),
        ("a = Clip(x, , one) b = Clip(x, , one) y = Sub(a, b)", ["Clip", "Sub"]),
    ],
)
def test_equal_nodes(body: str, left: list[str]) -> None:
    made = model(f"{SIGNATURE} {{ {body} }}", w=values(4, 4), v=values(4, 4), one=np.array(1, np.float32))
    made.graph.output[0].type.tensor_type.ClearField("shape")
    graph = named_graph(made)
    ShareInitializers().apply(graph)
    apply_once(MergeEqual(), graph)
    RemoveUnused().apply(graph)
    assert ops(graph) == left
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_the_node_that_stays_stands_for_those_that_go() -> None:
    made = model(f"{SIGNATURE} {{ [a] a = Exp(x) [b] b = Exp(x) [c] y = Sub(a, b) }}")
    graph = named_graph(made)
    MergeEqual().apply(graph)
    assert [node.origins for node in graph.nodes] == [(("a", "Exp"), ("b", "Exp")), ()]


def test_random_numbers_and_other_domains_stay() -> None:
    text = "a = RandomNormalLike(x) b = RandomNormalLike(x) d = local.F(x) e = local.F(x) y = Sum(a, b, d, e)"
    graph = named_graph(model(f"{SIGNATURE} {{ {text} }}"))
    assert not MergeEqual().apply(graph)


def test_two_outputs_keep_their_names_and_one_gives_its_own() -> None:
    made = model(
        "g (float[4] x) => (float[4] y, float[4] z) { a = Exp(x) y = Exp(x) z = Exp(x) b = Neg(a) c = Neg(b) }"
    )
    graph = named_graph(made)
    apply_once(MergeEqual(), graph)
    assert ops(graph) == ["Exp", "Exp", "Neg", "Neg"]
    assert [tensor.name for tensor in graph.outputs] == ["y", "z"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_bodies_read_what_stands_before_them_and_branches_do_not_share() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            a = Exp(x)
            t = If (c) <
                then_branch = yes () => (float[4] p) { q = Exp(x) r = Neg(x) p = Add(q, r) },
                else_branch = no () => (float[4] e) { s = Neg(x) u = Sqrt(x) e = Add(s, u) }>
            d = Sqrt(x)
            f = Add(a, t)
            y = Add(f, d)
        }"""
    )
    graph = named_graph(made)
    assert len(apply_once(MergeEqual(), graph).changed) == 1
    assert ops(graph) == ["Exp", "If", "Sqrt", "Add", "Add", "Neg", "Add", "Neg", "Sqrt", "Add"]
    for seed in (0, 1):
        inputs = {**sample(made, seed), "x": np.ones(4, np.float32)}
        assert difference(outputs(graph, inputs), outputs(made, inputs)) == 0


def test_an_output_of_a_body_is_made_in_the_body() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            a = Exp(x)
            t = If (c) <
                then_branch = yes () => (float[4] p) { p = Exp(x) },
                else_branch = no () => (float[4] e) { e = Neg(x) }>
            y = Add(a, t)
        }"""
    )
    graph = named_graph(made)
    assert not MergeEqual().apply(graph)


def test_long_chains_merge_in_one_walk() -> None:
    chains = " ".join(f"{name}{i + 1} = Neg({name}{i})" for i in range(2000) for name in "ab")
    made = model(f"g (float[4] x) => (float[4] y) {{ a0 = Exp(x) b0 = Exp(x) {chains} y = Add(a2000, b2000) }}")
    graph = named_graph(made)
    Pipeline((MergeEqual(),)).apply(graph)
    assert len(graph.nodes) == 2002
