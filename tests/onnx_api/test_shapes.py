from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper, parser

from onnxq.errors import ModelError
from onnxq.ir import Graph, all_graphs, read_model, to_model
from onnxq.onnx_api import infer_shapes

MODEL = """<ir_version: 8, opset_import: ["" : 17, "custom" : 1]>
g (float[N,3,8,8] x, bool c) => (float y)
<int64[2] target = {0, -1}, float[99] stale, float[7] told> {
  conv = Conv <pads = [1, 1, 1, 1]> (x, w)
  stale = Relu(conv)
  told = custom.Mystery(stale)
  after = Neg(told)
  flat = Reshape(stale, target)
  y = If (c) <
    then_branch = t () => (u) { inner = Transpose(flat) u = ReduceSum <keepdims = 0> (inner) },
    else_branch = e () => (v) { v = ReduceMax <keepdims = 0> (conv) }>
}"""


def graph_of(text: str = MODEL) -> Graph:
    model = parser.parse_model(text)
    if text is MODEL:
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((4, 3, 3, 3), np.float32), "w"))
    return read_model(model)


def shapes(graph: Graph) -> dict[str, tuple[object, object]]:
    return {
        tensor.name: (tensor.dtype and np.dtype(tensor.dtype).name, tensor.shape)
        for scope in all_graphs(graph)
        for node in scope.nodes
        for tensor in node.outputs
    }


def test_shapes_are_found_in_all_scopes_and_stale_ones_replaced() -> None:
    graph = graph_of()

    infer_shapes(graph)

    assert shapes(graph) == {
        "conv": ("float32", ["N", 4, 8, 8]),
        "stale": ("float32", ["N", 4, 8, 8]),
        "told": ("float32", [7]),
        "after": ("float32", [7]),
        "flat": ("float32", ["N", 256]),
        "y": ("float32", []),
        "inner": ("float32", [256, "N"]),
        "u": ("float32", []),
        "v": ("float32", []),
    }


def test_what_was_found_is_declared_when_written() -> None:
    graph = graph_of()

    infer_shapes(graph)
    again = read_model(to_model(graph))

    assert shapes(again) == shapes(graph)
    assert "unk__" not in str(to_model(graph))


def test_what_cannot_be_found_stays_unknown() -> None:
    graph = graph_of(
        """<ir_version: 8, opset_import: ["" : 17, "custom" : 1]> g (float[4] x, int64[K] s) => (y)
        <float[5] r> { m = custom.Mystery(x) n = Neg(m) r = Reshape(x, s) y = Add(n, r) }"""
    )

    infer_shapes(graph)

    assert shapes(graph) == {
        "m": (None, None),
        "n": (None, None),
        "r": ("float32", None),
        "y": (None, None),
    }


def test_declared_outputs_are_completed_and_never_changed() -> None:
    graph = graph_of(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,4] x) => (float[batch,?] a, b, float[?,?,?] odd)
        { a = Relu(x) b = Relu(x) odd = Relu(x) }"""
    )

    infer_shapes(graph)

    assert shapes(graph) == {
        "a": ("float32", [None, 4]),
        "b": ("float32", ["N", 4]),
        "odd": ("float32", [None, None, None]),
    }
    assert [[size.dim_param for size in info.type.tensor_type.shape.dim] for info in to_model(graph).graph.output] == [
        ["batch", ""],
        ["N", ""],
        ["", "", ""],
    ]
    assert graph.inputs[0].shape == ["N", 4]


def test_negative_dimensions_count_as_unknown() -> None:
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[4,4] x) => (y) { y = Relu(x) }')
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    graph = read_model(model)

    infer_shapes(graph)

    assert graph.outputs[0].shape == [None, 4]
    assert to_model(graph).graph.input[0] == model.graph.input[0], "the input stays as it was declared"


def test_weights_are_not_read(monkeypatch) -> None:
    graph = graph_of()
    weight = next(tensor for tensor in graph.initializers if tensor.name == "w")
    assert weight.nbytes < 1024
    weight.values = np.zeros((64, 3, 3, 3), np.float32)
    monkeypatch.setattr(type(weight.tensor_data), "chunks", None)

    infer_shapes(graph)

    with pytest.raises(TypeError, match="NoneType"):
        to_model(graph)
    assert shapes(graph)["conv"] == ("float32", ["N", 64, 8, 8])


@pytest.mark.parametrize("output", ["int64[4] y", "float[9,9] y"])
def test_a_wrong_output_declaration_does_not_stop_inference(output: str) -> None:
    graph = graph_of(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => ({output}) {{ h = Relu(x) y = Neg(h) }}'
    )

    infer_shapes(graph)

    assert shapes(graph)["h"] == ("float32", [4])


def test_an_input_that_contradicts_its_initializer_is_refused() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[4] x, float[2,2] w) => (y) <float[4] w = {1, 2, 3, 4}> { y = Add(x, w) }"""
    )

    with pytest.raises(
        ModelError, match=r"input 'w' is declared as float \[2, 2\], but its initializer is float \[4\]"
    ):
        infer_shapes(read_model(model))


def test_inference_that_gives_up_leaves_the_graph_as_it_was(monkeypatch) -> None:
    import onnx

    def give_up(*_: object, **__: object) -> None:
        raise onnx.shape_inference.InferenceError("no")

    monkeypatch.setattr("onnx.shape_inference.infer_shapes", give_up)
    graph = graph_of()
    before = shapes(graph)

    infer_shapes(graph)

    assert shapes(graph) == before


def test_nodes_that_were_appended_last_get_their_shapes() -> None:
    graph = graph_of()
    graph.nodes.reverse()

    infer_shapes(graph)

    assert shapes(graph)["flat"] == ("float32", ["N", 256])


def test_a_sequence_keeps_its_own_type() -> None:
    graph = graph_of(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) <int64 zero = {0}>
        { s = SequenceConstruct(x, x) y = SequenceAt(s, zero) }"""
    )

    infer_shapes(graph)

    assert shapes(graph)["s"] == (None, None)
    assert to_model(graph).graph.output[0] == helper.make_tensor_value_info("y", 1, [4])


def test_a_vector_that_doubles_again_and_again_needs_no_memory() -> None:
    doublings = " ".join(f"c{i + 1} = Concat<axis = 0>(c{i}, c{i})" for i in range(40))
    graph = read_model(
        parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : 17]> main (float[2] x) => (float[n] y) '
            f"<int64[4] c0 = {{1, 2, 3, 4}}> {{ {doublings} s = Shape(c40) y = Expand(x, s) }}"
        )
    )
    infer_shapes(graph)
    assert graph.tensors()["c40"].shape == [4 << 40]


def test_initializers_that_a_caller_may_override_are_no_constants() -> None:
    graph = graph_of(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[6] x, int64[2] s, float[N,2] w) => (y, z)
        <int64[2] s = {2, 3}, float[1,2] w = {1, 2}> { y = Reshape(x, s) z = Relu(w) }"""
    )

    infer_shapes(graph)

    assert shapes(graph) == {"y": ("float32", [None, None]), "z": ("float32", [None, 2])}


@pytest.mark.parametrize(
    ("declared", "rows", "other"),
    [
        ("float[batch,2] x, float[batch,3] w", "batch", "batch"),
        ("float[?,2] x, float[?,3] w", None, None),
        ("float[None,2] x, float[None,3] w", None, None),
        ("float[unk__1,2] x, float[unk__1,3] w", None, None),
        ("float[n,n] x, float[n,3] w", None, "n"),
    ],
)
def test_equal_names_of_inputs_are_equal_dimensions_unless_they_are_placeholders(
    declared: str, rows: str | None, other: str | None
) -> None:
    made = f'<ir_version: 8, opset_import: ["" : 17]> g ({declared}) => (y, z) {{ y = Relu(x) z = Relu(w) }}'
    model = parser.parse_model(made.replace("?", "what"))
    for info in model.graph.input:
        for size in info.type.tensor_type.shape.dim:
            size.dim_param = {"what": "?"}.get(size.dim_param, size.dim_param)
    graph = read_model(model)

    infer_shapes(graph)

    found = shapes(graph)
    assert found["y"][1][0] == rows
    assert found["z"][1][0] == other
    again = to_model(graph)
    written = [size.dim_param for info in again.graph.input for size in info.type.tensor_type.shape.dim]
    assert [name for name in written if name] == (["n", "n", "n"] if other == "n" else ["batch"] * 2 if rows else [])


def test_names_of_outputs_of_inner_tensors_and_in_bodies_are_no_facts() -> None:
    graph = graph_of(
        """<ir_version: 8, opset_import: ["" : 17, "custom" : 1]>
        g (float[A,2] x, bool go, int64 n) => (float[A,2] kept, float[B,2] y) <float[A,2] odd> {
            odd = custom.Mystery(x) kept = Identity(odd) y = Neg(kept)
            last = Loop (n, go, x) <body = b (int64 i, bool c, float[A,2] s) => (bool d, float[A,2] t) {
                d = Identity(c) t = Concat<axis = 0>(s, s) }>
        }"""
    )

    infer_shapes(graph)

    found = shapes(graph)
    assert [found[name][1] for name in ("odd", "kept", "y", "t")] == [[None, 2]] * 4
    written = to_model(graph).graph
    assert [info.type.tensor_type.shape.dim[0].dim_param for info in written.output] == ["A", "B"]
    body = written.node[-1].attribute[0].g
    assert [info.type.tensor_type.shape.dim[0].dim_param for info in (body.input[2], body.output[1])] == ["", ""]
