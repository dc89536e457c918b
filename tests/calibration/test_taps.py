from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxq.calibration.instrument import add_outputs, added_outputs, append_outputs
from onnxq.errors import ModelError


def two_layers(dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """x -> MatMul(w) -> h -> Relu -> r -> Add(Constant c) -> y, with no value_info."""
    w = numpy_helper.from_array(np.eye(2, dtype=helper.tensor_dtype_to_np_dtype(dtype)), "w")
    c = numpy_helper.from_array(np.ones(2, dtype=helper.tensor_dtype_to_np_dtype(dtype)))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Constant", [], ["c"], value=c),
        helper.make_node("Add", ["r", "c"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", dtype, ["N", 2])
    y = helper.make_tensor_value_info("y", dtype, ["N", 2])
    graph = helper.make_graph(nodes, "g", [x], [y], [w])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def names(outputs: list[onnx.ValueInfoProto]) -> list[str]:
    return [output.name for output in outputs]


def test_taps_become_outputs_of_a_copy() -> None:
    model = two_layers()
    tapped = add_outputs(model, ["h", "r"])
    assert names(list(tapped.graph.output)) == ["y", "h", "r"]
    assert names(list(model.graph.output)) == ["y"]
    onnx.checker.check_model(tapped, full_check=True)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_element_types_are_inferred_where_the_model_has_none(dtype: int) -> None:
    outputs = added_outputs(two_layers(dtype), ["h", "c", "w", "x"])
    assert [output.type.tensor_type.elem_type for output in outputs] == [dtype] * 4


def test_known_types_are_kept_as_the_model_has_them() -> None:
    model = two_layers()
    known = helper.make_tensor_value_info("h", TensorProto.FLOAT, ["N", "K"])
    model.graph.value_info.append(known)
    assert added_outputs(model, ["h"]) == [known]


def test_outputs_and_repeated_names_are_added_once() -> None:
    assert names(added_outputs(two_layers(), ["y", "h", "h"])) == ["h"]


def test_a_name_that_is_not_there_gets_a_suggestion() -> None:
    model = two_layers()
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "hidden"
    with pytest.raises(ModelError, match=r"Tensor 'hiden' is not in the main graph.*did you mean 'hidden'"):
        add_outputs(model, ["hiden"])


def test_a_tensor_of_a_custom_operator_has_no_type() -> None:
    model = two_layers()
    model.graph.node[0].domain = "my.domain"
    model.opset_import.append(helper.make_opsetid("my.domain", 1))
    with pytest.raises(ModelError, match="Tensor 'h' has no element type"):
        add_outputs(model, ["h"])


def test_where_inference_fails_nothing_has_a_type() -> None:
    model = two_layers()
    model.graph.node[0].domain = "ai.onnx"
    model.graph.node[1].domain = "nowhere"
    with pytest.raises(ModelError, match="Tensor 'h' has no element type"):
        add_outputs(model, ["h"])


def test_a_tensor_inside_a_body_is_not_in_the_main_graph() -> None:
    model = two_layers()
    body = helper.make_graph(
        [helper.make_node("Neg", ["r"], ["inner"])], "b", [], [helper.make_tensor_value_info("inner", 1, None)]
    )
    model.graph.node.append(helper.make_node("If", ["cond"], ["z"], then_branch=body, else_branch=body))
    with pytest.raises(ModelError, match="Tensor 'inner' is not in the main graph"):
        add_outputs(model, ["inner"])


def test_appended_bytes_are_the_tapped_model() -> None:
    model = two_layers()
    data = append_outputs(model.SerializeToString(), added_outputs(model, ["h", "r"]))
    assert onnx.ModelProto.FromString(data) == add_outputs(model, ["h", "r"])


def test_kept_tensors_give_their_size_only() -> None:
    model = two_layers()
    kept = onnx.ModelProto.FromString(append_outputs(model.SerializeToString(), added_outputs(model, ["h"]), ["r"]))
    assert names(list(kept.graph.output)) == ["y", "h", "r/size"]
    onnx.checker.check_model(kept, full_check=True)
