"""Tensors are found wherever a model can store them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import GraphProto, ModelProto, SparseTensorProto, TensorProto, helper

from onnxq.ir.stored_tensors import external_files, is_large, stored_tensors
from onnxq.ir.versions import NEWEST_IR_VERSION, NEWEST_OPSET, minimum_ir_version


def tensor(name: str, location: str = "") -> TensorProto:
    made = TensorProto(name=name, dims=[1], data_type=TensorProto.FLOAT)
    if location:
        made.data_location = TensorProto.EXTERNAL
        made.external_data.add(key="location", value=location)
    return made


def sparse(name: str) -> SparseTensorProto:
    return SparseTensorProto(values=tensor(name), indices=tensor(f"{name}_indices"), dims=[4])


def model() -> ModelProto:
    """Return a model that no runtime takes, with a tensor wherever there is room for one."""
    constant = helper.make_node("Constant", [], ["c"], value=tensor("attribute", "b.bin"))
    innermost = GraphProto(name="innermost", initializer=[tensor("innermost", "deep/a.bin")])
    body = GraphProto(
        name="body",
        node=[constant, helper.make_node("If", ["c"], ["d"], then_branch=innermost)],
        initializer=[tensor("body", "b.bin")],
    )
    custom = helper.make_node("Custom", [], ["e"], bodies=[body], many=[tensor("first"), tensor("second")])
    custom.attribute.append(helper.make_attribute("sparse", sparse("sparse_attribute")))
    graph = GraphProto(name="main", node=[custom], initializer=[tensor("main")], sparse_initializer=[sparse("sparse")])
    graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]))
    function = helper.make_function(
        "here", "F", [], ["f"], [helper.make_node("Constant", [], ["f"], value=tensor("function", "f.bin"))], []
    )
    return helper.make_model(graph, functions=[function])


def test_tensors_are_found_wherever_they_stand() -> None:
    expected = {"main", "attribute", "innermost", "body", "first", "second", "function"}
    expected |= {"sparse", "sparse_indices", "sparse_attribute", "sparse_attribute_indices"}
    names = [tensor.name for tensor in stored_tensors(model())]
    assert sorted(names) == sorted(expected)


def test_files_are_those_of_all_tensors_that_are_not_in_the_model(tmp_path: Path) -> None:
    expected = tuple(tmp_path / name for name in ("b.bin", "deep/a.bin", "f.bin"))
    assert external_files(model(), tmp_path) == expected
    assert external_files(helper.make_model(GraphProto(initializer=[tensor("w")])), tmp_path) == ()


# A model is large by the weights that lie beside it.


def test_a_model_is_large_by_its_external_data(large: Path, perceptron: ModelProto, tmp_path: Path) -> None:
    assert is_large(large)
    assert is_large(large.read_bytes())
    assert is_large(onnx.load(large, load_external_data=False))
    assert not is_large(perceptron)
    assert not is_large(tmp_path / "missing.onnx")
    assert not is_large(b"no model")


def test_weights_of_bodies_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.ir.stored_tensors._LARGE_BYTES", 2000)
    helper = onnx.helper

    def weight(name: str) -> onnx.TensorProto:
        tensor = onnx.TensorProto(name=name, dims=[300], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
        tensor.external_data.add(key="length", value="1200")
        return tensor

    inner = helper.make_node("Constant", [], ["c"], value=weight("c"))
    then = helper.make_graph([inner], "then", [], [helper.make_tensor_value_info("c", 1, [300])])
    other = helper.make_graph([], "other", [], [helper.make_tensor_value_info("w", 1, [300])], [weight("w")])
    branch = helper.make_node("If", ["x"], ["y"], then_branch=then, else_branch=other)
    given, made = helper.make_tensor_value_info("x", 9, []), helper.make_tensor_value_info("y", 1, [300])
    assert is_large(helper.make_model(helper.make_graph([branch], "g", [given], [made])))
    assert not is_large(helper.make_model(then))


@pytest.mark.parametrize(
    ("opset", "expected"),
    [(7, 3), (12, 3), (13, 7), (18, 7), (19, 9), (21, 10), (23, 11), (24, 12), (25, 13), (28, 13)],
)
def test_the_file_format_follows_from_the_opset(opset: int, expected: int) -> None:
    assert minimum_ir_version(opset) == expected
    assert minimum_ir_version(opset, all_initializers_are_inputs=False) == max(expected, 4)


def test_the_newest_opset_asks_for_the_newest_file_format() -> None:
    assert minimum_ir_version(NEWEST_OPSET) == NEWEST_IR_VERSION
