from __future__ import annotations

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, parser
from small_models import branching

from onnxq.ir import (
    Constant,
    Graph,
    Node,
    Variable,
    become_constant,
    constant,
    onnx_dtype,
    read_model,
    to_model,
)
from onnxq.ir.tensor_data import ArrayData


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
    held = branching().initializers[0]
    monkeypatch.setattr(type(held.tensor_data), "load", None)

    assert (held.shape, held.dtype, held.nbytes) == ((4,), np.float32, 16)
    assert repr(held) == "Constant('w', ProtoTensor(float, shape=(4,)))"


def test_a_variable_becomes_a_constant_and_back_as_in_graphsurgeon() -> None:
    tensor = branching().nodes[0].outputs[0]

    assert tensor.to_constant(np.ones(4, np.float32)) is tensor
    assert type(tensor) is Constant
    assert tensor.to_variable(shape=[4]) is tensor
    assert (type(tensor), tensor.dtype, tensor.shape, tensor.source) == (Variable, np.float32, [4], None)


def test_copies_of_nodes_and_tensors_are_of_our_classes_and_detached() -> None:
    node = branching().nodes[0]
    node.origins = (("m", "MatMul"), ("a", "Add"))
    twin = node.copy(inputs=[node.inputs[0]], outputs=[Variable("z")])

    assert (type(twin), twin.op, twin.source, twin.origins) == (Node, "Mul", node.source, node.origins)
    for tensor in node.inputs:
        assert type(tensor.copy()) is type(tensor)
        assert (tensor.copy().name, tensor.copy().outputs) == (tensor.name, [])
    assert node.inputs[1].copy().tensor_data is node.inputs[1].tensor_data


def test_a_node_lists_its_bodies_in_the_order_of_its_attributes() -> None:
    branch = branching().nodes[1]
    assert [body.name for body in branch.subgraphs()] == ["t", "e"]
    several = Node("Switch", attrs={"first": Graph(name="a"), "rest": [Graph(name="b"), Graph(name="c")], "axis": [1]})
    assert [body.name for body in several.subgraphs()] == ["a", "b", "c"]
    assert branching().nodes[0].subgraphs() == []


def test_a_folded_tensor_leaves_a_node_of_one_output_without_a_name_for_it() -> None:
    first = branching().nodes[0]
    tensor = first.outputs[0]
    readers = list(tensor.outputs)
    assert become_constant(tensor, ArrayData(np.zeros(4, np.float32))) is tensor
    assert (type(tensor), tensor.inputs, tensor.outputs) == (Constant, [], readers)
    assert [output.name for output in first.outputs] == [""]


def test_the_other_outputs_of_a_folded_node_keep_their_positions() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[2] b, float[2] n)
    { a, b = Split(x) n = Neg(a) }"""
    graph = read_model(parser.parse_model(text))

    become_constant(graph.nodes[0].outputs[0], ArrayData(np.zeros(2, np.float32)))

    written = to_model(graph)
    assert list(written.graph.node[0].output) == ["a.unused", "b"]
    session = onnxruntime.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
    kept, folded = session.run(None, {"x": np.arange(4, dtype=np.float32)})
    assert [kept.tolist(), folded.tolist()] == [[2, 3], [0, 0]]
