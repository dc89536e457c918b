"""StoreWeights where bodies read or declare the weight."""

from __future__ import annotations

import numpy as np
import pytest
from model_texts import difference, model, node_named, nodes, outputs, sample, values
from model_zoo import if_bodies_that_share_a_captured_weight
from stored_weights import store

from onnxq.ir import Graph, as_graph, constant

# --- bodies of control flow ---------------------------------------------------------------------------------------


def test_a_captured_weight_is_decoded_where_it_is_declared() -> None:
    made = if_bodies_that_share_a_captured_weight()
    graph, changes = store(made)
    assert changes.changed == ("w",)
    assert [node.op for node in graph.nodes[:2]] == ["Cast", "Mul"]
    users = [node_named(graph, name) for name in ("before", "yes", "no")]
    assert {node.inputs[1].name for node in users} == {"w.decoded"}
    for seed in (0, 1):
        assert difference(outputs(graph, sample(made, seed)), outputs(made, sample(made, seed))) < 0.03


def in_both_bodies(outer: bool) -> Graph:
    """An If whose bodies multiply with one weight that no list of initializers holds."""
    made = model(
        f"""g (float[3, 16] x, bool c) => (float[3, 16] y) {{
            {"[o] h = MatMul(x, w)" if outer else "h = Neg(x)"}
            y = If (c) <
                then_branch = yes () => (float[3, 16] t) {{ [a] t = MatMul(h, w) }},
                else_branch = no () => (float[3, 16] e) {{ [b] e = MatMul(h, w) }}>
        }}""",
        w=values(16, 16),
    )
    graph = as_graph(made)
    fresh = constant("fresh", values(16, 16))
    for node in nodes(graph, "MatMul"):
        node.inputs[1] = fresh
    return graph


@pytest.mark.parametrize("outer", [True, False])
def test_a_new_weight_is_decoded_around_all_bodies_that_read_it(outer: bool) -> None:
    graph, changes = store(in_both_bodies(outer))
    assert changes.changed == ("fresh",)
    assert [node.op for node in graph.nodes[:2]] == ["Cast", "Mul"]
    expected = in_both_bodies(outer)
    inputs = {"x": values(3, 16), "c": np.array(True)}
    assert difference(outputs(graph, inputs), outputs(expected, inputs)) < 0.03
    inputs["c"] = np.array(False)
    assert difference(outputs(graph, inputs), outputs(expected, inputs)) < 0.03


def test_a_weight_that_a_body_declares_is_decoded_there() -> None:
    numbers = ", ".join(str(number) for number in range(256))
    made = model(
        f"""g (float[3, 16] x, bool c) => (float[3, 16] y) {{
            y = If (c) <
                then_branch = yes () => (float[3, 16] t) <float[16, 16] w = {{{numbers}}}> {{ [a] t = MatMul(x, w) }},
                else_branch = no () => (float[3, 16] e) {{ e = Neg(x) }}>
        }}"""
    )
    graph, changes = store(made)
    assert changes.changed == ("w",)
    assert [node.op for node in graph.nodes] == ["If"]
    assert [node.op for node in graph.nodes[0].subgraphs()[0].nodes] == ["Cast", "Mul", "MatMul"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) < 0.03
