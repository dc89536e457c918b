"""Metadata of exporters is counted as the bytes that a file loses with it."""

from __future__ import annotations

from onnx import ModelProto, helper, parser

from onnxq.ir import as_graph, metadata_bytes, strip_metadata, to_model

TEXT = """<ir_version: 10, opset_import: ["" : 21]> g (float[4] x, bool c) => (float[4] y) {
    [neg] h = Neg(x)
    [k] k = Constant <value = float[4] {1, 2, 3, 4}> ()
    [if] z = If (c) <then_branch = t () => (float[4] u) { [in] v = Abs(h) [out] u = Exp(v) },
                     else_branch = e () => (float[4] w) { [other] w = Tanh(h) }>
    [sum] y = Add(z, k)
}"""


def annotated() -> ModelProto:
    """A model that says in every place where it came from."""
    model = parser.parse_model(TEXT)
    model.doc_string = model.graph.doc_string = "kept"
    model.metadata_props.add(key="labels", value="kept")
    graphs = [model.graph, *(attribute.g for attribute in model.graph.node[2].attribute)]
    graphs[0].value_info.append(helper.make_tensor_value_info("h", 1, [4]))
    graphs[1].value_info.append(helper.make_tensor_value_info("v", 1, [4]))
    for graph in graphs:
        graph.metadata_props.add(key="pkg.exporter", value="a graph")
        for node in graph.node:
            node.doc_string = f"File model.py, line {len(node.name)}"
            node.metadata_props.add(key="pkg.exporter.name_scopes", value="['', 'layer', 'layer.linear']" * 9)
        for info in graph.value_info:
            info.doc_string = "a tensor"
            info.metadata_props.add(key="pkg.exporter", value="a tensor")
    return model


def bare() -> ModelProto:
    model = annotated()
    for graph in (model.graph, *(attribute.g for attribute in model.graph.node[2].attribute)):
        del graph.metadata_props[:]
        for part in (*graph.node, *graph.value_info):
            part.ClearField("doc_string")
            del part.metadata_props[:]
    return model


def test_stripping_leaves_everything_else() -> None:
    model = annotated()
    graph = as_graph(model)
    strip_metadata(graph)
    assert to_model(graph) == bare()
    assert model == annotated(), "what was read is the caller's"


def test_the_bytes_are_those_of_the_file() -> None:
    # The lengths of messages around it take a few bytes as well.
    saved = annotated().ByteSize() - bare().ByteSize()
    assert 0 <= saved - metadata_bytes(as_graph(annotated())) < 20
    assert metadata_bytes(as_graph(bare())) == 0
