"""NameNodes gives every node of the model a name of its own and changes no name that is one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_texts import model, nodes, outputs, sample, values
from model_zoo import repeated_and_empty_node_names

from onnxq.errors import ModelError
from onnxq.ir import as_graph
from onnxq.passes import NameNodes
from onnxq.rewrite import Changes


def test_nodes_without_names_are_named_after_operator_and_output() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { a = Neg(x) [Neg_a] b = Exp(a) y = Add(a, b) }"))
    assert NameNodes().apply(graph) == Changes(("Neg_a.1", "Add_y"))
    assert [node.name for node in nodes(graph)] == ["Neg_a.1", "Neg_a", "Add_y"]


def test_the_first_of_several_nodes_keeps_the_name_over_all_bodies() -> None:
    made = repeated_and_empty_node_names()
    with pytest.raises(ModelError, match="same"):
        outputs(made, sample(made))
    graph = as_graph(made)
    changes = NameNodes().apply(graph)
    assert changes.changed == ("same.1", "Tanh_d", "same.2", "Neg_e")
    names = [node.name for node in nodes(graph)]
    assert names == ["same", "same.1", "Tanh_d", "branch", "same.2", "Neg_e"]
    assert outputs(graph, sample(made))["y"].shape == (2, 16)


def test_a_new_name_is_no_name_of_a_tensor_either() -> None:
    graph = as_graph(model("g (float[4] Neg_y) => (float[4] y) { y = Neg(Neg_y) }"))
    assert NameNodes().apply(graph).changed == ("Neg_y.1",)


def test_nodes_whose_outputs_are_omitted_are_named_after_the_first_that_is_not() -> None:
    made = model(
        "g (float[3, 2, 4] x) => (float[1, 2, 5] h) { , h = GRU <hidden_size = 5> (x, w, r) }",
        w=values(1, 15, 4), r=values(1, 15, 5),
    )  # fmt: skip
    graph = as_graph(made)
    assert NameNodes().apply(graph).changed == ("GRU_h",)


@given(names=st.lists(st.sampled_from(["", "n", "n.1", "Neg_t1", "t1", "/a:0;é"]), min_size=1, max_size=12))
@settings(max_examples=50)
def test_any_names_become_unique_and_unique_ones_stay(names: list[str]) -> None:
    steps = " ".join(f"t{i + 1} = Neg(t{i})" for i in range(len(names)))
    made = model(f"g (float[4] t0) => (float[4] t{len(names)}) {{ {steps} }}")
    for node, name in zip(made.graph.node, names, strict=True):
        node.name = name
    graph = as_graph(made)
    changes = NameNodes().apply(graph)
    found = [node.name for node in graph.nodes]
    assert all(found)
    assert len(set(found)) == len(found)
    firsts = {name: names.index(name) for name in names if name}
    assert all(found[index] == name for name, index in firsts.items())
    assert set(changes.changed) == {new for new, old in zip(found, names, strict=True) if new != old}
