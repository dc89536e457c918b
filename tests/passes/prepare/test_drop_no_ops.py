"""DropNoOps lets consumers read what Identity and Dropout read, unless somebody could tell."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, nodes, ops, outputs, sample, values
from onnx import ModelProto

from onnxq.ir import Graph, as_graph
from onnxq.passes import DropNoOps
from onnxq.rewrite import Changes


def drop(made: ModelProto) -> tuple[Graph, Changes]:
    graph = as_graph(made)
    changes = DropNoOps().apply(graph)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0
    return graph, changes


def test_a_chain_of_identities_goes() -> None:
    made = model("g (float[4] x) => (float[4] y) { [a] p = Identity(x) [b] q = Identity(p) y = Add(p, q) }")
    graph, changes = drop(made)
    assert changes == Changes(("a", "b"))
    assert [tensor.name for tensor in nodes(graph)[0].inputs] == ["x", "x"]


def test_an_identity_of_a_constant_makes_the_constant_visible() -> None:
    made = model("g (float[2, 4] x) => (float[2, 3] y) { [a] v = Identity(w) y = MatMul(x, v) }", w=values(4, 3))
    graph, changes = drop(made)
    assert changes.changed == ("a",)
    assert nodes(graph)[0].inputs[1].name == "w"


@pytest.mark.parametrize("source", ["x", "w"])
def test_an_identity_that_makes_a_graph_output_stays(source: str) -> None:
    made = model(f"g (float[4] x) => (float[4] y) {{ [a] y = Identity({source}) }}", w=values(4))
    graph, changes = drop(made)
    assert changes == Changes((), (("a", "its output is an output of the graph"),))
    assert ops(graph) == ["Identity"]


def test_the_last_identity_of_a_chain_to_a_graph_output_stays() -> None:
    graph, changes = drop(model("g (float[4] x) => (float[4] y) { [a] p = Identity(x) [b] y = Identity(p) }"))
    assert changes.changed == ("a",)
    assert [node.name for node in nodes(graph)] == ["b"]


def test_what_makes_its_input_makes_the_output_under_its_name() -> None:
    made = model("g (float[4] x) => (float[N] y) { a = Exp(x) [a] p = Identity(a) [b] y = Identity(p) }")
    graph, changes = drop(made)
    assert changes == Changes(("a", "b"))
    assert ops(graph) == ["Exp"]
    assert [(tensor.name, tensor.shape) for tensor in graph.outputs] == [("y", ["N"])]


def test_a_tensor_has_one_name_as_an_output() -> None:
    made = model("g (float[4] x) => (float[4] y, float[4] z) { a = Exp(x) [a] y = Identity(a) [b] z = Identity(a) }")
    graph, changes = drop(made)
    assert changes.changed == ("a",)
    assert ops(graph) == ["Exp", "Identity"]


def test_bodies_read_what_an_identity_around_them_read() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            [a] p = Identity(x)
            y = If (c) <
                then_branch = yes () => (float[4] t) { [b] q = Identity(p) t = Neg(q) },
                else_branch = no () => (float[4] e) { [d] e = Identity(p) }>
        }"""
    )
    graph, changes = drop(made)
    assert changes == Changes(("a", "b"), (("d", "its output is an output of the graph"),))
    assert ops(graph) == ["If", "Neg", "Identity"]


def test_a_loop_that_hands_its_condition_on_keeps_doing_so() -> None:
    made = model(
        """g (float[4] x) => (float[4] y) {
            y = Loop (trips, keep, x) <
                body = b (int64 i, bool on, float[4] s) => (bool off, float[4] t) {
                    [a] off = Identity(on)  [d] r = Identity(s)  t = Mul(r, r) }>
        }""",
        trips=np.array(2), keep=np.array(True),
    )  # fmt: skip
    graph, changes = drop(made)
    assert changes.changed == ("d",)
    assert ops(graph) == ["Loop", "Identity", "Mul"]


@pytest.mark.parametrize(
    ("operator", "opset"),
    [
        ("Dropout <ratio = 0.5> (x)", 7),
        ("Dropout <ratio = 0.5> (x)", 11),
        ("Dropout(x)", 12),
        ("Dropout(x, ratio)", 13),
        ("Dropout(x, ratio, no)", 13),
        ("Dropout(x, , no)", 21),
    ],
)
def test_dropout_at_inference_goes(operator: str, opset: int) -> None:
    weights = {"ratio": np.array(0.5, np.float32), "no": np.array(False)} if opset > 11 else {}
    made = model(f"g (float[4] x) => (float[4] y) {{ [a] d = {operator} y = Neg(d) }}", opset=opset, **weights)
    graph, changes = drop(made)
    assert changes.changed == ("a",)
    assert ops(graph) == ["Neg"]


def test_a_mask_that_nobody_reads_goes_too() -> None:
    graph, changes = drop(model("g (float[4] x) => (float[4] y) { [a] d, m = Dropout(x) y = Neg(d) }"))
    assert changes.changed == ("a",)
    assert ops(graph) == ["Neg"]


@pytest.mark.parametrize(("output", "node"), [("mask", ""), ("z", "z = Not(mask)")])
def test_a_mask_that_is_used_keeps_its_dropout(output: str, node: str) -> None:
    made = model(f"g (float[4] x) => (float[4] y, bool[4] {output}) {{ [a] d, mask = Dropout(x) y = Neg(d) {node} }}")
    graph, changes = drop(made)
    assert changes == Changes((), (("a", "its mask is used"),))
    assert "Dropout" in ops(graph)


@pytest.mark.parametrize("fed", [True, False])
def test_a_dropout_that_may_train_stays(fed: bool) -> None:
    weights = {} if fed else {"train": np.array(True)}
    inputs = "float[4] x, bool train" if fed else "float[4] x"
    made = model(
        f"g ({inputs}) => (float[4] y) {{ [a] d = Dropout(x, ratio, train) y = Neg(d) }}",
        ratio=np.array(0.5, np.float32), **weights,
    )  # fmt: skip
    graph = as_graph(made)
    assert DropNoOps().apply(graph) == Changes((), (("a", "it may run in training mode"),))
    assert ops(graph) == ["Dropout", "Neg"]


def test_an_operator_of_the_same_name_in_another_domain_stays() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { d = local.Identity(x) y = Neg(d) }"))
    assert not DropNoOps().apply(graph)
