"""Tensors are found wherever a model can store them."""

from __future__ import annotations

from pathlib import Path

from onnx import GraphProto, ModelProto, SparseTensorProto, TensorProto, helper

from onnxq.ir.protos import external_files, stored_tensors


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
