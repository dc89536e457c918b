"""InlineFunctions leaves the nodes of local functions in place of their calls."""

from __future__ import annotations

import pytest
from model_texts import difference, model, nodes, ops, outputs, sample, values
from model_zoo import local_functions

from onnxq.errors import ModelError
from onnxq.ir import as_graph, to_model
from onnxq.passes import InlineFunctions, NameNodes
from onnxq.rewrite import Changes

NESTED = """
<domain: "local", opset_import: ["" : 17, "local" : 1]>
outer <slope> (p) => (r) { a = local.inner <alpha: float = @slope> (p) r = Neg(a) }
<domain: "local", opset_import: ["" : 17]>
inner <alpha> (p) => (r) { r = LeakyRelu <alpha: float = @alpha> (p) }
"""


def test_calls_become_nodes_and_functions_go() -> None:
    made = local_functions()
    graph = as_graph(made)
    assert InlineFunctions().apply(graph) == Changes(("layer",))
    assert ops(graph) == ["MatMul", "Relu", "MatMul", "Relu"]
    assert not to_model(graph).functions
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) <= 1e-6


def test_the_weights_of_both_calls_stay_one_tensor() -> None:
    graph = as_graph(local_functions())
    InlineFunctions().apply(graph)
    first, second = nodes(graph, "MatMul")
    assert first.inputs[1] is second.inputs[1]


def test_functions_that_call_functions_hand_their_attributes_down() -> None:
    made = model("g (float[4] x) => (float[4] y) { y = local.outer <slope = 0.25> (x) }", functions=NESTED)
    graph = as_graph(made)
    assert set(InlineFunctions().apply(graph).changed) == {"outer", "inner"}
    assert ops(graph) == ["LeakyRelu", "Neg"]
    assert nodes(graph, "LeakyRelu")[0].attrs["alpha"] == 0.25
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_calls_inside_bodies_are_inlined() -> None:
    made = model(
        """g (float[4] x, bool c) => (float[4] y) {
            y = If (c) <
                then_branch = yes () => (float[4] t) { t = local.twice(x) },
                else_branch = no () => (float[4] e) { e = Neg(x) }>
        }""",
        functions='<domain: "local", opset_import: ["" : 17]> twice (p) => (r) { r = Add(p, p) }',
    )
    graph = as_graph(made)
    assert InlineFunctions().apply(graph)
    assert ops(graph) == ["If", "Add", "Neg"]
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_the_names_of_inlined_nodes_can_be_made_unique() -> None:
    graph = as_graph(local_functions())
    InlineFunctions().apply(graph)
    NameNodes().apply(graph)
    names = [node.name for node in nodes(graph)]
    assert len(set(names)) == len(names) == 4


def test_a_model_without_functions_is_not_touched() -> None:
    graph = as_graph(model("g (float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }", w=values(4, 4)))
    before = graph.nodes
    assert not InlineFunctions().apply(graph)
    assert graph.nodes is before


def test_a_function_of_an_opset_that_does_not_convert_is_an_error() -> None:
    made = model(
        "g (float[4] x) => (float[4] y) { y = local.f(x) }",
        functions='<domain: "local", opset_import: ["" : 6]> f (p) => (r) { r = Upsample <scales = [1.0]> (p) }',
    )
    with pytest.raises(ModelError, match="inlined"):
        InlineFunctions().apply(as_graph(made))
