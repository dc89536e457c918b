from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from onnxq.errors import ModelError
from onnxq.ir import (
    Graph,
    all_graphs,
    constant,
    load,
    minimum_ir_version,
    read_model,
    save,
    to_model,
)
from onnxq.onnx_api import inline_functions, upgrade_opset
from onnxq.runtime.sessions import open_session
from onnxq.runtime.sessions import run as outputs_of

WEIGHT = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
OLD = """<ir_version: 6, opset_import: ["" : 11, "com.microsoft" : 1], producer_name: "p">
old (float[N,32] x, bool c) => (float[N,32] y) {
  [matmul] h = MatMul(x, w)
  [branch] y = If (c) <
    then_branch = t () => (float[N,32] u) { [softmax] u = Softmax(h) },
    else_branch = e () => (float[N,32] v) { [gelu] g = com.microsoft.Gelu(h) [sum] s = ReduceSum <axes = [1]> (g)
      [add] v = Add(g, s) }>
}"""


def old_model() -> onnx.ModelProto:
    model = parser.parse_model(OLD)
    model.graph.initializer.append(numpy_helper.from_array(WEIGHT, "w"))
    return model


def node(graph: Graph, name: str) -> object:
    return next(node for scope in all_graphs(graph) for node in scope.nodes if node.name == name)


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> np.ndarray:
    import onnxruntime

    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]


@pytest.mark.parametrize("version", [13, 21])
@pytest.mark.parametrize("condition", [True, False])
def test_an_upgraded_model_computes_the_same_in_bodies_too(version: int, condition: bool) -> None:
    model = old_model()
    upgraded = to_model(upgrade_opset(read_model(model), version))
    feeds = {"x": np.random.default_rng(1).normal(size=(3, 32)).astype(np.float32), "c": np.array(condition)}

    onnx.checker.check_model(upgraded)
    assert (upgraded.opset_import[0].version, upgraded.ir_version) == (version, minimum_ir_version(version))
    np.testing.assert_allclose(run(upgraded, **feeds), run(model, **feeds), rtol=1e-6)


def test_an_upgrade_shares_the_weights_and_leaves_the_given_graph() -> None:
    model = old_model()
    graph = read_model(model)

    upgraded = upgrade_opset(graph, 21)

    assert upgraded.initializers[0].tensor_data is graph.initializers[0].tensor_data
    assert graph.opset == 11
    assert to_model(graph) == model


def test_what_the_converter_drops_is_put_back() -> None:
    model = old_model()
    model.doc_string, model.domain = "doc", "org.x"
    graph = model.graph
    graph.doc_string = "graph doc"
    graph.input[0].type.denotation = "IMAGE"
    graph.initializer[0].doc_string = "weights"
    graph.node[0].doc_string = "node doc"
    graph.quantization_annotation.add(tensor_name="h")
    graph.value_info.append(helper.make_tensor_value_info("h", 1, ["N", 32]))
    body = graph.node[1].attribute[0].g
    for holder in (
        model,
        graph,
        graph.node[0],
        graph.initializer[0],
        graph.value_info[0],
        graph.input[0],
        body.node[0],
    ):
        holder.metadata_props.add(key="k", value="v")

    upgraded = to_model(upgrade_opset(read_model(model), 21))

    expected = onnx.ModelProto()
    expected.CopyFrom(model)
    expected.opset_import[0].version, expected.ir_version = 21, 10
    new_bodies = {proto.name: proto.g for proto in upgraded.graph.node[1].attribute}
    assert [n.metadata_props[0].value for n in new_bodies["then_branch"].node if n.op_type == "Softmax"] == ["v"]
    for side in (expected, upgraded):
        side.graph.node[1].ClearField("attribute")
    assert upgraded == expected


def test_no_invented_dimension_names_are_declared() -> None:
    upgraded = to_model(upgrade_opset(read_model(old_model()), 21))

    assert "unk__" not in str(upgraded)


def test_a_graph_that_is_new_enough_is_returned_as_it_is() -> None:
    graph = read_model(old_model())

    assert upgrade_opset(graph, 11) is graph
    assert upgrade_opset(graph, 7) is graph


def test_external_weights_are_not_read(tmp_path, monkeypatch) -> None:
    save(read_model(old_model()), tmp_path / "m.onnx", external_data=True)
    monkeypatch.setattr(np, "memmap", None)

    upgraded = upgrade_opset(load(tmp_path / "m.onnx"), 21)

    monkeypatch.undo()
    np.testing.assert_array_equal(upgraded.initializers[0].values, WEIGHT)


def test_large_tensors_in_attributes_keep_their_values() -> None:
    model = old_model()
    model.graph.initializer.pop()
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(WEIGHT)))

    upgraded = upgrade_opset(read_model(model), 21)

    np.testing.assert_array_equal(upgraded.nodes[0].attrs["value"].values, WEIGHT)


def test_packed_types_survive_an_upgrade() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[1] x) => (float[4] y) <float s = {2}>
        { d = DequantizeLinear(q, s) y = Add(d, x) }"""
    )
    packed = TensorProto(name="q", data_type=TensorProto.INT4, dims=[4], raw_data=b"\x21\x43")
    model.graph.initializer.append(packed)

    upgraded = to_model(upgrade_opset(read_model(model), 25))

    assert packed in upgraded.graph.initializer
    assert run(upgraded, x=np.zeros(1, np.float32)).tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("written", ["", "ai.onnx"])
def test_a_domain_is_the_same_however_it_is_written(written: str) -> None:
    model = old_model()
    for entry in (*model.graph.node, *model.opset_import):
        entry.domain = entry.domain or written
    upgraded = upgrade_opset(read_model(model), 21)
    assert upgraded.opset == 21
    assert {(node.op, node.domain) for node in upgraded.nodes} == {
        (node.op_type, node.domain.removeprefix("ai.onnx")) for node in model.graph.node
    }


@pytest.mark.parametrize(
    ("change", "version", "message"),
    [
        (lambda graph: None, 27, "opset is 27, expected at most 26"),
        (lambda graph: graph.opset_imports.pop(""), 21, "imports no ONNX opset"),
        (
            lambda graph: setattr(graph.nodes[0], "op", "Unheard"),
            21,
            r"^node 'matmul' \(Unheard\) cannot be converted from opset 11 to 21 by onnx; export the model ",
        ),
    ],
)
def test_what_cannot_be_upgraded_is_refused_in_one_line(change, version: int, message: str) -> None:
    graph = read_model(old_model())
    change(graph)

    with pytest.raises(ModelError, match=message) as caught:
        upgrade_opset(graph, version)
    assert "\n" not in str(caught.value)


def test_an_attribute_without_a_type_is_refused_in_one_line() -> None:
    model = old_model()
    model.graph.node[0].attribute.add(name="untyped")
    with pytest.raises(ModelError, match=r"^node 'matmul' \(MatMul\) cannot be converted from opset 11 to 21 "):
        upgrade_opset(read_model(model), 21)


WITH_FUNCTIONS = """<ir_version: 8, opset_import: ["" : 11, "local" : 1]>
g (float[2,32] x, bool c) => (float[2,32] y) {
  [called] h = local.twice(x)
  [matmul] m = MatMul(h, w)
  [branch] y = If (c) <
    then_branch = t () => (float[2,32] u) { u = local.twice(m) },
    else_branch = e () => (float[2,32] v) { v = Neg(m) }>
}
<domain: "local", opset_import: ["" : 11, "local" : 1]> twice (p) => (r) { q = local.once(p) r = Add(q, p) }
<domain: "local", opset_import: ["" : 11]> once (p) => (r) { r = Softmax(p) }
"""


def model_with_functions() -> onnx.ModelProto:
    model = parser.parse_model(WITH_FUNCTIONS)
    model.graph.initializer.append(numpy_helper.from_array(WEIGHT, "w"))
    model.graph.node[1].metadata_props.add(key="k", value="v")
    return model


def test_calls_of_functions_are_inlined_in_bodies_and_in_functions() -> None:
    model = model_with_functions()
    graph = read_model(model)
    feeds = {"x": np.ones((2, 32), np.float32), "c": np.array(True)}

    inlined = inline_functions(graph)

    assert inlined.functions == []
    assert {node.op for scope in all_graphs(inlined) for node in scope.nodes} == {
        "Softmax",
        "Add",
        "MatMul",
        "If",
        "Neg",
    }
    assert inlined.initializers[0].tensor_data is graph.initializers[0].tensor_data
    assert node(inlined, "matmul").source.metadata_props[0].value == "v"
    assert to_model(graph) == model, "the given graph is not changed"
    np.testing.assert_allclose(run(to_model(inlined), **feeds), run(model, **feeds), rtol=1e-6)


def test_a_graph_without_functions_is_returned_as_it_is() -> None:
    graph = read_model(old_model())

    assert inline_functions(graph) is graph


def test_an_upgrade_inlines_first() -> None:
    model = model_with_functions()
    feeds = {"x": np.ones((2, 32), np.float32), "c": np.array(True)}

    upgraded = to_model(upgrade_opset(read_model(model), 21))

    onnx.checker.check_model(upgraded)
    np.testing.assert_allclose(run(upgraded, **feeds), run(model, **feeds), rtol=1e-6)


def test_a_graph_can_become_its_upgrade_in_place() -> None:
    graph = read_model(old_model())

    graph.adopt(upgrade_opset(graph, 21))
    graph.nodes[0].inputs[1] = constant("other", WEIGHT)

    assert graph.opset == 21
    assert [body.parent for body in node(graph, "branch").subgraphs()] == [graph, graph]
    assert graph.outputs[0].graph_output_of == [graph]
    assert [tensor.name for tensor in to_model(graph).graph.initializer] == ["other"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize(
    "node",
    [
        "Pad <pads = [0, 1, 0, 1]>",
        "Pad <pads = [0, 1, 0, 1], value = 2.0>",
        'Pad <pads = [0, 1, 0, 1], mode = "edge", value = 0.0>',
        'Pad <pads = [0, 1, 0, 1], mode = "reflect", value = 2.0>',
        "Clip <min = -0.5, max = 0.5>",
        "Clip <min = -0.5>",
    ],
)
@pytest.mark.parametrize("in_body", [False, True], ids=["", "in a body"])
def test_what_the_converter_writes_wrongly_is_corrected(node: str, dtype: type, *, in_body: bool) -> None:
    name = {np.float32: "float", np.float16: "float16", np.float64: "double"}[dtype]
    body = f"y = {node} (x)"
    if in_body:
        body = (
            f"y = If (c) <then_branch = t () => (p) {{ p = {node} (x) }}, "
            f"else_branch = e () => (r) {{ r = {node} (x) }}>"
        )
    made, plain = (
        parser.parse_model(
            f'<ir_version: 5, opset_import: ["" : 10]> g ({one}[1,3] x, bool c) => ({one}[n,m] y) {{ {body} }}'
        )
        for one in (name, "float")
    )
    given = np.array([[-1, 0.25, 3]], np.float32)
    # onnxruntime has no Clip of other types at opset 10.
    (expected,) = outputs_of(open_session(plain, optimize=False), {"x": given, "c": np.array(True)})
    for version in (13, 21):
        converted = to_model(upgrade_opset(read_model(made), version))
        onnx.checker.check_model(converted, full_check=True)
        fed = {"x": given.astype(dtype), "c": np.array(True)}
        (found,) = outputs_of(open_session(converted, optimize=False), fed)
        np.testing.assert_array_equal(found, expected.astype(dtype), strict=True)
