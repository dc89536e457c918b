"""RemoveUnused removes what no output depends on, and leaves what a caller may feed."""

from __future__ import annotations

import numpy as np
from model_texts import difference, initializer_names, model, nodes, ops, outputs, sample, values

from onnxq.ir import as_graph, constant, to_model
from onnxq.passes import RemoveUnused
from onnxq.rewrite import Changes


def test_nodes_without_effect_go_with_what_only_they_read() -> None:
    made = model(
        "g (float[4] x) => (float[4] y) { y = Add(x, w) [a] p = Mul(x, v) [b] q = Mul(p, w) }", w=values(4), v=values(4)
    )
    graph = as_graph(made)
    assert RemoveUnused().apply(graph) == Changes(("a", "b", "v"))
    assert ops(graph) == ["Add"]
    assert initializer_names(to_model(graph)) == {"w"}


def test_nodes_without_names_are_reported_too() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { y = Neg(x) p = Exp(x) }"))
    assert RemoveUnused().apply(graph) == Changes(("Exp_p",))
    assert not RemoveUnused().apply(graph)


def test_a_weight_that_lost_its_last_reader_goes() -> None:
    made = model("g (float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }", w=values(4, 4))
    graph = as_graph(made)
    graph.nodes[0].inputs[1] = constant("other", np.eye(4, dtype=np.float32))
    assert RemoveUnused().apply(graph) == Changes(("w",))
    assert initializer_names(to_model(graph)) == {"other"}


def test_initializers_that_no_node_ever_read_go_and_inputs_stay() -> None:
    made = model(
        """g (float[4] x, float[4] z, float[4] v, float[4] u) => (float[4] y)
        <float[4] v = {1, 2, 3, 4}, float[4] u = {4, 3, 2, 1}> { y = Neg(x) d = Abs(u) }""",
        w=values(4),
    )
    graph = as_graph(made)
    assert RemoveUnused().apply(graph).changed == ("Abs_d", "w")
    written = to_model(graph)
    assert initializer_names(written) == {"v", "u"}
    assert [info.name for info in written.graph.input] == ["x", "z", "v", "u"]
    given = {"x": values(4), "z": values(4), "v": values(4), "u": values(4)}
    assert difference(outputs(graph, given), outputs(made, given)) == 0


def test_what_a_body_reads_is_used_until_the_node_of_the_body_goes() -> None:
    text = """g (float[4] x, bool c) => (float[4] {out}) {{
        h = Neg(x)
        [branch] y = If (c) <
            then_branch = yes () => (float[4] t) {{ [dead] d = Exp(h) t = Add(h, w) }},
            else_branch = no () => (float[4] e) {{ e = Neg(h) }}>
        z = Abs(x)
    }}"""
    used = model(text.format(out="y"), w=values(4))
    graph = as_graph(used)
    assert RemoveUnused().apply(graph).changed == ("Abs_z", "dead")
    assert difference(outputs(graph, sample(used)), outputs(used, sample(used))) == 0

    graph = as_graph(model(text.format(out="z"), w=values(4)))
    assert {"Neg_h", "branch", "w"} <= set(RemoveUnused().apply(graph).changed)
    assert ops(graph) == ["Abs"]
    assert initializer_names(to_model(graph)) == set()


def test_initializers_of_bodies_go_with_their_readers() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            y = If (c) <
                then_branch = yes () => (float[4] t) <float[2] k = {1, 2}> { [dead] d = Neg(k) t = Abs(x) },
                else_branch = no () => (float[4] e) { e = Neg(x) }>
        }"""
    )
    graph = as_graph(made)
    assert RemoveUnused().apply(graph).changed == ("dead", "k")
    assert [node.op for node in nodes(graph)] == ["If", "Abs", "Neg"]
