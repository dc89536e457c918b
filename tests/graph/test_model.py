from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from onnxq.graph import Constant, Graph, Node, Variable, constant, onnx_dtype, read_model, to_model

MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x, bool c) => (float[4] y) <float[4] w = {1, 2, 3, 4}> {
  [scale] h = Mul(x, w)
  [branch] y = If (c) <then_branch = t () => (u) { u = Add(h, w) }, else_branch = e () => (h) { }>
}"""


def graph() -> Graph:
    return read_model(parser.parse_model(MODEL))


def test_objects_are_equal_only_to_themselves_and_can_be_keys() -> None:
    for make in (lambda: Node("Relu", "a"), lambda: Variable("a"), lambda: constant("a", 1), lambda: Graph(name="a")):
        one, other = make(), make()
        assert one == one
        assert one != other
        assert len({one, other}) == 2


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (Variable("v"), 0),
        (Variable("v", np.float16), TensorProto.FLOAT16),
        (Variable("v", TensorProto.BFLOAT16), TensorProto.BFLOAT16),
        (Variable("v", ml_dtypes.float8_e4m3fnuz), TensorProto.FLOAT8E4M3FNUZ),
        (constant("c", np.zeros(1, ml_dtypes.int4)), TensorProto.INT4),
        (constant("c", "text"), TensorProto.STRING),
        (constant("c", np.zeros(1, ">f4")), TensorProto.FLOAT),
    ],
)
def test_the_type_of_a_tensor_is_told_as_onnx_numbers_it(tensor: Variable | Constant, expected: int) -> None:
    assert onnx_dtype(tensor) == expected


def test_a_constant_tells_shape_type_and_size_without_loading(monkeypatch) -> None:
    held = graph().initializers[0]
    monkeypatch.setattr(type(held.payload), "load", None)

    assert (held.shape, held.dtype, held.nbytes) == ((4,), np.float32, 16)
    assert repr(held) == "Constant('w', ProtoPayload(float, shape=(4,)))"


def test_a_variable_becomes_a_constant_and_back_as_in_graphsurgeon() -> None:
    tensor = graph().nodes[0].outputs[0]

    assert tensor.to_constant(np.ones(4, np.float32)) is tensor
    assert type(tensor) is Constant
    assert tensor.to_variable(shape=[4]) is tensor
    assert (type(tensor), tensor.dtype, tensor.shape, tensor.source) == (Variable, np.float32, [4], None)


def test_copies_of_nodes_and_tensors_are_of_our_classes_and_detached() -> None:
    node = graph().nodes[0]
    twin = node.copy(inputs=[node.inputs[0]], outputs=[Variable("z")])

    assert (type(twin), twin.op, twin.source) == (Node, "Mul", node.source)
    for tensor in node.inputs:
        assert type(tensor.copy()) is type(tensor)
        assert (tensor.copy().name, tensor.copy().outputs) == (tensor.name, [])
    assert node.inputs[1].copy().payload is node.inputs[1].payload


def test_a_copied_graph_is_independent_and_shares_values() -> None:
    original = graph()
    original.nodes[0].attrs["list"] = [1, 2]

    twin = original.copy()
    twin.nodes[0].attrs["list"].append(3)
    twin.nodes[0].name = "changed"
    twin.nodes[1].bodies()[0].nodes.clear()
    twin.opset = 21

    assert (original.nodes[0].name, original.nodes[0].attrs["list"], original.opset) == ("scale", [1, 2], 17)
    assert len(original.nodes[1].bodies()[0].nodes) == 1
    assert twin.initializers[0] is not original.initializers[0]
    assert twin.initializers[0].payload is original.initializers[0].payload


def test_tensors_know_the_graphs_that_return_them() -> None:
    main = graph()
    body = main.nodes[1].bodies()[1]
    hidden, output = main.nodes[0].outputs[0], main.outputs[0]

    assert (hidden.returned_by, output.returned_by) == ([body], [main])
    main.outputs.append(hidden)
    assert hidden.returned_by == [body, main]
    main.outputs[0] = hidden
    assert (hidden.returned_by, output.returned_by) == ([body, main, main], [])
    del main.outputs[0]
    main.outputs[:] = [output]
    assert (hidden.returned_by, output.returned_by) == ([body], [main])
    main.outputs = [hidden, output]
    main.outputs += [main.inputs[0]]
    assert [tensor.name for tensor in main.outputs] == ["h", "y", "x"]
    main.outputs.pop()
    main.outputs.remove(hidden)
    assert (hidden.returned_by, output.returned_by) == ([body], [main])


def test_changing_the_opset_of_the_model_changes_that_of_its_bodies() -> None:
    main = graph()
    main.opset = 21

    assert main.nodes[1].bodies()[0].opset == 21
    assert [(entry.domain, entry.version) for entry in main.import_domains] == [("", 21)]


def test_cleanup_never_shifts_the_outputs_of_a_node() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[2] b) { a, b = Split(x) z = Neg(x) }"""
    main = read_model(parser.parse_model(text))

    main.cleanup(remove_unused_node_outputs=True)

    assert [node.op for node in main.nodes] == ["Split"]
    assert [tensor.name for tensor in main.nodes[0].outputs] == ["a", "b"]


def test_functions_are_carried_as_protos_through_cleanup() -> None:
    model = parser.parse_model(MODEL)
    node = helper.make_node("Relu", ["p"], ["q"])
    model.functions.append(helper.make_function("local", "f", ["p"], ["q"], [node], [helper.make_opsetid("", 17)]))
    main = read_model(model)

    assert [function.name for function in main.cleanup().functions] == ["f"]
    assert to_model(main) == model
    main.functions = []
    assert not to_model(main).functions


def test_assigned_values_are_written() -> None:
    main = graph()
    main.initializers[0].values = np.zeros((2, 2), np.float16)

    assert to_model(main).graph.initializer[0] == numpy_helper.from_array(np.zeros((2, 2), np.float16), "w")


def test_setting_metadata_leaves_the_other_entries_as_they_are() -> None:
    model = parser.parse_model(MODEL)
    model.metadata_props.add(key="author", value="somebody")
    damaged = ModelProto.FromString(model.SerializeToString().replace(b"somebody", b"some\xffody"))
    graph = read_model(damaged)
    graph.set_metadata("tool", "one")
    graph.set_metadata("tool", "two")
    written = to_model(graph)
    assert [entry.key for entry in written.metadata_props] == ["author", "tool"]
    assert written.metadata_props[1].value == "two"
    assert b"some\xffody" in written.SerializeToString()
