"""StripMetadata removes what exporters wrote about nodes, and nothing of the model."""

from __future__ import annotations

from model_texts import apply_once, difference, model, outputs, sample, values

from onnxq.ir import as_graph, metadata_bytes
from onnxq.passes import StripMetadata
from onnxq.rewrite import Changes


def test_nodes_lose_what_was_written_about_them() -> None:
    made = model("g (float[4,8] x) => (float[4,8] y) { [one] h = MatMul(x, w) [two] y = Relu(h) }", w=values(8, 8))
    made.graph.node[0].metadata_props.add(key="namespace", value="model/layer")
    made.graph.node[1].doc_string = "relu, line 7"
    graph = as_graph(made)
    assert apply_once(StripMetadata(), graph) == Changes(("one", "two"))
    assert metadata_bytes(graph) == 0
    assert difference(outputs(graph, sample(made)), outputs(made, sample(made))) == 0


def test_new_nodes_and_bare_ones_have_none() -> None:
    graph = as_graph(model("g (float[4] x) => (float[4] y) { y = Relu(x) }"))
    assert not StripMetadata().apply(graph)
