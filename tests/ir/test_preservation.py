"""What a model says survives reading and writing: one case for every field that the format has."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper, parser

from ir.preserved_fields import (
    Edit,
    base,
    branch,
    clear,
    denotations,
    empty_attribute,
    extra_output,
    function,
    initializer,
    loop,
    make_attribute,
    metadata,
    nested_bodies,
    overridable,
    quantization,
    rank_and_dimension_kinds,
    sparse,
    training,
    typed_initializer,
)
from onnxq.ir import load, read_model, save, to_model

CASES: dict[str, Edit] = {
    "nothing special": lambda m: None,
    "model documentation": lambda m: setattr(m, "doc_string", "line\nline"),
    "model domain and version": lambda m: (setattr(m, "domain", "org.x"), setattr(m, "model_version", 7)),
    "producer unset": lambda m: (clear(m, "producer_name"), clear(m, "producer_version")),
    "producer set but empty": lambda m: setattr(m, "producer_name", ""),
    "model metadata": metadata,
    "custom opset imports": lambda m: m.opset_import.append(helper.make_opsetid("com.microsoft", 1)),
    "default domain spelled out": lambda m: setattr(m.opset_import[0], "domain", "ai.onnx"),
    "training information": training,
    "device configuration": lambda m: m.configuration.add(name="two", num_devices=2),
    "local functions": function,
    "graph documentation": lambda m: setattr(m.graph, "doc_string", "doc"),
    "graph metadata": lambda m: metadata(m.graph),
    "graph name unset": lambda m: m.graph.ClearField("name"),
    "body documentation and metadata": lambda m: (setattr(branch(m), "doc_string", "d"), metadata(branch(m))),
    "body of a loop": loop,
    "bodies inside bodies": nested_bodies,
    "node documentation": lambda m: setattr(m.graph.node[0], "doc_string", "doc"),
    "node metadata": lambda m: metadata(m.graph.node[0]),
    "node metadata inside a body": lambda m: metadata(branch(m).node[0]),
    "node device configuration": lambda m: m.graph.node[0].device_configurations.add(configuration_id="two"),
    "nodes without names": lambda m: [node.ClearField("name") for node in m.graph.node],
    "node names set but empty": lambda m: setattr(m.graph.node[0], "name", ""),
    "node names used twice": lambda m: setattr(m.graph.node[2], "name", "scale"),
    "node domain set but empty": lambda m: setattr(m.graph.node[0], "domain", ""),
    "omitted inputs": lambda m: m.graph.node.append(helper.make_node("Clip", ["x", "", "w"], ["clipped"])),
    "omitted outputs": lambda m: m.graph.node.append(helper.make_node("LSTM", ["x", "w", "w"], ["", "last", ""])),
    "input documentation": lambda m: setattr(m.graph.input[0], "doc_string", "doc"),
    "input metadata": lambda m: metadata(m.graph.input[0]),
    "type and dimension denotations": denotations,
    "output documentation": lambda m: setattr(m.graph.output[0], "doc_string", "doc"),
    "output metadata": lambda m: metadata(m.graph.output[0]),
    "output without type": lambda m: m.graph.output[0].ClearField("type"),
    "inputs returned as they are": lambda m: m.graph.output.append(m.graph.input[0]),
    "initializers returned as they are": lambda m: m.graph.output.append(helper.make_tensor_value_info("w", 1, [4])),
    "value info metadata": lambda m: metadata(m.graph.value_info[0]),
    "value info of unknown rank, scalars and unknown dimensions": rank_and_dimension_kinds,
    "value info of outputs": lambda m: m.graph.value_info.append(m.graph.output[0]),
    "value info of initializers": lambda m: m.graph.value_info.append(helper.make_tensor_value_info("w", 1, [4])),
    "value info of nothing": lambda m: m.graph.value_info.append(helper.make_tensor_value_info("ghost", 1, [4])),
    "negative dimensions": lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -1),
    "overridable initializers": overridable,
    "unused initializers": initializer(TensorProto.FLOAT, [2], bytes(8)),
    "initializer documentation and metadata": lambda m: (
        setattr(m.graph.initializer[0], "doc_string", "doc"),
        metadata(m.graph.initializer[0]),
    ),
    "quantization annotations": quantization,
    "sparse initializers": lambda m: m.graph.sparse_initializer.append(sparse()),
    "a packed type": initializer(TensorProto.INT4, [3], b"\x21\x03"),
    "typed fields": typed_initializer(TensorProto.FLOAT16, [1.0, 2.0]),
    "strings, not all UTF-8": typed_initializer(TensorProto.STRING, [b"a", b"\xff\xfe"]),
    "tensor attribute": lambda m: make_attribute(m, numpy_helper.from_array(np.arange(3), "named")),
    "float attribute that is NaN": lambda m: make_attribute(m, float("nan")),
    "string attribute that is not UTF-8": lambda m: make_attribute(m, b"\xff\xfe"),
    "strings attribute that is not UTF-8": lambda m: make_attribute(m, [b"a", b"\xff\xfe"]),
    "empty ints attribute": empty_attribute(AttributeProto.INTS),
    "empty floats attribute": empty_attribute(AttributeProto.FLOATS),
    "empty strings attribute": empty_attribute(AttributeProto.STRINGS),
    "attribute documentation": lambda m: setattr(m.graph.node[2].attribute[0], "doc_string", "doc"),
    "body attribute documentation": lambda m: setattr(m.graph.node[1].attribute[0], "doc_string", "doc"),
    "tensors attribute": lambda m: make_attribute(m, [numpy_helper.from_array(np.arange(3))]),
    "graphs attribute": lambda m: make_attribute(m, [branch(m), branch(m, 1)]),
    "type attribute": lambda m: make_attribute(m, helper.make_tensor_type_proto(1, ["N"])),
    "types attribute": lambda m: make_attribute(m, [helper.make_tensor_type_proto(1, ["N"])]),
    "sparse tensor attribute": lambda m: make_attribute(m, sparse("")),
    "sparse tensors attribute": lambda m: make_attribute(m, [sparse("")]),
    "optional type": extra_output(helper.make_optional_type_proto(helper.make_tensor_type_proto(1, ["N"])), "Optional"),
    "sequence type": extra_output(
        helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2])), "SequenceConstruct"
    ),
    "map type": extra_output(helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, [])), "Custom"),
}


@pytest.mark.parametrize("edit", CASES.values(), ids=CASES.keys())
def test_a_model_is_the_same_after_reading_and_writing(edit: Edit) -> None:
    model = base()
    edit(model)
    before = model.SerializeToString(deterministic=True)

    written = to_model(read_model(model))

    assert written == model
    assert written.SerializeToString(deterministic=True) == before
    assert to_model(read_model(model).copy()) == model, "an independent copy says the same"
    assert model.SerializeToString(deterministic=True) == before, "reading and writing must not change the source"


def test_references_to_external_data_stay_in_their_folder(tmp_path) -> None:
    model = base()
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    stored = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    for tensor in stored.graph.initializer:
        tensor.external_data.add(key="checksum", value="0" * 40)
    (tmp_path / "m.onnx").write_bytes(stored.SerializeToString())

    assert to_model(load(tmp_path / "m.onnx"), folder=tmp_path) == stored


def test_captured_initializers_stay_where_they_are_declared() -> None:
    written = to_model(read_model(base()))

    assert [tensor.name for tensor in written.graph.initializer] == ["w", "outer"]
    assert [tensor.name for tensor in branch(written).initializer] == []
    assert [tensor.name for tensor in branch(written, 1).initializer] == ["k"]


def test_reading_values_does_not_change_what_is_written() -> None:
    model = base()
    CASES["a packed type"](model)
    model.graph.initializer[-1].name = "other"
    CASES["strings, not all UTF-8"](model)
    graph = read_model(model)

    for constant in graph.initializers:
        assert constant.values.shape == constant.shape

    assert to_model(graph) == model


def test_an_edited_node_keeps_its_documentation_and_metadata() -> None:
    model = base()
    metadata(model.graph.node[2])
    model.graph.node[2].doc_string = "doc"
    model.graph.node[2].attribute[0].doc_string = "why 1"
    graph = read_model(model)

    graph.nodes[2].attrs["axis"] = -1
    written = to_model(graph).graph.node[2]

    assert (written.doc_string, written.metadata_props[0].value) == ("doc", "v")
    assert (written.attribute[0].i, written.attribute[0].doc_string) == (-1, "why 1")


def test_an_edited_type_keeps_documentation_and_denotations() -> None:
    model = base()
    denotations(model)
    model.graph.input[0].doc_string = "doc"
    graph = read_model(model)

    graph.inputs[0].shape = [1, 4]
    written = to_model(graph).graph.input[0]

    assert written.doc_string == "doc"
    assert written.type.denotation == "IMAGE"
    assert [dim.dim_value for dim in written.type.tensor_type.shape.dim] == [1, 4]
    assert written.type.tensor_type.shape.dim[0].denotation == "DATA_BATCH"


def test_what_is_forgotten_about_an_inner_tensor_is_not_declared() -> None:
    graph = read_model(base())
    hidden = graph.nodes[0].outputs[0]

    hidden.dtype = hidden.shape = None

    assert [info.name for info in to_model(graph).graph.value_info] == []


def test_writing_is_deterministic(tmp_path) -> None:
    for name in ("a", "b"):
        save(read_model(base()), tmp_path / f"{name}.onnx")

    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_a_changed_opset_is_written_with_a_fitting_file_format() -> None:
    graph = read_model(base())
    graph.ir_version = 8

    graph.opset = 21
    written = to_model(graph)

    assert [(entry.domain, entry.version) for entry in written.opset_import] == [("", 21)]
    assert written.ir_version == 10


def test_the_domain_of_a_new_node_is_imported() -> None:
    graph = read_model(base())
    graph.nodes[0].domain = "com.microsoft"

    assert [(entry.domain, entry.version) for entry in to_model(graph).opset_import] == [("", 25), ("com.microsoft", 1)]


@pytest.mark.parametrize("listed", [True, False])
def test_initializers_beside_the_inputs_need_ir_version_4(listed: bool) -> None:
    text = """<ir_version: 3, opset_import: ["" : 8]>
    g (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}> { y = Add(x, w) }"""
    model = parser.parse_model(text)
    if listed:
        model.graph.input.append(helper.make_tensor_value_info("w", 1, [4]))

    assert to_model(read_model(model)).ir_version == (3 if listed else 4)
