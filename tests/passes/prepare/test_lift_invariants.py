"""LiftInvariants takes states out of loops that never change."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from model_texts import apply_once, difference, model, named_graph, nodes, outputs, sample, values
from onnx import ModelProto

from onnxq.ir import Graph, to_model
from onnxq.passes import LiftInvariants

LOOP = """g (float[4, 3] x) => (float[4, 3] y, float[4, 3] z) {{
    last, kept, all = Loop (three, , x, w) <body = step (int64 i, bool c, float[4, 3] h, float[3, 3] r) => {returned} {{
        go = Identity(c) s = MatMul(h, r) n = Tanh(s) {handed_on} }}>
    {after}
}}"""


def lifted(made: ModelProto) -> Graph:
    graph = named_graph(made)
    apply_once(LiftInvariants(), graph)
    onnx.checker.check_model(to_model(graph), full_check=True)
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) == 0
    return graph


def loop(
    handed_on: str = "k = Identity(r)",
    after: str = "y = MatMul(last, kept) z = ReduceSum<keepdims=0>(all, zero)",
    returned: str = "(bool go, float[4, 3] n, float[3, 3] k, float[4, 3] n2)",
) -> ModelProto:
    text = LOOP.format(returned=returned, handed_on=f"{handed_on} n2 = Identity(n)", after=after)
    return model(text, w=values(3, 3), three=np.array(3), zero=np.array([0]))


@pytest.mark.parametrize("handed_on", ["k = Identity(r)", "m = Identity(r) k = Identity(m)"])
def test_what_each_iteration_hands_on_is_read_from_around(handed_on: str) -> None:
    graph = lifted(loop(handed_on))
    (node,) = nodes(graph, "Loop")
    (body,) = node.subgraphs()
    assert (len(node.inputs), len(node.outputs), len(body.inputs), len(body.outputs)) == (3, 2, 3, 3)
    (product,) = (inner for inner in body.nodes if inner.op == "MatMul")
    assert product.inputs[1].name == "w"


def test_what_the_body_returns_itself_is_handed_on() -> None:
    returned = "(bool go, float[4, 3] n, float[3, 3] r, float[4, 3] n2)"
    (node,) = nodes(lifted(loop("", returned=returned)), "Loop")
    assert len(node.inputs) == 3


def test_what_changes_stays() -> None:
    (node,) = nodes(lifted(loop("k = Neg(r)")), "Loop")
    assert len(node.inputs) == 4


def test_what_the_graph_returns_stays() -> None:
    made = model(
        """g (float[4, 3] x) => (float[4, 3] last, float[3, 3] kept) {
            last, kept = Loop (three, , x, w) <
                body = step (int64 i, bool c, float[4, 3] h, float[3, 3] r) => (bool go, float[4, 3] n, float[3, 3] k) {
                    go = Identity(c) n = MatMul(h, r) k = Identity(r) }>
        }""",
        w=values(3, 3), three=np.array(3),
    )  # fmt: skip
    (node,) = nodes(lifted(made), "Loop")
    assert len(node.inputs) == 4


def test_states_that_trade_places_change() -> None:
    made = model(
        """g (float[3, 3] x) => (float[3, 3] y) {
            a, b = Loop (three, , x, w) <
                body = step (int64 i, bool c, float[3, 3] h, float[3, 3] r) => (bool go, float[3, 3] p, float[3, 3] q) {
                    go = Identity(c) p = Identity(r) q = Identity(h) }>
            y = MatMul(a, b)
        }""",
        w=values(3, 3), three=np.array(3),
    )  # fmt: skip
    (node,) = nodes(lifted(made), "Loop")
    assert len(node.inputs) == 4


def test_states_of_a_scan() -> None:
    made = model(
        """g (float[5, 4, 3] x) => (float[5, 4, 3] y, float[3, 3] z) {
            k, y = Scan <num_scan_inputs = 1,
                body = step (float[3, 3] r, float[4, 3] h) => (float[3, 3] same, float[4, 3] n) {
                    same = Identity(r) n = MatMul(h, r) }> (w, x)
            z = Neg(k)
        }""",
        w=values(3, 3),
    )  # fmt: skip
    (node,) = nodes(lifted(made), "Scan")
    assert (len(node.inputs), len(node.outputs)) == (1, 1)


def test_a_loop_in_the_body_of_another() -> None:
    made = model(
        """g (float[4, 3] x) => (float[4, 3] y) {
            y, kept = Loop (three, , x, w) <
                body = step (int64 i, bool c, float[4, 3] h, float[3, 3] r) => (bool go, float[4, 3] n, float[3, 3] k) {
                    go = Identity(c) k = Identity(r)
                    n, l = Loop (three, , h, r) <
                        body = inner (int64 j, bool d, float[4, 3] a, float[3, 3] b) =>
                            (bool on, float[4, 3] e, float[3, 3] f) {
                            on = Identity(d) e = MatMul(a, b) f = Identity(b) }>
                }>
        }""",
        w=values(3, 3), three=np.array(3),
    )  # fmt: skip
    graph = lifted(made)
    assert [len(node.inputs) for node in nodes(graph, "Loop")] == [3, 3]


def test_a_state_that_is_a_scan_output_as_well_stays() -> None:
    # What a body returns must be made in it, or be one of its states.
    returned = "(bool go, float[4, 3] n, float[3, 3] k, float[3, 3] r)"
    after = "y = MatMul(last, kept) z = ReduceSum<keepdims=0>(all, zero)"
    text = LOOP.replace("float[4, 3] z", "float[3, 3] z")
    handed_on = "k = Identity(r)"
    made = model(
        text.format(returned=returned, handed_on=handed_on, after=after),
        w=values(3, 3), three=np.array(3), zero=np.array([0]),
    )  # fmt: skip
    (node,) = nodes(lifted(made), "Loop")
    assert len(node.inputs) == 4


@pytest.mark.parametrize(("opset", "ir_version", "states"), [(17, 8, 0), (10, 5, 1)])
def test_a_loop_keeps_the_states_that_its_opset_asks_for(opset: int, ir_version: int, states: int) -> None:
    made = model(
        """g (float[2] x) => (float[2] y, float[3, 2] z) {
            last, z = Loop (three, yes, x) <
                body = step (int64 i, bool c, float[2] s) => (bool go, float[2] k, float[2] e) {
                    go = Identity(c) k = Identity(s) e = Neg(s) }>
            y = Neg(last)
        }""",
        opset=opset, ir_version=ir_version, three=np.array(3), yes=np.array(True),
    )  # fmt: skip
    graph = lifted(made)
    (node,) = nodes(graph, "Loop")
    assert len(node.inputs) == 2 + states
    assert graph.nodes[-1].inputs[0].name == "x"


def test_a_loop_keeps_an_output() -> None:
    made = model(
        """g (float[2] x) => (float[2] y) {
            last = Loop (three, , x) <
                body = step (int64 i, bool c, float[2] s) => (bool go, float[2] k) {
                    go = Identity(c) k = Identity(s) }>
            y = Neg(last)
        }""",
        three=np.array(3),
    )  # fmt: skip
    graph = lifted(made)
    (node,) = nodes(graph, "Loop")
    assert [tensor.name for tensor in node.outputs] == ["last"]
    assert graph.nodes[-1].inputs[0].name == "x"
