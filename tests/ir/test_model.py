from __future__ import annotations

import numpy as np
from onnx import ModelProto, helper, numpy_helper, parser
from small_models import BRANCHING, branching, model

from onnxq.ir import read_model, to_model


def test_a_copied_graph_is_independent_and_shares_values() -> None:
    original = branching()
    original.nodes[0].attrs["list"] = [1, 2]

    twin = original.copy()
    twin.nodes[0].attrs["list"].append(3)
    twin.nodes[0].name = "changed"
    twin.nodes[1].subgraphs()[0].nodes.clear()
    twin.opset = 21

    assert (original.nodes[0].name, original.nodes[0].attrs["list"], original.opset) == ("scale", [1, 2], 17)
    assert len(original.nodes[1].subgraphs()[0].nodes) == 1
    assert twin.initializers[0] is not original.initializers[0]
    assert twin.initializers[0].tensor_data is original.initializers[0].tensor_data


def test_tensors_know_the_graphs_that_return_them() -> None:
    main = branching()
    body = main.nodes[1].subgraphs()[1]
    hidden, output = main.nodes[0].outputs[0], main.outputs[0]

    assert (hidden.graph_output_of, output.graph_output_of) == ([body], [main])
    main.outputs.append(hidden)
    assert hidden.graph_output_of == [body, main]
    main.outputs[0] = hidden
    assert (hidden.graph_output_of, output.graph_output_of) == ([body, main, main], [])
    del main.outputs[0]
    main.outputs[:] = [output]
    assert (hidden.graph_output_of, output.graph_output_of) == ([body], [main])
    main.outputs = [hidden, output]
    main.outputs += [main.inputs[0]]
    assert [tensor.name for tensor in main.outputs] == ["h", "y", "x"]
    main.outputs.pop()
    main.outputs.remove(hidden)
    assert (hidden.graph_output_of, output.graph_output_of) == ([body], [main])


def test_changing_the_opset_of_the_model_changes_that_of_its_bodies() -> None:
    main = branching()
    main.opset = 21

    assert main.nodes[1].subgraphs()[0].opset == 21
    assert [(entry.domain, entry.version) for entry in main.import_domains] == [("", 21)]


def test_a_graph_is_a_few_lines() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float x) => (float y) { a = Neg(x) b = Neg(a) y = Abs(b) }"""
    main = read_model(parser.parse_model(text))

    assert repr(main).splitlines() == [
        "Graph g (Opset 17)",
        "Inputs: Variable (x): (shape=[], dtype=float32)",
        "Nodes: 3, 2 Neg, 1 Abs",
        "Outputs: Variable (y): (shape=[], dtype=float32)",
    ]
    main.inputs *= 60
    assert repr(main).splitlines()[1].endswith(", and 52 more")
    assert len(repr(branching())) < 500


def test_cleanup_never_shifts_the_outputs_of_a_node() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[2] b) { a, b = Split(x) z = Neg(x) }"""
    main = read_model(parser.parse_model(text))

    main.cleanup(remove_unused_node_outputs=True)

    assert [node.op for node in main.nodes] == ["Split"]
    assert [tensor.name for tensor in main.nodes[0].outputs] == ["a", "b"]


def test_functions_are_carried_as_protos_through_cleanup() -> None:
    source = model(BRANCHING)
    node = helper.make_node("Relu", ["p"], ["q"])
    source.functions.append(helper.make_function("local", "f", ["p"], ["q"], [node], [helper.make_opsetid("", 17)]))
    main = read_model(source)

    assert [function.name for function in main.cleanup().functions] == ["f"]
    assert to_model(main) == source
    main.functions = []
    assert not to_model(main).functions


def test_assigned_values_are_written() -> None:
    main = branching()
    main.initializers[0].values = np.zeros((2, 2), np.float16)

    assert to_model(main).graph.initializer[0] == numpy_helper.from_array(np.zeros((2, 2), np.float16), "w")


def test_setting_metadata_leaves_the_other_entries_as_they_are() -> None:
    source = model(BRANCHING)
    source.metadata_props.add(key="author", value="somebody")
    damaged = ModelProto.FromString(source.SerializeToString().replace(b"somebody", b"some\xffody"))
    graph = read_model(damaged)
    graph.set_metadata("tool", "one")
    graph.set_metadata("tool", "two")
    written = to_model(graph)
    assert [entry.key for entry in written.metadata_props] == ["author", "tool"]
    assert written.metadata_props[1].value == "two"
    assert b"some\xffody" in written.SerializeToString()
